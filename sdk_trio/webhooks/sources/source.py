"""A source as the receiver uses it: its route, its keys, and the delivery that it makes."""

import msgspec
import trio

from ...base.executor import run_in_thread
from ...base.http import Headers
from ...config import Settings
from ...config.options.sources import SourceOptions
from ...errors import OptionsValidationError, Problem
from ...events import Envelope
from ...records.deliveries import NewDelivery, signer_of
from .. import answers
from ..answers import RequestRefusal
from ..arrival import LARGE_BYTES, VerifiedDelivery
from ..verdict import Rejected
from .schemes import Genuine, Keys, Scheme


class Source(msgspec.Struct, frozen=True, eq=False):
    """One source: ``signer`` names it in the keys of its deliveries."""

    name: str
    path: str
    signer: str
    scheme: Scheme
    keys: Keys
    tolerance: int

    @classmethod
    def of(cls, options: SourceOptions) -> "Source":
        """Return the source of checked settings.

        Raises:
            OptionsValidationError: a secret cannot be used.
        """
        return cls(
            options.name,
            options.route,
            signer_of(options.name),
            Scheme.of(options),
            Keys.of(options),
            options.tolerance_seconds,
        )

    async def verify(
        self, headers: Headers, body: bytes, *, address: str | None, now: float
    ) -> VerifiedDelivery | RequestRefusal:
        """Verify a delivery to this source; return it, or the refusal.

        Args:
            headers: the headers of the request.
            body: its bytes.
            address: of the sender, if known.
            now: Unix seconds.
        """
        if len(body) > LARGE_BYTES:
            verdict = await run_in_thread(self.judge, headers, body, now)
        else:
            await trio.lowlevel.checkpoint()
            verdict = self.judge(headers, body, now)
        if isinstance(verdict, Rejected):
            fields = {"detail": verdict.detail}
            return RequestRefusal(str(verdict.cause), answers.INVALID, fields)
        delivery = NewDelivery(
            webhook_id=verdict.webhook_id,
            type=verdict.type,
            raw=body,
            # Without the time of the attempt, the time of its arrival.
            timestamp=int(now) if verdict.timestamp is None else verdict.timestamp,
            received_at=now,
            subject=verdict.subject,
            signer=self.signer,
            address=address,
        )
        return VerifiedDelivery(delivery, Envelope(verdict.type))

    def judge(self, headers: Headers, body: bytes, now: float) -> Genuine | Rejected:
        """Decide whether a delivery is authentic and recent. Pure."""
        return self.scheme.verify(headers, body, now=now, keys=self.keys, tolerance=self.tolerance)


def sources_by_path(settings: Settings) -> dict[str, Source]:
    """Return the sources of checked settings by their routes.

    Raises:
        OptionsValidationError: secrets cannot be used; every one is listed.
    """
    found: dict[str, Source] = {}
    problems: list[Problem] = []
    for options in settings.sources:
        try:
            source = Source.of(options)
        except OptionsValidationError as error:
            problems += error.problems
        else:
            found[source.path] = source
    if problems:
        raise OptionsValidationError(problems)
    return found
