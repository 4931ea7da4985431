"""The arguments of every command, as the table of commands names them.

Imports no part of the program: the values of its enumerations are spelt out, and compared in tests.
"""

from argparse import ArgumentParser

from ..records.channels import CHANNELS

#: The states of ``storage.records.DeliveryState``, whose import would load the whole store.
STATES = ("received", "running", "retrying", "done", "dead", "parked")
REPLAYABLE_STATES = ("dead", "parked", "retrying")

#: The states of ``storage.notification_records.NotificationState``.
NOTIFICATION_STATES = ("pending", "sending", "retrying", "sent", "failed", "skipped", "unknown")
RETRIABLE_STATES = ("failed", "skipped", "unknown")

#: The values of ``storage.tenant_records.TenantStatus``.
TENANT_STATUSES = ("Active", "Suspended", "Deactivated", "Deleted")

#: The values of ``storage.tenant_records.Transition``.
TRANSITIONS = ("Suspended", "Reactivated", "Deactivated", "Deleted")

_REFERENCE = "MODULE:ATTR"
_MOMENT_HELP = "ISO 8601, or a time ago such as 15m, 2h, 3d"


def run(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--app",
        metavar=_REFERENCE,
        help="the HandlerRegistry to run, imported from the current directory as uvicorn does; "
        "without it every event is parked",
    )
    parser.add_argument(
        "--standalone", action="store_true", help="the receiver alone: no AccessToken is needed"
    )
    parser.add_argument(
        "--upgrade-host",
        metavar=_REFERENCE,
        help="the application's HostUpgrade, for the upgrade from a single tenant at the start",
    )


def health(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--ready", action="store_true", help="ask whether it takes deliveries, not only if it lives"
    )
    parser.add_argument(
        "--url", metavar="U", help="the admin address (default: that of the settings)"
    )


def dev(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--app",
        metavar=_REFERENCE,
        help="the HandlerRegistry to run; without it every event is logged",
    )


def init(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--directory", metavar="D", default=".", help="where to write (default: here)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def config_check(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--standalone", action="store_true", help="check for the receiver alone: no AccessToken"
    )
    _add_format(parser)


def doctor(parser: ArgumentParser) -> None:
    parser.add_argument("--app", metavar=_REFERENCE, help="examine the handlers of it as well")
    parser.add_argument(
        "--standalone", action="store_true", help="examine the receiver alone: no AccessToken"
    )
    parser.add_argument("--offline", action="store_true", help="do not call the upstream")
    _add_format(parser)


def config_show(parser: ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="include what is at its default")
    _add_format(parser)


def openapi(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--admin", action="store_true", help="of the admin address instead of the receiver"
    )


def nothing(parser: ArgumentParser) -> None:
    """Add no argument of its own."""


def events_list(parser: ArgumentParser) -> None:
    parser.add_argument("--type", metavar="T", help="only this event type")
    parser.add_argument("--state", choices=STATES, help="only this state")
    parser.add_argument("--tenant", metavar="T", help="only this tenant's, by name or id")
    parser.add_argument("--since", metavar="T", help=f"only arrivals since: {_MOMENT_HELP}")
    parser.add_argument(
        "--limit", metavar="N", default="50", help="at most this many, newest first (default 50)"
    )
    _add_format(parser)


def events_show(parser: ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the webhook id")
    _add_format(parser)


def events_replay(parser: ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="dead, parked or retrying events")
    parser.add_argument(
        "--state", choices=REPLAYABLE_STATES, help="every event in this state, instead of ids"
    )
    parser.add_argument("--type", metavar="T", help="with --state: only this event type")
    parser.add_argument("--tenant", metavar="T", help="with --state: only this tenant's")
    parser.add_argument("--since", metavar="T", help=f"with --state: only since: {_MOMENT_HELP}")
    parser.add_argument("--dry-run", action="store_true", help="show what would be replayed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _add_format(parser)


def events_trigger(parser: ArgumentParser) -> None:
    parser.add_argument("type", metavar="TYPE", help="an event type, such as order.created")
    parser.add_argument(
        "--data", metavar="JSON", help="a JSON object that is merged into the sample's data"
    )
    parser.add_argument(
        "--url", metavar="U", help="where to post (default: the receiver of the data directory)"
    )
    parser.add_argument("--count", metavar="N", default="1", help="how many events (default 1)")
    parser.add_argument(
        "--tenant", metavar="T", help="to this tenant's address, with its secret; a name or id"
    )
    _add_format(parser)


def events_reconcile(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--since", metavar="T", required=True, help=f"what was sent since: {_MOMENT_HELP}"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be asked for")
    _add_format(parser)


def call(parser: ArgumentParser) -> None:
    parser.add_argument(
        "operation",
        metavar="WORD",
        nargs="*",
        help="resource, operation and the values of its path, such as: orders get ID; then "
        "--name value for each field",
    )
    parser.add_argument("--list", action="store_true", help="list the operations with these words")
    parser.add_argument("--limit", metavar="N", help="of a list: this many records (default 20)")
    parser.add_argument("--all", action="store_true", help="of a list: every record")
    parser.add_argument(
        "--data", metavar="JSON", help="the body, or the query of a GET; - reads standard input"
    )
    parser.add_argument("--raw", action="store_true", help="print the answer's bytes as they came")
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="of --list (default table)"
    )


def events_tail(parser: ArgumentParser) -> None:
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


def sign(parser: ArgumentParser) -> None:
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


def verify(parser: ArgumentParser) -> None:
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


def secrets_new(parser: ArgumentParser) -> None:
    parser.add_argument("--count", metavar="N", default="1", help="how many (default 1)")
    _add_format(parser)


def tenant_list(parser: ArgumentParser) -> None:
    parser.add_argument("--status", choices=TENANT_STATUSES, help="only this status")
    parser.add_argument(
        "--search", metavar="TEXT", help="only those with it in a name, an id or an address"
    )
    parser.add_argument("--limit", metavar="N", help="at most this many (default: all)")
    parser.add_argument(
        "--after", metavar="IDENTIFIER", default="", help="only those that come after this one"
    )
    _add_format(parser)


def tenant_show(parser: ArgumentParser) -> None:
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")
    _add_format(parser)


def tenant_add(parser: ArgumentParser) -> None:
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", help="lowercase letters, digits and hyphens, 1 to 64"
    )
    parser.add_argument("--name", metavar="N", required=True, help="the name for people")
    parser.add_argument("--email", metavar="E", help="the site manager's email address")
    parser.add_argument("--email-verified", action="store_true", help="the address is verified")
    parser.add_argument("--phone", metavar="P", help="the site manager's phone, as +15551234567")
    parser.add_argument(
        "--organization-id", metavar="O", help="the upstream's organization whose events it gets"
    )
    _add_token(parser)
    _add_secret_sources(parser)
    _add_who_and_why(parser)
    _add_format(parser)


def _add_token(parser: ArgumentParser, *, removable: bool = False) -> None:
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--access-token-env", metavar="NAME", help="the variable that holds its access token"
    )
    token.add_argument(
        "--access-token-file", metavar="FILE", help="the file that holds its access token"
    )
    if removable:
        token.add_argument(
            "--no-access-token", action="store_true", help="it has none of its own any more"
        )


def _add_secret_sources(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--webhook-secret-env",
        metavar="NAME",
        action="append",
        default=[],
        help="a variable that holds a webhook secret of its own; may be repeated",
    )
    parser.add_argument(
        "--webhook-secret-file",
        metavar="FILE",
        action="append",
        default=[],
        help="a file with webhook secrets of its own, one a line; may be repeated",
    )


def tenant_change(parser: ArgumentParser) -> None:
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")
    parser.add_argument("--name", metavar="N", help="the name for people")
    organization = parser.add_mutually_exclusive_group()
    organization.add_argument(
        "--organization-id", metavar="O", help="the upstream's organization whose events it gets"
    )
    organization.add_argument(
        "--no-organization", action="store_true", help="it gets no organization's events any more"
    )
    _add_who_and_why(parser)
    _add_format(parser)


def tenant_credentials_set(parser: ArgumentParser) -> None:
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")
    _add_token(parser, removable=True)
    _add_secret_sources(parser)
    parser.add_argument(
        "--no-webhook-secrets", action="store_true", help="it has none of its own any more"
    )
    _add_who_and_why(parser)
    _add_format(parser)


def tenant_credentials_rotate(parser: ArgumentParser) -> None:
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")
    _add_secret_sources(parser)
    parser.add_argument(
        "--remove",
        metavar="SOURCE",
        action="append",
        default=[],
        help="an old source, env:NAME or file:PATH as 'tenant credentials show' prints it",
    )
    _add_who_and_why(parser)
    _add_format(parser)


def tenant_import(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="CSV or JSON as of 'tenant export'; - is standard input"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would become of each row, and change none"
    )
    _add_who_and_why(parser)
    _add_format(parser)


def tenant_export(parser: ArgumentParser) -> None:
    parser.add_argument("--status", choices=TENANT_STATUSES, help="only this status")
    parser.add_argument(
        "--format", choices=("csv", "json"), default="csv", help="of standard output (default csv)"
    )


def tenant_contact(parser: ArgumentParser) -> None:
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")
    email = parser.add_mutually_exclusive_group()
    email.add_argument(
        "--email", metavar="E", help="the site manager's email address; another one is not verified"
    )
    email.add_argument("--no-email", action="store_true", help="there is no address any more")
    verified = parser.add_mutually_exclusive_group()
    verified.add_argument(
        "--email-verified", action="store_true", default=None, help="the address is verified"
    )
    verified.add_argument(
        "--email-not-verified",
        dest="email_verified",
        action="store_false",
        default=None,
        help="the address is not verified",
    )
    phone = parser.add_mutually_exclusive_group()
    phone.add_argument("--phone", metavar="P", help="the site manager's phone, as +15551234567")
    phone.add_argument("--no-phone", action="store_true", help="there is no phone any more")
    _add_who_and_why(parser)
    _add_format(parser)


def tenant_transition(parser: ArgumentParser) -> None:
    parser.add_argument("identifier", metavar="IDENTIFIER", help="the tenant, or its id")
    _add_who_and_why(parser)
    _add_bypass(parser)
    _add_format(parser)


def tenant_delete(parser: ArgumentParser) -> None:
    tenant_transition(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def tenant_audit(parser: ArgumentParser) -> None:
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", nargs="?", help="only this tenant, or its id"
    )
    parser.add_argument(
        "--status", choices=TENANT_STATUSES, help="only what led to this status, or stayed there"
    )
    parser.add_argument(
        "--search", metavar="TEXT", help="only rows with it in who, what, why or whom"
    )
    parser.add_argument("--limit", metavar="N", help="at most this many (default: all)")
    parser.add_argument("--after", metavar="SEQUENCE", help="only rows after this one")
    _add_format(parser)


def _add_who_and_why(parser: ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="R", help="why, for the audit trail and messages")
    parser.add_argument("--actor", metavar="A", help="who asks (default: the user of the machine)")


def _add_bypass(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--bypass-email-verification",
        action="store_true",
        help="suspend although the site manager's email is not verified; counts only while "
        "SuspendUnverifiedTenantsAnyway is true",
    )


def replication_render(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="F", help="write this file, whole, mode 0600 (default: print)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if the file (default: ConfigOutputPath) is not current",
    )


def replication_run(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--pid-file",
        metavar="P",
        help="where our process id goes, for who sends SIGHUP (default: ReplicatorPidFilePath)",
    )


def replication_status(parser: ArgumentParser) -> None:
    _add_format(parser)


def upgrade(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    parser.add_argument(
        "--host",
        metavar=_REFERENCE,
        help="the application's HostUpgrade: its resolver of the default tenant, its own steps",
    )
    _add_format(parser)


def tenant_purge(parser: ArgumentParser) -> None:
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", nargs="?", help="only this tenant, or its id"
    )
    parser.add_argument(
        "--now",
        action="store_true",
        help="also within its retention, with all earlier audit rows; needs IDENTIFIER",
    )
    parser.add_argument(
        "--orphans",
        action="store_true",
        help="replicas on a local disk, too, whose tenants this store does not know",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--reason", metavar="R", help="why, for the audit trail")
    parser.add_argument("--actor", metavar="A", help="who, for the audit trail (default: the user)")
    parser.add_argument(
        "--forget-audit", action="store_true", help="remove the tenants' earlier audit rows too"
    )
    _add_format(parser)


def replication_restore(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--in-place",
        metavar="T",
        help="restore this tenant's own database: suspend it, wait until nobody has the database "
        "open, replace it, and reactivate the tenant if it was active",
    )
    parser.add_argument(
        "--tenant", metavar="T", help="the tenant, or its id if it is not known here"
    )
    parser.add_argument(
        "--at",
        metavar="TIME",
        help=f"the last state before it (default: the newest); {_MOMENT_HELP}",
    )
    parser.add_argument("--output", metavar="F", help="the file to make, of --tenant")
    parser.add_argument("--force", action="store_true", help="replace --output if it exists")
    parser.add_argument(
        "--keep", metavar="F", help="with --in-place: a new file for the database that is replaced"
    )
    parser.add_argument(
        "--discard-newer",
        action="store_true",
        help="with --in-place: replace the database also when the replica lacks what it has",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        help="with --in-place: how long others may have the database open (default: 60)",
    )
    _add_who_and_why(parser)
    _add_bypass(parser)
    _add_format(parser)


def replication_verify(parser: ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tenant", metavar="T", help="only this tenant, of any status")
    which.add_argument("--all", action="store_true", help="every active tenant (the default)")
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="replicas that do not reach back any more as far as they did are good from now on",
    )
    _add_format(parser)


def notify_preview(parser: ArgumentParser) -> None:
    parser.add_argument("--transition", choices=TRANSITIONS, required=True, help="which texts")
    parser.add_argument(
        "--tenant", metavar="T", help="a tenant, or its id, in place of made-up values"
    )
    parser.add_argument("--reason", metavar="R", help="the reason (default: a made-up one)")
    _add_format(parser)


def notify_test(parser: ArgumentParser) -> None:
    parser.add_argument("--channel", choices=CHANNELS, required=True, help="which channel")
    parser.add_argument(
        "--to",
        metavar="ADDRESS",
        help="an email address, a phone number as +15551234567, or a URL (of webhook; default: the "
        "configured one)",
    )
    _add_format(parser)


def notify_list(parser: ArgumentParser) -> None:
    parser.add_argument("--state", choices=NOTIFICATION_STATES, help="only this state")
    parser.add_argument("--channel", choices=CHANNELS, help="only this channel")
    parser.add_argument("--tenant", metavar="T", help="only this tenant, or its id")
    parser.add_argument(
        "--limit", metavar="N", default="50", help="at most this many, newest first (default 50)"
    )
    _add_format(parser)


def notify_show(parser: ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the message, such as 17-email")
    _add_format(parser)


def notify_retry(parser: ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="messages, such as 17-email")
    parser.add_argument(
        "--state", choices=RETRIABLE_STATES, help="every message in this state, instead of ids"
    )
    parser.add_argument("--channel", choices=CHANNELS, help="with --state: only this channel")
    parser.add_argument("--dry-run", action="store_true", help="show what would be sent again")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _add_format(parser)


def _add_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="of standard output"
    )
