"""An HTTP proxy: a tunnel that CONNECT opens (RFC 9110, 9.3.6).

Every connection of the client goes through it, TLS runs inside, so the proxy sees the upstream's
name and port and nothing else. Variables such as ``HTTPS_PROXY`` are not followed, because anybody
who may set a variable would choose the way of the access token. The log and ``doctor`` say that
such a variable is ignored.
"""

import base64
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import attrs
import trio

from ..config.options.client import ConnectionOptions
from ..errors import OptionsValidationError, Problem

URL_KEY = "Sdk:Connection:ProxyUrl"
CREDENTIALS_KEY = "Sdk:Connection:ProxyCredentialsEnvVar"

#: Variables from which other programs take their proxy; the first one that is set wins.
VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

#: The longest answer to CONNECT, in bytes.
MAX_HEAD_BYTES = 16 * 1024

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: ([^\r\n]*))?\r?\n")
#: Statuses that ask for credentials: 407, and 401 from proxies that confuse both.
_ASKS_FOR_CREDENTIALS = (401, 407)


class ProxyRefusedError(OSError):
    """The proxy opened no tunnel; the upstream has not been reached."""


@attrs.frozen
class Proxy:
    """An HTTP proxy at ``host`` and ``port``; ``credentials`` are ``user:password`` or empty."""

    host: str
    port: int
    credentials: str = attrs.field(default="", repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def dial(self, host: str, port: int) -> trio.SocketStream:
        """Return a stream that ends at ``host`` and ``port``.

        The proxy resolves the name. Cancelling closes what was open.

        Raises:
            OSError: the proxy cannot be reached, or opens no tunnel.
        """
        try:
            stream = await trio.open_tcp_stream(self.host, self.port)
        except OSError as error:
            raise ProxyRefusedError(f"the proxy {self} cannot be reached: {error}") from error
        try:
            await stream.send_all(self._request(host, port))
            self._check(await _head(stream))
        except trio.BrokenResourceError as error:
            stream.socket.close()
            raise ProxyRefusedError(f"the proxy {self} ended the connection") from error
        except BaseException:
            stream.socket.close()
            raise
        return stream

    def _request(self, host: str, port: int) -> bytes:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.credentials:
            encoded = base64.b64encode(self.credentials.encode()).decode("ascii")
            lines.append(f"Proxy-Authorization: Basic {encoded}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _check(self, head: bytes) -> None:
        found = _STATUS.match(head)
        if found is None:
            raise ProxyRefusedError(f"what answers at {self} is no HTTP proxy")
        status = int(found[1])
        if not 200 <= status < 300:
            said = f"{status} {(found[2] or b'').decode('ascii', 'replace')}".rstrip()
            hint = f"; see {CREDENTIALS_KEY}" if status in _ASKS_FOR_CREDENTIALS else ""
            raise ProxyRefusedError(f"the proxy {self} answered {said}{hint}")
        if not head.endswith(b"\r\n\r\n") or head.count(b"\r\n\r\n") > 1:
            raise ProxyRefusedError(f"the proxy {self} broke its answer off, or put more behind it")


def proxy_of(settings: ConnectionOptions, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy that ``settings`` name, None when they name none.

    Raises:
        OptionsValidationError: the variable with its credentials does not hold any.
    """
    if not settings.proxy_url:
        return None
    url = urlsplit(settings.proxy_url)
    name = settings.proxy_credentials_env_var
    credentials = environ.get(name, "")
    if credentials and (":" not in credentials or not credentials.isprintable()):
        problem = Problem(
            CREDENTIALS_KEY,
            f"names the variable {name}, which does not hold user:password: set it so, or unset it",
        )
        raise OptionsValidationError([problem])
    return Proxy(url.hostname or "", url.port or 80, credentials)


def ignored_variable(host: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable by which other programs would reach ``host`` through a proxy."""
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    for name in exempt.split(","):
        suffix = name.strip().removeprefix("*").removeprefix(".").casefold()
        if name.strip() == "*" or (suffix and f".{host.casefold()}".endswith(f".{suffix}")):
            return None
    return next((name for name in VARIABLES if environ.get(name)), None)


async def _head(stream: trio.SocketStream) -> bytes:
    """Receive an answer up to its empty line, and any bytes behind it in the same packet.

    These are an error (see ``_check``): TLS speaks first from our side, so nothing may follow.
    """
    head = b""
    while True:
        data = await stream.receive_some(MAX_HEAD_BYTES)
        head += data
        if not data or b"\r\n\r\n" in head or len(head) > MAX_HEAD_BYTES:
            return head
