"""Every command in one table: its words, what it does, its arguments, where its code is.

Parser, documentation and tests read this table. It imports no part of the program but the
parser's, so that the help of every command is printed at once.
"""

from argparse import ArgumentParser
from collections.abc import Callable

import attrs

#: The states of ``storage.records.DeliveryState``, which would import the whole store.
STATES = ("received", "running", "retrying", "done", "dead", "parked")
REPLAYABLE_STATES = ("dead", "parked")

_REFERENCE = "MODULE:ATTR"
_MOMENT_HELP = "ISO 8601, or a time ago such as 15m, 2h, 3d"


@attrs.frozen
class Command:
    """One command: ``words`` choose it, ``target`` is ``module:function`` inside this package.

    The function takes the parsed arguments and returns the exit status.
    """

    words: str
    summary: str
    target: str
    add_arguments: Callable[[ArgumentParser], None]


def _run(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--app",
        metavar=_REFERENCE,
        help="the HandlerRegistry to run, imported from the current directory as uvicorn does; "
        "without it every event is parked",
    )
    parser.add_argument(
        "--standalone", action="store_true", help="the receiver alone: no AccessToken is needed"
    )


def _dev(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--app",
        metavar=_REFERENCE,
        help="the HandlerRegistry to run; without it every event is logged",
    )


def _init(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--directory", metavar="D", default=".", help="where to write (default: here)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def _config_check(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--standalone", action="store_true", help="check for the receiver alone: no AccessToken"
    )
    _add_format(parser)


def _config_show(parser: ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="include what is at its default")
    _add_format(parser)


def _nothing(parser: ArgumentParser) -> None:
    """Add no argument of its own."""


def _events_list(parser: ArgumentParser) -> None:
    parser.add_argument("--type", metavar="T", help="only this event type")
    parser.add_argument("--state", choices=STATES, help="only this state")
    parser.add_argument("--since", metavar="T", help=f"only arrivals since: {_MOMENT_HELP}")
    parser.add_argument(
        "--limit", metavar="N", default="50", help="at most this many, newest first (default 50)"
    )
    _add_format(parser)


def _events_show(parser: ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the webhook id")
    _add_format(parser)


def _events_replay(parser: ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="dead or parked events")
    parser.add_argument(
        "--state", choices=REPLAYABLE_STATES, help="every event in this state, instead of ids"
    )
    parser.add_argument("--type", metavar="T", help="with --state: only this event type")
    parser.add_argument("--since", metavar="T", help=f"with --state: only since: {_MOMENT_HELP}")
    parser.add_argument("--dry-run", action="store_true", help="show what would be replayed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _add_format(parser)


def _events_trigger(parser: ArgumentParser) -> None:
    parser.add_argument("type", metavar="TYPE", help="an event type, such as order.created")
    parser.add_argument(
        "--data", metavar="JSON", help="a JSON object that is merged into the sample's data"
    )
    parser.add_argument(
        "--url", metavar="U", help="where to post (default: the receiver of the data directory)"
    )
    parser.add_argument("--count", metavar="N", default="1", help="how many events (default 1)")
    _add_format(parser)


def _events_tail(parser: ArgumentParser) -> None:
    parser.add_argument("--type", metavar="T", help="only this event type")
    _add_format(parser)


def _add_secret(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--secret-env",
        metavar="NAME",
        help="the environment variable that holds the secret (default: the configured secrets)",
    )


def _add_body(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="the body (default: standard input)"
    )


def _sign(parser: ArgumentParser) -> None:
    _add_secret(parser)
    parser.add_argument("--id", metavar="ID", help="the webhook id (default: a new one)")
    parser.add_argument(
        "--timestamp", metavar="TIME", help="Unix seconds or ISO 8601 (default: now)"
    )
    parser.add_argument(
        "--format",
        choices=("headers", "curl", "json"),
        default="headers",
        help="header lines, a curl command, or a JSON object (default headers)",
    )
    _add_body(parser)


def _verify(parser: ArgumentParser) -> None:
    _add_secret(parser)
    parser.add_argument(
        "--headers",
        metavar="FILE",
        required=True,
        help="the request's headers: 'Name: value' lines, or a JSON object",
    )
    parser.add_argument(
        "--at",
        metavar="TIME",
        help="take this for the present time, for a delivery of earlier: Unix seconds or ISO 8601",
    )
    _add_format(parser)
    _add_body(parser)


def _secrets_new(parser: ArgumentParser) -> None:
    parser.add_argument("--count", metavar="N", default="1", help="how many (default 1)")
    _add_format(parser)


def _upgrade(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    parser.add_argument(
        "--host",
        metavar=_REFERENCE,
        help="the application's HostUpgrade: its resolver of the default tenant, its own steps",
    )
    _add_format(parser)


def _tenant_purge(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--reason", metavar="R", help="why, for the audit trail")
    parser.add_argument("--actor", metavar="A", help="who, for the audit trail (default: the user)")
    parser.add_argument(
        "--forget-audit", action="store_true", help="remove the tenants' earlier audit rows too"
    )
    _add_format(parser)


def _add_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="of standard output"
    )


COMMANDS = (
    Command("run", "run the receiver until it is told to stop", "daemon:run", _run),
    Command("dev", "run a receiver to try, without any file", "developer:dev", _dev),
    Command("init", "write the files of a new application", "initializer:init", _init),
    Command("config check", "report every problem of the settings", "config:check", _config_check),
    Command("config show", "show the settings and their origins", "config:show", _config_show),
    Command("config schema", "print the JSON Schema of the settings", "config:schema", _nothing),
    Command("events list", "list events of the inbox", "events:list_events", _events_list),
    Command("events show", "show one event", "events:show_event", _events_show),
    Command("events replay", "run dead or parked events again", "replayer:replay", _events_replay),
    Command("events trigger", "send a signed sample", "trigger:trigger", _events_trigger),
    Command("events tail", "print changes as they happen", "tailer:tail", _events_tail),
    Command("sign", "sign a body as the upstream would", "signing:sign_file", _sign),
    Command("verify", "say whether a delivery is authentic", "signing:verify_file", _verify),
    Command("secrets new", "make a webhook secret", "signing:new_secrets", _secrets_new),
    Command(
        "tenant purge", "remove long deleted tenants", "tenant_purger:purge_tenants", _tenant_purge
    ),
    Command("upgrade", "move a single tenant's data", "upgrade:run_upgrade", _upgrade),
)

#: What a group of commands is about.
GROUPS = {
    "config": "the settings: check them, show them, describe them",
    "events": "the inbox: what came, what became of it, what to run again",
    "secrets": "webhook secrets",
    "tenant": "tenants: their life and their data",
}
