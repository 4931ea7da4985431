"""Replication of the tenants' databases, by Litestream (spec 2.7, contracts 7)."""
