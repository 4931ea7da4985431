"""Following the feed of a receiver: an async iterator that loses no delivery and comes again.

``async with open_feed(url, token=...) as feed: async for message in feed: ...``. A message is the
object of JSON that the feed sends: ``seq``, ``kind``, ``at``, and what the kind says. After a lost
connection the iterator goes on behind the last delivery that it has returned.
"""

import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
import trio

from ..base.http import DEFAULT_PORTS
from ..base.throttle import jittered_wait
from ..config.fields import split_unix
from ..errors import SdkError, only_member
from .feed import HEARTBEAT_SECONDS, KINDS

#: A feed that says nothing for so long is gone, in seconds: it sends a heartbeat three times as
#: often.
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS

#: The time for a connection, and for its change of protocol, in seconds.
CONNECT_SECONDS = 10.0

#: The longest frame that is taken, in bytes: a body of a megabyte whose every byte is escaped.
FRAME_BYTES = 32 * 1024 * 1024

#: Waits between two attempts to connect, in seconds.
RETRY_BASE_SECONDS = 0.5
RETRY_CAP_SECONDS = 15.0

#: Statuses after which another attempt may succeed.
_LATER = frozenset({429, 500, 502, 503, 504})

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class FeedRefusedError(SdkError):
    """The feed cannot be followed as it was asked for: the message says why."""


def feed_url(base: str) -> str:
    """Return the address of the feed of an admin address.

    Args:
        base: ``http``, ``https``, ``ws`` or ``wss``, with a path in front of ours if a proxy has
            one; or ``unix:PATH``, which is returned without a mode.

    Raises:
        FeedRefusedError: it is no such URL.
    """
    if base.startswith("unix:") and (socket := split_unix(base)[0]):
        return f"unix:{socket}"
    parts = urlsplit(base)
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise FeedRefusedError(
            f"{base!r} is no address: give ws://HOST:PORT, wss://HOST or unix:PATH"
        )
    path = parts.path.rstrip("/").removesuffix("/feed")
    return urlunsplit((scheme, parts.netloc, f"{path}/feed", "", ""))


#: The fields that the ``hello`` of a receiver lacks which is older than this program.
_OF_OLDER_RECEIVERS: Final[dict[str, Any]] = {"store": None, "replaced": False, "resumed": []}


class _Answers(trio.abc.ReceiveStream):
    """The receiving half of a connection, whose end before the answer is an error.

    The library waits for the answer to its handshake for ever when the connection ends instead, as
    it does when a receiver that is just ending has taken it.
    """

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self.answered = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(max_bytes))
        except trio.BrokenResourceError:
            if self.answered:
                raise
            await trio.lowlevel.checkpoint()
            data = b""
        if data or self.answered:
            return data
        # It ends the reader of the library, and so the handshake.
        raise ConnectionResetError("the connection ended before it was answered")

    async def aclose(self) -> None:
        await self._stream.aclose()


class FeedReader:
    """The messages of a feed, one after the other; made by :func:`open_feed`.

    ``position`` is where the feed would be resumed: the ``seq`` of the last message, None before
    the first one; ``store`` names the store that it is of. ``trouble`` is why there is no
    connection at present; None: there is one. ``on_trouble`` is called with each new trouble.
    """

    def __init__(
        self,
        url: str,
        token: str,
        query: dict[str, str],
        after: int | None,
        store: str | None = None,
    ) -> None:
        self.position: int | None = after
        self.store = store
        self._taken, self._taken_in = after, store
        self.trouble: str | None = None
        self._url = url
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._query = query
        self._refused: FeedRefusedError | None = None
        self._send, self._receive = trio.open_memory_channel[dict[str, Any]](0)
        self.on_trouble: Callable[[str], None] | None = None

    def __aiter__(self) -> "FeedReader":
        return self

    async def __anext__(self) -> dict[str, Any]:
        """Wait for the next message.

        Cancelled, it loses none.

        Raises:
            FeedRefusedError: the feed refuses it for good: the token, the query, the relay.
        """
        try:
            message = await self._receive.receive()
        except trio.EndOfChannel:
            raise self._refused or FeedRefusedError("the feed has ended") from None
        self.position = message["seq"]
        if message["kind"] == "hello":
            self.store = message["store"]
        return message

    async def run(self, context: ssl.SSLContext | None) -> None:
        """Connect, and connect again, until cancelled or refused."""
        failures = 0
        await trio.lowlevel.checkpoint()
        with self._send:
            while True:
                taken = self._taken
                await self._follow(context)
                if self._refused is not None:
                    return
                failures = 1 if self._taken != taken else failures + 1
                wait = jittered_wait(
                    failures,
                    random.random(),  # noqa: S311 - it spreads attempts, and is no secret
                    base_seconds=RETRY_BASE_SECONDS,
                    cap_seconds=RETRY_CAP_SECONDS,
                )
                await trio.sleep(wait)

    async def _follow(self, context: ssl.SSLContext | None) -> None:
        """Hand over the messages of one connection until it ends."""
        # Imported here: whoever only looks into the store does not load it.
        from trio_websocket import ConnectionClosed, ConnectionRejected, HandshakeError

        try:
            await self._converse(context)
        except Exception as group:  # nurseries wrap what is told apart here
            error = only_member(group)
            if isinstance(error, ConnectionRejected):
                if error.status_code == 400 and self._taken_in is not None:
                    # An older receiver knows no names of stores: it is asked again without.
                    self._taken_in = None
                else:
                    self._note(_reason(error.status_code, error.body))
                    if error.status_code not in _LATER:
                        self._refused = FeedRefusedError(f"{self._url} refuses: {self.trouble}")
            elif isinstance(error, ConnectionClosed):
                self._note((error.reason and error.reason.reason) or "the connection broke")
            elif isinstance(
                error,
                (
                    *(HandshakeError, OSError, trio.TooSlowError),
                    *(trio.BrokenResourceError, trio.ClosedResourceError),
                ),
            ):
                slow = "no answer in time" if isinstance(error, trio.TooSlowError) else ""
                self._note(str(error) or slow or type(error).__name__)
            else:
                raise
        await trio.lowlevel.checkpoint()

    async def _converse(self, context: ssl.SSLContext | None) -> None:
        from trio_websocket import wrap_client_stream

        given = {"after": self._taken, "store": self._taken_in}
        after = {name: str(value) for name, value in given.items() if value is not None}
        # Any name would do on a Unix socket; this one is taken everywhere.
        url = "ws://localhost/feed" if self._url.startswith("unix:") else self._url
        parts = urlsplit(url)
        # The library leaves the socket of a refused connection open, so it is ours to close.
        async with await _connect(self._url, context) as stream, trio.open_nursery() as nursery:
            answers = _Answers(stream)
            with trio.fail_after(CONNECT_SECONDS):
                socket = await wrap_client_stream(
                    nursery,
                    # Its annotation names two streams; any stream is what it takes.
                    trio.StapledStream(stream, answers),  # type: ignore[arg-type]
                    parts.netloc.rpartition("@")[2],
                    f"{parts.path}?{urlencode({**self._query, **after})}",
                    extra_headers=self._headers,
                    max_message_size=FRAME_BYTES,
                )
            answers.answered = True
            self._note(None)
            while True:
                with trio.fail_after(SILENT_SECONDS):
                    frame = await socket.get_message()
                # Bytes: the lines of a text also end at U+2028 or U+0085, within its JSON.
                told = frame.encode() if isinstance(frame, str) else frame
                for line in told.splitlines():
                    message = msgspec.json.decode(line)
                    if message["kind"] == "hello":
                        message = _OF_OLDER_RECEIVERS | message
                    await self._send.send(message)
                    # Taken: whoever took it may not have run since.
                    self._taken = message["seq"]
                    if message["kind"] == "hello":
                        self._taken_in = message["store"]

    def _note(self, trouble: str | None) -> None:
        changed, self.trouble = trouble != self.trouble, trouble
        if changed and trouble is not None and self.on_trouble is not None:
            self.on_trouble(trouble)


async def _connect(
    url: str, context: ssl.SSLContext | None
) -> "trio.SocketStream | trio.SSLStream[trio.SocketStream]":
    parts = urlsplit(url)
    host = parts.hostname or ""
    secure = parts.scheme == "wss"
    with trio.fail_after(CONNECT_SECONDS):
        if parts.scheme == "unix":
            return await trio.open_unix_socket(url.removeprefix("unix:"))
        stream = await trio.open_tcp_stream(
            host, parts.port or DEFAULT_PORTS["https" if secure else "http"]
        )
    if not secure:
        return stream
    return trio.SSLStream(
        stream,
        context or ssl.create_default_context(),
        server_hostname=host,
        https_compatible=True,
    )


def _reason(status: int, body: bytes | None) -> str:
    try:
        told = msgspec.json.decode(body or b"", type=dict[str, str])["error"]
    except (msgspec.DecodeError, KeyError):
        told = "no reason"
    return f"{status}, {told}"


@asynccontextmanager
async def open_feed(
    url: str,
    *,
    token: str,
    after: int | None = None,
    store: str | None = None,
    kinds: Sequence[str] = KINDS,
    types: Sequence[str] = (),
    state: str | None = None,
    tenant: str | None = None,
    body: bool = False,
    relay: bool = False,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[FeedReader]:
    """Follow the feed of the admin address ``url`` for the length of the block.

    Args:
        url: the admin address, such as ``http://127.0.0.1:8081``, ``wss://hooks.example`` or
            ``unix:/run/sdk_trio/admin.sock``.
        token: the admin token.
        after: begin after this sequence; None: with what comes from now on.
        store: the name of the store that ``after`` is of, see :class:`FeedReader`; another one is
            begun with its first delivery, and its ``hello`` has ``replaced``.
        kinds: of ``delivery``, ``changed``, ``rejected`` and ``tenant``; ``hello``, ``lagged`` and
            ``heartbeat`` always come.
        types: only these event types; ``*`` stands for any text.
        state: only deliveries in this state.
        tenant: only those of this tenant, by identifier or id.
        body: each delivery carries its body, ``raw`` or ``raw_base64``.
        relay: and its signed headers, ``headers``.
        context: the TLS context of ``https`` and ``wss``; None: the system's authorities.

    Raises:
        FeedRefusedError: ``url`` is no address, or the feed refuses.
    """
    options = {
        "kinds": ",".join(kinds),
        "types": ",".join(types),
        "state": state,
        "tenant": tenant,
        "body": "1" if body else None,
        "relay": "1" if relay else None,
    }
    query = {name: value for name, value in options.items() if value}
    reader = FeedReader(feed_url(url), token, query, after, store)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run, context)
            try:
                yield reader
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The nursery is ours: what leaves the block is what the block has raised.
        error = only_member(group)
        raise error from (None if error is group else error.__cause__)
