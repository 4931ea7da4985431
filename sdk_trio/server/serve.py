"""The server of one ASGI application: listens on addresses, serves requests, and drains."""

import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ..base.cells import Cells
from ..base.clock import wall
from ..base.http import App
from ..base.logs import Throttle, get_logger
from ..base.telemetry import Sample
from .accept import Acceptor
from .limits import Limits, NoteRefusal
from .listen import BindError, listen
from .slots import ConnectionSlots, SourceOf
from .tls import load_certificate, validity, validity_fault

__all__ = ["BindError", "Server"]

if TYPE_CHECKING:
    import ssl

    from .hypercorn import HypercornServer

_log = get_logger("server")


class Server:
    """Serves one ASGI application on a list of addresses until it is stopped.

    Args:
        app: the ASGI application.
        bind: ``HOST:PORT``, ``[v6]:PORT``, ``unix:PATH`` or ``fd:N``; port 0 picks a free one.
        key: the setting that ``bind`` came from, for messages.
        cert_file, key_file: PEM files; with both, every address speaks TLS.
        graceful_seconds: time for requests in progress after :meth:`stop`.
        fast_path: serve with the project's own connections; False: with hypercorn.
        limits: the limits of each connection; hypercorn enforces only some of them.
        source_of: maps the peer's host to the source that its connections count for; None: they
            have no limit, such as a trusted proxy's connections.
        note_refusal: called for every request that the server itself refuses.
    """

    def __init__(
        self,
        app: App,
        bind: Sequence[str],
        *,
        key: str,
        graceful_seconds: float,
        cert_file: str | None = None,
        key_file: str | None = None,
        fast_path: bool = True,
        limits: Limits | None = None,
        source_of: SourceOf = lambda _: None,
        note_refusal: NoteRefusal | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._app = app
        self._certificate = (cert_file, key_file)
        self._fast_path = fast_path
        self._slots = ConnectionSlots(self._limits, source_of)
        self._note_refusal = note_refusal or _RefusalLog().note
        self._tls: ssl.SSLContext | None = None
        self._certificate_end: float | None = None
        self._hypercorn: HypercornServer | None = None
        self._bind = tuple(bind)
        self._key = key
        self._graceful_seconds = graceful_seconds
        self._stop_wanted = trio.Event()
        self.ended: trio.Event = trio.Event()

    def prepare_certificate(self, cert_file: str, key_file: str) -> Callable[[], None]:
        """Load the files now, and return a function that uses them for new connections.

        The function does nothing without TLS. Established connections keep their keys.

        Raises:
            OptionsValidationError: the certificate or its key cannot be used.
        """
        context = load_certificate(cert_file, key_file)
        dates = validity(context, cert_file)

        def commit() -> None:
            if self._tls is not None:
                self._tls = context
                self._note_dates(cert_file, dates)

        return commit

    def _note_dates(self, cert_file: str, dates: tuple[float, float] | None) -> None:
        self._certificate_end = dates and dates[1]
        # Serve anyway: without the process, events that wait in the store would not be handled.
        if (fault := validity_fault(dates, wall())) is not None:
            _log.warning("server.certificate", file=cert_file, fault=fault)

    async def run(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind, report the actual addresses as URLs, and serve until :meth:`stop`.

        Requests in progress then get ``graceful_seconds``, and are cancelled after that.
        Cancellation of this method closes every connection at once.

        Raises:
            BindError: an address is in use, not ours, or not permitted.
            OptionsValidationError: the certificate or its key cannot be used.
        """
        cert_file, key_file = self._certificate
        if cert_file is not None:
            self._tls = load_certificate(cert_file, key_file)
            self._note_dates(cert_file, validity(self._tls, cert_file))
        sockets = listen(self._bind, key=self._key)
        try:
            async with trio.open_nursery() as connections:
                acceptor = Acceptor(
                    self._app, self._limits, self._slots, self._note_refusal, lambda: self._tls
                )
                cells = Cells(connections)
                async with trio.open_nursery() as accepting:
                    if self._fast_path:
                        connections.start_soon(acceptor.sweep)
                        for sock in sockets:
                            accepting.start_soon(acceptor.accept, sock, cells, accepting)
                    else:
                        accepting.start_soon(
                            partial(
                                trio.serve_listeners,
                                self._load_hypercorn().serve,
                                [self._listener(sock) for sock in sockets],
                                handler_nursery=connections,
                            )
                        )
                    scheme = "http" if self._tls is None else "https"
                    task_status.started(tuple(_url(sock, scheme) for sock in sockets))
                    await self._stop_wanted.wait()
                    accepting.cancel_scope.cancel()
                for sock in sockets:
                    sock.close()
                cells.close()
                # Idle connections close now; requests in progress get time to finish.
                connections.cancel_scope.deadline = trio.current_time() + self._graceful_seconds
                if self._hypercorn is not None:
                    await self._hypercorn.begin_drain()
                await acceptor.drain()
        finally:
            for sock in sockets:
                sock.close()
            self.ended.set()

    def samples(self) -> Iterator[Sample]:
        """Yield the end of the validity of the certificate for new connections, if it is known."""
        if self._certificate_end is not None:
            yield Sample("sdk_certificate_end_time_seconds", (), self._certificate_end)

    def stop(self) -> None:
        """Stop accepting connections; :meth:`run` returns when the current requests have ended."""
        self._stop_wanted.set()

    def _load_hypercorn(self) -> "HypercornServer":
        # Imported here, because it costs 40 ms and 5 MB.
        from .hypercorn import HypercornServer

        self._hypercorn = HypercornServer(self._app, self._limits, self._slots, self._note_refusal)
        return self._hypercorn

    def _listener(self, sock: socket.socket) -> trio.abc.Listener[Any]:
        plain = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        return plain if self._tls is None else _SecureListener(plain, lambda: self._tls)


class _RefusalLog:
    """Logs refused requests if no ``note_refusal`` is given: a few of each status."""

    def __init__(self) -> None:
        self._throttle = Throttle(lines=5, seconds=10.0)

    def note(self, status: int, reason: str, address: str | None) -> None:
        suppressed = self._throttle.admit(status)
        if suppressed is not None:
            _log.info(
                "server.request_refused",
                status=status,
                reason=reason,
                address=address,
                suppressed=suppressed,
            )


class _SecureListener(trio.abc.Listener["trio.SSLStream[trio.SocketStream]"]):
    """A ``trio.SSLListener`` whose context may change: each connection gets the current one."""

    def __init__(
        self, plain: trio.SocketListener, context: "Callable[[], ssl.SSLContext | None]"
    ) -> None:
        self._plain = plain
        self._context = context

    async def accept(self) -> "trio.SSLStream[trio.SocketStream]":
        stream = await self._plain.accept()
        context = self._context()
        assert context is not None  # a reload never switches TLS on or off
        return trio.SSLStream(stream, context, server_side=True, https_compatible=True)

    async def aclose(self) -> None:
        await self._plain.aclose()


def _url(sock: socket.socket, scheme: str) -> str:
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{scheme}://{host}:{name[1]}"
