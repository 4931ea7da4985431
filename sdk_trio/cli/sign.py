"""``sign``, ``verify`` and ``secrets new``, and the secrets that commands sign and verify with.

No secret is taken from an argument: other users of the machine can read those of every process.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.http import is_token
from ..errors import EXIT_CONFIGURATION, EXIT_FAILURE, DeliveryDecodingError, SdkError
from .parse import (
    UsageError,
    add_format,
    add_moment,
    add_number,
    add_secret,
    describing,
    moment_text,
)

if not describing():
    from msgspec.structs import replace

    from ..config import KeyDerivation, Secret, Settings, parse_secret
    from ..config.fields import split_unix
    from ..config.secret import first_signing
    from ..events import decode_envelope
    from ..webhooks.signature import NEW_SECRET_BYTES, Keyring, new_secret, sign
    from ..webhooks.verdict import Accepted, Cause, Delivery, Rejected, verify_delivery
    from .settings import load
    from .terminal import print_json, print_rows, print_text, read_bytes

_REQUEST_LINE = re.compile(r"[A-Z]+ \S+( HTTP/[0-9.]+)?")


def parse_headers(content: bytes) -> list[tuple[bytes, bytes]]:
    """Return names and values in their order, repeated ones as they came.

    Args:
        content: ``Name: value`` lines, as a proxy or ``curl -v`` shows them (a request line and
            the marks ``>`` are skipped); or a JSON object of names and values; or a JSON list of
            pairs.

    Raises:
        UsageError: it has none of these forms; the message names the line.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("--headers: the file is not UTF-8 text") from None
    pairs = _from_json(text) if text.lstrip()[:1] in ("{", "[") else _from_lines(text)
    try:
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in pairs]
    except UnicodeEncodeError:
        raise UsageError("--headers: a header contains invalid characters") from None


def _from_lines(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        # curl -v marks the headers that it sends like this.
        stripped = line.removeprefix(">").strip()
        if not stripped or (not pairs and _REQUEST_LINE.fullmatch(stripped)):
            continue
        name, colon, value = stripped.partition(":")
        # A server would skip an invalid name; here it is an error, because a lost header is often
        # the problem.
        if not colon or not is_token(name):
            raise UsageError(f"--headers: line {number} is not of the form 'Name: value'")
        pairs.append((name, value.strip()))
    return pairs


def _from_json(text: str) -> list[tuple[str, str]]:
    try:
        # As pairs: an object that repeats a name would lose one, and a repeated header is a cause
        # of refusal.
        document: Any = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--headers: the file is not valid JSON: {error}") from None
    pairs: list[tuple[str, str]] = []
    for item in document:
        if not (isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise UsageError(
                "--headers takes a JSON object of names and values, or a list of [name, value]"
            )
        name, value = item
        # Proxies and frameworks print repeated headers as a list under one name.
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str | int) and not isinstance(v, bool) for v in values):
            raise UsageError(f"--headers: the value of {name!r} is not text")
        pairs += [(name, str(v)) for v in values]
    return pairs


#: The address in the printed curl command for a receiver that listens on all addresses.
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def _add_body(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="the body (default: standard input)"
    )


def sign_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``sign``."""
    add_secret(parser)
    parser.add_argument("--id", metavar="ID", help="the webhook id (default: a new one)")
    add_moment(parser, "--timestamp", "when it was sent (default: now)")
    parser.add_argument(
        "--format",
        choices=("headers", "curl", "json"),
        default="headers",
        help="header lines, a curl command, or a JSON object (default headers)",
    )
    _add_body(parser)


def sign_file(arguments: Namespace) -> int:
    """Print the headers that make a body a signed delivery.

    Raises:
        UsageError: a receiver would refuse the id, the time or the secret.
    """
    settings = load(arguments)
    secret = for_signing(chosen_secrets(arguments, settings))
    timestamp = int(time.time() if arguments.timestamp is None else arguments.timestamp)
    webhook_id = arguments.id or f"msg_{uuid.uuid4().hex}"
    body = read_bytes(arguments.file)
    try:
        signature = sign(
            secret, webhook_id, timestamp, body, derivation=settings.webhooks.key_derivation
        )
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None
    headers = {
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature,
    }
    if arguments.format == "json":
        print_json(headers)
    elif arguments.format == "curl":
        print_text(_curl(settings, headers, arguments.file))
    else:
        for name, value in headers.items():
            print_text(f"{name}: {value}")
    return 0


def new_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``secrets new``."""
    add_number(parser, "--count", greatest=1000, default=1, help="number of secrets (default 1)")
    add_format(parser)


def new_secrets(arguments: Namespace) -> int:
    """Print new webhook secrets, a line each."""
    made = [new_secret(secrets.token_bytes(NEW_SECRET_BYTES)) for _ in range(arguments.count)]
    if arguments.format == "json":
        print_rows([{"secret": text} for text in made], ("secret",), as_json=True)
    else:
        for text in made:
            print_text(text)
    return 0


def _curl(settings: Settings, headers: dict[str, str], file: str) -> str:
    server = settings.server
    host, _, port = server.bind[0].rpartition(":")
    scheme = "https" if server.cert_file else "http"
    path = settings.webhooks.path
    target = ["--url", f"{scheme}://{_ANYWHERE.get(host, host)}:{port}{path}"]
    if server.bind[0].startswith("unix:"):
        socket_path, _ = split_unix(server.bind[0])
        target = ["--unix-socket", socket_path, "--url", f"http://localhost{path}"]
    # Only the service manager knows the port; examples/systemd uses 8080.
    elif server.bind[0].startswith("fd:"):
        target = ["--url", f"{scheme}://127.0.0.1:8080{path}"]
    words = ["curl", *target]
    for name, value in headers.items():
        words += ["--header", f"{name}: {value}"]
    # --data would remove the line breaks, which would invalidate the signature.
    return shlex.join([*words, "--data-binary", f"@{file}"])


def verify_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_secret(parser)
    parser.add_argument(
        "--headers",
        metavar="FILE",
        required=True,
        help="the request's headers: 'Name: value' lines, or a JSON object",
    )
    add_moment(parser, "--at", "use this as the current time, for an earlier delivery")
    add_format(parser)
    _add_body(parser)


def verify_file(arguments: Namespace) -> int:
    """Print whether a delivery is authentic, and if not, which check failed; return 0 or 1."""
    if arguments.headers == "-" and arguments.file == "-":
        raise UsageError("headers and body cannot both come from standard input: name a FILE")
    settings = load(arguments)
    webhooks = settings.webhooks
    keyring = Keyring.from_secrets(chosen_secrets(arguments, settings), webhooks.key_derivation)
    now = time.time() if arguments.at is None else arguments.at
    delivery = Delivery(
        parse_headers(read_bytes(arguments.headers)), read_bytes(arguments.file), now
    )
    tolerance = webhooks.tolerance_seconds
    verdict = verify_delivery(delivery, keyring, tolerance_seconds=tolerance)
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
        return "to check an earlier delivery, give its webhook-timestamp with --at"
    if verdict.cause is not Cause.NO_MATCH:
        return None
    for body, reason in _variants(delivery.raw):
        tried = replace(delivery, raw=body)
        # The timestamp has been checked already, so any age passes here.
        if isinstance(verify_delivery(tried, keyring, tolerance_seconds=2**40), Accepted):
            return f"it is authentic {reason}; the signature covers the exact bytes that were sent"
    return None


def _variants(raw: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield the forms that a body often takes between the sender and a file."""
    yield raw.rstrip(b"\r\n"), "without the line break at the end, which an editor or echo adds"
    yield raw + b"\n", "with a line break at the end, which was lost in transit"
    yield raw.replace(b"\r\n", b"\n"), "with LF instead of CRLF line ends"
    yield raw.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"), "with CRLF instead of LF line ends"
    yield raw.removeprefix(b"\xef\xbb\xbf"), "without the byte order mark at the beginning"


# -- secrets -----------------------------------------------------------------------------------

DEV_SECRET_NAME = "dev-secret"

# Capitals only: secrets have lower-case letters, so a secret is never shown as a name.
_USUAL_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class NoSecretError(SdkError):
    """No secret to sign or verify with was found."""

    exit_code = EXIT_CONFIGURATION


def secret_of_variable(name: str) -> Secret:
    """Return the secret in the environment variable ``name``.

    Raises:
        UsageError: it is not set, or empty.
    """
    text = os.environ.get(name, "")
    if not text.strip():
        # People may enter the secret instead of its name, so only a usual name is shown.
        shown = name if _USUAL_NAME.fullmatch(name) else "that was named"
        raise UsageError(
            f"--secret-env: the environment variable {shown} is not set; it takes the name of a "
            "variable, never the secret itself"
        )
    return Secret(text)


def chosen_secrets(arguments: Namespace, settings: Settings) -> tuple[Secret, ...]:
    """Return the secret that ``--secret-env`` names, or without it :func:`known_secrets`."""
    if arguments.secret_env is not None:
        return (secret_of_variable(arguments.secret_env),)
    return known_secrets(settings)


def known_secrets(settings: Settings) -> tuple[Secret, ...]:
    """Return the configured secrets, or else the one generated by ``dev``.

    Raises:
        NoSecretError: no secret was found.
    """
    configured = settings.webhooks.all_secrets
    if configured:
        return configured
    generated = read_dev_secret(settings.storage.path)
    if generated is None:
        raise NoSecretError(
            "there is no webhook secret: set Sdk:Webhooks:Secret (variable SDK__WEBHOOKS__SECRET), "
            "name a variable with --secret-env where the command has it, or start 'dev', which "
            "generates one"
        )
    return (generated,)


def for_signing(secrets_: tuple[Secret, ...]) -> Secret:
    """Return the first secret that can sign, as public keys cannot; else the first one."""
    return first_signing(secrets_) or secrets_[0]


def read_dev_secret(directory: str) -> Secret | None:
    """Return the secret that ``dev`` keeps in the data directory, None if there is none.

    Raises:
        NoSecretError: the file cannot be read or has no secret.
    """
    from ..base.private_files import read_private  # imports trio, which sign does not need

    file = Path(directory) / DEV_SECRET_NAME
    try:
        text = read_private(file).strip()
        # Strictly: under Auto a truncated file would be accepted as a secret.
        parse_secret(text, KeyDerivation.STANDARD)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or error
        raise NoSecretError(f"{file.absolute()} cannot be read: {reason}") from error
    except ValueError:
        raise NoSecretError(
            f"{file.absolute()} has no webhook secret: delete it, and 'dev' generates another one"
        ) from None
    return Secret(text, made_for_tests=True)


def provide_dev_secret(directory: str) -> Secret:
    """Return the secret of the data directory, generated at the first call (mode 0600)."""
    known = read_dev_secret(directory)
    if known is not None:
        return known
    from ..base.private_files import create_data_directory

    file = create_data_directory(directory) / DEV_SECRET_NAME
    text = new_secret(secrets.token_bytes(NEW_SECRET_BYTES))
    try:
        # Created with its mode, and never opened if it exists: no one else may read it, and a link
        # must not redirect it.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{text}\n")
    except OSError as error:
        raise NoSecretError(
            f"{file.absolute()} cannot be written ({error.strerror}): make the data directory "
            "writable, or set Sdk:Storage:Path to a writable one"
        ) from error
    return Secret(text, made_for_tests=True)
