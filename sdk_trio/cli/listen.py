"""``listen``: forwards the deliveries of a remote receiver to this machine, for development.

Each delivery is posted to the local address with its exact bytes and signature headers, so that the
local receiver really verifies it. Deliveries are posted one at a time in order of arrival. The
position is stored in a file, so nothing is missed while the listener is not running: the remote
store keeps the deliveries, not this command.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import aclosing
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from ..errors import EXIT_UNAVAILABLE, SdkError
from .parse import UsageError, add_feed, add_format, add_number, add_source, describing

if not describing():
    import filelock
    import httpx
    import trio

    from ..admin.access import TOKEN_NAME
    from ..admin.follow import AdminRefusedError, call, feed_url, open_feed
    from ..base.private_files import read_private, write_private
    from ..base.public_addresses import names_local_address
    from ..base.throttle import jittered_wait
    from ..config import Secret, Settings
    from ..webhooks.signed_request import sign_body
    from .receiver import admin_address
    from .settings import load
    from .sign import secret_of_variable
    from .terminal import STATE_COLORS, cell, is_terminal, print_json_line, print_text, say

#: The wait for the local server's answer, in seconds: as long as the upstream waits.
ANSWER_SECONDS = 10.0

#: Waits between two attempts to reach a local server that is down, in seconds.
AWAY_BASE_SECONDS = 0.25
AWAY_CAP_SECONDS = 5.0

#: Attempts at a delivery if the local server breaks the connection each time. They are limited
#: because the delivery's handler may be the cause, and later deliveries wait. A restarting server
#: needs one or two attempts.
BROKEN_ATTEMPTS = 5

#: Timeout of a query about the relay, in seconds.
ASK_SECONDS = 10.0


#: The message if the position belongs to another store than the receiver's current one.
REPLACED = "the receiver has a different store than before: starting with its first delivery"


class RelayError(SdkError):
    """The receiver's feed cannot be followed; the message gives the reason and the fix."""

    exit_code = EXIT_UNAVAILABLE


@attrs.frozen
class FeedSource:
    """The followed receiver: its admin address and its token."""

    url: str
    token: str = attrs.field(repr=False)


def feed_source(settings: Settings, arguments: Namespace) -> FeedSource:
    """Return the receiver of ``--from``, or else of the settings, with its token.

    Raises:
        UsageError: the token is missing, or the address is unknown.
        FeedRefusedError: ``--from`` is not an address.
    """
    url = arguments.from_ or admin_address(settings, option="--from")
    name = arguments.token_env or settings.admin.token_env_var
    token = os.environ.get(name, "").strip()
    if not token and arguments.from_ is None:
        try:
            token = read_private(Path(settings.storage.path) / TOKEN_NAME).strip()
        except (OSError, ValueError):
            token = ""
    if not token:
        raise UsageError(
            f"the variable {name} is not set: set it to the admin token of {url}, which is "
            f"in the file {TOKEN_NAME} of its data directory if none was chosen; --token-env names "
            "another variable"
        )
    source = FeedSource(url, token)
    if feed_url(url).startswith("ws:") and not names_local_address(url):
        say(f"the token is sent to {url} without TLS: use wss:// there")
    return source


async def call_api(
    source: FeedSource,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    body: object = None,
) -> Any:
    """Call the receiver's API and return the document that it answers.

    Raises:
        RelayError: no answer, or a refusal.
    """
    url = feed_url(source.url)
    try:
        with trio.fail_after(ASK_SECONDS):
            return await call(url, method, path, token=source.token, query=query, body=body)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
        raise RelayError(f"{source.url} does not answer: {str(error) or 'too slow'}") from None
    except AdminRefusedError as error:
        raise RelayError(f"{source.url} answers: {error}") from None


async def first_since(source: FeedSource, since: float) -> int | None:
    """Return the sequence just before the first arrival since ``since``; None without arrivals."""
    # Round down: rounding up would skip a delivery that arrived exactly at this time.
    numerator, denominator = since.as_integer_ratio()
    micros = numerator * 10**6 // denominator
    query = {"since": f"{micros // 10**6}.{micros % 10**6:06}", "order": "oldest", "limit": "1"}
    rows = await call_api(source, "GET", "/api/events", query=query)
    return rows[0]["sequence"] - 1 if rows else None


def raw_of(event: Mapping[str, Any]) -> bytes | None:
    """Return the exact bytes of the body that an event of the feed carries; None without one."""
    if event.get("raw_base64") is not None:
        return base64.b64decode(event["raw_base64"])
    raw = event.get("raw")
    return None if raw is None else str(raw).encode()


# -- the position --------------------------------------------------------------------------------


class Cursor:
    """A listener's position, stored in a file that only one listener can use at a time.

    Args:
        file: its directory is created.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = filelock.FileLock(f"{file}.lock")
        self.position: int | None = None
        self.store: str | None = None

    def open(self) -> None:
        """Lock the file and read the position; None if there is none yet.

        Raises:
            UsageError: another listener has locked it, or it cannot be read.
        """
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
            kept = json.loads(read_private(self._file))
            self.position, self.store = int(kept["position"]), kept.get("store")
        except filelock.Timeout:
            raise UsageError(
                f"another listener uses {self._file}: use another file with --cursor"
            ) from None
        except FileNotFoundError:
            self.position = None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self._file} has no position ({error}): remove it, or use another file with "
                "--cursor"
            ) from None

    def save(self, position: int, store: str | None = None) -> None:
        """Store a position and the name of its store, atomically."""
        if (position, store) == (self.position, self.store):
            return
        write_private(self._file, json.dumps({"position": position, "store": store}) + "\n")
        self.position, self.store = position, store

    def close(self) -> None:
        """Release the file."""
        self._lock.release()


def cursor_file(arguments: Namespace, source: FeedSource) -> Path:
    """Return the file of ``--cursor``, or else the default for source, target and tenant."""
    if arguments.cursor:
        return Path(arguments.cursor)
    words = json.dumps(
        [feed_url(source.url), arguments.forward_to, arguments.tenant]
        + ([] if arguments.source is None else [arguments.source])
    )
    name = hashlib.sha256(words.encode()).hexdigest()[:16]
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "sdk_trio" / f"listen-{name}.json"


# -- the command ---------------------------------------------------------------------------------


def listen_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``listen``."""
    parser.add_argument("--forward-to", metavar="URL", help="post each delivery to this address")
    parser.add_argument(
        "--events", metavar="TYPES", default="", help="only these types, such as order.*,refund.*"
    )
    parser.add_argument("--tenant", metavar="T", help="only this tenant's, by name or id")
    add_source(parser, "only this source's")
    add_feed(parser)
    parser.add_argument(
        "--secret-env",
        metavar="NAME",
        help="sign with the secret in this variable, instead of the receiver's signature",
    )
    parser.add_argument(
        "--cursor",
        metavar="FILE",
        help=("store the position in this file (default: a file of this user)"),
    )
    add_number(
        parser,
        "--after",
        least=0,
        greatest=10**18,
        metavar="SEQ",
        help="start after this sequence, ignoring the file",
    )
    add_number(
        parser,
        "--give-up",
        least=0,
        metavar="SECONDS",
        help=(
            "skip a delivery that could not be posted for so long (default: wait for a server "
            f"that is down, and skip after {BROKEN_ATTEMPTS} broken connections)"
        ),
    )
    parser.add_argument(
        "--print-secret",
        action="store_true",
        help="print the secret that the deliveries are signed with, and exit",
    )
    add_format(parser)


def listen(arguments: Namespace) -> int:
    """Forward deliveries until interrupted; or print the secret and return 0.

    Raises:
        UsageError: an argument is missing or wrong.
        RelayError: the receiver does not answer, or does not relay to this machine.
        FeedRefusedError: the feed refuses.
    """
    if not arguments.print_secret and not arguments.forward_to:
        raise UsageError("give the address of your application: --forward-to http://localhost:3000")
    target = arguments.forward_to or ""
    if target and urlsplit(target).scheme not in ("http", "https"):
        raise UsageError("--forward-to takes http://HOST:PORT/PATH or https://...")
    settings = load(arguments)
    source = feed_source(settings, arguments)
    if arguments.print_secret:
        answer = trio.run(_ask_secret, source)
        print_text(cell(answer["secret"]))
        return 0
    secret = secret_of_variable(arguments.secret_env) if arguments.secret_env else None
    cursor = Cursor(cursor_file(arguments, source))
    cursor.open()
    try:
        if arguments.after is not None:
            cursor.save(arguments.after)
        relay = Relay(
            target,
            cursor,
            secret=secret,
            settings=settings,
            as_json=arguments.format == "json",
            give_up=arguments.give_up,
        )
        trio.run(_listen, source, relay, arguments)
    finally:
        cursor.close()
    return 0


async def _ask_secret(source: FeedSource) -> Any:
    return await call_api(source, "POST", "/api/relay/secret", body={"actor": "listen"})


async def _listen(source: FeedSource, relay: Relay, arguments: Namespace) -> None:
    info = await call_api(source, "GET", "/api/relay")
    if not info["can_sign"] and not relay.signs:
        raise UsageError(
            "the receiver does not sign (it verifies with a public key, or Sdk:Admin:ReadOnly is "
            "true): set --secret-env to a variable that holds a secret of your own, and verify "
            "with that secret in your application"
        )
    cursor = relay.cursor
    options = {
        "kinds": ("delivery",),
        "types": tuple(word.strip() for word in arguments.events.split(",") if word.strip()),
        "tenant": arguments.tenant,
        "source": arguments.source,
        "relay": True,
    }
    async with (
        aclosing(relay),
        open_feed(
            source.url, token=source.token, after=cursor.position, store=cursor.store, **options
        ) as feed,
    ):
        feed.on_trouble = lambda trouble: say(f"not connected: {trouble}; retrying")
        async for message in feed:
            if message["kind"] == "hello":
                say(f"listening to {source.url}, forwarding to {relay.target}; Ctrl-C ends")
                if message["replaced"]:
                    say(f"{REPLACED}; --after SEQ starts elsewhere")
            posted = None
            if message["kind"] == "delivery":
                posted = await relay.forward(message["event"])
            # Stored before it is shown: an event that was shown is not sent again.
            cursor.save(message["seq"], feed.store)
            if posted is not None:
                relay.show(message["event"], posted)


@attrs.frozen
class ForwardedAnswer:
    """The answer of the local server: its status, or None and the reason why there is none."""

    status: int | None
    seconds: float
    trouble: str | None


class Relay:
    """Posts deliveries to the local address, one after the other.

    Args:
        target: the local address.
        cursor: the position.
        secret: signs the delivery; None: the receiver's signature is kept.
        settings: provides the key derivation of the secret.
        as_json: print JSON objects.
        give_up: seconds of failed attempts after which a delivery is skipped. None: skip a delivery
            only if the server breaks the connection :data:`BROKEN_ATTEMPTS` times.
    """

    def __init__(
        self,
        target: str,
        cursor: Cursor,
        *,
        secret: Secret | None,
        settings: Settings,
        as_json: bool,
        give_up: float | None = None,
    ) -> None:
        self.target = target
        self._give_up = inf if give_up is None else give_up
        self._left_out = 0
        self.cursor = cursor
        self._secret = secret
        self._derivation = settings.webhooks.key_derivation
        self._as_json = as_json
        # One connection per delivery: an idle connection that the server has closed would look
        # like a server that died while answering.
        single = httpx.Limits(max_keepalive_connections=0)
        # A client with an explicit transport ignores the environment's proxies, which would receive
        # bodies and signatures. ANSWER_SECONDS bounds each exchange.
        direct = httpx.AsyncHTTPTransport(limits=single)
        self._client = httpx.AsyncClient(transport=direct, trust_env=False, timeout=None)  # noqa: S113 - see above
        self._colors = is_terminal() and not os.environ.get("NO_COLOR")

    @property
    def signs(self) -> bool:
        """Whether it signs with its own secret."""
        return self._secret is not None

    async def aclose(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def forward(self, event: Mapping[str, Any]) -> ForwardedAnswer:
        """Post one delivery, and return the answer.

        If the server is down or dies while answering, the delivery is retried with the same id
        until it is given up. If the server does not answer in time, it has received the delivery,
        so the delivery is not retried.
        """
        raw = raw_of(event)
        if raw is None:
            await trio.lowlevel.checkpoint()
            return ForwardedAnswer(None, 0.0, "its body was removed")
        headers = self._headers(event, raw)
        failures = broken = 0
        end = trio.current_time() + self._give_up
        while True:
            answer, away = await self._post(raw, headers)
            if answer.status is not None or answer.trouble == _TOO_SLOW:
                return answer
            failures += 1
            broken += not away
            if broken == BROKEN_ATTEMPTS or trio.current_time() >= end:
                self._left_out += 1
                trouble = (
                    f"{answer.trouble}: skipped, {self._left_out} so far; --after "
                    f"{event['sequence'] - 1} sends it again"
                )
                return attrs.evolve(answer, trouble=trouble)
            if failures == 1:
                does = "is down" if away else "breaks the connection"
                say(f"{self.target} {does} ({answer.trouble}): retrying")
            wait = jittered_wait(
                failures,
                random.uniform(0.5, 1),  # noqa: S311 - it spreads attempts, and is not a secret
                base_seconds=AWAY_BASE_SECONDS,
                cap_seconds=AWAY_CAP_SECONDS,
            )
            await trio.sleep(min(wait, max(0.0, end - trio.current_time())))

    def _headers(self, event: Mapping[str, Any], raw: bytes) -> dict[str, str]:
        if self._secret is None:
            return dict(map(tuple, event["headers"]))
        signed = sign_body(
            raw,
            secret=self._secret,
            webhook_id=event["webhook_id"],
            timestamp=int(time.time()),
            derivation=self._derivation,
        )
        return signed.headers

    async def _post(self, raw: bytes, headers: dict[str, str]) -> tuple[ForwardedAnswer, bool]:
        """Return the answer, and whether the connection was refused."""
        await trio.lowlevel.checkpoint()
        begun = trio.current_time()
        status, trouble, away = None, None, False
        try:
            with trio.fail_after(ANSWER_SECONDS):
                answer = await self._client.post(self.target, content=raw, headers=headers)
            status = answer.status_code
        except trio.TooSlowError:
            trouble = _TOO_SLOW
        except httpx.HTTPError as error:
            trouble = str(error) or type(error).__name__
            away = isinstance(error, httpx.ConnectError)
        return ForwardedAnswer(status, trio.current_time() - begun, trouble), away

    def show(self, event: Mapping[str, Any], answer: ForwardedAnswer) -> None:
        """Print the result of one delivery."""
        status, seconds, trouble = answer.status, answer.seconds, answer.trouble
        if self._as_json:
            names = ("sequence", "webhook_id", "key", "type")
            fields = {name: event[name] for name in names}
            print_json_line(
                {**fields, "status": status, "seconds": round(seconds, 3), "error": trouble}
            )
            return
        text = f"{status or '---'}"
        if self._colors:
            good = status is not None and 200 <= status < 300
            text = f"\x1b[{STATE_COLORS['done' if good else 'dead']}m{text}\x1b[0m"
        clock = time.strftime("%H:%M:%S", time.gmtime())
        parts = [clock, text, f"{seconds * 1000:6.0f} ms", cell(event["type"]), cell(event["key"])]
        print_text("  ".join([*parts, *([cell(trouble)] if trouble else [])]))


_TOO_SLOW = f"no answer in {ANSWER_SECONDS:g} s"
