"""What became of one attempt to send one message on one channel. Pure (contracts 6)."""

import attrs


@attrs.frozen
class Sent:
    """The provider took it; ``provider_id`` is its name for the message, if it gave one."""

    provider_id: str | None = None


@attrs.frozen
class Again:
    """It was surely not taken, and may be later; not before ``after_seconds``, if it says so."""

    reason: str
    after_seconds: float | None = None


@attrs.frozen
class Refused:
    """It was surely not taken, and never will be as it is: trying again is no use."""

    reason: str


@attrs.frozen
class Skipped:
    """Nothing was sent, and the reason is ours: no address, not verified, no credential."""

    reason: str


@attrs.frozen
class Ambiguous:
    """It was sent, and no answer came: whether it was taken cannot be known."""

    reason: str


Outcome = Sent | Again | Refused | Skipped | Ambiguous
