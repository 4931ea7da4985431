"""Alerts: which conditions open them, when messages are sent, and how."""
