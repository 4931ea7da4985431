"""Replication of the tenants' databases, by Litestream."""
