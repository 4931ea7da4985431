"""The store in one SQLite database: functions of a connection, and the thread that commits."""
