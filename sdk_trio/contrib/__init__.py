"""Helpers for handlers that use other frameworks, each importable if its framework is."""
