"""The argument parser, built from the table of commands."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .._version import __version__
from .commands import COMMANDS, GROUPS
from .usage import UsageError, check_words, option_meant

PROGRAM = "sdk-trio"

_EXIT_CODES = """\
exit status: 0 fine, 1 failure, 2 usage, 69 unavailable, 78 configuration, 128 + the signal's
number when it was cut short. Every command is described in docs/reference/command-line.md.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are :class:`UsageError`; no option can be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    @property
    def options(self) -> list[str]:
        """Every option that it takes, such as ``--config``."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that ``runner`` words all errors in one place."""
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments; ``target`` names the chosen command's function.

    Raises:
        UsageError: there is no such command or argument.
        SystemExit: ``--help`` or ``--version``, after printing.
    """
    check_words(arguments, [command.words for command in COMMANDS])
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    chosen: Parser = parsed.parser
    if rest and not parsed.takes_fields:
        advice = option_meant(rest, chosen.options)
        chosen.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
    del parsed.parser
    parsed.fields = rest
    return parsed


def build_parser() -> Parser:
    """Return the parser of every command in :data:`COMMANDS`."""
    parser = Parser(
        prog=PROGRAM,
        description="A runtime for signed webhooks.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    top = _add_choices(parser)
    groups: dict[str, Any] = {"": top}
    for command in COMMANDS:
        group, _, word = command.words.rpartition(" ")
        chosen = _group(groups, group).add_parser(
            word,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        )
        command.add_arguments(chosen)
        _add_settings(chosen)
        chosen.set_defaults(
            target=command.target,
            words=command.words,
            takes_fields=command.takes_fields,
            parser=chosen,
        )
    return parser


def _group(groups: dict[str, Any], words: str) -> Any:
    """Return the subparsers of a group of commands, which may be nested."""
    if words not in groups:
        outer, _, word = words.rpartition(" ")
        about = GROUPS[words]
        parser = _group(groups, outer).add_parser(word, help=about, description=about)
        groups[words] = _add_choices(parser)
    return groups[words]


def _add_choices(parser: argparse.ArgumentParser) -> Any:
    return parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="a settings file, JSON or TOML; may be repeated, later ones win",
    )
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, such as Sdk:Webhooks:Path=/hooks; may be repeated; not for secrets",
    )


class _Version(argparse.Action):
    """Prints the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        parser.exit()
