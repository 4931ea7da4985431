"""The check of the words that name a command, with suggestions for misspelt ones. Pure."""

import difflib
from collections.abc import Collection, Sequence

from ..errors import EXIT_USAGE, SdkError

#: Commands that the documentation names and that this version does not contain.
NOT_IN_THIS_VERSION = frozenset(
    {
        "listen",
        "storage",
    }
)


class UsageError(SdkError):
    """A command was called wrongly: the message says which argument and what it takes."""

    exit_code = EXIT_USAGE


def check_words(arguments: Sequence[str], known: Collection[str]) -> None:
    """Check the words before the first option against the known commands.

    Args:
        arguments: the command line after the program's name.
        known: the commands in full, such as ``run`` and ``events list``.

    Raises:
        UsageError: the command is not in this version, or unknown; with the closest name.
    """
    chosen = ""
    for depth, word in enumerate(arguments, start=1):
        if chosen in known or word.startswith("-"):
            return
        within = [command for command in known if command.startswith(chosen and f"{chosen} ")]
        chosen = f"{chosen} {word}".lstrip()
        _check(chosen, [" ".join(command.split()[:depth]) for command in within])


def option_meant(given: Sequence[str], known: Collection[str]) -> str:
    """Return ``; did you mean --config?`` for the first option that is similar to a known one.

    The text is empty if none is similar.
    """
    for word in given:
        if word.startswith("--"):
            close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            if close:
                return f"; did you mean {close[0]}?"
    return ""


def _check(chosen: str, candidates: Sequence[str]) -> None:
    if chosen in candidates:
        return
    if chosen in NOT_IN_THIS_VERSION:
        raise UsageError(f"the command '{chosen}' is not in this version")
    close = difflib.get_close_matches(chosen, candidates, n=1)
    advice = (
        f"did you mean '{close[0]}'?"
        if close
        else f"choose from {', '.join(dict.fromkeys(candidates))}"
    )
    raise UsageError(f"there is no command '{chosen}': {advice}")
