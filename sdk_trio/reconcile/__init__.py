"""Reconciliation: finds deliveries that the inbox lacks, and requests them again."""
