"""Mechanisms that several rooms need, each with one home; nothing here knows of webhooks."""
