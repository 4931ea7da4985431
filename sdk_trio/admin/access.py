"""Access rights and rate limits of requests to the admin address.

- Probes are open: an orchestrator has no token. Their reasons are shown to requests from this
  machine or with the token; a wrong token is refused.
- ``/metrics`` and ``/healthz`` are open while every address belongs to this machine (loopback or a
  Unix socket); otherwise they need the token.
- ``/api`` always needs the token, except ``/api/proof``.
- Everything except probes requires a known ``Host``, so that a web page whose host name points to
  this machine (DNS rebinding) reads nothing. IP addresses cannot be redirected.
- A changing call must not come from another site's page, and must be allowed by the settings.

:class:`Pacer` spreads requests over time. Probes have a separate one, so that a flood of other
requests does not delay them. :class:`Concurrency` reserves connection slots for probes.
"""

import base64
import hmac
import ipaddress
import os
import secrets
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import msgspec
import trio

from ..base.logs import get_logger
from ..base.opener import open_file
from ..base.private_files import create_data_directory, open_private
from ..base.public_addresses import host_name
from ..base.throttle import TokenBucket
from ..config import Settings, StorageBackend
from ..errors import StoreUnavailableError


class Refusal(msgspec.Struct, frozen=True):
    """The refusal of a request: the status and a sentence for the caller.

    ``guessed``: a wrong token was given.
    """

    status: int
    reason: str
    guessed: bool = False


@attrs.frozen
class Access:
    """The rules of one admin address.

    Args:
        token: the required token of the ``Authorization: Bearer`` header; None: no token is valid.
        addresses: its URLs; empty while they are unknown.
        allowed_hosts: further names that a ``Host`` header may carry.
        read_only: changing calls are refused.
    """

    token: str | None = attrs.field(repr=False)
    addresses: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    read_only: bool = False

    @property
    def is_local(self) -> bool:
        """Whether every address is reachable only from this machine."""
        return bool(self.addresses) and all(map(is_of_this_machine, self.addresses))

    def has_token(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request carries the token, in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if self.token is None or scheme.casefold() != "bearer":
            return False
        # A comparison that ends at the first difference would show an attacker the length of the
        # match.
        return hmac.compare_digest(
            given.strip().encode("utf-8", "replace"), self.token.encode("utf-8", "replace")
        )

    def check_host(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a ``Host`` that is neither an IP address nor one of our names."""
        name = host_name(headers.get("host", ""))
        own = (host_name(address.partition("://")[2]) for address in self.addresses)
        # These names resolve only to this machine (RFC 6761, 6.3), so no page can own one.
        if is_address(name) or name == "localhost" or name.endswith(".localhost"):
            return None
        if name and name in {*own, *(allowed.casefold() for allowed in self.allowed_hosts)}:
            return None
        return Refusal(
            403, "this Host is not known here: use an IP address, or add it to Admin:AllowedHosts"
        )

    def check_token(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a request without the token."""
        if self.has_token(headers):
            return None
        return Refusal(
            401,
            "this needs the admin token: Authorization: Bearer TOKEN",
            guessed="authorization" in headers,
        )

    def prove(self, headers: Mapping[str, str]) -> str | None:
        """Return the proof that this is the runtime; None without a valid proof of the caller.

        Only a caller that knows the token gets one. An answer to strangers would let them try weak
        tokens offline, at any pace.
        """
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        nonce, _, given = rest.partition(" ")
        if self.token is None or scheme != PROOF_SCHEME or not nonce:
            return None
        expected = proof_of(self.token, nonce, of_runtime=False)
        if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode()):
            return None
        return proof_of(self.token, nonce, of_runtime=True)

    def check_proof(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a caller that does not prove that it knows the token."""
        if self.prove(headers) is not None:
            return None
        return Refusal(
            401,
            "this needs a proof that you have the admin token",
            guessed="authorization" in headers,
        )

    def check_change(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a changing call from another site's page, or in read-only mode."""
        if _is_of_another_site(headers):
            return Refusal(403, "a changing call must not come from a page of another site")
        if self.read_only:
            return Refusal(403, "nothing can be changed here: Sdk:Admin:ReadOnly is true")
        # Another site's page can send three media types without a preflight request (Fetch,
        # CORS-safelisted request-header); this is none of them.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return Refusal(415, "the body must be application/json")
        return None

    def check_feed(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a listener without the token, and one on a page of another site.

        For WebSocket a browser sends cookies and no ``Authorization``, and lets a page connect to
        any address. So the ``Origin`` is checked here (RFC 6455, 10.2), and the token may be in a
        subprotocol.
        """
        if _is_of_another_site(headers):
            return Refusal(403, "the feed may not be read by a page of another site")
        if "authorization" in headers:
            return self.check_token(headers)
        given = _token_in(headers.get("sec-websocket-protocol", ""))
        if given is None:
            return self.check_token(headers)
        if self.has_token({"authorization": f"Bearer {given}"}):
            return None
        return Refusal(401, "the token in Sec-WebSocket-Protocol is wrong", guessed=True)


#: The scheme of ``Authorization`` by which a caller proves that it knows the token, without sending
#: it. The value is the caller's nonce, a space, and :func:`proof_of` the nonce.
PROOF_SCHEME = "SDK-Proof"

#: The path that answers such a proof with the runtime's own proof.
PROOF = "/api/proof"


def proof_of(token: str, nonce: str, *, of_runtime: bool) -> str:
    """Return the proof of a caller, or the runtime's answer to it, in hexadecimal digits.

    The two differ, so that an impostor on the port cannot send the caller's proof back.
    """
    who = "runtime" if of_runtime else "caller"
    return hmac.new(token.encode(), f"sdk-trio {who} {nonce}".encode(), "sha256").hexdigest()


#: The subprotocol of the feed, and the prefix of the subprotocol that carries the token. A browser
#: has no other way to send a token with WebSocket: a token in the URL would be in logs of proxies.
FEED_PROTOCOL = "sdk-trio.feed"
TOKEN_PROTOCOL = "sdk-trio.token."


def _token_in(protocols: str) -> str | None:
    """Return the token among subprotocols, in base64url; None if there is none."""
    for name in map(str.strip, protocols.split(",")):
        if name.startswith(TOKEN_PROTOCOL):
            text = name.removeprefix(TOKEN_PROTOCOL)
            try:
                padded = text + "=" * (-len(text) % 4)
                return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
            except ValueError:
                return ""
    return None


def _is_of_another_site(headers: Mapping[str, str]) -> bool:
    # Browsers send it with every request, and no page can set it. Programs send neither of the two.
    site = headers.get("sec-fetch-site", "none")
    origin = headers.get("origin")
    own = (
        origin is None
        or origin.casefold().partition("://")[2] == headers.get("host", "").casefold()
    )
    return site not in ("none", "same-origin") or not own


def is_address(name: str) -> bool:
    """Return whether a name is an IP address, version 6 in its brackets."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_of_this_machine(address: str) -> bool:
    """Return whether a started address is reachable only from this machine."""
    if address.startswith("unix:"):
        return True
    name = host_name(address.partition("://")[2]).removeprefix("[").removesuffix("]")
    return is_address(name) and ipaddress.ip_address(name).is_loopback


def header_map(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return ASGI headers by name; a repeated header counts as empty.

    Our clients never repeat one, and a proxy may use the other of the two.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("latin-1").lower()
        found[key] = "" if key in found else value.decode("latin-1")
    return found


class Pacer:
    """A rate limit: ``per_second`` calls, and ``burst`` at once after idle time; others wait.

    Nothing is refused: a waiting connection sends nothing more, which slows a flood. With four
    clients sending constant requests, deliveries kept their rate; without the limit they dropped to
    a tenth. ``waiting`` is the number of waiting calls.
    """

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._bucket = TokenBucket(per_second=per_second, burst=burst)
        self.waiting: int = 0

    async def wait_for_slot(self) -> None:  # noqa: ASYNC910 - sending the answer is a checkpoint
        """Wait for a rate slot. Cancellation still consumes it."""
        now = trio.current_time()
        # Booked at once, so that waiting requests leave in order of arrival.
        due = self._bucket.book(now)
        if due > now:
            self.waiting += 1
            try:
                await trio.sleep_until(due)
            finally:
                self.waiting -= 1


class Concurrency:
    """Limits the requests in progress, in total and per source.

    Probes are not counted: the connection slots above these limits are reserved for them.

    Args:
        most: maximum of requests in progress at the same time.
        most_of_one: maximum per source. All clients without an address (None) are one source.
    """

    def __init__(self, *, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._by_source: Counter[Hashable] = Counter()

    @contextmanager
    def request(self, source: Hashable) -> Iterator[bool]:
        """Count one request during the block; the block gets False if it is one too many."""
        counts = self._by_source
        if counts.total() >= self._most or counts[source] >= self._most_of_one:
            yield False
            return
        counts[source] += 1
        try:
            yield True
        finally:
            counts[source] -= 1
            if not counts[source]:
                del counts[source]


_log = get_logger("admin")

#: The file in the data directory.
TOKEN_NAME = "admin-token"

_TOKEN_BYTES = 32


@attrs.frozen
class AdminToken:
    """The token, and its location in words: a variable, or the path of a file.

    Without a token, the location is a text that names the variable to set.
    """

    value: str | None = attrs.field(repr=False)
    place: str


def provide_token(settings: Settings, environ: Mapping[str, str] = os.environ) -> AdminToken:
    """Return the token from the configured variable, or else the file, generated if missing.

    A file that others can read is replaced; one of another user is refused. If no token can be
    stored, a warning is logged and calls that need it are refused; the receiver still runs, because
    deliveries matter more than the admin address.

    Raises:
        StoreUnavailableError: the data directory cannot be used, and the store is in it. The start
            fails with this message only.
    """
    variable = settings.admin.token_env_var
    # Most files of variables leave a line break at the end.
    given = environ.get(variable, "").strip()
    if given:
        return AdminToken(given, f"the variable {variable}")
    file = Path(settings.storage.path) / TOKEN_NAME
    try:
        create_data_directory(settings.storage.path)
    except (OSError, StoreUnavailableError) as error:
        if settings.storage.backend is StorageBackend.SQLITE:
            raise
        return _no_token(variable, file, error)
    try:
        return AdminToken(_kept(file) or _generate(file), str(file.absolute()))
    except OSError as error:
        return _no_token(variable, file, error)


def _no_token(variable: str, file: Path, error: Exception) -> AdminToken:
    _log.warning(
        "admin.token_missing",
        path=str(file),
        error=str(error),
        hint=f"set the variable {variable}; until then /api is closed",
    )
    return AdminToken(None, f"none: set the variable {variable}")


def _kept(file: Path) -> str | None:
    """Return the token of an earlier start, if it is still secret."""
    try:
        descriptor = open_private(file)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as opened:
        token = opened.read(1024).strip()
        # Check the open file, not the name, which may refer to another file by now.
        exposed = os.name == "posix" and os.fstat(opened.fileno()).st_mode & 0o077
    # A token that others could read may be known to them, whatever the mode now.
    if token and not exposed:
        return token
    _log.warning("admin.token_replaced", path=str(file), hint="other users could read it")
    file.unlink()
    return None


def _generate(file: Path) -> str:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    temporary = file.with_name(f"{TOKEN_NAME}.{secrets.token_hex(8)}")
    # Complete before it is renamed, and unreadable for others from its first byte on.
    descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{token}\n")
        try:
            # Unlike a rename, a hard link does not replace a file of another process that started
            # at the same time; both then use the same token.
            os.link(temporary, file)
        except FileExistsError:
            return _kept(file) or token
    finally:
        with suppress(OSError):
            temporary.unlink()
    return token
