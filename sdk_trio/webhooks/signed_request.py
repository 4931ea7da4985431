"""Signing and posting of deliveries, for the simulator, ``events trigger``, and tests."""

import hmac
import ssl
from collections.abc import Mapping
from hashlib import sha256
from typing import Protocol
from urllib.parse import urlsplit

import attrs
import trio

from ..config import KeyDerivation, Secret, Settings
from ..errors import EXIT_UNAVAILABLE, SdkError
from ..records.deliveries import key_of
from .signature import sign

#: Seconds that one delivery may take. The upstream gives up after 10, so a test delivery that takes
#: longer would also fail in production (Standard Webhooks advises senders 15 to 30).
DELIVERY_SECONDS = 10.0


class DeliveryFailedError(SdkError):
    """There was no answer: the address cannot be reached, or the receiver took too long."""

    exit_code = EXIT_UNAVAILABLE


@attrs.frozen
class SignedDelivery:
    """A delivery as sent; ``body`` has exactly the signed bytes."""

    webhook_id: str
    timestamp: int
    signature: str
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the request, lower case, with the content type."""
        return {
            "content-type": "application/json",
            "webhook-id": self.webhook_id,
            "webhook-timestamp": str(self.timestamp),
            "webhook-signature": self.signature,
        }


@attrs.frozen
class Posted:
    """The receiver's answer to a delivery."""

    status: int
    body: bytes


#: The header by which the receiver recognises a delivery of its own simulator.
SIMULATION_HEADER = "sdk-simulated"


def simulation_secret(settings: Settings) -> Secret | None:
    """Return the secret that the simulator signs with; None outside of Development."""
    if not settings.is_development:
        return None
    secrets = settings.webhooks.all_secrets
    return next((secret for secret in secrets if secret.made_for_tests), None)


def simulation_mark(settings: Settings) -> bytes | None:
    """Return the value of :data:`SIMULATION_HEADER`; None without a simulator.

    Only a holder of the simulator's secret can make it, and the processes of one receiver agree.
    """
    secret = simulation_secret(settings)
    if secret is None:
        return None
    return hmac.new(secret.reveal().encode(), b"simulated", sha256).hexdigest().encode()


def sign_body(
    body: bytes,
    *,
    secret: Secret | str,
    webhook_id: str,
    timestamp: int,
    derivation: KeyDerivation = KeyDerivation.STANDARD,
    signer: str = "",
) -> SignedDelivery:
    """Sign ``body`` as the upstream would; arguments and errors are those of ``sign``."""
    signature = sign(secret, webhook_id, timestamp, body, derivation=derivation, signer=signer)
    return SignedDelivery(key_of(webhook_id, signer), timestamp, signature, body)


class Postable(Protocol):
    """A delivery as it is sent: its id, its headers and its exact body."""

    @property
    def webhook_id(self) -> str:
        """Return the id under which the receiver stores it."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of the request."""
        ...

    @property
    def body(self) -> bytes:
        """Return the signed bytes."""
        ...


async def post(
    url: str,
    delivery: Postable,
    *,
    ca_file: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Posted:
    """Post ``delivery`` to ``url`` once and return the answer; redirects are not followed.

    Args:
        url: ``http://``, ``https://``, or ``unix:SOCKET:PATH`` for a unix socket.
        ca_file: PEM file that verifies the server's certificate; its host name is then not checked,
            because a receiver's own certificate does not name its loopback address.
        headers: further headers.

    Raises:
        DeliveryFailedError: no answer within 10 seconds, or ``ca_file`` cannot be used.
    """
    # Imported here, because it takes 100 ms, which a receiver without a simulator does not need.
    import httpx

    socket_path, target = _split_target(url)
    # Without TLS there is nothing to verify, and loading the authorities takes 15 ms.
    verify: ssl.SSLContext | bool = url.startswith("https:")
    if ca_file is not None:
        try:
            verify = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # that of ssl is also an OSError
            raise DeliveryFailedError(
                f"cannot deliver to {url}: the certificate file {ca_file} cannot be used: "
                f"{error.strerror or error}"
            ) from error
        # The file holds the server's own certificate, and seldom the authority that issued it, so
        # the chain may end at the certificate itself.
        verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        verify.check_hostname = False
    sent = {**delivery.headers, **(headers or {})}
    transport = httpx.AsyncHTTPTransport(uds=socket_path, verify=verify)
    try:
        with trio.fail_after(DELIVERY_SECONDS):
            # A proxy of the environment would get the body and its signature.
            client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=None)  # noqa: S113 - the scope above bounds the whole exchange
            async with client:
                answer = await client.post(target, content=delivery.body, headers=sent)
    except (httpx.HTTPError, trio.TooSlowError) as error:
        reason = f"no answer in {DELIVERY_SECONDS:g} s" if not str(error) else str(error)
        raise DeliveryFailedError(
            f"cannot deliver to {url}: {reason}. Check that the receiver is running there"
        ) from error
    return Posted(answer.status_code, answer.content)


def _split_target(url: str) -> tuple[str | None, str]:
    if not url.startswith("unix:"):
        return None, url
    socket_path, _, path = url.removeprefix("unix:").partition(":")
    return socket_path, f"http://localhost{path or '/'}"


def own_url(address: str, path: str) -> str:
    """Return the URL of ``path`` on one of our own addresses, reachable from this machine.

    ``address`` is a started one: ``http://0.0.0.0:8080`` becomes the loopback address.
    """
    if address.startswith("unix:"):
        return f"{address}:{path}"
    parts = urlsplit(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "")
    netloc = parts.netloc if host is None else f"{host}:{parts.port}"
    return f"{parts.scheme}://{netloc}{path}"
