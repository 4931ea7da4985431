"""Tells site managers of their tenant's transitions: email, SMS, webhook (spec 2.9 and 6.2)."""
