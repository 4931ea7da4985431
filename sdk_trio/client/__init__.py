"""The client of the upstream API; start with ``client.Client``."""
