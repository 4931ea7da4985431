"""The HTTP server for ASGI applications; it does not depend on webhooks."""
