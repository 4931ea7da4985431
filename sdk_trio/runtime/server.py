"""The only place that knows hypercorn: sockets, TLS, HTTP and graceful stop (architecture.md)."""

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve

from ..errors import EXIT_UNAVAILABLE, SdkError

App = Callable[[Any, Any, Any], Awaitable[None]]

#: Connections that the kernel holds for us while the loop is busy.
BACKLOG = 1024

#: How long an idle connection is kept, in seconds: longer than the 60 s of common proxies, which
#: would otherwise send a request into a connection that we have just closed.
KEEP_ALIVE_SECONDS = 75.0

#: Requests on one connection before it is closed; bounds what one connection can hold on to.
KEEP_ALIVE_REQUESTS = 100_000


class BindError(SdkError):
    """An address cannot be listened on; the message names the key and the address."""

    exit_code = EXIT_UNAVAILABLE


class Server:
    """Serves one ASGI application on a list of addresses until told to stop.

    Args:
        app: the ASGI application.
        bind: ``HOST:PORT``, ``[v6]:PORT``, ``unix:PATH`` or ``fd:N``; port 0 picks a free one.
        key: the setting that ``bind`` came from, for messages.
        cert_file, key_file: PEM files; with both, every address speaks TLS.
        graceful_seconds: how long requests in progress may take after :meth:`stop`.
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
    ) -> None:
        self._app = app
        self._bind = tuple(bind)
        self._key = key
        self._stop_wanted = trio.Event()
        self.ended = trio.Event()
        config = Config()
        config.bind = [_hypercorn_address(address) for address in bind]
        config.certfile = cert_file
        config.keyfile = key_file
        config.backlog = BACKLOG
        config.graceful_timeout = graceful_seconds
        config.keep_alive_timeout = KEEP_ALIVE_SECONDS
        config.keep_alive_max_requests = KEEP_ALIVE_REQUESTS
        # Neither helps a sender, and both would make equal answers differ.
        config.include_date_header = False
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = _server_log()
        self._config = config

    async def run(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind, report the real addresses as URLs, and serve until :meth:`stop`.

        Requests in progress get ``graceful_seconds``, then they are cancelled. Cancelled, it
        closes every connection at once.

        Raises:
            BindError: an address is in use, not ours, or not permitted.
        """
        sockets = self._open_sockets()
        try:
            # hypercorn's own list of addresses is not used: it renders unix sockets as text only.
            task_status.started(_urls(sockets))
            await worker_serve(
                ASGIWrapper(self._app),
                self._config,
                sockets=sockets,
                shutdown_trigger=self._stop_wanted.wait,
            )
        finally:
            for sock in (*sockets.secure_sockets, *sockets.insecure_sockets):
                sock.close()
            self.ended.set()

    def stop(self) -> None:
        """Stop accepting connections; :meth:`run` returns when the present requests have ended."""
        self._stop_wanted.set()

    def _open_sockets(self) -> Sockets:
        try:
            sockets = self._config.create_sockets()
            self._config.create_ssl_context()
            for sock in (*sockets.secure_sockets, *sockets.insecure_sockets):
                sock.listen(BACKLOG)
        except OSError as error:
            addresses = ", ".join(self._bind)
            raise BindError(
                f"{self._key}: cannot listen on {addresses}: {error.strerror or error}. "
                "Stop what uses the address, or choose another one (port 0 takes a free one)."
            ) from error
        return sockets


def _hypercorn_address(address: str) -> str:
    return f"fd://{address.removeprefix('fd:')}" if address.startswith("fd:") else address


def _urls(sockets: Sockets) -> tuple[str, ...]:
    return tuple(
        _url(sock, scheme)
        for scheme, group in (("https", sockets.secure_sockets), ("http", sockets.insecure_sockets))
        for sock in group
    )


def _url(sock: socket.socket, scheme: str) -> str:
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{scheme}://{host}:{name[1]}"


def _server_log() -> logging.Logger:
    log = logging.getLogger("sdk_trio.server")
    log.setLevel(logging.WARNING)  # hypercorn says "Running on" at INFO; runtime.started says it
    return log
