"""The client of the upstream API: ``client.Client`` is where to begin (spec 1)."""
