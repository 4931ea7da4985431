"""Connections and HTTP as a client: the calls of the upstream and notifications use them."""
