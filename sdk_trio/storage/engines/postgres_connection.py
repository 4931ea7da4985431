"""Connections to PostgreSQL that another thread can cut, and the thread that cuts silent ones."""

import math
import os
import select
import socket
import threading
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.adapt import Buffer
from psycopg.types.numeric import Int8Dumper
from psycopg.types.string import StrDumper, TextLoader

from ...base import clock
from ...base.executor import start_thread
from ...base.logs import get_logger
from ...base.text import storable

#: Time for a statement that reads, migrates or belongs to a handler, in seconds.
STATEMENT_SECONDS = 60

#: Time that a client waits for an answer after the server's own limit, in seconds.
SILENCE_SECONDS = 5.0

#: Pause between two checks for connections whose server does not answer, in seconds.
WATCH_SECONDS = 1.0

# SQLSTATEs after which a connection is useless: shutdown, crash, and a standby (a former primary,
# or one that is not promoted yet).
_DEAD = frozenset({"57P01", "57P02", "57P03", "57P05", "25006", "25P03", "08000", "08003", "08006"})

_log = get_logger("storage")


# PostgreSQL's text cannot hold NUL, which JSON and error messages may contain. NUL is written as
# SUB and "0", SUB as SUB and "1".
class _PackedDumper(StrDumper):
    def dump(self, obj: str) -> Buffer | None:
        if "\0" in obj or "\x1a" in obj:
            obj = obj.replace("\x1a", "\x1a1").replace("\0", "\x1a0")
        try:
            return super().dump(obj)
        except UnicodeEncodeError:
            return super().dump(storable(obj))


class _PackedLoader(TextLoader):
    def load(self, data: Buffer) -> Any:
        text = super().load(data)
        if isinstance(text, str) and "\x1a" in text:
            return text.replace("\x1a0", "\0").replace("\x1a1", "\x1a")
        return text


class _Socket:
    """A second descriptor of a connection's socket, by which another thread can end it.

    libpq may close its own descriptor at any moment, and the number then belongs to another file.
    """

    def __init__(self, descriptor: int) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        # Windows duplicates no sockets this way.
        if hasattr(select, "poll"):
            self._descriptor = os.dup(descriptor)

    def shut_down(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                duplicate = socket.socket(fileno=self._descriptor)
                with suppress(OSError):  # the other side has ended it
                    duplicate.shutdown(socket.SHUT_RDWR)
                duplicate.detach()

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


class StoreConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that another thread can cut, and that knows how long its server is silent."""

    #: The database and its host, for people.
    place: str = ""
    #: Whether a pooler is used, so that a session lasts for one transaction only.
    pooled: bool = False
    #: Whether the server has warned since the COMMIT was sent.
    warned: bool = False
    #: Behind a pooler: the settings that each transaction begins with.
    settings: bytes = b""
    #: The longest time that the server may take for a statement, in seconds.
    limit: float = STATEMENT_SECONDS
    #: The monotonic time after which the connection is cut, because no caller waits.
    cut_at: float = math.inf
    _socket: _Socket | None = None
    _asked_at: float | None = None

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait for the server; see psycopg. :meth:`waited` measures it."""
        self._asked_at = clock.monotonic()
        try:
            return super().wait(*args, **options)
        finally:
            self._asked_at = None

    def waited(self) -> float:
        """Return how long the connection has waited for an answer, in seconds."""
        asked = self._asked_at
        return 0.0 if asked is None else clock.monotonic() - asked

    def make_cuttable(self) -> None:
        """Make :meth:`cut` possible; the thread that has connected calls it once."""
        self._socket = _Socket(self.fileno())

    def cut(self) -> None:
        """End the connection from any thread; a statement that waits for an answer raises.

        Whether that statement was run is unknown, as after any broken connection.
        """
        if self._socket is not None:
            self._socket.shut_down()

    def close(self) -> None:
        """Close it; see psycopg."""
        super().close()
        if self._socket is not None:
            self._socket.close()

    @property
    def useless(self) -> bool:
        """Whether the connection can no longer run anything."""
        return self.closed or self.broken

    def notice_end(self) -> None:
        """Close it if the server has ended it since its last use; does not block.

        Otherwise a statement would be sent into an ended connection, and no one could know whether
        it was run.
        """
        if not hasattr(select, "poll"):  # Windows
            return
        poll = select.poll()
        while not self.useless:
            poll.register(self.fileno(), select.POLLIN)
            if not poll.poll(0):
                return
            try:
                self.pgconn.consume_input()
            except psycopg.Error:
                self.close()

    def roll_back(self, error: BaseException) -> None:
        """Roll back after ``error``; close the connection where that is impossible."""
        if isinstance(error, psycopg.Error) and error.sqlstate in _DEAD:
            self.close()
        idle = psycopg.pq.TransactionStatus.IDLE
        if not self.useless and self.pgconn.transaction_status != idle:
            try:
                self.execute("ROLLBACK")
            except psycopg.Error:
                self.close()


class _Watch:
    """Cuts connections whose server has not answered within all limits, in its own thread.

    The server ends a statement by its own limit. Without an answer after that, the connection is
    half-open: a network device acknowledges its packets, and forwards nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[StoreConnection] = set()
        self._runs = False

    def add(self, connection: StoreConnection) -> None:
        """Watch ``connection`` until it is closed. The thread ends with the last connection."""
        with self._lock:
            self._connections.add(connection)
            if not self._runs:
                start_thread(self._run, name="sdk-postgres-watch")
                self._runs = True

    def _run(self) -> None:
        while True:
            clock.sleep(WATCH_SECONDS)
            with self._lock:
                self._connections = {each for each in self._connections if not each.useless}
                self._runs = bool(self._connections)
                watched = tuple(self._connections)
            if not watched:
                return
            for connection in watched:
                self._check(connection)
            del watched, connection

    def _check(self, connection: StoreConnection) -> None:
        if clock.monotonic() > connection.cut_at:
            connection.cut()
        elif (seconds := connection.waited()) > connection.limit + SILENCE_SECONDS:
            _log.warning(
                "store.connection_cut",
                place=connection.place,
                seconds=round(seconds, 1),
                hint="the server did not answer; a new connection is made",
            )
            connection.cut()


_watch = _Watch()

#: Watch a connection until it is closed.
watch = _watch.add


def adapt(connection: StoreConnection) -> None:
    """Have the connection take any text, and give each parameter one type for all values."""
    connection.adapters.register_dumper(str, _PackedDumper)
    connection.adapters.register_loader("text", _PackedLoader)
    # By default the type depends on the value, and each type prepares another statement.
    connection.adapters.register_dumper(int, Int8Dumper)
