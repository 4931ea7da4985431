"""``sign`` and ``secrets new``: the sender's side, signing a body and making a secret."""

import secrets
import shlex
import time
import uuid
from argparse import Namespace

from ..config import Settings
from ..config.forms import split_unix
from ..webhooks.signature import NEW_SECRET_BYTES, new_secret, sign
from .file_reader import read_bytes
from .moments import parse_count, parse_moment
from .printer import print_json, print_rows, print_text
from .secret_finder import chosen_secrets, for_signing
from .settings_reader import load
from .usage import UsageError

#: The address in the printed curl command for a receiver that listens on all addresses.
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def sign_file(arguments: Namespace) -> int:
    """Print the headers that make a body a signed delivery.

    Raises:
        UsageError: the id, the time or the secret is one that a receiver would refuse.
    """
    settings = load(arguments)
    secret = for_signing(chosen_secrets(arguments, settings))
    given = arguments.timestamp
    timestamp = int(time.time()) if given is None else parse_moment(given, option="--timestamp")
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


def new_secrets(arguments: Namespace) -> int:
    """Print new webhook secrets, a line each."""
    count = parse_count(arguments.count, option="--count", greatest=1000)
    made = [new_secret(secrets.token_bytes(NEW_SECRET_BYTES)) for _ in range(count)]
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
    elif server.bind[0].startswith("fd:"):
        target = ["--url", f"{scheme}://127.0.0.1:8080{path}"]
    words = ["curl", *target]
    for name, value in headers.items():
        words += ["--header", f"{name}: {value}"]
    return shlex.join([*words, "--data-binary", f"@{file}"])
