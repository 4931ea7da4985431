"""The store's statements: one implementation for every engine that speaks SQL."""
