"""Notifies site managers of their tenant's transitions, on each channel of ``channels/``."""
