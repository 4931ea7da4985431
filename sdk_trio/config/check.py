"""Checks of settings: values, ranges, and dependencies. Pure.

Ranges, required values and forms come from each setting's metadata. Rules between several settings
are here; those of tenants are in ``check_tenants.py``. All faults are found in one pass: a start
that reports one at a time costs a restart for each.
"""

import functools
import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import msgspec

from ..base.http import is_token
from ..base.public_addresses import is_local_bind, names_public_address
from ..errors import Problem
from .check_sources import source_problems, source_warnings
from .check_tenants import (
    alert_warnings,
    notification_problems,
    notification_warnings,
    replication_problems,
    replication_warnings,
)
from .fields import (
    ApiVersionStrictness,
    Form,
    KeyDerivation,
    Mode,
    StorageBackend,
    check_form,
    pascal_case,
    split_unix,
)
from .options import Settings, bundled_api_version, environment_meant
from .options.client import ConnectionOptions
from .options.forward import URL_ROUTE
from .secret import PUBLIC_KEY_PREFIX, QUOTED, Secret, is_quoted, parse_secret
from .table import (
    NOTIFICATIONS_ENABLED,
    USE_REPLICATION,
    Setting,
    bound_addresses,
    is_below,
    used_settings,
)

#: Usual environments; a similar other name is probably a typing error.
USUAL_ENVIRONMENTS = ("Production", "Staging", "Development")

RECONCILIATION_NEEDS_CLIENT = Problem(
    "Sdk:Webhooks:Reconciliation:Enabled",
    "needs the client, and standalone runs the receiver only: set it to false, or run the full "
    "stack with an AccessToken",
)


PROCESSES_NEED_COMMAND = Problem(
    "Sdk:Server:Processes",
    "only 'sdk-trio run' runs several processes, and restarts each of them; a runtime inside "
    "another program is one process: set it to 1",
)


def unmet_needs(settings: Settings) -> list[Problem]:
    """Return one problem for each enabled part whose prerequisite is disabled."""
    tenants = settings.multi_tenant
    replicated = tenants.file_db.replication.use_replication
    asked = [
        (replicated, USE_REPLICATION, "whose databases are replicated"),
        (tenants.notifications.enabled, NOTIFICATIONS_ENABLED, "whose site managers are notified"),
    ]
    advice = "set Sdk:MultiTenant:Enabled to true, or remove the key"
    return [
        Problem(key, f"needs tenants, {why}: {advice}")
        for wanted, key, why in asked
        if wanted and not tenants.enabled
    ]


class Findings(msgspec.Struct, frozen=True):
    """Errors (``problems``) and suspicious values (``warnings``) of the settings."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def check(
    settings: Settings,
    *,
    standalone: bool = False,
    receiver: bool = True,
    invalid: Collection[str] = (),
) -> Findings:
    """Check settings against every rule.

    Args:
        settings: as bound, or created by hand.
        standalone: only the receiver runs, so no AccessToken is needed.
        receiver: the receiver runs, so at least one webhook secret is needed.
        invalid: full keys that could not be bound; no further problem is reported for them.
    """
    # A disabled section may hold anything: deployment templates include it.
    used = used_settings(settings, invalid)
    secrets = _webhook_secrets(settings, receiver=receiver, invalid=invalid)
    problems = [
        *(problem for setting in used for problem in _check_value(setting, settings)),
        *_core(settings, standalone=standalone),
        *secrets.problems,
        *_addresses(settings),
        *_connection(settings.connection),
        *_reconciliation(settings, lacks_client=standalone and receiver),
        *_forwarding(settings),
        *source_problems(settings, receiver=receiver),
        *notification_problems(settings.multi_tenant.notifications),
        *replication_problems(settings),
        *_version(settings, ApiVersionStrictness.STRICT),
    ]
    warnings = [
        *_version(settings, ApiVersionStrictness.WARN),
        *secrets.warnings,
        *_environment(settings),
        *_replay_window(settings),
        *source_warnings(settings),
        *exposure_warnings(settings),
        *notification_warnings(settings.multi_tenant.notifications),
        *alert_warnings(settings.alerts),
        *replication_warnings(settings),
    ]

    # An unbound setting has its default by now; a rule that joins it with others would report a
    # value that no one wrote.
    def written(found: list[Problem]) -> tuple[Problem, ...]:
        return tuple(p for p in found if not any(is_below(key, p.key) for key in invalid))

    return Findings(written(problems), written(warnings))


def _check_value(setting: Setting, settings: Settings) -> Iterator[Problem]:
    """Check one setting against its metadata: required, range, order, form."""
    value = setting.of(settings)
    if setting.about.required and _is_blank(value):
        yield Problem(
            setting.key,
            "is required: set a value, or remove the key for the default"
            if setting.default
            else "is required: set a value",
        )
        return
    values = enumerate(value) if setting.many else [(None, value)]
    for index, item in values:
        wrong = (
            _range_fault(setting, item)
            or _order_fault(setting, item, settings)
            or _form_fault(setting, item, settings)
        )
        if wrong:
            key = setting.key if index is None else f"{setting.key}:{index}"
            yield Problem(key, wrong)


def _is_blank(value: Any) -> bool:
    # Zero and false are values.
    return not value.strip() if isinstance(value, str) else value is None or value == ()


def _range_fault(setting: Setting, value: Any) -> str | None:
    if isinstance(value, timedelta):
        # Ranges of time spans are in seconds, like those of other durations.
        value = value.total_seconds()
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    least, greatest = setting.bounds
    if (least is None or value >= least) and (greatest is None or value <= greatest):
        return None
    unit = f" {setting.about.unit}" if setting.about.unit else ""
    # More digits add nothing, and Python refuses to print thousands of them.
    shown = f", not {value}" if abs(value) < 10**15 else ""
    if greatest is None:
        return f"must be at least {least:.15g}{unit}{shown}"
    return f"must be {least:.15g} to {greatest:.15g}{unit}{shown}"


def _order_fault(setting: Setting, value: Any, settings: Settings) -> str | None:
    other = setting.about.at_least
    if other is None:
        return None
    section = functools.reduce(getattr, setting.attributes[:-1], settings)
    least = getattr(section, other)
    return None if value >= least else f"must be at least {pascal_case(other)} ({least:g})"


def _form_fault(setting: Setting, value: Any, settings: Settings) -> str | None:
    if setting.about.form is None or not isinstance(value, str):
        return None
    # Not set: `required` decides whether it may be empty.
    if value == "" and not setting.many:
        return None
    return check_form(setting.about.form, value, development=settings.is_development)


def _core(settings: Settings, *, standalone: bool) -> Iterator[Problem]:
    token = settings.access_token
    if token is None or not settings.has_access_token:
        if not standalone:
            yield Problem(
                "Sdk:AccessToken",
                "is required, except with --standalone if no handler calls the upstream: "
                "set the variable SDK__ACCESSTOKEN or use a secret store",
            )
    elif is_quoted(token.reveal()):
        yield Problem("Sdk:AccessToken", QUOTED)
    # The token becomes a header. A line break in it, as at the end of a file, would break the
    # request or be cut off silently.
    elif not all("!" <= character <= "~" for character in token.reveal()):
        yield Problem(
            "Sdk:AccessToken",
            "holds white space, a line break or characters outside ASCII: copy it again",
        )
    if settings.mode is Mode.CUSTOM and _is_blank(settings.custom_base_url):
        yield Problem("Sdk:CustomBaseUrl", "is required when Mode is Custom: set an HTTPS URL")


def _version(settings: Settings, strictness: ApiVersionStrictness) -> Iterator[Problem]:
    """Report an ApiVersion that differs from the bundled one, at this strictness."""
    version = settings.api_version
    bundled = bundled_api_version(settings.upstream.version_header)
    differs = version is not None and version != bundled
    if version and check_form(Form.API_VERSION, version, development=False):
        return  # its form is reported as another problem
    if differs and settings.api_version_strictness is strictness:
        yield Problem(
            "Sdk:ApiVersion",
            f"differs from the bundled version {bundled}, and ApiVersionStrictness is "
            f"{strictness}: remove the key, or set ApiVersionStrictness to Off if this is meant",
        )


def _environment(settings: Settings) -> Iterator[Problem]:
    name = settings.environment
    if environment_meant(name) is not None:
        return
    import difflib  # needed only for an unusual name

    # Title case, like the usual names, so that "PRODUCTON" is found.
    meant = difflib.get_close_matches(name.title(), USUAL_ENVIRONMENTS, n=1, cutoff=0.8)
    near = f": did you mean {meant[0]}?" if meant and meant[0].casefold() != name.casefold() else ""
    yield Problem(
        "Sdk:Environment",
        "counts as Production, like every name except Development (or dev)"
        f"{near or ', which is right for a copy of it; only its files have names of their own'}",
    )


#: Headers of a forwarded event that only forwarding may set.
_OURS = re.compile(r"webhook-.*|sdk-.*|traceparent|content-.*|host|connection|transfer-encoding")


def _forwarding(settings: Settings) -> Iterator[Problem]:
    """Check the settings of a route against each other, and its headers."""
    names: set[str] = set()
    for index, route in enumerate(settings.forward.all_routes):
        place = f"Sdk:Forward:Routes:{index}"
        if route.name in names:
            yield Problem(
                f"{place}:Name", f"is {route.name}, like another route's: choose another name"
            )
        names.add(route.name)
        for number, header in enumerate(route.headers):
            wrong = _header_fault(header.reveal())
            if wrong:
                yield Problem(f"{place}:Headers:{number}", wrong)
        if route.name == URL_ROUTE:
            place = "Sdk:Forward"
        if names_public_address(route.url) and not route.allow_public_addresses:
            yield Problem(
                f"{place}:Url",
                "is an address of the public internet: give a route in Forward:Routes with "
                "AllowPublicAddresses, if this is meant",
            )


def _header_fault(text: str) -> str | None:
    # The text may be a credential, so it is not quoted.
    name, colon, value = text.partition(":")
    if not colon or not is_token(name):
        return "must be a header as Name: value"
    if _OURS.fullmatch(name.casefold()):
        return "is a header that forwarding sets itself, or that belongs to the connection"
    if not all(" " <= character <= "~" for character in value):
        return "has a value with a line break or characters outside ASCII"
    return None


def forward_secret_problem(text: str) -> str | None:
    """Return the fault of a variable's signing secrets, or None."""
    if not text.strip():
        return "is not set: generate one with 'secrets new', and give it to the application as well"
    for part in text.split():
        try:
            secret = parse_secret(part, KeyDerivation.STANDARD)
        except ValueError as error:
            return f"cannot be signed with: one of its secrets {error}"
        if part.startswith(PUBLIC_KEY_PREFIX):
            return "cannot be signed with: it is a public key; generate a secret with 'secrets new'"
        if secret.guessable is not None:
            return f"must not be used: one of its secrets {secret.guessable}"
    return None


def _webhook_secrets(settings: Settings, *, receiver: bool, invalid: Collection[str]) -> Findings:
    """Check every webhook secret; verification is never skipped because none is valid."""
    webhooks = settings.webhooks
    problems: list[Problem] = []
    warnings: list[Problem] = []
    seen: dict[Secret, str] = {}
    for key, secret in _keyed_secrets(settings):
        try:
            parsed = parse_secret(secret.reveal(), webhooks.key_derivation)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
            continue
        warnings += [Problem(key, warning) for warning in parsed.warnings]
        if parsed.guessable is not None:
            # An example secret is fine for trying things out; in production everyone knows it.
            found = warnings if settings.is_development else problems
            found.append(Problem(key, parsed.guessable))
        # By the text: the receiver treats Secret and Secrets as one list.
        first = seen.setdefault(secret, key)
        if first != key and key == "Sdk:Simulator:SecretEnvVar":
            problems.append(
                Problem(
                    key,
                    f"names a variable with the secret of {first}, which is not a test secret: "
                    "every receiver with that secret would accept deliveries that the simulator "
                    "signs; use a secret of its own for the simulator ('secrets new')",
                )
            )
        elif first != key:
            warnings.append(Problem(key, f"is the same secret as {first}: remove one of them"))
    # A secret that cannot be read is a problem of its own; "is required" next to it would mislead.
    unread = any(key.startswith("Sdk:Webhooks:Secret") for key in invalid)
    # Tenants have their own secrets.
    required = receiver and not settings.multi_tenant.enabled
    if required and not webhooks.all_secrets and not unread:
        problems.append(
            Problem(
                "Sdk:Webhooks:Secret",
                "is required: the receiver needs at least one secret; set the variable "
                "SDK__WEBHOOKS__SECRET or use a secret store (a program that only has a client "
                "reads its settings with receiver=False)",
            )
        )
    return Findings(tuple(problems), tuple(warnings))


def _keyed_secrets(settings: Settings) -> Iterator[tuple[str, Secret]]:
    if settings.webhooks.secret is not None:
        yield "Sdk:Webhooks:Secret", settings.webhooks.secret
    for index, secret in enumerate(settings.webhooks.secrets):
        of_list = f"Sdk:Webhooks:Secrets:{index}"
        yield "Sdk:Simulator:SecretEnvVar" if secret.made_for_tests else of_list, secret


def _addresses(settings: Settings) -> Iterator[Problem]:
    """Check the bound addresses, and the processes that share them."""
    server = settings.server
    if server.processes != 1 and settings.storage.backend is StorageBackend.MEMORY:
        yield Problem(
            "Sdk:Server:Processes",
            "several processes need a store that they share, and with Storage:Backend Memory "
            "each process has its own: set Backend to Sqlite or Postgres, or Processes to 1",
        )
    yield from _both_or_neither("Server", CertFile=server.cert_file, KeyFile=server.key_file)
    taken: dict[str, str] = {}
    addresses = bound_addresses(settings)
    for key, address in addresses:
        # Only identical spellings: the operating system refuses two names of one address.
        first = taken.setdefault(address.casefold(), key)
        # Port 0 asks the system for a free port, so two of them never collide.
        if first != key and not address.endswith(":0"):
            yield Problem(key, f"is the same address as {first}: choose another one")
    admin = "Sdk:Admin:Bind"
    for key, address in addresses:
        if settings.admin.enabled and key != admin and _covers(address, settings.admin.bind):
            yield Problem(
                admin, f"has the port of {key}, which listens on every address: choose another port"
            )


def _connection(connection: ConnectionOptions) -> Iterator[Problem]:
    """Check the settings between client and upstream."""
    proxy = (connection.proxy_url or "").casefold()
    if proxy.startswith("https:"):
        yield Problem(
            "Sdk:Connection:ProxyUrl",
            "must start with http://: the connection to the proxy is plain, and TLS runs through "
            "it to the upstream",
        )
    elif proxy and proxy.removeprefix("http://").rstrip("/").count("/"):
        yield Problem("Sdk:Connection:ProxyUrl", "has a path: remove it, and keep host and port")
    yield from _both_or_neither(
        "Connection",
        ClientCertFile=connection.client_cert_file,
        ClientKeyFile=connection.client_key_file,
    )
    # HTTP/3 uses UDP, which CONNECT does not carry: both settings would be ignored silently.
    if connection.enable_http3 and (proxy or connection.client_cert_file):
        yield Problem(
            "Sdk:Connection:EnableHttp3",
            "cannot be combined with ProxyUrl or ClientCertFile, which HTTP/3 would ignore: set "
            "it to false",
        )


def _both_or_neither(section: str, **files: str | None) -> Iterator[Problem]:
    """Check a certificate and its key, by their names in ``section``."""
    missing = [name for name, file in files.items() if _is_blank(file)]
    if len(missing) == 1:
        yield Problem(
            f"Sdk:{section}:{missing[0]}",
            f"is required: TLS needs both {' and '.join(files)}, or neither",
        )


def _covers(one: str, other: str) -> bool:
    """Return whether one of two addresses with the same port covers every host."""
    hosts, ports = zip(*(text.rpartition(":")[::2] for text in (one, other)), strict=True)
    same_port = ports[0] == ports[1] != "0"
    return same_port and hosts[0] != hosts[1] and not {"0.0.0.0", "[::]"}.isdisjoint(hosts)


#: A larger ToleranceSeconds is a warning. Senders sign each attempt again, so the default of five
#: minutes is enough for clock skew.
USUAL_TOLERANCE = 3600


def _replay_window(settings: Settings) -> Iterator[Problem]:
    """Warn of a large ToleranceSeconds, which makes captured deliveries usable for longer."""
    webhooks = settings.webhooks
    tolerance, hours = webhooks.tolerance_seconds, webhooks.dedup_retention_hours
    key = "Sdk:Webhooks:ToleranceSeconds"
    # Only the remembered id stops a captured delivery within the tolerance.
    if tolerance >= hours * 3600:
        yield Problem(
            key,
            f"is not less than DedupRetentionHours ({hours}): a captured delivery that is sent "
            "again after its id was forgotten is handled twice; lower it, or raise "
            "DedupRetentionHours",
        )
    elif tolerance > USUAL_TOLERANCE:
        yield Problem(
            key,
            f"is more than {USUAL_TOLERANCE}: a captured delivery can be sent again for "
            f"{tolerance / 3600:.1f} hours, and only its remembered id stops it; 300 is enough "
            "for clock skew",
        )


def _reconciliation(settings: Settings, *, lacks_client: bool) -> Iterator[Problem]:
    options = settings.webhooks.reconciliation
    if not options.enabled:
        if options.reenable_endpoint:
            yield Problem(
                "Sdk:Webhooks:Reconciliation:ReenableEndpoint",
                "needs Enabled: otherwise the receiver does not read its endpoint",
            )
        return
    if lacks_client:
        yield RECONCILIATION_NEEDS_CLIENT
    if options.max_lookback_hours > settings.webhooks.dedup_retention_hours:
        # A pass would fetch an id that the inbox has forgotten, and its handler would run again.
        yield Problem(
            "Sdk:Webhooks:Reconciliation:MaxLookbackHours",
            f"must be at most DedupRetentionHours ({settings.webhooks.dedup_retention_hours})",
        )
    if options.max_lookback_hours > settings.webhooks.payload_retention_days * 24:
        yield Problem(
            "Sdk:Webhooks:Reconciliation:MaxLookbackHours",
            "must be at most PayloadRetentionDays, after which parked events are removed "
            f"({settings.webhooks.payload_retention_days * 24} hours)",
        )


# -- exposure to strangers: valid, and a warning at every start ----------------------------------

#: 32 hexadecimal characters are 128 bits; a generated token has 43 characters.
LEAST_TOKEN_CHARACTERS = 32

#: Larger blocks contain strangers: /8 of IPv4, /32 of IPv6.
_WIDEST = {4: 8, 6: 32}

#: The mode bits of a socket that let every user of the machine connect.
_OTHERS_MODE = 0o006


def exposure_warnings(settings: Settings) -> Iterator[Problem]:
    """Warn of settings that expose more than usual."""
    server, admin = settings.server, settings.admin
    # Unix sockets and loopback are local: bodies cannot be read in transit.
    public = [address for address in server.bind if not is_local_bind(address)]
    if public and not settings.webhooks.require_https:
        yield Problem(
            "Sdk:Webhooks:RequireHttps",
            f"is false, and {', '.join(public)} can be reached from other machines: bodies can "
            "be read in transit; set it to true, or bind to a loopback address",
        )
    if admin.enabled and not is_local_bind(admin.bind):
        yield Problem(
            "Sdk:Admin:Bind",
            "can be reached from other machines over plain HTTP: the token can be read in "
            "transit; bind it to a loopback address or a unix socket, or use a separate "
            "network",
        )
    if settings.is_development:
        yield from _development(settings, public)
    # One warning per entry, so that it names the one to change.
    for index, entry in enumerate(server.trusted_proxies):
        if is_wide(entry):
            yield Problem(
                f"Sdk:Server:TrustedProxies:{index}",
                f"contains strangers ({entry}), whose forwarding headers are trusted: they choose "
                "the address and scheme that count for them; list only the proxies' "
                "addresses",
            )
    for key, address in bound_addresses(settings):
        if address.startswith("unix:") and _is_open_to_others(address):
            yield Problem(
                key,
                "lets every user of this machine connect, and peers of a unix socket cannot be "
                "distinguished; use mode=0660 and a dedicated group",
            )


def _is_open_to_others(address: str) -> bool:
    _, mode = split_unix(address)
    return mode.isdigit() and bool(int(mode, 8) & _OTHERS_MODE)


def _development(settings: Settings, public: list[str]) -> Iterator[Problem]:
    if public:
        yield Problem(
            "Sdk:Environment",
            f"is Development, and {', '.join(public)} can be reached from other machines; bind "
            "to a loopback address, or set it to Production",
        )
    # A real secret must not be used where exceptions are shown in full and the simulator runs.
    if any(not secret.made_for_tests for secret in settings.webhooks.all_secrets):
        yield Problem(
            "Sdk:Environment",
            "is Development, and a webhook secret is configured: in a real installation set it "
            "to Production; for experiments use the secret of a separate endpoint, which no "
            "other receiver uses, or none: 'dev' generates one (Sdk:Simulator:SecretEnvVar names "
            "another)",
        )


def is_wide(entry: str) -> bool:
    """Return whether a block of TrustedProxies is so large that it contains strangers."""
    try:
        network = ip_network(entry, strict=False)
    except ValueError:
        return False  # unix, or refused by the rules of forms
    return network.prefixlen < _WIDEST[network.version]


def token_fault(token: str) -> str | None:
    """Return the fault of a given admin token, as the end of a sentence, or None."""
    if is_quoted(token):
        return QUOTED
    if len(token) < LEAST_TOKEN_CHARACTERS:
        return (
            f"has {len(token)} characters, which is too easy to guess: at least "
            f"{LEAST_TOKEN_CHARACTERS} "
            "are needed ('openssl rand -hex 32' prints 64); or unset the variable, and a token is "
            "generated"
        )
    return None


def admin_token_findings(settings: Settings, token: str) -> Findings:
    """Judge the admin token of the environment.

    Args:
        settings: where it is used.
        token: the value of the variable; empty if a token is generated.
    """
    fault = token_fault(token) if settings.admin.enabled and token else None
    if fault is None:
        return Findings()
    variable = settings.admin.token_env_var
    found = Problem("Sdk:Admin:TokenEnvVar", f"names the variable {variable}, whose value {fault}")
    # On loopback and unix sockets only this machine can guess the token: a warning is enough.
    if is_local_bind(settings.admin.bind):
        return Findings(warnings=(found,))
    return Findings(problems=(found,))
