"""Helpers for other frameworks; each module needs its framework installed."""
