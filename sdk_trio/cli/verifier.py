"""``verify``: says whether a delivery is authentic and, locally, which check failed."""

import time
from argparse import Namespace
from collections.abc import Iterator

from msgspec.structs import replace

from ..errors import EXIT_FAILURE, DeliveryDecodingError
from ..events import decode_envelope
from ..webhooks.signature import Keyring
from ..webhooks.verdict import Accepted, Cause, Delivery, Rejected, judge
from .file_reader import read_bytes
from .header_lines import parse_headers
from .moments import moment_text, parse_moment
from .printer import print_json, print_text
from .secret_finder import chosen_secrets
from .settings_reader import load
from .usage import UsageError


def verify_file(arguments: Namespace) -> int:
    """Print whether a delivery is authentic, and if not, which check failed; return 0 or 1."""
    if arguments.headers == "-" and arguments.file == "-":
        raise UsageError("headers and body cannot both come from standard input: name a FILE")
    settings = load(arguments)
    webhooks = settings.webhooks
    keyring = Keyring.from_secrets(chosen_secrets(arguments, settings), webhooks.key_derivation)
    now = time.time() if arguments.at is None else parse_moment(arguments.at, option="--at")
    delivery = Delivery(
        parse_headers(read_bytes(arguments.headers)), read_bytes(arguments.file), now
    )
    tolerance = webhooks.tolerance_seconds
    verdict = judge(delivery, keyring, tolerance_seconds=tolerance)
    hint = None
    if isinstance(verdict, Rejected):
        hint = _hint(verdict, delivery, keyring)
    answer = _answer(verdict, delivery.raw, hint)
    if arguments.format == "json":
        print_json(answer)
    elif answer["authentic"]:
        print_text(f"authentic: {answer['detail']}")
    else:
        print_text(f"rejected: {answer['cause']}: {answer['detail']}")
        if hint is not None:
            print_text(f"hint: {hint}")
    return 0 if answer["authentic"] else EXIT_FAILURE


def _answer(
    verdict: Accepted | Rejected, raw: bytes, hint: str | None
) -> dict[str, str | int | bool | None]:
    """Return the text to print: the verdict, and whether the body is an event."""
    if isinstance(verdict, Rejected):
        cause, detail, matched = str(verdict.cause), verdict.detail, None
        webhook_id = None
    else:
        webhook_id, matched = verdict.webhook_id, verdict.secret_index
        how = "ed25519" if verdict.derivation is None else f"key derivation {verdict.derivation}"
        cause = None
        detail = (
            f"{webhook_id}, signed at {moment_text(verdict.timestamp)} with secret {matched} "
            f"({how})"
        )
        try:
            decode_envelope(raw)
        except DeliveryDecodingError as error:
            cause, detail = "not_an_event", f"the signature is good, but {error}"
    return {
        "authentic": cause is None,
        "cause": cause,
        "detail": detail,
        "hint": hint,
        "webhook_id": webhook_id,
        "secret_index": matched,
    }


def _hint(verdict: Rejected, delivery: Delivery, keyring: Keyring) -> str | None:
    """Return a hint if a small change of the body would have been accepted."""
    if verdict.cause in (Cause.TOO_OLD, Cause.TOO_NEW):
        return "to check a delivery of another time, give its webhook-timestamp with --at"
    if verdict.cause is not Cause.NO_MATCH:
        return None
    for body, reason in _variants(delivery.raw):
        tried = replace(delivery, raw=body)
        # The timestamp has been checked already, so any age passes here.
        if isinstance(judge(tried, keyring, tolerance_seconds=2**40), Accepted):
            return f"it is authentic {reason}; the signature covers the exact bytes that were sent"
    return None


def _variants(raw: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield the forms that a body often takes between the wire and a file."""
    yield raw.rstrip(b"\r\n"), "without the line break at the end, which an editor or echo adds"
    yield raw + b"\n", "with a line break at the end, which was lost on the way"
    yield raw.replace(b"\r\n", b"\n"), "with LF instead of CRLF line ends"
    yield raw.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"), "with CRLF instead of LF line ends"
    yield raw.removeprefix(b"\xef\xbb\xbf"), "without the byte order mark at the beginning"
