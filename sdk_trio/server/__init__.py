"""HTTP for ASGI applications; it knows nothing of webhooks."""
