"""Tells site managers of their tenant's transitions: email, SMS, webhook."""
