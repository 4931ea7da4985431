"""The five targets of replication as emulators on loopback, with the settings of each.

Every target is a context manager that starts its server on a free port and stops it. The start is
fast, but :meth:`Target.wait_ready` takes time, so :func:`all_targets` first starts all of them and
then waits. Keys and accounts are made for each run.
"""

import base64
import contextlib
import getpass
import hashlib
import hmac
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

from .ports import free_port
from .programs import program

#: The seconds for a server to answer; Node and Python start slowly on a busy machine.
START_SECONDS = 60

BUCKET = "tenants"


class Target:
    """One target: its type, its keys below ``Replication``, and its environment variables."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.keys: dict[str, Any] = {}
        self.environ: dict[str, str] = {}
        self._command: Sequence[str] = ()
        self._command_environ: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The keys as a mapping for settings, below ``MultiTenant:FileDb:Replication:``."""
        return {"ReplicaTargetType": self.kind} | {
            f"{self.kind}:{key}": value for key, value in self.keys.items()
        }

    def run(self, *command: str, **environ: str) -> None:
        """Store the command of the server, and start it."""
        self._command, self._command_environ = command, environ
        self.start()

    def start(self) -> None:
        """Start the server, possibly again after :meth:`stop`."""
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, **self._command_environ},
            )

    def stop(self) -> None:
        """Stop the server; a target that is a directory has none."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the server from answering, without an error, until :meth:`resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End :meth:`pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wait_ready(self) -> None:
        """Wait until the server answers, and prepare it."""
        if self.port:
            self._wait_for_port()
            self.prepare()

    def prepare(self) -> None:
        """Make the resources that replication expects, such as a bucket."""

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                log = (self.directory / "server.log").read_text(errors="replace")
                raise RuntimeError(f"the emulator of {self.kind} did not start:\n{log[-2000:]}")
            time.sleep(0.05)


@contextmanager
def all_targets(directory: Path) -> Iterator[dict[str, Target]]:
    """Start all five at once; ready when the block begins, stopped when it ends."""
    makers = (object_store, blob_store, cloud_storage, sftp, local_disk)
    with ExitStack() as stack:
        targets = [stack.enter_context(make(directory / make.__name__)) for make in makers]
        for target in targets:
            target.wait_ready()
        yield {target.kind: target for target in targets}


@contextmanager
def local_disk(directory: Path) -> Iterator[Target]:
    """A directory."""
    target = Target("LocalDisk", directory)
    target.keys = {"Path": str(directory / "replica")}
    yield target


@contextmanager
def object_store(directory: Path) -> Iterator[Target]:
    """moto's server, which speaks S3."""
    target = _ObjectStore("ObjectStore", directory)
    target.port = free_port()
    target.keys = {
        "Bucket": BUCKET,
        "EndpointUrl": f"http://127.0.0.1:{target.port}",
        "ForcePathStyle": True,
    }
    # The emulator accepts any pair.
    target.environ = {
        "OBJECT_STORE_ACCESS_KEY_ID": secrets.token_hex(10),
        "OBJECT_STORE_SECRET_ACCESS_KEY": secrets.token_hex(20),
    }
    with _running(target, program("moto_server"), "-H", "127.0.0.1", "-p", str(target.port)):
        yield target


class _ObjectStore(Target):
    def prepare(self) -> None:
        _request(self.port, "PUT", f"/{BUCKET}", {})


@contextmanager
def blob_store(directory: Path) -> Iterator[Target]:
    """Azurite, with its own account instead of the well-known one."""
    target = _BlobStore("BlobStore", directory)
    target.port = free_port()
    account, key = "emulated", base64.b64encode(secrets.token_bytes(64)).decode()
    target.keys = {
        "AccountName": account,
        "Container": BUCKET,
        "EndpointUrl": f"http://127.0.0.1:{target.port}/{account}",
    }
    target.environ = {"BLOB_STORE_KEY": key}
    command = (
        program("azurite-blob"),
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--inMemoryPersistence",
        "--blobPort",
        str(target.port),
    )
    with _running(target, *command, AZURITE_ACCOUNTS=f"{account}:{key}"):
        yield target


class _BlobStore(Target):
    def prepare(self) -> None:
        """Make the container, with a request that the account's key signs."""
        account, key = self.keys["AccountName"], self.environ["BLOB_STORE_KEY"]
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-10-04"}
        path = f"/{account}/{BUCKET}"
        # The signed text: the method, eleven headers that are empty here, those of Azure, and the
        # resource, which begins with the account.
        lines = ["PUT", *[""] * 11, *(f"{name}:{headers[name]}" for name in sorted(headers))]
        lines += [f"/{account}{path}", "restype:container"]
        digest = hmac.digest(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256)
        signature = base64.b64encode(digest).decode()
        headers["Authorization"] = f"SharedKey {account}:{signature}"
        _request(self.port, "PUT", f"{path}?restype=container", headers)


@contextmanager
def cloud_storage(directory: Path) -> Iterator[Target]:
    """gcp-storage-emulator, with an invented service account."""
    target = Target("CloudStorage", directory)
    target.port = free_port()
    credentials = directory / "service-account.json"
    credentials.write_text(json.dumps(_service_account()))
    target.keys = {"Bucket": BUCKET, "CredentialsJsonPath": str(credentials)}
    target.environ = {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{target.port}"}
    command = (
        program("gcp-storage-emulator"),
        "start",
        "--host=127.0.0.1",
        f"--port={target.port}",
        "--in-memory",
        f"--default-bucket={BUCKET}",
    )
    with _running(target, *command):
        yield target


def _service_account() -> dict[str, str]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": "emulated",
        "private_key_id": uuid.uuid4().hex,
        "private_key": pem.decode(),
        "client_email": "emulated@emulated.iam.example.com",
        "client_id": "1",
        "token_uri": "http://127.0.0.1:9/token",
    }


@contextmanager
def sftp(directory: Path) -> Iterator[Target]:
    """Debian's sshd with keys of its own; only its SFTP part, only the user of the tests."""
    target = Target("Sftp", directory)
    target.port = free_port()
    host_public = _ssh_key(directory / "host_key")
    user_public = _ssh_key(directory / "user_key")
    (directory / "authorized_keys").write_text(user_public + "\n")
    if os.geteuid() == 0:
        # The chroot directory of its unprivileged process, which the system service would make.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    (directory / "sshd_config").write_text(
        "\n".join(
            (
                f"Port {target.port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {directory}/host_key",
                f"AuthorizedKeysFile {directory}/authorized_keys",
                f"PidFile {directory}/sshd.pid",
                f"AllowUsers {getpass.getuser()}",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "UsePAM no",
                # Others than the owner may have access to directories of tests.
                "StrictModes no",
                "MaxStartups 100",
                "Subsystem sftp internal-sftp",
                "ForceCommand internal-sftp",
                "",
            )
        )
    )
    target.keys = {
        "Host": "127.0.0.1",
        "Port": target.port,
        "User": getpass.getuser(),
        "Path": str(directory / "replica"),
        "PrivateKeyPath": str(directory / "user_key"),
        "HostKey": host_public,
    }
    with _running(target, program("sshd"), "-D", "-e", "-f", str(directory / "sshd_config")):
        yield target


def _ssh_key(path: Path) -> str:
    """Make an Ed25519 key at ``path``, and return its public half."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return public.decode()


# -- shared --------------------------------------------------------------------------------------


@contextmanager
def _running(target: Target, *command: str, **environ: str) -> Iterator[None]:
    target.run(*command, **environ)
    try:
        yield
    finally:
        target.stop()


def _request(port: int, method: str, path: str, headers: Mapping[str, str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status not in (200, 201):
        raise RuntimeError(f"{method} {path}: {answer.status} {body[:500]!r}")
