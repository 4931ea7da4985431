"""Ports for programs that cannot choose a free one themselves."""

import itertools
import os
import random
import socket

#: Below the range from which systems choose ports for clients and for "port 0". Another connection
#: of the machine could take a port of that range before the program binds it, perhaps a second
#: time.
_FIRST, _LAST = 15_000, 32_000

#: Each process of pytest-xdist uses its own range. There are rarely more of them.
_SHARES = 10

_drawn = itertools.count(random.randrange(_LAST - _FIRST))


def free_port() -> int:
    """Return an unused TCP port of loopback.

    No other process of this run gets it, and this one gets it again only after all others. So it
    stays free until the program binds it, and between two starts of the program.
    """
    first, size = _FIRST, _LAST - _FIRST
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        size //= _SHARES
        first += int(worker.removeprefix("gw")) % _SHARES * size
    while True:
        port = first + next(_drawn) % size
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
