"""The store: what arrived, before its sender is answered, and the tenants."""
