"""The engines: how SQLite and PostgreSQL run and commit transactions."""
