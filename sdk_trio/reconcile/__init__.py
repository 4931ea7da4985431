"""Reconciliation: finds deliveries that the inbox lacks, and asks the upstream for them again."""
