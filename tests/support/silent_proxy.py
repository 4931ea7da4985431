"""A proxy in front of PostgreSQL that may fall silent: it reads bytes and forwards none."""

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SilentProxy:
    """Forwards connections to a server's socket; ``port`` is its own on 127.0.0.1.

    After :meth:`fall_silent` the kernel still acknowledges bytes on existing connections, so no TCP
    timeout ends them. New connections work, unless ``new`` is True.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._silenced: set[socket.socket] = set()
        self._silent_for_new = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def fall_silent(self, *, new: bool = False) -> None:
        """Forward nothing on existing connections, with ``new`` also on later ones."""
        self._silenced = set(self._peers)
        self._silent_for_new = new

    def recover(self) -> None:
        """Forward bytes on new connections."""
        self._silent_for_new = False

    def close(self) -> None:
        self._ended = True
        self._waker.send(b"x")
        self._thread.join()
        for each in (self._listener, self._waker, self._woken, *self._peers):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(str(self._target))
        except OSError:
            client.close()
            server.close()
            return
        for one, other in ((client, server), (server, client)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)
            if self._silent_for_new:
                self._silenced.add(one)

    def _pass_on(self, one: socket.socket) -> None:
        other = self._peers.get(one)
        if other is None:  # the other half ended in the same iteration
            return
        data = b""
        with suppress(OSError):
            data = one.recv(65536)
        if data and one in self._silenced:
            return
        try:
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        # The other half of a silent connection stays open: the server notices nothing.
        if one in self._silenced:
            self._selector.unregister(one)
            return
        for each in (one, other):
            with suppress(KeyError):
                self._selector.unregister(each)
            self._peers.pop(each, None)
            each.close()


@contextmanager
def silent_proxy(directory: Path) -> Iterator[SilentProxy]:
    """Run a proxy in front of the server whose socket is in ``directory``."""
    proxy = SilentProxy(directory / ".s.PGSQL.5432")
    try:
        yield proxy
    finally:
        proxy.close()
