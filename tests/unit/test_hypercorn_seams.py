"""Checks of every private part of hypercorn that `server/hypercorn.py` uses.

A failure after an upgrade of hypercorn shows which part has changed. Review that part before you
widen the pin in pyproject.toml.
"""

import inspect
from importlib.metadata import version

import h11
import hypercorn.events
import pytest
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

SIGNATURES = {
    TCPServer.__init__: "self app config context state stream",
    TCPServer.run: "self",
    TCPServer.protocol_send: "self event",
    TCPServer._read_data: "self",
    TCPServer._close: "self",
    TCPServer._idle_timeout: "self",
    TrioSingleTask.restart: "self task_group action",
    TrioSingleTask.stop: "self",
    TaskGroup.__init__: "self",
    TaskGroup.__aenter__: "self",
    WorkerContext.__init__: "self max_requests",
    H11Protocol.__init__: "self app config context task_group connection_state ssl client server "
    "send",
    H11Protocol._check_protocol: "self event",
    H11Protocol._create_stream: "self request",
    H11Protocol._send_error_response: "self status_code",
    parse_socket_addr: "family address",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_the_signatures_are_those_that_we_call_and_override(function):
    assert list(inspect.signature(function).parameters) == SIGNATURES[function].split()


def test_the_minor_version_is_the_reviewed_one():
    assert version("hypercorn").split(".")[:2] == ["0", "18"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        # The overridden methods must be called, and at these places.
        (H11Protocol._handle_events, "await self._check_protocol(event)"),
        (H11Protocol._handle_events, "await self._create_stream(event)"),
        (H11Protocol._handle_events, "h11.Request"),
        (TCPServer.protocol_send, "await self.idle_task.restart("),
        (TCPServer._read_data, "await self.protocol.handle(Closed())"),
        (TCPServer._read_data, "await self.stream.receive_some(MAX_RECV)"),
        (TCPServer._idle_timeout, "await self.context.terminated.wait()"),
        (TCPServer._close, "await self.stream.send_eof()"),
        (TCPServer._close, "await self.stream.aclose()"),
        (TCPServer.protocol_send, "await self.stream.send_all(event.data)"),
    ],
)
def test_replaced_parts_are_used_where_expected(function, text):
    assert text in inspect.getsource(function)


def test_the_connection_shows_the_state_of_the_response_and_of_the_next_head():
    protocol = H11Protocol(
        None, Config(), WorkerContext(None), None, ConnectionState({}), False, None, None, None
    )
    connection = protocol.connection
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT")
    connection.next_event()
    assert connection.our_state is h11.SEND_RESPONSE
    connection.send(h11.Response(status_code=200, headers=[]))
    assert connection.our_state is h11.SEND_BODY
    assert connection.trailing_data[0] == b"GET / HT"
    # Before the wait for the next request, and at no other time.
    recycling = inspect.getsource(H11Protocol._maybe_recycle)
    assert "self.connection.start_next_cycle()" in recycling
    assert "await self.send(Updated(idle=True))" in recycling


def test_the_attributes_that_we_set_exist():
    server = TCPServer(None, Config(), WorkerContext(None), {}, None)
    assert {"app", "config", "context", "stream", "idle_task"} <= set(vars(server))
    assert "_task_group" in inspect.getsource(TCPServer.run)
    config = Config()
    for name in (
        "certfile",
        "keyfile",
        "keep_alive_timeout",
        "keep_alive_max_requests",
        "include_date_header",
        "include_server_header",
        "alpn_protocols",
        "accesslog",
        "errorlog",
        "create_ssl_context",
    ):
        assert hasattr(config, name), name
    assert hypercorn.events.Updated(idle=True).idle
    assert hypercorn.events.RawData(b"x").data == b"x"
