"""TLS on the project's own connections: as plain ones, through real handshakes and records."""

import socket
import ssl
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest
import trio
import trustme
from support.hostile_requests import REFUSED, get, post
from support.http_serving import QUICK, http_server
from support.serving import RawWire, chunked
from support.waiting import until

from sdk_trio.errors import OptionsValidationError
from sdk_trio.server import tls
from sdk_trio.server.tls import load_certificate

AUTHORITY = trustme.CA()
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificate")
    issued = AUTHORITY.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    issued.cert_chain_pems[0].write_to_path(directory / "certificate.pem")
    return str(directory / "certificate.pem"), str(directory / "key.pem")


class SecureWire:
    """A client's end of a TLS connection."""

    def __init__(self, stream):
        self.stream = stream

    async def send(self, *pieces):
        for piece in pieces:
            await self.stream.send_all(piece)

    async def rest(self):
        """Return all bytes until the server ends the connection."""
        received = b""
        with suppress(trio.BrokenResourceError):
            while chunk := await self.stream.receive_some(65536):
                received += chunk
        return received

    async def until(self, text):
        received = b""
        while text not in received:
            chunk = await self.stream.receive_some(65536)
            assert chunk, f"the end came before {text!r}: {received[-200:]!r}"
            received += chunk
        return received


def client_context(version=None):
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


@asynccontextmanager
async def secure_wire(server, context=None):
    port = int(server.url.rpartition(":")[2])
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", port),
        context or client_context(),
        server_hostname="localhost",
        https_compatible=True,
    )
    try:
        yield SecureWire(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def exchange(server, *pieces, context=None):
    async with secure_wire(server, context) as wire:
        await wire.send(*pieces)
        return await wire.rest()


async def connect_without_end(server):
    while True:
        async with secure_wire(server):
            pass


LAST = get(b"/close")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_an_application_is_given_the_same_but_for_the_scheme(files, version):
    request = post(b"body", b"/a%2Fb?x=1", b"X-One:  1 ")
    async with http_server(True, certificate=files) as secure, http_server(True) as plain:
        secure_answer = await exchange(secure, request + LAST, context=client_context(version))
        plain_answer = await plain.exchange(request + LAST)
    assert secure_answer == plain_answer
    one, other = secure.observer.seen[0], plain.observer.seen[0]
    assert one.reading == other.reading
    assert (one.scope["scheme"], other.scope["scheme"]) == ("https", "http")
    assert not one.scope["extensions"]


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 300_000])
async def test_bodies_of_many_records_arrive_whole_in_either_coding(files, size):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    async with http_server(True, certificate=files) as server:
        coded = get(b"/", b"Transfer-Encoding: chunked", method=b"POST") + chunked(body)
        answers = await exchange(server, post(body) + coded + LAST)
    assert [seen.body for seen in server.observer.seen[:2]] == [body, body]
    assert answers.count(b"HTTP/1.1 200") == 3


async def test_requests_that_came_in_one_record_are_all_answered(files):
    """Bytes buffered by OpenSSL do not make the descriptor readable."""
    limits = QUICK.__class__(sweep_seconds=0.01, read_bytes=64)
    async with http_server(True, certificate=files, limits=limits) as server:
        answers = await exchange(server, b"".join(post(b"%03d" % n) for n in range(100)) + LAST)
    assert answers.count(b"HTTP/1.1 200") == 101
    assert [seen.body for seen in server.observer.seen[:100]] == [b"%03d" % n for n in range(100)]


async def test_a_request_in_single_records_of_a_byte_is_the_same_request(files):
    request = post(b"0123456789", b"/bytes")
    async with http_server(True, certificate=files) as server:
        await exchange(server, *[bytes([byte]) for byte in request], LAST)
    assert server.observer.seen[0].body == b"0123456789"


async def test_a_long_answer_that_does_not_fit_the_socket_arrives_whole(files):
    async with http_server(True, certificate=files) as server, secure_wire(server) as wire:
        await wire.send(get(b"/big"), LAST)
        answers = await wire.rest()
    assert answers.count(b"x" * 1000) == 20_000
    assert answers.endswith(b"\r\n\r\n")


async def test_refusals_over_tls_equal_those_without(files):
    names = list(REFUSED)[::4]
    async with (
        http_server(True, certificate=files, patience=60) as secure,
        http_server(True, patience=60) as plain,
    ):
        for name in names:
            request = REFUSED[name][0]
            assert await exchange(secure, request) == await plain.exchange(request), name
    assert secure.observer.seen == []


async def test_an_upgrade_is_passed_over_and_the_preface_of_http_2_refused(files):
    upgrade = post(b"body", b"/upgrade", b"Connection: upgrade", b"Upgrade: websocket")
    async with http_server(True, certificate=files) as server:
        assert (await exchange(server, upgrade + LAST)).count(b"HTTP/1.1 200") == 2
        answer = await exchange(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 505")
    assert server.observer.seen[0].body == b"body"


async def test_no_other_protocol_is_agreed_on(files):
    context = client_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with http_server(True, certificate=files) as server, secure_wire(server, context) as wire:
        await wire.send(LAST)
        assert wire.stream.selected_alpn_protocol() == "http/1.1"
        await wire.rest()


async def test_old_versions_are_refused(files):
    context = client_context()
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with http_server(True, certificate=files) as server:
        with pytest.raises(trio.BrokenResourceError):
            await exchange(server, LAST, context=context)
        assert (await exchange(server, LAST)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("noise", [b"", b"\x16\x03\x01\x02\x00", get()])
async def test_a_client_that_does_not_finish_the_handshake_is_disconnected(
    files, noise, monkeypatch
):
    async with http_server(True, certificate=files) as server:
        monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.1)
        with await RawWire.connect(server.url.replace("https", "http")) as wire:
            await wire.send(noise)
            assert b"HTTP" not in await wire.rest()
        monkeypatch.undo()
        assert (await exchange(server, LAST)).startswith(b"HTTP/1.1 200")


async def test_the_end_comes_to_idle_clients_and_to_those_in_their_handshake(files):
    async with (
        http_server(True, certificate=files, patience=60) as server,
        secure_wire(server) as idle,
    ):
        with await RawWire.connect(server.url.replace("https", "http")) as silent:
            for _ in range(3):  # by its answers, the other one has been accepted as well
                await idle.send(get())
                await idle.until(b"\r\n\r\n")
            server.server.stop()
            assert await idle.rest() == b""
            assert b"HTTP" not in await silent.rest()


async def test_requests_in_progress_are_finished_and_announce_the_close(files):
    async with http_server(True, certificate=files) as server, secure_wire(server) as wire:
        await wire.send(get(b"/gate"))
        await server.observer.began.wait()
        server.server.stop()
        with pytest.raises(OSError, match="connect"):
            await connect_without_end(server)
        server.observer.gate.set()
        answer = await wire.rest()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()


async def test_the_end_of_a_connection_is_announced_to_the_client(files):
    """Without it, a client could not distinguish the end from an attack that cuts connections."""
    async with http_server(True, certificate=files) as server:
        port = int(server.url.rpartition(":")[2])

        def ask():
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.settimeout(60)
                secured = client_context().wrap_socket(
                    plain, server_hostname="localhost", suppress_ragged_eofs=False
                )
                with secured:
                    secured.sendall(LAST)
                    received = b""
                    while chunk := secured.recv(65536):
                        received += chunk
                    return received

        assert (await trio.to_thread.run_sync(ask)).startswith(b"HTTP/1.1 200")


async def test_a_client_that_vanishes_is_forgotten(files):
    async with http_server(True, certificate=files) as server:
        async with secure_wire(server) as wire:
            await wire.send(get(b"/watch"))
            await server.observer.began.wait()
        await until(lambda: server.observer.received)
    assert server.observer.received[0]["type"] == "http.disconnect"


async def test_connections_over_the_limit_are_closed(files):
    limits = QUICK.__class__(sweep_seconds=0.01, connections=1)
    async with (
        http_server(True, certificate=files, limits=limits) as server,
        secure_wire(server) as wire,
    ):
        await wire.send(get(b"/gate"))
        await server.observer.began.wait()
        with await RawWire.connect(server.url.replace("https", "http")) as other:
            assert await other.rest() == b""  # nothing that is not TLS
        server.observer.gate.set()
        await wire.until(b"\r\n\r\n")
        await wire.send(LAST)
        assert (await wire.rest()).startswith(b"HTTP/1.1 200")


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(files, tmp_path):
    from cryptography.hazmat.primitives import serialization

    with open(files[1], "rb") as file:
        key = serialization.load_pem_private_key(file.read(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase of a test"),
        )
    )
    with pytest.raises(OptionsValidationError, match="Sdk:Server:KeyFile"):
        load_certificate(files[0], str(locked))


async def test_hypercorn_serves_tls_where_the_fast_path_is_off(files):
    async with http_server(False, certificate=files) as server:
        assert (await exchange(server, LAST)).startswith(b"HTTP/1.1 200")
    assert server.observer.seen[0].scope["scheme"] == "https"


async def test_an_expired_certificate_is_logged_and_served_all_the_same(tmp_path, caplog):
    now = datetime.now(UTC)
    issued = AUTHORITY.issue_cert("localhost", not_before=now - DAY * 2, not_after=now - DAY)
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    async with http_server(True, certificate=(certificate, key)) as served:
        assert "has expired" in caplog.text
        caplog.clear()
        served.server.prepare_certificate(certificate, key)()
        assert "has expired" in caplog.text
