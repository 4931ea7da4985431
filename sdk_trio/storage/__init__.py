"""The store: deliveries before their senders are answered, tenants, messages to site managers."""
