"""The command line: the table of commands, and the reading of their arguments and values.

Parser, documentation and tests read :data:`COMMANDS`. It imports no part of the program: the file
of a group is imported when one of its commands is chosen.

A parser is filled when the command line reaches it, so only the chosen command's arguments are
declared. They are in the file of its group, which imports the command's dependencies only if
:func:`describing` is false: ``--help`` of a command loads neither Trio nor a store.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from .._version import __version__
from ..base.times import parse_short_span, readable
from ..errors import EXIT_USAGE, SdkError
from ..records.states import TenantStatus


class Command(NamedTuple):
    """One command: ``words`` choose it, ``target`` is ``module:function`` inside this package.

    The function takes the parsed arguments and returns the exit status. The function ``{last
    word}_arguments`` of the same module, if it exists, adds the arguments to the command's parser;
    a hyphen in the word is an underscore there.
    With ``takes_fields``, undeclared options are collected in the list ``fields`` of the arguments.
    """

    words: str
    summary: str
    target: str
    takes_fields: bool = False


COMMANDS = (
    Command("run", "run the receiver until it is stopped", "run:run"),
    Command("health", "check the health of a running receiver", "receiver:check_health"),
    Command("dev", "run a receiver to try, without any file", "dev:dev"),
    Command("init", "write the files of a new application", "application:init"),
    Command("config check", "report every problem of the settings", "settings:check"),
    Command("config show", "show the settings and their origins", "settings:show"),
    Command("config schema", "print the JSON Schema of the settings", "settings:schema"),
    Command("doctor", "find faults, with remedies", "doctor.run:doctor"),
    Command("simulate", "run an application in virtual worlds of faults", "simulate:simulate_app"),
    Command("events types", "list the event types and their classes", "trigger:types"),
    Command("events list", "list events of the inbox", "events:list_events"),
    Command("events show", "show one event", "events:show_event"),
    Command("events replay", "run dead, parked or retrying events again", "events:replay"),
    Command("events pause", "pause events by type: they wait in the store", "pauses:pause"),
    Command("events resume", "resume paused events, the oldest first", "pauses:resume"),
    Command("events pauses", "list what is paused, since when and why", "pauses:pauses"),
    Command("events trigger", "send a signed sample event", "trigger:trigger"),
    Command("events resend", "deliver one event to another address", "trigger:resend"),
    Command("events reconcile", "fetch missed events from the upstream", "upstream:reconcile"),
    Command("events catch-up", "add events for changed records", "catch_up:catch_up"),
    Command("events rejected", "list the requests that were refused", "rejected:list_rejected"),
    Command("events tail", "print changes as they happen", "events:tail"),
    Command(
        "listen", "forward the deliveries of a remote receiver to this machine", "listen:listen"
    ),
    Command("routes list", "list where events are forwarded", "routes:list_routes"),
    Command("routes pause", "hold back the events of a route", "routes:pause"),
    Command("routes resume", "release the events of a route", "routes:resume"),
    Command("call", "call the upstream API", "upstream:call", takes_fields=True),
    Command("sign", "sign a body as the upstream would", "sign:sign_file"),
    Command("verify", "check whether a delivery is authentic", "sign:verify_file"),
    Command("secrets new", "generate a webhook secret", "sign:new_secrets"),
    Command("tenant list", "list tenants", "tenants:list_tenants"),
    Command("tenant show", "show one tenant", "tenants:show_tenant"),
    Command("tenant add", "add a tenant", "tenants:add"),
    Command("tenant set", "change the fields of a tenant", "tenants:set_fields"),
    Command("tenant import", "add or change tenants from a file", "tenant_import:import_tenants"),
    Command("tenant export", "print tenants as CSV or JSON", "tenant_import:export_tenants"),
    Command("tenant suspend", "suspend an active tenant", "tenants:transition"),
    Command("tenant reactivate", "make a tenant active again", "tenants:transition"),
    Command("tenant deactivate", "deactivate a tenant", "tenants:transition"),
    Command("tenant delete", "delete a tenant softly", "tenants:transition"),
    Command("tenant audit", "show who changed what, and why", "tenants:audit"),
    Command("tenant purge", "remove long deleted tenants", "tenant_purge:purge_tenants"),
    Command("replication run", "run a replicator, reload on SIGHUP", "replication:run_replicator"),
    Command("replication status", "show how far behind replicas are", "replication:show_status"),
    Command("replication render", "print the replicator's configuration", "replication:render"),
    Command("replication restore", "restore a tenant's database into a file", "restore:restore"),
    Command("replication verify", "prove that replicas can be restored", "replication:verify"),
    Command("upgrade", "move a single tenant's data", "upgrade:run_upgrade"),
    Command("notify preview", "show the text of a message", "notifications:preview"),
    Command("notify test", "send one real test message", "notifications:test"),
    Command("notify list", "list messages", "notifications:list_notifications"),
    Command("notify show", "show one message", "notifications:show_notification"),
    Command("notify retry", "send messages again that did not arrive", "notifications:retry"),
    Command("alerts list", "list alerts, the open ones first", "alerts:list_alerts"),
    Command("alerts test", "send a test message on each channel", "alerts:test"),
    Command("storage status", "show the store's version, sizes and rows", "storage:show_status"),
    Command("storage check", "check the store for damage", "storage:check_store"),
    Command("storage migrate", "move the store to another engine", "storage:migrate"),
    Command(
        "storage backup",
        "write a backup of the store, even while a receiver runs",
        "storage:back_up",
    ),
    Command("storage restore", "restore a backup into an empty store", "storage:restore"),
    Command("openapi", "print the OpenAPI document", "settings:openapi"),
    Command(
        "completion", "print the script that completes commands in a shell", "completion:complete"
    ),
)

#: Examples at the end of the help of commands that start with these words.
EXAMPLES = """\
run --standalone --app app:handlers
run -c appsettings.json -p 9000 --app app:handlers
run --forward-to http://127.0.0.1:3000/hooks
health --ready
health --url unix:/run/sdk-trio/admin.sock
dev
dev --app app:handlers --reload
dev -p 9000
init --directory shop
config check --standalone
config check -c appsettings.json -f json
config show
config show --all
config schema > sdk.schema.json
doctor --standalone --app app:handlers
simulate --app app:handlers
simulate --app app:handlers --check app:check --seeds 1000
simulate --app app:handlers --seed 17 --write-test test_seed_17.py
events types
events types --app app:handlers
events list --state dead
events list --type order.paid --since 2h -n 10
events list --subject 4f0c1a52-7e11-4d0b-9a53-0c1f6e2b7d10
events show msg_2f0c
events replay msg_2f0c
events replay --state dead --since 1d --dry-run
events replay --state dead --error 'ValueError: no such product'
events replay --state dead --route shop
events pause --type 'order.*' --until 2h --reason 'database migration'
events resume --type 'order.*'
events pauses
events trigger order.paid
events trigger order.paid --data '{"amount": 100}'
events trigger order.paid -n 100
events resend msg_2f0c --to http://localhost:3000/webhooks
events reconcile --since 2h --dry-run
events catch-up --since 3h --dry-run
events catch-up --since 2026-11-20T04:00Z --types 'order.*'
events rejected --cause no_match
events tail --type 'order.*' --body
events tail --from wss://hooks.example --state dead
listen --forward-to http://localhost:3000/webhooks
listen --from wss://hooks.example --forward-to http://localhost:3000/
routes list
routes list -f json
routes pause shop --reason 'database migration'
routes resume shop
call --list
call orders list --limit 5
call orders get ID
sign body.json
sign body.json --format curl
verify --headers headers.txt body.json
secrets new
tenant list --status Active
tenant show acme
tenant add acme --name 'Acme Ltd' --email ada@acme.example
tenant add acme --name Acme --webhook-secret-env ACME_SECRET
tenant set acme --name 'Acme Limited' --phone +15551234567
tenant set acme --email ada@acme.example --email-verified
tenant set acme --webhook-secret-env ACME_2 --keep-webhook-secrets
tenant set acme --remove-webhook-secret env:ACME_1
tenant import tenants.csv --dry-run
tenant export > tenants.csv
tenant suspend acme --reason 'invoice overdue'
tenant reactivate acme --reason paid
tenant deactivate acme --reason 'contract ended'
tenant delete acme --reason 'asked by mail'
tenant audit acme
tenant audit --status Suspended
tenant purge --dry-run
replication run -c appsettings.json
replication status
replication render --check
replication restore --tenant acme --output acme.db
replication restore --in-place acme --at 2h
replication verify --all
upgrade --dry-run
notify preview --transition Suspended
notify test --channel email --to ada@acme.example
notify list --state failed
notify show 17-email
notify retry 17-email
alerts list --open
alerts test
alerts test --channel chat
storage status
storage status -f json
storage check
storage migrate --from sqlite --to postgres --dry-run
storage migrate --from sqlite --to postgres
storage backup inbox-2026-05-01.backup
storage restore inbox-2026-05-01.backup
openapi
openapi --admin
completion fish | source
completion zsh > ~/.zfunc/_sdk-trio
"""

#: The help text of each group of commands.
GROUPS = {
    "alerts": "conditions that an operator has to know about",
    "config": "the settings: check them, show them, describe them",
    "events": "the inbox: deliveries, their states, and replays",
    "replication": "the replication of the tenants' databases",
    "routes": "the applications that events are forwarded to",
    "secrets": "webhook secrets",
    "storage": "the store: its version, sizes, check and backup, its move to another engine",
    "notify": "messages to site managers: their texts and states",
    "tenant": "tenants: their data, status and history",
}


PROGRAM = "sdk-trio"

_EXIT_CODES = """\
exit status: 0 fine, 1 failure, 2 usage, 69 unavailable, 78 configuration, 128 + the signal's
number when it was interrupted. 'help COMMAND' describes a command, 'config schema' every setting,
'events types' every event.
"""

_HELP = frozenset({"-h", "--help"})

#: Short forms of options that are typed often; ``-n`` is a number of records.
SHORT_FORMS = {
    "--app": "-a",
    "--config": "-c",
    "--count": "-n",
    "--format": "-f",
    "--limit": "-n",
    "--port": "-p",
    "--set": "-s",
    "--yes": "-y",
}


class UsageError(SdkError):
    """A command was called incorrectly: the message names the argument and its valid values."""

    exit_code = EXIT_USAGE


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are :class:`UsageError`; no option can be abbreviated.

    ``fill`` declares the arguments. It is called once, when the parser is about to parse.
    """

    def __init__(self, *, fill: Callable[["Parser"], None], **options: Any) -> None:
        # An abbreviation in a script would break, or change its meaning, when an option is added.
        super().__init__(allow_abbrev=False, **options)
        self._fill: Callable[[Parser], None] | None = fill

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Declare an argument, and its short form if there is one."""
        return super().add_argument(*_with_short_form(names), **options)

    def choose(self, words: Sequence[str]) -> "Parser":
        """Return the parser of a command or group below this one."""
        found = self
        for word in words:
            found.fill()
            (choices,) = (a for a in found._actions if isinstance(a, argparse._SubParsersAction))
            found = choices.choices[word]
        found.fill()
        return found

    @property
    def options(self) -> list[str]:
        """All its options, such as ``--config``."""
        return list(self._option_string_actions)

    def fill(self) -> None:
        """Declare the arguments, unless already done."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; argparse calls this for the parser of a chosen command as well."""
        self.fill()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that ``main`` words all errors."""
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments; ``target`` names the chosen command's function.

    Raises:
        UsageError: the command or argument does not exist.
        SystemExit: ``--help`` or ``--version``, after printing.
    """
    arguments = _as_options(arguments)
    # Words first: argparse would name all commands in one long list for a mistyped one.
    check_words(arguments, [command.words for command in COMMANDS])
    if " ".join(arguments) in {"", *GROUPS}:
        # Show the list of a group to people who enter only its name. An incomplete script fails
        # anyway.
        build_parser(alone=True).choose(arguments).print_help(sys.stderr)
        raise UsageError("a command is missing: choose one from this list")
    parser = build_parser(alone=not _HELP.isdisjoint(arguments))
    parsed: argparse.Namespace
    # Unknown arguments are checked here, because `call` takes options that no parser knows: the
    # fields of the upstream's operations.
    parsed, rest = parser.parse_known_args(arguments)
    chosen: Parser = parsed.parser
    if rest and not parsed.takes_fields:
        advice = option_meant(rest, chosen.options)
        chosen.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
    _refuse_undecodable(chosen, parsed, rest)
    del parsed.parser
    parsed.fields = rest
    return parsed


#: The metavars of arguments that are, or may contain, file names: those can be any bytes.
_OF_FILES = frozenset({"FILE", "F", "D", "KEY=VALUE"})


def _refuse_undecodable(parser: Parser, parsed: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise UsageError for a text that is not UTF-8: stores cannot keep or compare it.

    Python decodes invalid bytes in ``sys.argv`` as lone surrogates (PEP 383).
    """
    for action in parser._actions:
        given = getattr(parsed, action.dest, None)
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str) and not text.isascii() and action.metavar not in _OF_FILES:
                _require_utf_8(text, action.option_strings[-1:] or [str(action.metavar)])
    for text in rest:
        _require_utf_8(text, ["an argument"])


def _require_utf_8(text: str, name: Sequence[str]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{name[0]}: {text!r} is not UTF-8: enter it in UTF-8, for example in a terminal "
            "whose locale is UTF-8"
        ) from None


def _as_options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the command line with ``help WORDS`` and ``version`` replaced by their options."""
    match arguments:
        case ["help", *words]:
            return [*words, "--help"]
        case ["version"]:
            return ["--version"]
    return arguments


def _with_short_form(names: Sequence[Any]) -> Sequence[Any]:
    short = SHORT_FORMS.get(names[0]) if names else None
    return names if short is None else (short, *names)


def build_parser(*, alone: bool = False) -> Parser:
    """Return the parser of every command in :data:`COMMANDS`.

    With ``alone``, groups are imported only for the arguments of their commands.
    """
    parser = Parser(
        prog=PROGRAM,
        description="A runtime for signed webhooks. 'help COMMAND' shows its arguments.",
        epilog=_EXIT_CODES,
        # The epilog has lines of its own, which the usual formatter would fill up.
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fill=partial(_fill_group, group="", alone=alone),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


def _fill_group(parser: Parser, *, group: str, alone: bool) -> None:
    """Declare the commands of a group, which may contain groups; "" contains all."""
    choices: Any = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    prefix = group and f"{group} "
    for command in COMMANDS:
        if not command.words.startswith(prefix):
            continue
        word, _, deeper = command.words.removeprefix(prefix).partition(" ")
        if not deeper:
            about, summary = command.summary, command.summary
            about = f"{about[0].upper()}{about[1:]}."
            # Filled when it is reached: every group would otherwise be imported for each command.
            fill = partial(_fill_command, command=command, alone=alone)
        elif word not in choices.choices:
            about = summary = GROUPS[f"{prefix}{word}"]
            fill = partial(_fill_group, group=f"{prefix}{word}", alone=alone)
        else:
            continue
        choices.add_parser(
            word,
            help=summary,
            description=about,
            # Examples are lines of their own.
            formatter_class=argparse.RawDescriptionHelpFormatter,
            fill=fill,
        )


def _examples(words: str) -> str:
    lines = [line for line in EXAMPLES.splitlines() if f"{line} ".startswith(f"{words} ")]
    return "\n  ".join(("examples:", *(f"{PROGRAM} {line}" for line in lines)))


def _fill_command(parser: Parser, *, command: Command, alone: bool) -> None:
    """Declare the arguments of a command, and those of the settings; add its examples."""
    parser.epilog = _examples(command.words)
    module = f"{__package__}.{command.target.partition(':')[0]}"
    group = _half_of(module) if alone else import_module(module)
    last = command.words.split()[-1].replace("-", "_")
    add_arguments = getattr(group, f"{last}_arguments", None)
    if add_arguments is not None:
        add_arguments(parser)
    _add_settings(parser)
    parser.set_defaults(
        target=command.target,
        words=command.words,
        takes_fields=command.takes_fields,
        parser=parser,
    )


_describing = False


def describing() -> bool:
    """Return whether the file of a group runs only for the arguments of its commands.

    It then omits the imports that only the commands need, which would slow down ``--help``.
    """
    return _describing


def _half_of(name: str) -> ModuleType:
    """Return the module of a group without the dependencies of its commands.

    It is not put into ``sys.modules``: a command that runs later in this process imports the whole.
    """
    global _describing
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    half = module_from_spec(spec)
    _describing = True
    try:
        spec.loader.exec_module(half)
    finally:
        _describing = False
    return half


def _add_settings(parser: argparse.ArgumentParser) -> None:
    # Every command accepts these, even those without settings: one line that works for a command
    # works for all.
    group = parser.add_argument_group("settings")
    group.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="a settings file, JSON or TOML; may be repeated, later ones win",
    )
    group.add_argument(
        "-s",
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


# -- arguments that several groups take ------------------------------------------------------------

#: Metavariable of options that name an object of the application.
REFERENCE = "MODULE:ATTR"

#: Help text on the values of :func:`parse_moment`.
MOMENT_HELP = "ISO 8601, Unix seconds, or a time ago such as 15m, 2h, 3d"


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add ``--format table|json``."""
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="of standard output"
    )


def add_number(
    parser: argparse.ArgumentParser,
    option: str,
    *,
    least: int = 1,
    greatest: int = 1_000_000,
    metavar: str = "N",
    **about: Any,
) -> None:
    """Add an option for an integer from ``least`` to ``greatest``."""
    kind = partial(parse_count, option=option, least=least, greatest=greatest)
    parser.add_argument(option, metavar=metavar, type=kind, **about)


def add_status(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--status`` of tenants."""
    parser.add_argument("--status", choices=[each.value for each in TenantStatus], help=help)


def add_limit(parser: argparse.ArgumentParser, default: int | None = 50) -> None:
    """Add ``--limit``; without a default all is printed."""
    which = " (default: all)" if default is None else f", newest first (default {default})"
    add_number(parser, "--limit", default=default, help=f"at most this many{which}")


def add_moment(
    parser: argparse.ArgumentParser, option: str, help: str, *, required: bool = False
) -> None:
    """Add an option that takes a moment, see :func:`parse_moment`."""
    kind = partial(parse_moment, now=time.time(), option=option)
    help = f"{help}: {MOMENT_HELP}"
    parser.add_argument(option, metavar="T", type=kind, required=required, help=help)


def add_source(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--source``, the name of a sender other than the upstream."""
    parser.add_argument("--source", metavar="NAME", help=f"{help}, by the name in the settings")


def add_secret(parser: argparse.ArgumentParser) -> None:
    """Add the option for the secret to sign or verify with."""
    parser.add_argument(
        "--secret-env",
        metavar="NAME",
        help="the environment variable with the secret (default: the configured secrets)",
    )


def add_feed(parser: argparse.ArgumentParser) -> None:
    """Add the options for the followed receiver, and for its token."""
    parser.add_argument(
        "--from",
        dest="from_",
        metavar="URL",
        help="the admin address of a receiver, such as wss://hooks.example or unix:PATH",
    )
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="the variable with its admin token (default: that of Sdk:Admin:TokenEnvVar)",
    )


def add_port(parser: argparse.ArgumentParser) -> None:
    """Add ``--port``, see :func:`port_settings`."""
    about = "listen on this port of 127.0.0.1; 0 takes a free one"
    add_number(parser, "--port", least=0, greatest=65535, help=about)


def port_settings(port: int | None) -> dict[str, str]:
    """Return the settings of ``--port``."""
    return {} if port is None else {"Sdk:Server:Bind": f"127.0.0.1:{port}"}


def add_forward_to(parser: argparse.ArgumentParser) -> None:
    """Add ``--forward-to``, see :func:`forward_settings`."""
    parser.add_argument(
        "--forward-to",
        metavar="URL",
        help="post events without a handler to this application, signed with the secret "
        "in SDK_FORWARD_SECRET; unix:SOCKET:PATH as well",
    )


def forward_settings(url: str | None) -> dict[str, str]:
    """Return the settings of ``--forward-to``."""
    return {} if url is None else {"Sdk:Forward:Url": url}


def add_dev(parser: argparse.ArgumentParser) -> None:
    """Add ``--dev``: examine the setup of ``dev``."""
    parser.add_argument(
        "--dev", action="store_true", help="as 'dev' runs: Development, its own secret, no token"
    )


def add_reason_and_actor(parser: argparse.ArgumentParser) -> None:
    """Add the reason and the actor of a change of a tenant."""
    parser.add_argument("--reason", metavar="R", help="why, for the audit trail and messages")
    parser.add_argument(
        "--actor", metavar="A", help="who makes the change (default: the user of the machine)"
    )


def add_bypass(parser: argparse.ArgumentParser) -> None:
    """Add the option that suspends although the email address is not verified."""
    parser.add_argument(
        "--bypass-email-verification",
        action="store_true",
        help="suspend although the site manager's email is not verified; counts only while "
        "SuspendUnverifiedTenantsAnyway is true",
    )


def add_identifier(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a tenant."""
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")


def add_sources(parser: argparse.ArgumentParser, *, changes: bool = False) -> None:
    """Add the options for the sources of an access token and of webhook secrets.

    With ``changes`` they can also be removed or kept.
    """
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--access-token-env", metavar="NAME", help="the variable with its access token"
    )
    token.add_argument("--access-token-file", metavar="FILE", help="the file with its access token")
    if changes:
        token.add_argument(
            "--no-access-token", action="store_true", help="the host's access token is used"
        )
    parser.add_argument(
        "--webhook-secret-env",
        metavar="NAME",
        action="append",
        default=[],
        help="a variable with its own webhook secret; may be repeated",
    )
    parser.add_argument(
        "--webhook-secret-file",
        metavar="FILE",
        action="append",
        default=[],
        help="a file with webhook secrets of its own, one a line; may be repeated",
    )

    if not changes:
        return
    parser.add_argument(
        "--keep-webhook-secrets",
        action="store_true",
        help="put the named sources before the current ones; otherwise they replace them",
    )
    parser.add_argument(
        "--remove-webhook-secret",
        metavar="SOURCE",
        action="append",
        default=[],
        help="remove env:NAME or file:PATH, as 'tenant show' prints it, and keep the others",
    )
    parser.add_argument(
        "--no-webhook-secrets", action="store_true", help="the host's webhook secrets are used"
    )


# -- words -------------------------------------------------------------------------------------


def check_words(arguments: Sequence[str], known: Collection[str]) -> None:
    """Check the words before the first option against the known commands.

    Args:
        arguments: the command line after the program's name.
        known: the commands in full, such as ``run`` and ``events list``.

    Raises:
        UsageError: the command is unknown; with the closest name.
    """
    chosen = ""
    for depth, word in enumerate(arguments, start=1):
        if chosen in known or word.startswith("-"):
            return
        within = [command for command in known if command.startswith(chosen and f"{chosen} ")]
        chosen = f"{chosen} {word}".lstrip()
        _check(chosen, [" ".join(command.split()[:depth]) for command in within])


#: Words that people try first, and the words of the commands.
_MEANT = {
    "create": "add",
    "new": "add",
    "change": "set",
    "update": "set",
    "remove": "delete",
    "rm": "delete",
    "ls": "list",
}


def _check(chosen: str, candidates: Sequence[str]) -> None:
    if chosen in candidates:
        return
    group, _, word = chosen.rpartition(" ")
    meant = f"{group} {_MEANT.get(word, '')}".strip()
    if word in _MEANT and meant in candidates:
        raise UsageError(f"there is no command '{chosen}': did you mean '{meant}'?")
    # Only one suggestion: several guesses would not help.
    import difflib  # on the path of a mistake only

    close = difflib.get_close_matches(chosen, candidates, n=1)
    advice = (
        f"did you mean '{close[0]}'?"
        if close
        else f"choose from {', '.join(dict.fromkeys(candidates))}"
    )
    raise UsageError(f"there is no command '{chosen}': {advice}")


def option_meant(given: Sequence[str], known: Collection[str]) -> str:
    """Return ``; did you mean --config?`` for the first option that is similar to a known one.

    The text is empty if none is similar.
    """
    import difflib  # on the path of a mistake only

    for word in given:
        if word.startswith("--"):
            close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            if close:
                return f"; did you mean {close[0]}?"
    return ""


# -- values ------------------------------------------------------------------------------------

# Fewer digits are a compact date of ISO 8601, or an age without its unit; more reach beyond the
# year 9999, where no date of Python goes.
_UNIX_SECONDS = re.compile(r"[0-9]{9,12}")


def parse_moment(text: str, *, now: float, option: str = "--since", ahead: bool = False) -> float:
    """Return Unix seconds of a time in ISO 8601 or Unix seconds, or of an age: ``15m``, ``2h``.

    A time without an offset from UTC is in this machine's time zone; a date means its first moment.
    With ``ahead``, ``15m`` is that far ahead. ``option`` is for the message.

    Raises:
        UsageError: it has none of these forms, or is before 1970.
    """
    stripped = text.strip()
    # Checked before ISO 8601, which has no such form.
    span = parse_short_span(stripped)
    if span is not None:
        return now + span if ahead else now - span
    moment = float(stripped) if _UNIX_SECONDS.fullmatch(stripped) else _iso(stripped)
    if moment is None or moment < 0:
        raise UsageError(
            f"{option} takes a time such as 2026-01-31T12:00Z, Unix seconds, or 15m, 2h, 3d "
            f"{'from now' if ahead else 'ago'}; not {text!r}"
        )
    return moment


def parse_count(text: str, *, option: str, least: int = 1, greatest: int = 1_000_000) -> int:
    """Return an integer from ``least`` to ``greatest``.

    Raises:
        UsageError: it is not such a number.
    """
    # isdigit accepts digits of every script, and int() refuses texts of thousands of them with
    # another error.
    if text.isascii() and text.isdigit() and len(text) <= 18 and least <= int(text) <= greatest:
        return int(text)
    raise UsageError(f"{option} takes a whole number from {least} to {greatest}, not {text!r}")


def moment_text(seconds: float | None) -> str | None:
    """Return Unix seconds as people read them, in UTC to the second; None stays None."""
    return None if seconds is None else readable(seconds)


def _iso(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
