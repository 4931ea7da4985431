"""Ports for programs that cannot be told to choose one themselves."""

import itertools
import os
import random
import socket

#: Each process of pytest-xdist has a thousand ports of its own, which it takes in their turn: two
#: tests never get the same one before the first has bound it.
_MANY = 1000
_FIRST = 15_000 + _MANY * (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
)
#: From anywhere, as somebody else may run the tests beside us.
_turns = itertools.count(random.randrange(_MANY))


def free_port() -> int:
    """Return a TCP port of loopback that nothing uses, and that nobody is given by chance.

    It lies below the range from which systems choose ports for clients and for "port 0": a port
    out of that range would be taken by any connection of the machine before the program, which
    perhaps stops and starts again, binds it.
    """
    while True:
        port = _FIRST + next(_turns) % _MANY
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
