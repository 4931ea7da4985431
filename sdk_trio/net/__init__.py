"""Connections and HTTP as a client: what calls of the upstream and notifications are sent
through.
"""
