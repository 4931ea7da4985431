"""Helpers for several test modules."""
