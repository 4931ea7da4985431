"""``events trigger``, ``types`` and ``resend``: signed samples, and events for other receivers."""

from __future__ import annotations

import json
import time
import uuid
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime
from inspect import getdoc
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs

from ..errors import EXIT_FAILURE, StorageError, TenantCredentialsError, UnknownTenantError
from .parse import UsageError, add_format, add_number, add_secret, add_source, describing

if not describing():
    import trio

    from ..base.public_addresses import is_loopback
    from ..config import Secret, Settings
    from ..config.secret import first_signing
    from ..events import DEFAULT_CATALOG
    from ..events.samples import sample_body
    from ..records.deliveries import DeliveryRecord, DeliveryState, key_of, signer_of
    from ..runtime.presence import DEV_SECRET, Presence
    from ..storage.ports import Inbox
    from ..webhooks.signed_request import post, sign_body
    from . import sources
    from .application import import_registry
    from .events import find_event
    from .receiver import reach
    from .settings import load
    from .sign import (
        NoSecretError,
        for_signing,
        known_secrets,
        read_dev_secret,
        secret_of_variable,
    )
    from .store import open_inbox, open_tenants, source_named, tenant_path, why_unreachable
    from .terminal import Progress, print_list, say

if TYPE_CHECKING:
    from ..records.tenants import Tenant

COLUMNS = ("webhook_id", "type", "status", "state", "attempts", "last_error")
COLUMNS_OF_SOURCES = (*COLUMNS[:2], "source", *COLUMNS[2:])

#: Seconds to wait in total until all events have been handled.
SETTLE_SECONDS = 5.0
# A sample is handled in milliseconds; people do not notice 0.05 s.
POLL_SECONDS = 0.05

# The receiver answers only with a status, so that strangers learn nothing more. These texts explain
# it to the operator.
_HINTS = {
    400: "the receiver refused it: the secret differs from the receiver's, a clock is wrong, or "
    "RequireHttps is true; 'events rejected' shows the cause",
    404: "nothing is served at this path: compare it with Sdk:Webhooks:Path",
    405: "this is not a webhook receiver: check the address",
    403: "this machine's address is not in Sdk:Webhooks:AllowedSourceIpRanges",
    413: "the body is larger than Sdk:Webhooks:MaxPayloadBytes",
    429: "too many deliveries a minute: see Sdk:Webhooks:RateLimitPerMinute",
    500: "the handler raised an exception: see 'events show' and the receiver's log",
    503: "the queue is full, the store is unavailable, the receiver is stopping, or the handler "
    "took too long or requested a later delivery (RetryLater): see 'events show'",
}


@attrs.frozen
class Target:
    """The address to post to and the secret; ``ca_file`` verifies our own receiver's certificate.

    ``organization`` is named in the samples. ``signer`` is the id of the tenant whose secret is
    used, "" for the host's.
    """

    url: str
    secret: Secret = attrs.field(repr=False)
    ca_file: str | None = None
    organization: str | None = None
    signer: str = ""


def trigger_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events trigger``."""
    parser.add_argument("type", metavar="TYPE", help="an event type, such as order.created")
    parser.add_argument(
        "--data",
        metavar="JSON",
        help="a JSON object that is merged into the sample's data; with --source, the body or a "
        "file with it",
    )
    parser.add_argument(
        "--url", metavar="U", help="where to post (default: the receiver of the data directory)"
    )
    add_source(parser, "as the sender of this source")
    add_number(parser, "--count", greatest=100_000, default=1, help="number of events (default 1)")
    parser.add_argument(
        "--tenant", metavar="T", help="to this tenant's address, with its secret; a name or id"
    )
    add_secret(parser)
    add_format(parser)


def trigger(arguments: Namespace) -> int:
    """Send ``--count`` samples one at a time; return 1 if one was not successful.

    Raises:
        UnknownEventTypeError: no such type.
        NoReceiverError: no receiver runs, and no ``--url`` was given.
        UnknownTenantError: the tenant of ``--tenant`` does not exist.
        TenantCredentialsError: no secret of the tenant can be read.
        UsageError: ``--url`` is another machine's, and ``--secret-env`` is missing.
        DeliveryFailedError: no answer came.
    """
    if arguments.source is not None:
        return _trigger_of_source(arguments)
    overrides = _overrides(arguments.data)
    _body(arguments.type, overrides, "", None)  # an unknown type is reported first
    settings = load(arguments)
    given = _given_secret(arguments)
    if arguments.tenant is None:
        target = _target(settings, arguments.url, given)
    else:
        target = _tenant_target(settings, arguments.tenant, arguments.url, given)
    sent: list[dict[str, Any]] = []
    try:
        trio.run(_send, settings, target, arguments.type, overrides, arguments.count, sent)
    finally:
        # Also after an error or an interruption, the samples that were sent are printed.
        print_list(arguments, sent, COLUMNS)
    return _verdict(sent, target.url)


def _trigger_of_source(arguments: Namespace) -> int:
    """Send deliveries as the sender of a source does, signed with its secret."""
    if arguments.tenant is not None:
        raise UsageError("give --tenant or --source: the events of a source have no tenant")
    document = sources.body_in(arguments)
    settings = load(arguments)
    options = source_named(settings, arguments.source)
    given = _given_secret(arguments)
    secret = given or first_signing(options.secrets)
    ca_file = None
    if arguments.url is None:
        url = sources.url_of(settings, options)
        ca_file = settings.server.cert_file if url.startswith("https:") else None
    else:
        url = _whole(arguments.url, options.route)
        if secret is not None and given is None:
            _guarded(secret, url)
    sent: list[dict[str, Any]] = []

    async def send() -> None:
        await sources.send(
            options,
            url,
            arguments.type,
            document,
            secret=secret,
            ca_file=ca_file,
            count=arguments.count,
            sent=sent,
        )
        if why_unreachable(settings) is None:
            await _look_up(settings, sent, signer_of(options.name))

    try:
        trio.run(send)
    finally:
        print_list(arguments, sent, COLUMNS_OF_SOURCES)
    return _verdict(sent, url)


def types_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events types``."""
    parser.add_argument(
        "--app", metavar="MODULE:ATTR", help="show the handler of each type, and its policies"
    )
    add_format(parser)


def types(arguments: Namespace) -> int:
    """Print every event type of the upstream, its class, and its meaning.

    With ``--app`` also the handler of each, and its policies.

    Raises:
        AppNotFoundError: ``--app`` cannot be imported or has the wrong type.
        AppBrokenError: its import raised.
    """
    registered: dict[str, dict[str, str]] = {}
    columns: tuple[str, ...] = ("type", "class", "meaning")
    of_sources: list[dict[str, Any]] = []
    if arguments.app is not None:
        handlers = import_registry(arguments.app)
        registered = {
            each.group: {"handler": each.name, "policies": str(each.policy)}
            for each in handlers.registrations
        }
        columns = ("type", "class", "handler", "policies")
        of_sources = [
            {
                "type": each.group.partition(":")[2],
                "class": "" if each.data_class is None else each.data_class.__name__,
                "known": False,
                "meaning": "",
                "source": each.source,
                **registered[each.group],
            }
            for each in handlers.registrations
            if each.source is not None
        ]
    missing = {"handler": "", "policies": ""} if arguments.app is not None else {}
    rows = [
        {
            "type": row.wire_type,
            "class": row.event_class.__name__,
            "known": row in DEFAULT_CATALOG.known,
            "meaning": (getdoc(row.event_class) or "").partition("\n")[0],
            **registered.get(row.wire_type, missing),
        }
        for row in DEFAULT_CATALOG
    ]
    if of_sources:
        columns = (columns[0], "source", *columns[1:])
    print_list(arguments, [*rows, *of_sources], columns)
    if arguments.format != "json":
        say("'events trigger TYPE' sends a sample of it")
    return 0


def resend_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events resend``."""
    parser.add_argument("id", metavar="ID", help="the webhook id")
    parser.add_argument("--to", metavar="URL", required=True, help="where to post it")
    add_secret(parser)
    add_format(parser)


def resend(arguments: Namespace) -> int:
    """Post the body of an event, with its id and a current signature; 1 if it is not accepted.

    The inbox is only read: to run the event again in this receiver, use ``events replay``.

    Raises:
        UsageError: the URL is invalid, or the body was removed.
        UnknownEventError: the inbox has no event with that id, or events from several senders.
        NoSecretError: no secret to sign with.
        UsageError: ``--to`` is another machine's, and ``--secret-env`` is missing.
        DeliveryFailedError: no answer came.
    """
    settings = load(arguments)
    url = _whole(arguments.to, "/", option="--to")
    record, _, _ = trio.run(find_event, settings, arguments.id)
    if record.raw is None:
        raise UsageError(
            f"the body of {arguments.id} was removed: see Sdk:Webhooks:PayloadRetentionDays"
        )
    if record.source is not None:
        given = _given_secret(arguments)
        if given is None:
            options = source_named(settings, record.source)
            for secret in options.secrets[:1]:
                _guarded(secret, url)
        posted = trio.run(post, url, sources.signed_again(settings, record, given))
        return _print_resent(arguments, record, url, posted.status)
    try:
        signed = sign_body(
            record.raw,
            secret=_given_secret(arguments) or _guarded(_secret_of_signer(settings, record), url),
            webhook_id=record.webhook_id,
            timestamp=int(time.time()),
            derivation=settings.webhooks.key_derivation,
        )
    except ValueError as error:
        raise NoSecretError(f"nothing can be signed: {error}") from None
    posted = trio.run(post, url, signed)
    return _print_resent(arguments, record, url, posted.status)


def _print_resent(arguments: Namespace, record: DeliveryRecord, url: str, status: int) -> int:
    row = {"webhook_id": record.webhook_id, "type": record.type, "to": url, "status": status}
    print_list(arguments, [row], tuple(row))
    return 0 if 200 <= status < 300 else EXIT_FAILURE


def _given_secret(arguments: Namespace) -> Secret | None:
    return None if arguments.secret_env is None else secret_of_variable(arguments.secret_env)


def _guarded(secret: Secret, url: str) -> Secret:
    """Return a secret of our receiver, if it may sign for ``url``.

    Raises:
        UsageError: that is another machine. The recipient could pass the delivery on to the
            receiver, which would run it.
    """
    is_here = url.startswith("unix:") or is_loopback(urlsplit(url).hostname or "")
    if is_here or secret.made_for_tests:
        return secret
    raise UsageError(
        f"{url} is on another machine, which could pass the delivery on to your receiver: name the "
        "variable with the secret of that address with --secret-env"
    )


def _secret_of_signer(settings: Settings, record: DeliveryRecord) -> Secret:
    """Return a secret of the sender that signed an event: the host's, or its tenant's.

    With the host's secret, a tenant's event would count as an event of any tenant that its body
    names.

    Raises:
        NoSecretError: the tenant no longer has a secret.
    """
    if not record.signer:
        return for_signing(known_secrets(settings))
    try:
        _, secret = trio.run(_tenant_and_secret, settings, record.signer)
    except UnknownTenantError:
        secret = None
    if secret is None:
        raise NoSecretError(
            f"the tenant {record.signer} has signed {record.webhook_id}, and it has no webhook "
            "secret here: name the variable of a secret with --secret-env"
        )
    return secret


def _overrides(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--data is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("--data takes a JSON object, such as '{\"amount\": 100}'")
    return document


def _target(settings: Settings, url: str | None, given: Secret | None) -> Target:
    if url is None:
        presence = reach(settings.storage.path)
        secret = given or secret_of(settings, presence)
        return Target(presence.url, secret, _vouching(settings, presence))
    whole = _whole(url, settings.webhooks.path)
    return Target(whole, given or _guarded(for_signing(known_secrets(settings)), whole))


def _vouching(settings: Settings, presence: Presence) -> str | None:
    # Our own receiver's self-signed certificate is trusted by its file; experiments need not
    # disable verification.
    return settings.server.cert_file if presence.url.startswith("https:") else None


def _whole(url: str, path: str, *, option: str = "--url") -> str:
    """Return the given URL, with ``path`` if it has none."""
    if not url.startswith("unix:"):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{option} takes http://HOST:PORT/PATH or https://..., not {url!r}")
        # `--url http://host:8080` means the receiver there, not its root path, which serves
        # nothing.
        if parts.path in ("", "/"):
            url = f"{parts.scheme}://{parts.netloc}{path}"
    return url


def _tenant_target(settings: Settings, key: str, url: str | None, given: Secret | None) -> Target:
    """Return the tenant's own address and secret, or the host's if it has no secrets.

    Raises:
        UsageError: tenants are disabled, or the tenant has neither secrets nor an organization.
    """
    if not settings.multi_tenant.enabled:
        raise UsageError("--tenant: Sdk:MultiTenant:Enabled is false, so there are no tenants")
    tenant, secret = trio.run(_tenant_and_secret, settings, key)
    if secret is not None:
        path = tenant_path(settings.webhooks.path, tenant.identifier)
        if url is not None:
            whole = _whole(url, path)
            target = Target(whole, given or _guarded(secret, whole))
        else:
            presence = reach(settings.storage.path)
            address = tenant_path(presence.url, tenant.identifier)
            target = Target(address, given or secret, _vouching(settings, presence))
        return attrs.evolve(target, organization=tenant.organization_id, signer=tenant.id)
    if tenant.organization_id is None:
        raise UsageError(
            f"--tenant: {tenant.identifier} has neither webhook secrets nor an organization, so no "
            "delivery is its own: 'tenant set' takes --webhook-secret-env and --organization-id"
        )
    say(f"{tenant.identifier} has no webhook secrets of its own: sent to the host's address")
    return attrs.evolve(_target(settings, url, given), organization=tenant.organization_id)


async def _tenant_and_secret(settings: Settings, key: str) -> tuple[Tenant, Secret | None]:
    """Return a tenant, and the first of its secrets that can sign; None if it has no own secret."""
    from ..tenants.credentials import CredentialReader

    async with open_tenants(settings) as service:
        tenant = await service.get(key)
    problem: TenantCredentialsError | None = None
    found: list[Secret] = []
    reader = CredentialReader()
    for source in tenant.credentials.webhook_secrets:
        try:
            # One source that cannot be read does not matter while another one can sign.
            found += await reader.read_webhook_secrets(tenant, source)
        except TenantCredentialsError as error:
            problem = problem or error
    if found:
        return tenant, for_signing(tuple(found))
    if problem is not None:
        raise problem
    return tenant, None


def secret_of(settings: Settings, presence: Presence) -> Secret:
    """Return the secret that the running receiver verifies with.

    Raises:
        NoSecretError: the secret is unknown here.
    """
    if presence.secret != DEV_SECRET:
        return for_signing(known_secrets(settings))
    generated = read_dev_secret(settings.storage.path)
    if generated is None:
        raise NoSecretError(
            f"the receiver's secret was removed from {settings.storage.path}: restart 'dev'"
        )
    return generated


def _body(
    wire_type: str, overrides: dict[str, Any] | None, seed: str, organization: str | None
) -> bytes:
    return sample_body(
        wire_type,
        now=datetime.now(UTC),
        overrides=overrides,
        seed=seed,
        organization=organization,
    )


async def _send(
    settings: Settings,
    target: Target,
    wire_type: str,
    overrides: dict[str, Any] | None,
    count: int,
    sent: list[dict[str, Any]],
) -> None:
    """Post the samples and add each to ``sent``; then add their states in the inbox."""
    progress = Progress("sent", count)
    await trio.lowlevel.checkpoint()
    for _ in range(count):
        # A new id each time: a receiver answers a known id without running the handler.
        webhook_id = f"msg_{uuid.uuid4().hex}"
        try:
            signed = sign_body(
                _body(wire_type, overrides, webhook_id, target.organization),
                secret=target.secret,
                webhook_id=webhook_id,
                # Each sample gets its own time, because many samples may take longer than the
                # tolerance.
                timestamp=int(time.time()),
                derivation=settings.webhooks.key_derivation,
            )
        except ValueError as error:
            raise NoSecretError(f"nothing can be signed: {error}") from None
        posted = await post(target.url, signed, ca_file=target.ca_file)
        unknown: dict[str, Any] = dict.fromkeys(("state", "attempts", "last_error"))
        row = {"webhook_id": webhook_id, "type": wire_type, "status": posted.status}
        sent.append(row | unknown)
        progress.advance()
    # With --url the inbox is usually on another machine, and only the answers are known.
    if why_unreachable(settings) is None:
        await _look_up(settings, sent, target.signer)


async def _look_up(settings: Settings, sent: list[dict[str, Any]], signer: str) -> None:
    """Complete ``sent`` from the inbox, if it is reachable and has the events."""
    await trio.lowlevel.checkpoint()
    try:
        async with open_inbox(settings) as inbox:
            # One deadline for all: while the first is waited for, the others are handled.
            deadline = trio.current_time() + SETTLE_SECONDS
            for row in sent:
                record = await _settled(inbox, key_of(row["webhook_id"], signer), deadline)
                if record is not None:
                    # The first line fits into a table; `events show` has the rest.
                    error = record.last_error.partition("\n")[0] if record.last_error else None
                    row |= {"state": record.state, "attempts": record.attempts, "last_error": error}
    except StorageError as error:
        say(f"the inbox cannot be read: {error}")


async def _settled(inbox: Inbox, key: str, deadline: float) -> DeliveryRecord | None:
    """Wait until the event has been handled, has failed, or the deadline has passed."""
    while True:
        record = await inbox.get(key)
        waits = (DeliveryState.RECEIVED, DeliveryState.RUNNING)
        if record is None or record.state not in waits or trio.current_time() >= deadline:
            return record
        await trio.sleep(POLL_SECONDS)


def _verdict(sent: list[dict[str, Any]], url: str) -> int:
    refused = [row["status"] for row in sent if not 200 <= row["status"] < 300]
    # Each status once: a hundred refused samples have one cause.
    for status in dict.fromkeys(refused):
        say(f"{status} from {url}: {_HINTS.get(status, 'not a success')}")
    return EXIT_FAILURE if refused else 0
