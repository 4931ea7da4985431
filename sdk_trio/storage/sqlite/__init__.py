"""The store in one SQLite database."""
