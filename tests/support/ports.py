"""Ports for programs that cannot be told to choose one themselves."""

import itertools
import os
import random
import socket

#: Below the range from which systems choose ports for clients and for "port 0": a port out of that
#: range would be taken by any connection of the machine before the program, which perhaps stops and
#: starts again, binds it.
_FIRST, _LAST = 15_000, 32_000

#: The processes of pytest-xdist draw from ranges of their own. There are rarely more of them.
_SHARES = 10

_drawn = itertools.count(random.randrange(_LAST - _FIRST))


def free_port() -> int:
    """Return a TCP port of loopback that nothing uses, and that nobody is given by chance.

    No other process of this run is given it, nor this one once more before all others: it stays
    free until the program binds it, and while a program that is started again does not run.
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
