"""Following the feed of a receiver: an async iterator that reconnects and loses no delivery.

``async with open_feed(url, token=...) as feed: async for message in feed: ...``. A message is a
JSON object of the feed: ``seq``, ``kind``, ``at``, and the fields of the kind. After a lost
connection the iterator continues after the last delivery that it returned.

The token goes only to a peer that has proved itself: by its certificate under TLS, or by a proof
that it knows the token, on the same connection (docs/adr/0062-relay.md). Another program may have
taken the port of a stopped receiver. The environment's proxies are not used: one would read the
token.
"""

import hmac
import random
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import h11
import msgspec
import trio

from ..base import opener
from ..base.http import DEFAULT_PORTS
from ..base.throttle import jittered_wait
from ..config.fields import split_unix
from ..config.sources import printable
from ..errors import SdkError, only_member
from .access import PROOF, PROOF_SCHEME, proof_of
from .feed import HEARTBEAT_SECONDS, KINDS

#: After this many seconds of silence a feed counts as lost: it sends a heartbeat three times as
#: often.
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS

#: The time for a connection, and for its change of protocol, in seconds.
CONNECT_SECONDS = 10.0

#: The longest accepted frame, in bytes: a body of a megabyte with every byte escaped.
FRAME_BYTES = 32 * 1024 * 1024

#: Waits between two attempts to connect, in seconds.
RETRY_BASE_SECONDS = 0.5
RETRY_CAP_SECONDS = 15.0

#: The largest answer of the API that is taken, in bytes.
ANSWER_BYTES = 16 * 1024 * 1024

#: Statuses after which another attempt may succeed.
_LATER = frozenset({429, 500, 502, 503, 504})

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class FeedRefusedError(SdkError):
    """The feed cannot be followed with these arguments: the message has the reason."""


class AdminRefusedError(SdkError):
    """A request was answered with another ``status`` than 200, or with none (0)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}, {reason}" if status else reason)
        self.status = status


def feed_url(base: str) -> str:
    """Return the address of the feed of an admin address.

    Args:
        base: ``http``, ``https``, ``ws`` or ``wss``, with the path prefix of a proxy, if any;
            or ``unix:PATH``, which is returned without a mode.

    Raises:
        FeedRefusedError: ``base`` is not such a URL.
    """
    if base.startswith("unix:") and (socket := split_unix(base)[0]):
        return f"unix:{socket}"
    parts = urlsplit(base)
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise FeedRefusedError(
            f"{base!r} is not an address: use ws://HOST:PORT, wss://HOST or unix:PATH"
        )
    path = parts.path.rstrip("/").removesuffix("/feed")
    return urlunsplit((scheme, parts.netloc, f"{path}/feed", "", ""))


class _Answers(trio.abc.ReceiveStream):
    """The receiving half of a connection; its end before the answer is an error.

    Otherwise the library would wait forever for the answer to its handshake if the connection ends,
    as it does if a stopping receiver has accepted it.
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
    """The messages of a feed, in order; created by :func:`open_feed`.

    ``position`` is where the feed would resume: the ``seq`` of the last message, None before the
    first one; ``store`` is the name of its store. ``trouble`` is why there is currently no
    connection, or None. ``on_trouble`` is called with each new trouble.
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
        self.store: str | None = store
        self._taken, self._taken_in = after, store
        self.trouble: str | None = None
        self._url = url
        self._token = token
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._query = query
        self._refused: FeedRefusedError | None = None
        self._send, self._receive = trio.open_memory_channel[dict[str, Any]](0)
        self.on_trouble: Callable[[str], None] | None = None

    def __aiter__(self) -> "FeedReader":
        return self

    async def __anext__(self) -> dict[str, Any]:
        """Wait for the next message.

        Cancellation loses no message.

        Raises:
            FeedRefusedError: the feed refuses the token, the query or the relay; a retry would not
                help.
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
                    random.random(),  # noqa: S311 - it spreads attempts, and is not a secret
                    base_seconds=RETRY_BASE_SECONDS,
                    cap_seconds=RETRY_CAP_SECONDS,
                )
                await trio.sleep(wait)

    async def _follow(self, context: ssl.SSLContext | None) -> None:
        """Hand over the messages of one connection until it ends."""
        # Imported here: commands that only read the store do not load it.
        from trio_websocket import ConnectionClosed, ConnectionRejected, HandshakeError

        try:
            await self._converse(context)
        except Exception as group:  # nurseries wrap the errors that are handled separately here
            error = only_member(group)
            if isinstance(error, AdminRefusedError):
                self._refuse(error.status, str(error))
            elif isinstance(error, ConnectionRejected):
                self._refuse(error.status_code, f"{error.status_code}, {_reason(error.body)}")
            elif isinstance(error, ConnectionClosed):
                closed = (error.reason and error.reason.reason) or "the connection broke"
                self._note(printable(closed))
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

    def _refuse(self, status: int, reason: str) -> None:
        self._note(reason)
        if status not in _LATER:
            self._refused = FeedRefusedError(f"{self._url} refuses: {reason}")

    async def _converse(self, context: ssl.SSLContext | None) -> None:
        from trio_websocket import wrap_client_stream

        given = {"after": self._taken, "store": self._taken_in}
        after = {name: str(value) for name, value in given.items() if value is not None}
        # The library leaves the socket of a refused connection open, so it is ours to close.
        async with await _connect(self._url, context) as stream, trio.open_nursery() as nursery:
            answers = _Answers(stream)
            with trio.fail_after(CONNECT_SECONDS):
                exchange = _Exchange(stream, self._url)
                await exchange.prove_peer(self._token)
                socket = await wrap_client_stream(
                    nursery,
                    # It is annotated with two stream types, but accepts any stream.
                    trio.StapledStream(stream, answers),  # type: ignore[arg-type]
                    exchange.host,
                    f"{exchange.base}/feed?{urlencode({**self._query, **after})}",
                    extra_headers=self._headers,
                    max_message_size=FRAME_BYTES,
                )
            answers.answered = True
            self._note(None)
            while True:
                with trio.fail_after(SILENT_SECONDS):
                    frame = await socket.get_message()
                # Bytes: the lines of a text also end at U+2028 or U+0085, within its JSON.
                lines = frame.encode() if isinstance(frame, str) else frame
                for line in lines.splitlines():
                    message = msgspec.json.decode(line)
                    await self._send.send(message)
                    # The iterator has the message, but its task may not have run yet.
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
            return await opener.dial_unix(url.removeprefix("unix:"))
        stream = await opener.dial_tcp(
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


def _reason(body: bytes | None) -> str:
    """Return the reason in an answer, with control characters escaped."""
    try:
        return printable(msgspec.json.decode(body or b"", type=dict[str, str])["error"])
    except (msgspec.DecodeError, KeyError):
        return "check that it is the admin address of a receiver of this version"


class _Exchange:
    """Requests over one connection to the admin address whose feed is at ``url``."""

    def __init__(self, stream: trio.abc.Stream, url: str) -> None:
        # Any name would work on a Unix socket; this one is accepted everywhere.
        parts = urlsplit("ws://localhost/feed" if url.startswith("unix:") else url)
        self.host = parts.netloc.rpartition("@")[2]
        self.base = parts.path.removesuffix("/feed")
        self._is_proven = parts.scheme == "wss"
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def prove_peer(self, token: str) -> None:
        """Ask the peer for a proof that it knows the token.

        Raises:
            AdminRefusedError: it gave none.
        """
        if self._is_proven:
            await trio.lowlevel.checkpoint()
            return
        nonce = secrets.token_urlsafe(32)
        ours = proof_of(token, nonce, of_runtime=False)
        try:
            status, body = await self.request("GET", PROOF, f"{PROOF_SCHEME} {nonce} {ours}")
        except h11.ProtocolError as error:
            raise _unproven(str(error)) from None
        if status != 200:
            raise AdminRefusedError(status, f"{_reason(body)} (the token was not sent)")
        try:
            theirs = msgspec.json.decode(body, type=dict[str, str])["proof"]
        except (msgspec.DecodeError, KeyError):
            theirs = ""
        expected = proof_of(token, nonce, of_runtime=True)
        if not hmac.compare_digest(theirs.encode("utf-8", "replace"), expected.encode()):
            raise _unproven("the answer does not come from the receiver")
        # If this connection were closed here, the token would be sent over another one.
        if self._http.their_state is not h11.DONE:
            raise _unproven("it closes the connection")
        self._http.start_next_cycle()

    async def request(
        self, method: str, path: str, authorization: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Send one request; return the status and the body of the answer."""
        headers = [
            ("host", self.host),
            ("authorization", authorization),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
        ]
        request = h11.Request(method=method, target=f"{self.base}{path}", headers=headers)
        for part in (request, h11.Data(data=body), h11.EndOfMessage()):
            await self._stream.send_all(self._http.send(part) or b"")
        status, content = 0, bytearray()
        while True:
            await trio.lowlevel.checkpoint()
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                data = bytes(await self._stream.receive_some())
                if not data and not status:
                    raise ConnectionResetError("the connection ended before it was answered")
                self._http.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > ANSWER_BYTES:
                    raise h11.RemoteProtocolError("the answer is too large")
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(content)
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("it changes the protocol")


def _unproven(reason: str) -> AdminRefusedError:
    return AdminRefusedError(
        0,
        f"the peer does not prove that it is the receiver ({printable(reason)}), so the token "
        "was not sent: another program may have taken its port, or the receiver has another "
        "version",
    )


async def call(
    url: str,
    method: str,
    path: str,
    *,
    token: str,
    query: Mapping[str, str] | None = None,
    body: object = None,
    context: ssl.SSLContext | None = None,
) -> Any:
    """Return the JSON document of a call of the API.

    Args:
        url: the address of the feed; see :func:`feed_url`.
        method: of the request.
        path: below the admin address, such as ``/api/relay``.
        token: the admin token.
        query: the query's parameters.
        body: sent as JSON; None: no body.
        context: the TLS context of ``wss``; None: the system's authorities.

    Raises:
        AdminRefusedError: the peer does not prove itself, or answers with another status than 200.
        OSError: there is no connection, or it breaks; trio.BrokenResourceError as well.
    """
    target = f"{path}?{urlencode(query)}" if query else path
    sent = b"" if body is None else msgspec.json.encode(body)
    async with await _connect(url, context) as stream:
        exchange = _Exchange(stream, url)
        await exchange.prove_peer(token)
        try:
            status, content = await exchange.request(method, target, f"Bearer {token}", sent)
        except h11.ProtocolError as error:
            raise AdminRefusedError(0, printable(str(error))) from None
        if status != 200:
            raise AdminRefusedError(status, _reason(content))
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            raise AdminRefusedError(0, "the answer is not JSON") from None


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
    source: str | None = None,
    body: bool = False,
    relay: bool = False,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[FeedReader]:
    """Follow the feed of the admin address ``url`` for the length of the block.

    Args:
        url: the admin address, such as ``http://127.0.0.1:8081``, ``wss://hooks.example`` or
            ``unix:/run/sdk_trio/admin.sock``.
        token: the admin token.
        after: start after this sequence; None: with new deliveries only.
        store: the name of the store of ``after``, see :class:`FeedReader`; another store is read
            from its first delivery, and its ``hello`` has ``replaced``.
        kinds: of ``delivery``, ``changed``, ``rejected`` and ``tenant``; ``hello``, ``lagged`` and
            ``heartbeat`` always come.
        types: only these event types; ``*`` matches any text.
        state: only deliveries in this state.
        tenant: only events of this tenant, by identifier or id.
        source: only events of this source, by name.
        body: each delivery carries its body, ``raw`` or ``raw_base64``.
        relay: and its signed headers, ``headers``.
        context: the TLS context of ``https`` and ``wss``; None: the system's authorities.

    Raises:
        FeedRefusedError: ``url`` is not an address, or the feed refuses.
    """
    options = {
        "kinds": ",".join(kinds),
        "types": ",".join(types),
        "state": state,
        "tenant": tenant,
        "source": source,
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
        # The nursery is internal: raise the block's own exception without the group.
        error = only_member(group)
        raise error from (None if error is group else error.__cause__)
