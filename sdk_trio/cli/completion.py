"""``completion``: scripts that complete commands, options and values in a shell, written by shtab.

A script contains the parser's whole data, so that completion does not start this program.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from typing import Any

from ..errors import EXIT_UNAVAILABLE, SdkError
from .parse import COMMANDS, Parser, build_parser, describing

if not describing():
    from ..events import DEFAULT_CATALOG
    from .terminal import print_text

#: The metavariables of event types, of files, and of directories.
_TYPES, _FILES, _DIRECTORIES = {"TYPE", "T"}, {"FILE", "F"}, {"D"}


class ShtabMissingError(SdkError):
    """The extra ``completion`` is not installed."""

    exit_code = EXIT_UNAVAILABLE


def completion_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads it")


def complete(arguments: Namespace) -> int:
    """Print the script of a shell.

    Raises:
        ShtabMissingError: shtab, which writes the script, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ShtabMissingError(
            "completion needs the module shtab: pip install 'sdk-trio[completion]'"
        ) from None
    parser = build_parser(alone=True)
    _offer(parser, {"file": shtab.FILE, "directory": shtab.DIRECTORY})
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            _add_words(action)
    print_text(shtab.complete(parser, shell=arguments.shell))
    return 0


def _offer(parser: Parser, paths: dict[str, Any]) -> None:
    """Declare all arguments, also of the commands below, and offer values where they are known."""
    parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _offer(below, paths)
        elif action.dest == "type" and action.metavar in _TYPES:
            # Only for completion: the parser accepts any text as a type, and patterns as well.
            action.choices = [row.wire_type for row in DEFAULT_CATALOG]
        elif action.metavar in _FILES | _DIRECTORIES:
            kind = "file" if action.metavar in _FILES else "directory"
            action.complete = paths[kind]  # type: ignore[attr-defined] # read by shtab


def _add_words(commands: Any) -> None:
    """Add ``help`` and ``version``, which the parser receives as options."""
    words = list(dict.fromkeys(word for row in COMMANDS for word in row.words.split()))

    def fill(parser: Parser) -> None:
        parser.add_argument("words", nargs="*", choices=words, help="of a command")

    commands.add_parser("help", help="show the arguments of a command", fill=fill).fill()
    commands.add_parser("version", help="print the version", fill=lambda _: None).fill()
