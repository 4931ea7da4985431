"""The checks of ``doctor`` over the network: the running receiver, and the upstream."""

import socket
import ssl
import time
from argparse import Namespace
from collections import Counter
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx
import trio

from ...client.client import Client
from ...client.errors import CallError
from ...config import Settings
from ...config.fields import ForwardedHeaders
from ...errors import OptionsValidationError, SdkError
from ...net.poster import NoAllowedAddressError
from ...net.transport import URL_KEY as PROXY_URL
from ...net.transport import Proxy, ignored_variable, proxy_of, tls_context
from ...reconcile.plan import has_path
from ...runtime.presence import Presence
from ...webhooks.forward import dial_of
from ...webhooks.origin import TrustedProxies
from ...webhooks.registry import PROBE_TYPE
from ...webhooks.signed_request import DeliveryFailedError, post, sign_body
from ..listen import feed_source
from ..receiver import reach
from ..rejected import ADVICE, rejections
from ..routes import pauses_of
from ..sign import NoSecretError
from ..trigger import secret_of
from . import Report
from .settings import ALLOWED_SOURCES, TRUSTED_PROXIES, check_endpoints

#: The body of the probe. It is always the same, so that the inbox gets at most one such event.
PROBE_BODY = b'{"type":"%s","data":{"id":"doctor"}}' % PROBE_TYPE.encode()

#: The event that ``doctor`` delivers to the running receiver, always the same.
# A known id is answered 200 without a handler, so that probing again does nothing.
PROBE_ID = "msg_sdk_trio_doctor"

#: The longest time of each attempt to reach the upstream, in seconds.
STEP_SECONDS = 5.0

#: The smallest reported difference to the upstream's clock, in seconds. Clocks synchronized by NTP
#: differ by milliseconds, but the header has whole seconds, and a request takes time.
NOTABLE_SKEW = 5.0

UPSTREAM_KEYS = "Sdk:Mode, Sdk:Upstream"
TOKEN = "Sdk:AccessToken"


async def check_receiver(settings: Settings, report: Report) -> None:
    """Deliver a signed probe to the running receiver, and explain its answer.

    Raises:
        NoReceiverError: no receiver is running.
    """
    await trio.lowlevel.checkpoint()
    presence = reach(settings.storage.path)
    where = presence.url
    # The receiver's own certificate is its authority: it may be self-signed.
    ca_file = settings.server.cert_file if where.startswith("https:") else None
    posted = None
    try:
        signed = sign_body(
            PROBE_BODY,
            secret=secret_of(settings, presence),
            webhook_id=PROBE_ID,
            timestamp=int(time.time()),
            derivation=settings.webhooks.key_derivation,
        )
        posted = await post(where, signed, ca_file=ca_file, headers=_as_a_proxy(settings, presence))
    except NoSecretError as error:
        report.note(where, f"nothing was delivered: {error}")
    except DeliveryFailedError as error:
        report.problem(where, str(error), f"check process {presence.pid} and its log; restart it")
    counts, own = await _read_rejections(settings, report)
    if posted is not None:
        cause = own[0] if own else None
        _explain(posted.status, where, settings, report, cause)
    # Exclude those of doctor's own probes: they say nothing about senders.
    counts.subtract(own)
    for cause in sorted(counts.keys() & ADVICE.keys()):
        if counts[cause] > 0:
            report.warning(
                "rejected requests",
                f"{counts[cause]} since the receiver started: {cause}",
                f"{ADVICE[cause]}; 'events rejected --cause {cause}' lists the newest",
            )


async def _read_rejections(settings: Settings, report: Report) -> tuple[Counter[str], list[str]]:
    """Return the receiver's rejection counts by cause, and the causes for doctor's own probes.

    The latter come from the newest rejections that the receiver keeps, newest first.
    """
    try:
        source = feed_source(settings, Namespace(from_=None, token_env=None))
        answer = await rejections(source, limit="200")
    except SdkError as error:
        report.note("rejected requests", f"they were not read: {error}")
        await trio.lowlevel.checkpoint()
        return Counter(), []
    own = [row["cause"] for row in answer["rejections"] if row["webhook_id"] == PROBE_ID]
    return Counter(answer["causes"]), own


async def check_routes(settings: Settings, report: Report) -> None:
    """Connect to the application of each route, and report paused routes.

    Raises:
        StorageError: the store cannot be opened.
    """
    await trio.lowlevel.checkpoint()
    pauses = await pauses_of(settings)
    for route in settings.forward.all_routes:
        where = f"route {route.name}"
        if (pause := pauses.get(route.name)) is not None:
            report.warning(where, f"paused {pause}", f"'routes resume {route.name}', if it is over")
        try:
            with trio.fail_after(STEP_SECONDS):
                host, port = _target_of(route.url)
                stream = await dial_of(route)(host, port)
            await trio.aclose_forcefully(stream)
        except NoAllowedAddressError as error:
            report.problem(
                where,
                f"{error}, so nothing is posted there",
                "point the name to an address in your network, or set AllowPublicAddresses",
            )
        except (OSError, trio.TooSlowError) as error:
            reason = str(error) or f"no connection within {STEP_SECONDS:g} s"
            report.problem(
                where,
                f"cannot connect to {route.url}: {reason}",
                "start the application, or change the route; its events wait in the store",
            )
        else:
            report.ok(where, f"a server listens at {route.url}")


def _target_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _as_a_proxy(settings: Settings, presence: Presence) -> dict[str, str]:
    """Return the headers that a trusted proxy on this machine would send."""
    if presence.url.startswith("https:"):
        return {}
    unix = presence.url.startswith("unix:")
    trusted = settings.server.trusted_proxies
    host = "" if unix else (urlsplit(presence.url).hostname or "")
    # The receiver's own code selects the headers it trusts, so that exactly these are sent.
    family = settings.server.forwarded_headers
    name, value = "x-forwarded-proto", "https"
    if family is ForwardedHeaders.FORWARDED:
        name, value = "forwarded", "proto=https"
    headers = [(name.encode(), value.encode())]
    origin = TrustedProxies(trusted, family).resolve(None if unix else host, "http", headers)
    return {name: value} if origin.secure else {}


def _explain(
    status: int, where: str, settings: Settings, report: Report, cause: str | None
) -> None:
    """Report what the answer to the probe means; ``cause``: the cause of a 400, if known."""
    proxied = settings.server.trusted_proxies
    match status:
        case 200:
            report.ok(where, "a signed delivery passed through the whole pipeline: 200")
        # If the cause is unknown, the settings show whether HTTPS or the secret is likelier.
        case 400 if cause == "not_https" or (
            cause is None and settings.webhooks.require_https and not where.startswith("https:")
        ):
            report.problem(
                where,
                "400: the receiver refused a delivery that this machine has signed; RequireHttps "
                f"is true; trusted proxies: {', '.join(proxied) or 'none'}",
                f"see the finding on {TRUSTED_PROXIES}; if there is none, compare the secrets and "
                "settings of the running process with these ('events rejected' has the cause)",
            )
        case 400:
            report.problem(
                where,
                "400: the receiver refused a delivery that this machine has signed: it runs with "
                "another secret, or with another clock",
                "run doctor with the receiver's own environment and files, or restart the receiver",
            )
        case 403:
            report.note(where, f"403: this machine is not in {ALLOWED_SOURCES}; senders may be")
        case 404:
            report.problem(
                where,
                "404: nothing is served at Sdk:Webhooks:Path",
                "restart the receiver: it runs with another path",
            )
        case 429:
            report.note(where, "429: the rate limit is exhausted; try again later")
        case 503:
            report.problem(
                where,
                "503: the queue is full, the store is unavailable, or the receiver is stopping",
                "check its log: queue.full, store.unavailable or store.lost",
            )
        case _:
            report.problem(where, f"{status} was answered", "check the receiver's log")


async def check_upstream(
    settings: Settings, handled: tuple[str, ...] | None, report: Report
) -> None:
    """Reach the upstream step by step: name, connection, TLS, token, base path, endpoints."""
    where = settings.base_url
    await trio.lowlevel.checkpoint()
    try:
        made, proxy = Client(settings), proxy_of(settings.connection)
        tls = tls_context(settings.connection) if where.startswith("https:") else None
    except OptionsValidationError as error:
        for problem in error.problems:
            report.problem(problem.key, problem.message, "change the key, or the file it names")
        return
    # Step by step, because the error of a whole request does not show whether name, port or
    # certificate was wrong.
    if not await _is_reached(where, proxy, tls, report):
        return
    async with made as client:
        asked_at = time.time()
        try:
            response = await client.request(
                "GET",
                "/organizations/",
                params={"limit": 1},
                # Each status is a finding of its own, so none is an error here.
                accepts_any_status=True,
                max_retries=0,
                total_timeout=STEP_SECONDS,
            )
        except CallError as error:
            report.problem(where, f"no answer: {error}", "try again; check the upstream's status")
            return
        # Compare with the middle of the request: the answer was dated at some time during it.
        _check_skew(response, (asked_at + time.time()) / 2, settings, report)
        if _is_welcome(response.status_code, where, report):
            await _check_endpoints(client, settings, handled, report)


async def _is_reached(
    where: str, proxy: Proxy | None, tls: ssl.SSLContext | None, report: Report
) -> bool:
    """Try the name, the connection and TLS one after the other; report the first failure."""
    parts = urlsplit(where)
    host, port = parts.hostname or "", parts.port or (443 if tls else 80)
    asked = (host, port) if proxy is None else (proxy.host, proxy.port)
    ignored = ignored_variable(host) if proxy is None else None
    hint = f"; {ignored} is set, and is ignored: set {PROXY_URL} to use it" if ignored else ""
    await trio.lowlevel.checkpoint()
    try:
        with trio.fail_after(STEP_SECONDS):
            # With a proxy, the proxy resolves the upstream's name.
            await trio.socket.getaddrinfo(*asked, type=socket.SOCK_STREAM)
    except (OSError, trio.TooSlowError) as error:
        report.problem(
            where,
            f"DNS: the name {asked[0]} cannot be resolved ({_words(error)})",
            f"check {UPSTREAM_KEYS} and CustomBaseUrl, and this machine's resolver{hint}"
            if proxy is None
            else f"check {PROXY_URL}, and this machine's resolver",
        )
        return False
    try:
        with trio.fail_after(STEP_SECONDS):
            dial = trio.open_tcp_stream if proxy is None else proxy.dial
            stream = await dial(host, port)
    except (OSError, trio.TooSlowError) as error:
        report.problem(
            where,
            f"TCP: no connection to {host} port {port} ({_words(error)})",
            f"allow connections to that port in the firewall, or correct the proxy or address{hint}"
            if proxy is None
            else f"check {PROXY_URL}, and the rules of the proxy {proxy}",
        )
        return False
    async with stream:
        if tls is None:
            return True
        secure = trio.SSLStream(stream, tls, server_hostname=host)
        try:
            with trio.fail_after(STEP_SECONDS):
                await secure.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError, trio.TooSlowError) as error:
            cause = error.__cause__ or error
            report.problem(
                where,
                f"TLS: {host} has no certificate that this machine trusts ({_words(cause)})",
                "correct the clock, or set Sdk:Connection:CaFile to the authorities of the private "
                "certificate or the intercepting proxy",
            )
            return False
    return True


def _words(error: BaseException) -> str:
    if isinstance(error, trio.TooSlowError):
        return f"nothing within {STEP_SECONDS:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _is_welcome(status: int, where: str, report: Report) -> bool:
    match status:
        case 401:
            report.problem(
                TOKEN,
                "401: the upstream does not know the access token: wrong, revoked, or of the other "
                "environment (a sandbox token with Mode Live, or the other way round)",
                "create a token at the upstream for this environment, or set Sdk:Mode to the "
                "token's",
            )
        case 403:
            report.problem(
                TOKEN,
                "403: the access token is valid, but lacks the scope organizations:read",
                "give the token the scopes that the application needs",
            )
        case 404:
            report.problem(
                "Sdk:BasePath",
                f"404: {where} has no such route below the base path; an upstream that does not "
                "know the value of the version header also answers 404",
                "compare Sdk:BasePath, Sdk:ApiVersion and Sdk:Upstream:VersionHeader with the "
                "upstream's documentation",
            )
        case _ if 200 <= status < 300:
            report.ok(where, "reached, and the access token is accepted")
            return True
        case 429:
            report.note(where, "429: reached, but the rate limit is exhausted; try later")
        case _:
            report.problem(where, f"{status} was answered", "check the upstream's status")
    return False


def _check_skew(response: httpx.Response, now: float, settings: Settings, report: Report) -> None:
    """Compare our clock with the upstream's, which timestamps deliveries."""
    where = "clock of this machine"
    try:
        # The header has whole seconds, so its middle is compared.
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp() + 0.5
    except (KeyError, ValueError):
        report.note(where, "the upstream sends no time to compare it with")
        return
    skew = now - theirs
    way = "ahead of" if skew > 0 else "behind"
    tolerance = settings.webhooks.tolerance_seconds
    what = f"{abs(skew):.0f} s {way} the upstream's"
    remedy = "correct it: run an NTP client (systemd-timesyncd, chrony)"
    if abs(skew) >= tolerance:
        report.problem(
            where,
            f"it is {what}: beyond ToleranceSeconds ({tolerance}) all deliveries are refused",
            remedy,
        )
    elif abs(skew) > max(NOTABLE_SKEW, tolerance / 10):
        report.warning(where, f"it is {what}; at {tolerance} s all deliveries are refused", remedy)
    else:
        report.ok(where, "it agrees with the upstream's")


async def _check_endpoints(
    client: Client, settings: Settings, handled: tuple[str, ...] | None, report: Report
) -> None:
    await trio.lowlevel.checkpoint()
    try:
        listed = [
            record.raw
            async for record in client.with_options(
                max_retries=0, total_timeout=STEP_SECONDS
            ).webhooks.list_webhook_endpoints()
        ]
    except CallError as error:
        report.note(
            "webhook endpoints",
            f"the upstream does not list them: {error}",
            "give the token the scope webhooks:read, so that they can be compared",
        )
        return
    chosen = settings.webhooks.reconciliation.endpoint_ids
    ours = [
        entry
        for entry in listed
        if (entry.get("id") in chosen if chosen else has_path(entry, settings.webhooks.path))
    ]
    check_endpoints(ours, settings.webhooks.path, handled, report)
