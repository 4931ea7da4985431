"""The client of the upstream API; begin with ``client.Client``."""
