"""Sources: senders other than the upstream, each with its address and its scheme.

``places`` finds a value in a delivery, ``schemes`` decides whether a delivery is authentic,
``signing`` signs as a sender does, and ``source`` connects them to the settings.
"""
