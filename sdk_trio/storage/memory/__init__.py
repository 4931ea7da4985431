"""The store in memory: for tests, development, and receivers whose deliveries may be lost."""
