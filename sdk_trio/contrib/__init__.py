"""Helpers for handlers beside other frameworks, each imported by who has its framework."""
