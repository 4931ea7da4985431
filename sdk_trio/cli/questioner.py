"""The question to the user before an action that may have been meant otherwise."""

import sys


def confirmed(question: str) -> bool:
    """Ask on standard error and return whether the answer was yes.

    If standard input is no terminal, the answer is yes: a script cannot be asked, and its author
    has chosen the command.
    """
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in ("y", "yes")
