"""The checks of ``doctor`` on the settings: secrets, HTTPS, proxies, sources. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

from ...config import (
    KeyDerivation,
    Loaded,
    Secret,
    Settings,
    parse_secret,
)
from ...config.check import is_wide
from ...config.fields import Mode
from ...config.secret import HMAC_PREFIX, PRIVATE_KEY_PREFIX, PUBLIC_KEY_PREFIX
from ...errors import Problem
from ...webhooks.origin import UNIX
from ...webhooks.sources.schemes import Scheme
from . import Report

TRUSTED_PROXIES = "Sdk:Server:TrustedProxies"
REQUIRE_HTTPS = "Sdk:Webhooks:RequireHttps"
ALLOWED_SOURCES = "Sdk:Webhooks:AllowedSourceIpRanges"
BIND = "Sdk:Server:Bind"

#: The prefixes of the upstream's access tokens, of every kind.
_TOKEN_PREFIXES = ("polar_oat_", "polar_pat_", "polar_at_")

_SET_ALL_HEADERS = (
    "let it set or remove all of X-Forwarded-For, X-Forwarded-Proto and Forwarded; "
    "examples/nginx and examples/caddy do"
)


def check_settings(loaded: Loaded, report: Report) -> None:
    """Report every problem and warning of the settings, with their origins."""
    problems = [*loaded.problems, *loaded.unmet]
    for problem in problems:
        report.problem(_place(problem), *_said_and_advised(problem))
    for warning in loaded.warnings:
        report.warning(_place(warning), *_said_and_advised(warning))
    if not problems and not loaded.warnings:
        report.ok("Sdk", f"valid; {len(loaded.origins)} keys are set")


def _place(problem: Problem) -> str:
    if problem.is_of_source:
        return str(problem.origin)
    return f"{problem.key} ({problem.origin})" if problem.origin else problem.key


def _said_and_advised(problem: Problem) -> tuple[str, str]:
    """Split a message into fault and advice: the advice is its last clause after a colon."""
    said, colon, rest = problem.message.partition(": ")
    if not colon:
        return problem.message, "change it: 'config schema' describes every key"
    # Messages of settings are one line, `fault: reason; advice`; here they are split into parts.
    reason, semicolon, advice = rest.rpartition("; ")
    return f"{said}: {reason}" if semicolon else said, advice


def check_secrets(settings: Settings, report: Report) -> None:
    """Report how each webhook secret is read, and find values that were mixed up."""
    token = settings.access_token.reveal() if settings.access_token else ""
    key = "Sdk:AccessToken"
    if token.startswith((HMAC_PREFIX, PUBLIC_KEY_PREFIX, PRIVATE_KEY_PREFIX)):
        report.problem(
            key,
            "it starts like a webhook secret: the two were probably exchanged",
            "set the organization access token here, and the secret in Sdk:Webhooks:Secret",
        )
    elif token:
        # The length shows a token that was cut off in pasting, and reveals nothing else.
        report.ok(key, f"set, {len(token)} characters")
    for name, secret in keyed_secrets(settings):
        text = secret.reveal()
        if text == token or text.startswith(_TOKEN_PREFIXES):
            report.problem(
                name,
                "it is an access token, not a webhook secret, so no delivery can be verified",
                "set the secret that the upstream shows for the webhook endpoint, whsec_...",
            )
            continue
        report.ok(name, _taken_for(text, settings.webhooks.key_derivation))
    if settings.mode is Mode.LIVE and not settings.webhooks.require_https:
        report.warning(
            REQUIRE_HTTPS,
            "Mode is Live, and deliveries are accepted without HTTPS",
            "set it to true; behind a proxy name it in Sdk:Server:TrustedProxies",
        )


def keyed_secrets(settings: Settings) -> Iterator[tuple[str, Secret]]:
    """Return the webhook secrets with their full keys."""
    if settings.webhooks.secret is not None:
        yield "Sdk:Webhooks:Secret", settings.webhooks.secret
    for index, secret in enumerate(settings.webhooks.secrets):
        yield f"Sdk:Webhooks:Secrets:{index}", secret


def _taken_for(text: str, derivation: KeyDerivation) -> str:
    parsed = parse_secret(text, derivation)
    if parsed.ed25519_public_key is not None:
        return "an ed25519 public key"
    keys = " and then as ".join(
        f"base64 of a key of {len(key)} bytes"
        if kind is KeyDerivation.STANDARD
        else f"a text of {len(key)} bytes, used as the key"
        for kind, key in parsed.hmac_keys
    )
    return f"KeyDerivation {derivation} tries it as {keys}"


def check_https(settings: Settings, report: Report) -> None:
    """Report whether any delivery can count as HTTPS, and whose headers are trusted."""
    server = settings.server
    if not settings.webhooks.require_https:
        report.note(
            REQUIRE_HTTPS,
            "false: deliveries without HTTPS are accepted",
            "leave that to development",
        )
    # Our own TLS does not depend on a proxy.
    elif server.cert_file:
        report.ok("Sdk:Server:CertFile", "TLS ends here, so every delivery is HTTPS")
    elif not server.trusted_proxies:
        report.problem(
            TRUSTED_PROXIES,
            "every delivery is answered 400: RequireHttps is true, CertFile is not set, and no "
            "proxy is trusted to report HTTPS",
            "behind a proxy: set it to the proxy's address as this machine sees it, such as "
            '["127.0.0.1"] for one on the same machine. Without a proxy: set Sdk:Server:CertFile '
            "and Sdk:Server:KeyFile. To try things out: RequireHttps false",
        )
    else:
        for address in server.bind:
            _check_reachable(address, server.trusted_proxies, report)
    if server.trusted_proxies:
        _check_trust(server.trusted_proxies, report)


def _check_reachable(address: str, trusted: tuple[str, ...], report: Report) -> None:
    """Find listening addresses that no trusted proxy can connect to."""
    if address.startswith("fd:"):
        report.note(BIND, f"{address} was opened by the service manager: its kind is not known")
    elif address.startswith("unix:"):
        if UNIX not in trusted:
            report.problem(
                TRUSTED_PROXIES,
                f"every delivery to {address} is answered 400: peers of a unix socket have no "
                "address, and 'unix' is not among the trusted proxies",
                'add "unix"',
            )
    elif all(entry == UNIX for entry in trusted):
        report.problem(
            TRUSTED_PROXIES,
            f"every delivery to {address} is answered 400: only peers of unix sockets are trusted",
            "add the proxy's address, or bind the receiver to unix:PATH",
        )
    elif (host := _loopback(address)) and not _covers(trusted, host):
        report.problem(
            TRUSTED_PROXIES,
            f"every delivery to {address} is answered 400: the peer of a loopback address "
            f"is {host}, which is not a trusted proxy",
            f'add "{host}", or bind to an address that the proxy reaches from elsewhere',
        )


def _check_trust(trusted: tuple[str, ...], report: Report) -> None:
    # The checks of the settings already warn of wide ranges.
    if not any(map(is_wide, trusted)):
        report.note(
            TRUSTED_PROXIES,
            f"{', '.join(trusted)}: headers that such a peer passes on unchanged are trusted",
            _SET_ALL_HEADERS,
        )


def check_replays(settings: Settings, report: Report) -> None:
    """Report the sources whose deliveries can be replayed, because they sign no timestamp."""
    for index, options in enumerate(settings.sources):
        where, scheme = f"Sdk:Sources:{index}", Scheme.of(options)
        if scheme.signs_timestamp:
            said = f"{options.name} signs a timestamp: {options.tolerance_seconds} s"
            if scheme.signs_id:
                report.ok(where, said)
            else:
                report.note(
                    where,
                    f"{said}; its id is not signed, so until then a copy with a changed id runs",
                    "make its handlers idempotent",
                )
            continue
        id_too = "" if scheme.signs_id else "; its id is not signed either, so a changed id runs"
        report.note(
            where,
            f"{options.name} signs no timestamp: only deduplication stops a replay of a captured "
            f"delivery, for {settings.webhooks.dedup_retention_hours} hours{id_too}",
            "keep TLS up to this receiver, and make its handlers idempotent",
        )


def check_sources(settings: Settings, report: Report) -> None:
    """Find limits by address that would see only the proxy's address."""
    ranges = settings.webhooks.allowed_source_ip_ranges
    limit = settings.webhooks.rate_limit_per_minute
    trusted = settings.server.trusted_proxies
    hosts = [host for address in settings.server.bind if (host := _loopback(address))]
    # All listening addresses are loopback: senders connect through a proxy, and all have its
    # address.
    hidden = not trusted and len(hosts) == len(settings.server.bind)
    unix = not trusted and any(a.startswith("unix:") for a in settings.server.bind)
    if ranges and (unix or (hidden and not all(_covers(ranges, host) for host in hosts))):
        report.problem(
            ALLOWED_SOURCES,
            "every delivery is answered 403: the receiver can only be reached through its own "
            "machine, and no proxy is trusted to name the sender",
            f"set {TRUSTED_PROXIES} to the proxy's address, or empty the list",
        )
    elif ranges:
        report.ok(ALLOWED_SOURCES, f"{len(ranges)} ranges may deliver, others get 403")
    if limit is not None and (hidden or unix):
        report.warning(
            "Sdk:Webhooks:RateLimitPerMinute",
            "all senders together count as one: their addresses are hidden behind the proxy",
            f"set {TRUSTED_PROXIES} to the proxy's address",
        )


def _loopback(address: str) -> str | None:
    """Return the peer of an address that only this machine can reach, otherwise None."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        parsed = ip_address(host)
    except ValueError:
        return None
    # The peer of a loopback address has the same one.
    return str(parsed) if parsed.is_loopback else None


def _covers(entries: tuple[str, ...], host: str) -> bool:
    return any(entry != UNIX and _holds(entry, host) for entry in entries)


def _holds(entry: str, host: str) -> bool:
    network, address = ip_network(entry, strict=False), ip_address(host)
    return network.version == address.version and address in network


def check_handlers(
    missing: tuple[str, ...], total: int, registered: int, *, required: bool, report: Report
) -> None:
    """Report the known event types without a handler."""
    where = "Sdk:Webhooks:FailOnMissingHandlers"
    if not missing:
        report.ok("--app", f"each of the {total} known event types has a handler or is settled")
        return
    named = ", ".join(missing)
    what = f"{len(missing)} of {total} known event types have no handler: {named}"
    if required:
        report.problem(
            where, f"the receiver does not start: {what}", "register handlers, or set it to false"
        )
    elif registered == 0:
        report.warning("--app", "it has no handler at all: every event is parked", "register some")
    else:
        report.note(
            "--app",
            f"{what}; without a fallback such events are parked",
            "register the missing handlers",
        )


def check_endpoints(
    ours: Sequence[Mapping[str, Any]], path: str, handled: tuple[str, ...] | None, report: Report
) -> None:
    """Compare the events of the upstream's endpoints for our path with the handlers.

    ``handled`` are the types with a handler, None if no application was named.
    """
    if not ours:
        report.problem(
            "Sdk:Webhooks:Path",
            f"no webhook endpoint of the upstream has a URL that ends in {path}: nothing arrives",
            "create one at the upstream, or set the path of an existing one",
        )
    for endpoint in ours:
        where = f"webhook endpoint {endpoint.get('id')}"
        # Senders disable an endpoint that keeps failing, and nothing else reports that here.
        if endpoint.get("enabled") is False:
            report.problem(
                where,
                "the upstream has disabled it, as it does after ten failed events, and keeps no "
                "record of what it skips until it is enabled",
                "enable it there, then run 'events catch-up --since T': it makes events from the "
                "records that changed. With Sdk:Webhooks:Reconciliation:Enabled the receiver does "
                "that by itself",
            )
        if str(endpoint.get("url")).startswith("http:"):
            report.warning(where, "its URL is not HTTPS", "give it an https:// URL")
        if str(endpoint.get("format", "raw")) != "raw":
            report.problem(
                where,
                f"its format is {endpoint.get('format')}, which contains no events",
                "choose the format raw at the upstream",
            )
        events = endpoint.get("events")
        if handled is not None and isinstance(events, list):
            _compare(where, {str(event) for event in events}, set(handled), report)
    if ours:
        report.ok("Sdk:Webhooks:Path", f"{len(ours)} of the upstream's endpoints use {path}")


def _compare(where: str, sent: set[str], handled: set[str], report: Report) -> None:
    if never := sorted(handled - sent):
        report.warning(
            where,
            f"it does not send these types that have a handler: {', '.join(never)}",
            "choose these events at the upstream",
        )
    if parked := sorted(sent - handled):
        report.note(
            where,
            f"it sends these types that have no handler: {', '.join(parked)}; such events are "
            "parked",
            "register handlers, or do not choose these events",
        )
