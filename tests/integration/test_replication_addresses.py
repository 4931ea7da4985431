"""The real replicator's interpretation of an address: a blob store's, over the control socket."""

import base64
import hashlib
import hmac
import secrets
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import apsw
import pytest
import trio
import trustme
from support.programs import program
from support.waiting import until

from sdk_trio.config.fields import ReplicaTargetType
from sdk_trio.config.options.tenants import BlobStoreOptions, ReplicationOptions
from sdk_trio.errors import ReplicatorError
from sdk_trio.replication.control import ControlClient
from sdk_trio.replication.manifest import child_environment, replica_url

HOST = "account.blob.core.windows.net"


class Cloud:
    """A proxy that takes every connection to the blob store, and keeps the first request."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.authority = directory / "authority.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST).configure_cert(self.context)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked: list[bytes] = []
        self.requests: list[bytes] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                plain, _ = self.listener.accept()
                with suppress(OSError), plain:
                    self.asked.append(plain.recv(4096))
                    plain.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    with self.context.wrap_socket(plain, server_side=True) as stream:
                        self.requests.append(stream.recv(16384))
                        stream.sendall(b"HTTP/1.1 403 no\r\ncontent-length: 0\r\n\r\n")


def is_signed(request: bytes, key: str) -> bool:
    """Whether the account's key has signed a GET, as the store's documentation says."""
    line, *lines = request.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
    target = urlsplit(line.split()[1])
    reported = [f"{name}:{headers[name]}" for name in ("x-ms-date", "x-ms-version")]
    asked = [f"{name}:{value}" for name, value in sorted(parse_qsl(target.query))]
    text = "\n".join(["GET", *[""] * 11, *reported, f"/account{target.path}", *asked])
    made = hmac.digest(base64.b64decode(key), text.encode(), hashlib.sha256)
    return headers["authorization"] == f"SharedKey account:{base64.b64encode(made).decode()}"


async def test_a_blob_store_s_address_leads_to_its_account_with_its_key(tmp_path: Path) -> None:
    binary = program("litestream")
    cloud = Cloud(tmp_path)
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    environ = {
        "BLOB_STORE_KEY": key,
        "HTTPS_PROXY": f"http://127.0.0.1:{cloud.listener.getsockname()[1]}",
        "SSL_CERT_FILE": str(cloud.authority),
    }
    options = ReplicationOptions(
        use_replication=True,
        replica_target_type=ReplicaTargetType.BLOB_STORE,
        blob_store=BlobStoreOptions(account_name="account", container="tenants", path_prefix="p"),
        sync_interval_seconds=1,
    )
    file = tmp_path / "t1.db"
    database = apsw.Connection(str(file))
    database.execute("PRAGMA journal_mode = WAL; CREATE TABLE t (x)")
    database.close()
    path = tmp_path / "s.sock"
    manifest = tmp_path / "replicator.yml"
    manifest.write_text(f"socket: {{enabled: true, path: {path}, permissions: 0600}}\ndbs: []\n")
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            [binary, "replicate", "-config", str(manifest)],
            env=child_environment(options, environ),
            stdout=log,
            stderr=log,
        )
    try:
        client = ControlClient(str(path))
        url = replica_url(options, "t1")
        assert url == "abs://account@tenants/p/t1"
        with trio.fail_after(60):
            while True:
                try:
                    await client.register(str(file), url)
                    break
                except ReplicatorError:
                    await trio.sleep(0.05)
            await until(lambda: cloud.requests)
    finally:
        child.kill()
        child.wait()
        cloud.listener.close()
    assert cloud.asked[0].startswith(f"CONNECT {HOST}:443 ".encode())
    assert b"prefix=p%2Ft1%2F" in cloud.requests[0].partition(b"\r\n")[0]
    assert is_signed(cloud.requests[0], key)
    assert not is_signed(cloud.requests[0], base64.b64encode(b"another").decode())


@pytest.mark.parametrize(
    "blobs",
    [
        BlobStoreOptions(account_name="a", endpoint_url="http://127.0.0.1:1/a"),
        BlobStoreOptions(account_name="a@b"),
        BlobStoreOptions(account_name="a", path_prefix="with space"),
    ],
)
def test_settings_that_a_blob_store_s_address_cannot_express_have_no_address(
    blobs: BlobStoreOptions,
) -> None:
    options = ReplicationOptions(
        replica_target_type=ReplicaTargetType.BLOB_STORE, blob_store=blobs, sync_interval_seconds=1
    )
    assert replica_url(options, "t1") is None
