"""The store in memory, for tests and for what may be lost."""
