"""The whole client over its own transport and real sockets."""

import asyncio
import contextlib
import functools
import gc
import socket
import ssl
import struct
import warnings

import httpx
import pytest
import trio
import trio.testing
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.client.client import Client
from sdk_trio.client.errors import (
    AttemptTimeoutError,
    CallError,
    ConnectionFailedError,
    OutcomeUnknownError,
)
from sdk_trio.config import Mode, Secret, Settings
from sdk_trio.config.options.client import ConnectionOptions
from sdk_trio.errors import NotRunningError
from sdk_trio.net.messages import ConnectFailedError, Origin
from sdk_trio.net.socket import open_wire
from sdk_trio.net.transport import Transport
from sdk_trio.server.tls import TlsSocket

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def settings(port, connections=10):
    return Settings(
        mode=Mode.CUSTOM,
        custom_base_url=f"http://127.0.0.1:{port}",
        access_token=Secret("not-a-real-token"),
        connection=ConnectionOptions(max_connections_per_server=connections),
    )


@contextlib.asynccontextmanager
async def served(answers):
    """Run a server that answers where ``answers(head)`` is true, and is silent elsewhere."""

    async def serve(stream):
        with contextlib.suppress(trio.BrokenResourceError):
            buffer = b""
            while received := await stream.receive_some():
                buffer += received
                while b"\r\n\r\n" in buffer:
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    if answers(head):
                        await stream.send_all(ANSWER)

    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            serving = functools.partial(trio.serve_tcp, serve, 0, host="127.0.0.1")
            [listener] = await nursery.start(serving)
            yield listener.socket.getsockname()[1]
            nursery.cancel_scope.cancel()


async def test_a_write_that_waited_for_a_connection_was_certainly_not_executed():
    async with (
        served(lambda head: not head.startswith(b"GET /v1/silent")) as port,
        Client(settings(port, connections=1)) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.request, "GET", "/silent")
        await trio.testing.wait_all_tasks_blocked(0.05)
        with pytest.raises(AttemptTimeoutError):
            await client.request("POST", "/x", attempt_timeout=0.2, max_retries=0)
        nursery.cancel_scope.cancel()


async def test_a_write_that_left_has_an_unknown_outcome(mock_clock):
    mock_clock.rate = 1

    def silent(head):
        mock_clock.jump(20)  # its time is over when it has arrived, and not before
        return False

    async with served(silent) as port, Client(settings(port)) as client:
        with pytest.raises(OutcomeUnknownError) as caught:
            await client.request("POST", "/x", attempt_timeout=20)
    assert caught.value.attempts == 1


async def test_if_no_server_listens_every_method_is_retried():
    with trio.socket.socket() as unused:
        await unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        async with Client(settings(port)) as client:
            with pytest.raises(ConnectionFailedError) as caught:
                await client.request("POST", "/x", max_retries=1)
    assert caught.value.attempts == 2


async def test_hedged_and_cancelled_calls_leave_no_connection_in_use():
    heads = []

    def sometimes(head):
        heads.append(head)
        return len(heads) % 3 > 0

    async with served(sometimes) as port:
        transport = Transport(settings(port).connection)
        async with Client(settings(port), transport) as client:

            async def call(seconds):
                with trio.move_on_after(seconds):
                    await client.request("GET", "/x", hedge_after=0.002)

            for _ in range(10):
                async with trio.open_nursery() as nursery:
                    for number in range(30):
                        nursery.start_soon(call, number / 1000)
            # A connection that was begun for a call that has gone is still opened, for the next.
            await until(lambda: not transport.statistics.connecting)
            assert (transport.statistics.exchanges, transport.statistics.waiting) == (0, 0)
            assert not client.breaker.probe_is_out


async def test_a_read_under_way_when_the_client_closes_ends_with_an_error_of_calls():
    errors = []
    arrived = trio.Event()

    def silent(head):
        arrived.set()
        return False

    async with served(silent) as port, trio.open_nursery() as nursery:

        async def call(client):
            try:
                await client.request("GET", "/x")
            except CallError as error:
                errors.append(error)

        async with Client(settings(port)) as client:
            nursery.start_soon(call, client)
            await arrived.wait()
    [error] = errors
    assert isinstance(error, ConnectionFailedError)
    assert "closed" in str(error)


async def test_under_asyncio_the_client_explains_that_it_needs_trio():
    async def main():
        async with Client(settings(1), httpx.MockTransport(lambda request: None)):
            raise AssertionError("it opened")

    with pytest.raises(NotRunningError, match=r"trio\.run"):
        await trio.to_thread.run_sync(asyncio.run, main())


@contextlib.contextmanager
def no_socket_is_left_open():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def reset_connection(listener):
    """Return a stream whose other end has reset the connection."""
    stream = await trio.open_tcp_stream(*listener.getsockname())
    accepted, _ = listener.accept()
    # To close without lingering resets.
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()
    with trio.fail_after(PATIENCE_SECONDS):
        await trio.lowlevel.wait_readable(stream.socket)
    return stream


async def test_a_connection_that_is_reset_before_tls_leaves_no_socket_open():
    """Python's ``wrap_socket`` notices it, raises, and forgets the socket that it has made."""
    with socket.create_server(("127.0.0.1", 0)) as listener, no_socket_is_left_open():

        async def dial(host, port):
            return await reset_connection(listener)

        with pytest.raises(ConnectFailedError):
            await open_wire(
                Origin("https", "127.0.0.1", listener.getsockname()[1]),
                context=ssl.create_default_context(),
                protocols=["http/1.1"],
                limit=PATIENCE_SECONDS,
                dial=dial,
            )


async def test_a_client_that_resets_before_tls_leaves_no_socket_of_the_server_open():
    with socket.create_server(("127.0.0.1", 0)) as listener, no_socket_is_left_open():
        stream = await reset_connection(listener)
        sock = socket.socket(fileno=stream.socket.detach())
        with pytest.raises(OSError, match=r"."):
            TlsSocket(sock, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        assert sock.fileno() == -1
