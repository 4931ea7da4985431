"""The HTTP client: connections for calls of the upstream and for notifications."""
