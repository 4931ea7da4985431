"""The store in a schema of a PostgreSQL database, which several hosts share."""
