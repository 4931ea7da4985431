"""Reconciliation: what the upstream delivered and the inbox does not have."""
