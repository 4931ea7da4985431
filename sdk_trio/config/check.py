"""Checks of settings: values, ranges, and what needs what. Pure.

Ranges, required values and forms come from the metadata beside each setting; the rules that join
several settings are written out here, and those of tenants in ``check_tenants.py``. Every fault is
found in one pass, because a start that names one fault at a time costs a restart for each.
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
from .check_tenants import (
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

#: Environments that people use; another name that is nearly one of them is probably a slip.
USUAL_ENVIRONMENTS = ("Production", "Staging", "Development")

RECONCILIATION_NEEDS_CLIENT = Problem(
    "Sdk:Webhooks:Reconciliation:Enabled",
    "needs the client, and standalone is the receiver alone: set it to false, or run the full "
    "stack with an AccessToken",
)


PROCESSES_NEED_COMMAND = Problem(
    "Sdk:Server:Processes",
    "several processes are run by 'sdk-trio run', which begins each of them anew; a runtime inside "
    "of another program is one process: set it to 1 there",
)


def unmet_needs(settings: Settings) -> list[Problem]:
    """Return one problem for each part that is asked for without what it works on."""
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
    """Faults (``problems``) and oddities (``warnings``) of the settings."""

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
        settings: what was bound, or made by hand.
        standalone: the receiver alone runs, so no AccessToken is needed.
        receiver: the receiver runs, so at least one webhook secret is needed.
        invalid: full keys that could not be bound; nothing more is said about them.
    """
    # A section that is switched off may hold anything: templates of deployments carry it along.
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
        *notification_problems(settings.multi_tenant.notifications),
        *replication_problems(settings),
        *_version(settings, ApiVersionStrictness.STRICT),
    ]
    warnings = [
        *_version(settings, ApiVersionStrictness.WARN),
        *secrets.warnings,
        *_environment(settings),
        *_replay_window(settings),
        *exposure_warnings(settings),
        *notification_warnings(settings.multi_tenant.notifications),
        *replication_warnings(settings),
    ]

    # A setting that could not be bound is a default by now, and a rule that joins it with others
    # would report a value that no one wrote.
    def written(found: list[Problem]) -> tuple[Problem, ...]:
        return tuple(p for p in found if not any(is_below(key, p.key) for key in invalid))

    return Findings(written(problems), written(warnings))


def _check_value(setting: Setting, settings: Settings) -> Iterator[Problem]:
    """Check one setting by its metadata: required, range, order, form."""
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
        # Ranges of time spans are written in seconds, as those of other durations are.
        value = value.total_seconds()
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    least, greatest = setting.bounds
    if (least is None or value >= least) and (greatest is None or value <= greatest):
        return None
    unit = f" {setting.about.unit}" if setting.about.unit else ""
    # Digits beyond that say nothing, and Python refuses to print thousands of them.
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
    # Not set: whether it may be empty is a matter of `required`.
    if value == "" and not setting.many:
        return None
    return check_form(setting.about.form, value, development=settings.is_development)


def _core(settings: Settings, *, standalone: bool) -> Iterator[Problem]:
    token = settings.access_token
    if token is None or not settings.has_access_token:
        if not standalone:
            yield Problem(
                "Sdk:AccessToken",
                "is required; with --standalone it is not, if no handler calls the upstream. Else "
                "set it through the variable SDK__ACCESSTOKEN or a secret store",
            )
    elif is_quoted(token.reveal()):
        yield Problem("Sdk:AccessToken", QUOTED)
    # The token becomes a header. A line break in it, which a file's last line leaves behind, would
    # break the request or be cut off in silence.
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
        return  # its form is a problem of its own
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
    import difflib  # on the path of an unusual name only

    # Title case, because the usual names have it, and "PRODUCTON" should be found.
    meant = difflib.get_close_matches(name.title(), USUAL_ENVIRONMENTS, n=1, cutoff=0.8)
    near = f": did you mean {meant[0]}?" if meant and meant[0].casefold() != name.casefold() else ""
    yield Problem(
        "Sdk:Environment",
        "counts as Production, as every name but Development (or dev) does"
        f"{near or ', which is right for a copy of it; only its files have names of their own'}",
    )


#: Headers of a forwarded event that are ours to say.
_OURS = re.compile(r"webhook-.*|sdk-.*|traceparent|content-.*|host|connection|transfer-encoding")


def _forwarding(settings: Settings) -> Iterator[Problem]:
    """Check what several settings of a route say together, and its headers."""
    names: set[str] = set()
    for index, route in enumerate(settings.forward.all_routes):
        place = f"Sdk:Forward:Routes:{index}"
        if route.name in names:
            yield Problem(f"{place}:Name", f"is {route.name}, as another route's: names differ")
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
    # The text may be a credential, and is not quoted.
    name, colon, value = text.partition(":")
    if not colon or not is_token(name):
        return "must be a header as Name: value"
    if _OURS.fullmatch(name.casefold()):
        return "is a header that forwarding sets itself, or that belongs to the connection"
    if not all(" " <= character <= "~" for character in value):
        return "has a value with a line break or characters outside ASCII"
    return None


def forward_secret_problem(text: str) -> str | None:
    """Return what is wrong with the value of a variable with secrets to sign with, or None."""
    if not text.strip():
        return "is not set: make one with 'secrets new', and give it to the application as well"
    for part in text.split():
        try:
            secret = parse_secret(part, KeyDerivation.STANDARD)
        except ValueError as error:
            return f"cannot be signed with: one of its secrets {error}"
        if part.startswith(PUBLIC_KEY_PREFIX):
            return "cannot be signed with: it is a public key; make a secret with 'secrets new'"
        if secret.guessable is not None:
            return f"must not be used: one of its secrets {secret.guessable}"
    return None


def _webhook_secrets(settings: Settings, *, receiver: bool, invalid: Collection[str]) -> Findings:
    """Check every webhook secret; verification is never skipped for want of one."""
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
            # To try things out an example serves; where money is, it is everybody's secret.
            found = warnings if settings.is_development else problems
            found.append(Problem(key, parsed.guessable))
        # Compared by the text: Secret and Secrets are one list to the receiver.
        first = seen.setdefault(secret, key)
        if first != key and key == "Sdk:Simulator:SecretEnvVar":
            problems.append(
                Problem(
                    key,
                    f"names a variable with the secret of {first}, which is not for tests: what "
                    "the simulator signs could be sent to whoever verifies with that; give it one "
                    "of its own ('secrets new')",
                )
            )
        elif first != key:
            warnings.append(Problem(key, f"is the same secret as {first}: remove one of them"))
    # A secret that cannot be read is a problem of its own; "is required" beside it would send
    # people to look for what is there.
    unread = any(key.startswith("Sdk:Webhooks:Secret") for key in invalid)
    # Tenants bring their own secrets.
    required = receiver and not settings.multi_tenant.enabled
    if required and not webhooks.all_secrets and not unread:
        problems.append(
            Problem(
                "Sdk:Webhooks:Secret",
                "is required: the receiver needs at least one secret; set it through the variable "
                "SDK__WEBHOOKS__SECRET or a secret store (a program with a client alone reads its "
                "settings with receiver=False)",
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
    """Check the addresses that are bound, and the processes that share them."""
    server = settings.server
    if server.processes != 1 and settings.storage.backend is StorageBackend.MEMORY:
        yield Problem(
            "Sdk:Server:Processes",
            "several processes need a store that they share, and Storage:Backend Memory is each "
            "process's own: set Backend to Sqlite or Postgres, or Processes to 1",
        )
    yield from _both_or_neither("Server", CertFile=server.cert_file, KeyFile=server.key_file)
    taken: dict[str, str] = {}
    addresses = bound_addresses(settings)
    for key, address in addresses:
        # Spelled alike only: two names of one address are the operating system's to refuse.
        first = taken.setdefault(address.casefold(), key)
        # Port 0 asks the system for a free one, so two of them never meet.
        if first != key and not address.endswith(":0"):
            yield Problem(key, f"is the same address as {first}: choose another one")
    admin = "Sdk:Admin:Bind"
    for key, address in addresses:
        if settings.admin.enabled and key != admin and _covers(address, settings.admin.bind):
            yield Problem(admin, f"has the port of {key}, which takes it on every address")


def _connection(connection: ConnectionOptions) -> Iterator[Problem]:
    """Check what lies between the client and the upstream."""
    proxy = (connection.proxy_url or "").casefold()
    if proxy.startswith("https:"):
        yield Problem(
            "Sdk:Connection:ProxyUrl",
            "must begin with http://: the way to the proxy is plain, and TLS runs through it to "
            "the upstream",
        )
    elif proxy and proxy.removeprefix("http://").rstrip("/").count("/"):
        yield Problem("Sdk:Connection:ProxyUrl", "has a path: leave host and port")
    yield from _both_or_neither(
        "Connection",
        ClientCertFile=connection.client_cert_file,
        ClientKeyFile=connection.client_key_file,
    )
    # HTTP/3 runs over UDP, which CONNECT does not carry; both settings would be passed by without a
    # word.
    if connection.enable_http3 and (proxy or connection.client_cert_file):
        yield Problem(
            "Sdk:Connection:EnableHttp3",
            "cannot be with ProxyUrl or ClientCertFile, which HTTP/3 would pass by: set it to "
            "false",
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
    """Whether one of two different addresses stands for every host, the port being the same."""
    hosts, ports = zip(*(text.rpartition(":")[::2] for text in (one, other)), strict=True)
    same_port = ports[0] == ports[1] != "0"
    return same_port and hosts[0] != hosts[1] and not {"0.0.0.0", "[::]"}.isdisjoint(hosts)


#: A larger ToleranceSeconds is a warning. Senders sign each attempt anew, so five minutes, the
#: default, are enough for clocks that differ.
USUAL_TOLERANCE = 3600


def _replay_window(settings: Settings) -> Iterator[Problem]:
    """Say what a large ToleranceSeconds lets a stranger do with a captured delivery."""
    webhooks = settings.webhooks
    tolerance, hours = webhooks.tolerance_seconds, webhooks.dedup_retention_hours
    key = "Sdk:Webhooks:ToleranceSeconds"
    # The memory of an id is what stops a captured delivery that is still in time.
    if tolerance >= hours * 3600:
        yield Problem(
            key,
            f"is not less than DedupRetentionHours ({hours}): a captured delivery that is sent "
            "again after its id has been forgotten is handled again; lower it, or raise "
            "DedupRetentionHours",
        )
    elif tolerance > USUAL_TOLERANCE:
        yield Problem(
            key,
            f"is more than {USUAL_TOLERANCE}: a captured delivery can be sent again for "
            f"{tolerance / 3600:.1f} hours, and only the memory of its id stops it; 300 is enough "
            "for clocks that differ",
        )


def _reconciliation(settings: Settings, *, lacks_client: bool) -> Iterator[Problem]:
    options = settings.webhooks.reconciliation
    if not options.enabled:
        return
    if lacks_client:
        yield RECONCILIATION_NEEDS_CLIENT
    if options.max_lookback_hours > settings.webhooks.dedup_retention_hours:
        # An id that the inbox has forgotten would be asked for, and its handler run again.
        yield Problem(
            "Sdk:Webhooks:Reconciliation:MaxLookbackHours",
            f"must be at most DedupRetentionHours ({settings.webhooks.dedup_retention_hours})",
        )
    if options.max_lookback_hours > settings.webhooks.payload_retention_days * 24:
        yield Problem(
            "Sdk:Webhooks:Reconciliation:MaxLookbackHours",
            "must be at most PayloadRetentionDays, after which parked events are forgotten "
            f"({settings.webhooks.payload_retention_days * 24} hours)",
        )


# -- exposure to strangers: valid, and a warning at every start ----------------------------------

#: 32 characters of hexadecimal digits are 128 bits; the token that is generated has 43.
LEAST_TOKEN_CHARACTERS = 32

#: Blocks larger than this hold strangers: /8 of IPv4, /32 of IPv6.
_WIDEST = {4: 8, 6: 32}

#: The bits of a socket's mode that let every user of the machine connect.
_EVERYBODY = 0o006


def exposure_warnings(settings: Settings) -> Iterator[Problem]:
    """Say what these settings open to more people than is usual."""
    server, admin = settings.server, settings.admin
    # Unix sockets and loopback are local: on those a body cannot be read on its way.
    public = [address for address in server.bind if not is_local_bind(address)]
    if public and not settings.webhooks.require_https:
        yield Problem(
            "Sdk:Webhooks:RequireHttps",
            f"is false, and {', '.join(public)} can be reached from elsewhere: bodies can be read "
            "on the way; set it to true, or bind to a loopback address",
        )
    if admin.enabled and not is_local_bind(admin.bind):
        yield Problem(
            "Sdk:Admin:Bind",
            "can be reached from elsewhere, and speaks plain HTTP: the token can be read on the "
            "way; bind it to a loopback address or a unix socket, or keep it in a network of its "
            "own",
        )
    if settings.is_development:
        yield from _development(settings, public)
    # Each entry of its own, so that the warning names the one to change.
    for index, entry in enumerate(server.trusted_proxies):
        if is_wide(entry):
            yield Problem(
                f"Sdk:Server:TrustedProxies:{index}",
                f"holds strangers ({entry}), whose forwarding headers are believed: they choose "
                "the address and the scheme that they are taken for; name the proxies' own "
                "addresses",
            )
    for key, address in bound_addresses(settings):
        if address.startswith("unix:") and _is_for_everybody(address):
            yield Problem(
                key,
                "lets every user of this machine connect, and a peer of a unix socket has no "
                "address to be told apart by; use mode=0660 and a group of its own",
            )


def _is_for_everybody(address: str) -> bool:
    _, mode = split_unix(address)
    return mode.isdigit() and bool(int(mode, 8) & _EVERYBODY)


def _development(settings: Settings, public: list[str]) -> Iterator[Problem]:
    if public:
        yield Problem(
            "Sdk:Environment",
            f"is Development, and {', '.join(public)} can be reached from elsewhere; bind to a "
            "loopback address, or set it to Production",
        )
    # A real secret has no business where exceptions are shown whole and the simulator is mapped.
    if any(not secret.made_for_tests for secret in settings.webhooks.all_secrets):
        yield Problem(
            "Sdk:Environment",
            "is Development, and a webhook secret is configured: in the real installation set it "
            "to Production; to try things out take the secret of an endpoint of its own, with "
            "which nothing else verifies, or none: 'dev' makes one (Sdk:Simulator:SecretEnvVar "
            "names another)",
        )


def is_wide(entry: str) -> bool:
    """Say whether a block of TrustedProxies is so large that strangers are in it."""
    try:
        network = ip_network(entry, strict=False)
    except ValueError:
        return False  # unix, or what the rules of forms refuse
    return network.prefixlen < _WIDEST[network.version]


def token_fault(token: str) -> str | None:
    """Say what is wrong with an admin token that was given, as the end of a sentence, or None."""
    if is_quoted(token):
        return QUOTED
    if len(token) < LEAST_TOKEN_CHARACTERS:
        return (
            f"has {len(token)} characters, and can be guessed: at least {LEAST_TOKEN_CHARACTERS} "
            "are needed ('openssl rand -hex 32' prints 64); or unset the variable, and a token is "
            "generated"
        )
    return None


def admin_token_findings(settings: Settings, token: str) -> Findings:
    """Judge the admin token of the environment.

    Args:
        settings: where it is used.
        token: the value of the variable; empty where one is generated.
    """
    fault = token_fault(token) if settings.admin.enabled and token else None
    if fault is None:
        return Findings()
    variable = settings.admin.token_env_var
    found = Problem("Sdk:Admin:TokenEnvVar", f"names the variable {variable}, whose value {fault}")
    # On loopback and unix sockets only this machine can guess the token, which is worth a warning.
    if is_local_bind(settings.admin.bind):
        return Findings(warnings=(found,))
    return Findings(problems=(found,))
