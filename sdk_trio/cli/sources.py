"""``events trigger --source`` and ``events resend``: deliveries that are signed as sources do."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from .parse import UsageError, describing

if not describing():
    import trio

    from ..config import Secret, Settings
    from ..config.options.sources import SourceOptions
    from ..records.deliveries import DeliveryRecord
    from ..webhooks.signed_request import post
    from ..webhooks.sources.signing import SourceDelivery, add_names, make_body, new_id, sign_as
    from .receiver import reach
    from .sign import NoSecretError
    from .store import source_named
    from .terminal import Progress


def body_in(arguments: Namespace) -> Any | None:
    """Return the document of ``--data``: a file, or JSON itself; None without one.

    Raises:
        UsageError: it cannot be read, or is not a JSON object.
    """
    text: str | None = arguments.data
    if text is None:
        return None
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--data: cannot read {arguments.data!r}: {error}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--data is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("--data takes a JSON object, or a file with one: the body of a delivery")
    return document


def url_of(settings: Settings, options: SourceOptions) -> str:
    """Return the address of a source at the receiver of the data directory.

    Raises:
        NoReceiverError: no receiver runs there.
    """
    return reach(settings.storage.path).url.removesuffix(settings.webhooks.path) + options.route


def sign_with(
    options: SourceOptions,
    event_type: str,
    body: bytes,
    *,
    webhook_id: str | None,
    secret: Secret | None,
) -> SourceDelivery:
    """Sign a body as the sender of a source does.

    Raises:
        NoSecretError: nothing can be signed.
    """
    try:
        return sign_as(
            options,
            event_type,
            body,
            webhook_id=webhook_id,
            timestamp=int(time.time()),
            secret=secret,
        )
    except ValueError as error:
        raise NoSecretError(f"nothing can be signed: {error}") from None


async def send(
    options: SourceOptions,
    url: str,
    event_type: str,
    document: Any | None,
    *,
    secret: Secret | None,
    ca_file: str | None,
    count: int,
    sent: list[dict[str, Any]],
) -> None:
    """Post deliveries as the sender of a source does, and add each to ``sent``."""
    progress = Progress("sent", count)
    await trio.lowlevel.checkpoint()
    for _ in range(count):
        webhook_id, now = new_id(), int(time.time())
        if document is None:
            body = make_body(options, event_type, {}, webhook_id=webhook_id, timestamp=now)
        else:
            body = add_names(options, event_type, document, webhook_id=webhook_id, timestamp=now)
        signed = sign_with(options, event_type, body, webhook_id=webhook_id, secret=secret)
        posted = await post(url, signed, ca_file=ca_file)
        unknown: dict[str, Any] = dict.fromkeys(("state", "attempts", "last_error"))
        row = {"webhook_id": signed.webhook_id, "type": event_type, "source": options.name}
        sent.append({**row, "status": posted.status, **unknown})
        progress.advance()


def signed_again(
    settings: Settings, record: DeliveryRecord, secret: Secret | None
) -> SourceDelivery:
    """Return the delivery of a stored event of a source, with a current signature.

    Raises:
        UsageError: the settings no longer have the source.
        NoSecretError: nothing can be signed.
    """
    options = source_named(settings, record.source or "")
    return sign_with(
        options, record.type, record.raw or b"", webhook_id=record.webhook_id, secret=secret
    )
