"""Real proxies in front of a receiver, with the configurations that are shipped as examples."""

import contextlib
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import httpx
import trio
import trustme

from sdk_trio.webhooks.signed_request import SignedDelivery
from support.ports import free_port
from support.programs import program

EXAMPLES = Path(__file__).parents[2] / "examples"

HOST = "webhooks.example.com"


def replaced(text: str, changes: dict[str, str]) -> str:
    """Return an example with values of the test; fail if an original value is missing."""
    for old, new in changes.items():
        assert old in text, f"the example no longer has {old!r}"
        text = text.replace(old, new)
    return text


@attrs.frozen
class Proxy:
    """A running proxy: its port on both loopback addresses, and its certificate authority."""

    port: int
    ca_file: Path

    async def post(
        self,
        delivery: SignedDelivery,
        headers: dict[str, str] | None = None,
        *,
        source: str = "127.0.0.1",
        content=None,
        http2: bool = False,
    ) -> httpx.Response:
        """Deliver from the address ``source`` of this machine."""
        async with self.client(source, http2=http2) as client:
            return await client.post(
                "/hooks/sdk",
                content=delivery.body if content is None else content,
                headers={**delivery.headers, **(headers or {})},
            )

    async def exchange(self, data: bytes) -> bytes:
        """Send exact bytes; return the beginning of the response, empty without one."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        tcp = await trio.open_tcp_stream("127.0.0.1", self.port)
        stream = trio.SSLStream(tcp, context, server_hostname=HOST, https_compatible=True)
        answer = b""
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(data.replace(b"Host: test", f"Host: {HOST}".encode(), 1))
                answer = await stream.receive_some(1000)
        return answer

    def client(self, source: str = "127.0.0.1", *, http2: bool = False) -> httpx.AsyncClient:
        address = "[::1]" if ":" in source else "127.0.0.1"
        transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(cafile=str(self.ca_file)),
            local_address=source,
            http2=http2,
        )
        transport = _Named(transport)
        return httpx.AsyncClient(
            transport=transport, base_url=f"https://{address}:{self.port}", timeout=60
        )


class _Named(httpx.AsyncBaseTransport):
    """Requests the proxy's name, which has no DNS entry, at its address."""

    def __init__(self, inner):
        self._inner = inner

    async def handle_async_request(self, request):
        request.headers["host"] = HOST
        request.extensions["sni_hostname"] = HOST
        return await self._inner.handle_async_request(request)

    async def aclose(self):
        await self._inner.aclose()


@asynccontextmanager
async def running(kind: str, directory: Path, upstream: str):
    """Run ``nginx`` or ``caddy`` in front of ``upstream`` (``HOST:PORT`` or ``unix:PATH``)."""
    command = program(kind)
    authority = trustme.CA()
    certificate = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    certificate.private_key_pem.write_to_path(directory / "privkey.pem")
    with (directory / "fullchain.pem").open("wb") as file:
        for pem in certificate.cert_chain_pems:
            file.write(pem.bytes())
    port = free_port()
    make = {"nginx": _nginx, "caddy": _caddy}[kind]
    arguments, environment = make(directory, port, upstream)
    log = directory / "proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        await _until_it_listens(process, port, log)
        yield Proxy(port, directory / "ca.pem")
    finally:
        process.terminate()
        with trio.CancelScope(shield=True), trio.move_on_after(5):
            while process.poll() is None:
                await trio.sleep(0.01)
        process.kill()
        process.wait()


async def _until_it_listens(process, port, log):
    waited_for = ["127.0.0.1", "::1"]
    with trio.fail_after(60):
        while waited_for:
            assert process.poll() is None, log.read_text()
            try:
                socket.create_connection((waited_for[-1], port), timeout=1).close()
                waited_for.pop()
            except OSError:
                await trio.sleep(0.02)


def _nginx(directory, port, upstream):
    site = replaced(
        (EXAMPLES / "nginx" / "receiver.conf").read_text(),
        {
            "server 127.0.0.1:8080;": f"server {upstream};",
            "listen 443 ": f"listen 127.0.0.1:{port} ",
            "listen [::]:443 ": f"listen [::1]:{port} ",
            "/etc/ssl/sdk/": f"{directory}/",
        },
    )
    (directory / "receiver.conf").write_text(site)
    paths = "".join(
        f"  {name}_temp_path {directory}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {directory}/nginx.pid;\nerror_log stderr;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}include {directory}/receiver.conf;\n}}\n"
    )
    return ["-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", "stderr"], {}


def _caddy(directory, port, upstream):
    if upstream.startswith("unix:"):
        upstream = f"unix/{upstream.removeprefix('unix:')}"
    site = replaced(
        (EXAMPLES / "caddy" / "Caddyfile").read_text(),
        {
            "reverse_proxy 127.0.0.1:8080 {": f"reverse_proxy {upstream} {{",
            f"{HOST} {{\n": (
                f"{HOST} {{\n\tbind 127.0.0.1 ::1\n"
                f"\ttls {directory}/fullchain.pem {directory}/privkey.pem\n"
            ),
        },
    )
    (directory / "Caddyfile").write_text(
        "{\n\tadmin off\n\tauto_https disable_redirects\n"
        f"\thttps_port {port}\n\thttp_port {free_port()}\n"
        f"\tstorage file_system {directory}/storage\n"
        "\tservers {\n\t\tprotocols h1 h2\n\t}\n}\n" + site
    )
    environment = {"HOME": str(directory), "XDG_DATA_HOME": str(directory)}
    return ["run", "--config", str(directory / "Caddyfile"), "--adapter", "caddyfile"], environment
