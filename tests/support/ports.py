"""Ports for programs that cannot be told to choose one themselves."""

import random
import socket


def free_port() -> int:
    """Return a TCP port of loopback that nothing uses, and that nobody is given by chance.

    It lies below the range from which systems choose ports for clients and for "port 0": a port
    out of that range would be taken by any connection of the machine before the program, which
    perhaps stops and starts again, binds it.
    """
    while True:
        # Not of the seeded numbers: Hypothesis gives all processes of a run the same ones.
        port = random.SystemRandom().randint(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
