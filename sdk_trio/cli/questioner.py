"""Asks people before something is done that they may not have meant."""

import sys


def confirmed(question: str) -> bool:
    """Ask on standard error and return whether the answer was yes.

    Where nobody can be asked, because standard input is no terminal, the answer is yes: a script
    meant what it wrote.
    """
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in ("y", "yes")
