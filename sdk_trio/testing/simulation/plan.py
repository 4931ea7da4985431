"""The plan of a simulation: the events, the faults, and the troubles of handlers.

It is made before the simulation begins. A failure is shrunk by removing parts. Pure.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from ...records.deliveries import key_of, signer_of
from ...records.policies import glob_of, name_of_glob

if TYPE_CHECKING:
    import httpx

#: The kinds of faults, and what they do.
FAULTS = {
    "kill": "the process is killed (kill -9)",
    "power": "the power is cut: unsynced writes are lost or torn",
    "stall": "the process is paused (SIGSTOP, a suspended machine)",
    "deploy": "the process is stopped gracefully and started again",
    "hang": "the disk does not answer",
    "full": "the disk is full",
    "sync": "syncs fail, and lose their writes",
    "read": "reads of the disk fail",
    "clock": "the wall clock is set wrong, and corrected later",
    "network": "the receiver cannot be reached",
    "suspend": "a tenant is suspended, and reactivated later",
    "pause": "events of some types are paused, and resumed later",
    "upstream": "the upstream fails: no connection, no answer, 429 or 5xx",
}

#: The order of the events of one object, by the last word of their type.
_LIFECYCLE = (
    "created", "confirmed", "active", "paid", "updated", "cycled", "past_due", "uncanceled",
    "canceled", "refunded", "revoked", "expired", "deleted",
)  # fmt: skip

#: The kinds of :class:`Trouble` that the random numbers choose from.
_TROUBLES = ("slow", "slow", "fail", "fail_after", "hang", "cancel")

#: The most crashes, stalls and outages of one simulation. An event that ran in each of them must
#: not run out of attempts.
_MOST_CRASHES = 3


@attrs.frozen(kw_only=True)
class World:
    """The world in which handlers are simulated.

    Args:
        hours: the virtual hours in which events arrive and faults happen; above 0. The world then
            continues until everything has ended.
        events: the number of the sender's events.
        subjects: the number of objects that the events are about.
        faults: the kinds of faults that may happen, keys of :data:`FAULTS`; empty: none.
        most_faults: the largest number of faults.
        troubles: handlers may be slow, hang, fail and be cancelled.
        processes: the number of processes that share one store, as with ``Server:Processes``.
        tenants: the number of tenants that the events belong to; 0: none. The fault ``suspend``
            needs them.
        feed: a client follows the feed of the admin address; with one process only.
        upstream: makes the upstream that handlers call by ``services.client``: a transport of
            httpx, such as a :class:`~sdk_trio.testing.MockUpstream`; None: there is no client. The
            fault ``upstream`` needs it.
        sources: other senders beside the upstream, as ``{"stripe": {"invoice.paid": {...}}}``: by
            name, then by type, a sample of ``data``. Each signs by Standard Webhooks with a secret
            of its own. All senders use the same ids.
        settings: overrides of the settings, as ``{"Webhooks:Queue:Workers": 2}``.
        dead_is_failure: an event that ends dead is a failure.
    """

    hours: float = attrs.field(default=0.02, validator=attrs.validators.gt(0))
    events: int = attrs.field(default=20, validator=attrs.validators.ge(1))
    subjects: int = attrs.field(default=6, validator=attrs.validators.ge(1))
    faults: Collection[str] = attrs.field(
        default=tuple(FAULTS),
        validator=attrs.validators.deep_iterable(attrs.validators.in_(FAULTS)),
    )
    most_faults: int = attrs.field(default=5, validator=attrs.validators.ge(0))
    troubles: bool = True
    processes: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    tenants: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    feed: bool = False
    upstream: Callable[[], "httpx.AsyncBaseTransport"] | None = None
    sources: Mapping[str, Mapping[str, Mapping[str, Any]]] = attrs.field(factory=dict)
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    dead_is_failure: bool = True


class Trouble(msgspec.Struct, frozen=True):
    """A trouble in one run of a handler. The kinds are ``slow``, ``fail``, ``fail_after`` (after
    the handler's work), ``hang`` and ``cancel``. ``seconds`` is the duration of the first two.
    """

    kind: str
    seconds: float


class Arrival(msgspec.Struct, frozen=True):
    """An event that the sender has from ``at`` on, in virtual seconds.

    ``again_after``: seconds after which it is delivered again although it was acknowledged.
    ``tenant``: the number of the tenant that it belongs to. ``source``: the name of its sender,
    None: the upstream.
    """

    number: int
    at: float
    type: str
    subject: str
    troubles: tuple[Trouble, ...] = ()
    again_after: float | None = None
    tenant: int | None = None
    source: str | None = None

    @property
    def webhook_id(self) -> str:
        """The id of its deliveries."""
        return f"msg_{self.number:04d}"

    @property
    def key(self) -> str:
        """The key under which the store has it."""
        return key_of(self.webhook_id, self.source and signer_of(self.source))


class Fault(msgspec.Struct, frozen=True):
    """A fault of ``kind`` at ``at`` that lasts ``seconds``.

    ``value``: the step of a clock in seconds; the number of changes to the disk before a crash; the
    number of a tenant. ``glob``: the types that are paused.
    """

    at: float
    kind: str
    seconds: float
    value: float = 0.0
    glob: str = ""

    @property
    def end(self) -> float:
        """The end of the fault, in virtual seconds."""
        return self.at + self.seconds

    def __str__(self) -> str:
        detail = f", by {self.value:+.0f} s" if self.kind == "clock" else ""
        detail = f": {name_of_glob(self.glob)}" if self.kind == "pause" else detail
        return f"{FAULTS[self.kind]}, for {self.seconds:.1f} s{detail}"


class SimulationPlan(msgspec.Struct, frozen=True):
    """The whole plan of one seed; times in virtual seconds."""

    seed: int
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]

    @property
    def end(self) -> float:
        """The virtual time at which the last event has arrived and the last fault is over."""
        ends = [each.at for each in self.arrivals] + [fault.end for fault in self.faults]
        return max(ends, default=0.0)


def make_plan(seed: int, world: World, types: Sequence[str]) -> SimulationPlan:
    """Return the plan of a seed.

    Args:
        types: the event types that the application handles; not empty without sources.
    """
    dice = random.Random(f"{seed}/plan")
    seconds = world.hours * 3600
    arrivals = _arrivals(dice, world, types or _types_of_sources(world), seconds)
    if world.tenants:
        # With separate random numbers, because tenants have objects with the same names.
        owners = random.Random(f"{seed}/tenants")
        arrivals = tuple(
            msgspec.structs.replace(each, tenant=owners.randrange(world.tenants))
            for each in arrivals
        )
    if world.sources:
        senders = [None, *world.sources] if types else list(world.sources)
        arrivals = _shared_among(random.Random(f"{seed}/sources"), world, arrivals, senders)
    return SimulationPlan(seed, arrivals, _faults(dice, world, seconds, _globs(world, types)))


def _types_of_sources(world: World) -> list[str]:
    return [each for types in world.sources.values() for each in types]


def _shared_among(
    dice: random.Random, world: World, arrivals: Sequence[Arrival], senders: Sequence[str | None]
) -> tuple[Arrival, ...]:
    """Return the arrivals, each from one of ``senders``, which all count their ids from 0."""
    numbers = dict.fromkeys(senders, 0)
    shared = []
    for arrival in arrivals:
        sender = dice.choice(senders)
        number, numbers[sender] = numbers[sender], numbers[sender] + 1
        changes: dict[str, Any] = {"number": number}
        if sender is not None:
            kind = dice.choice(sorted(world.sources[sender]))
            changes |= {"source": sender, "type": kind, "tenant": None}
        shared.append(msgspec.structs.replace(arrival, **changes))
    return tuple(shared)


def _globs(world: World, types: Sequence[str]) -> list[str]:
    """Return what a pause may hold: a type, the types of a family, or all of a sender."""
    globs = {*types, *(f"{each.rpartition('.')[0]}.*" for each in types), "*"}
    for source, samples in world.sources.items():
        globs |= {glob_of(each, source) for each in (*samples, "*")}
    return sorted(globs)


def _arrivals(
    dice: random.Random, world: World, types: Sequence[str], seconds: float
) -> tuple[Arrival, ...]:
    families: dict[str, list[str]] = {}
    for each in sorted(types, key=_place):
        families.setdefault(each.rpartition(".")[0], []).append(each)
    names = sorted(families)
    subjects = [(f"sub_{number}", dice.choice(names)) for number in range(world.subjects)]
    # An object's events follow each other closely: a checkout is a handful of events in a second.
    sequences = {
        subject: sorted(dice.uniform(0, seconds) for _ in range(2)) for subject, _ in subjects
    }
    steps = dict.fromkeys(sequences, 0)
    arrivals = []
    for number in range(world.events):
        subject, family = dice.choice(subjects)
        members = families[family]
        step, steps[subject] = steps[subject], steps[subject] + 1
        near = dice.choice(sequences[subject]) + step * dice.choice((0.01, 0.2, 3.0))
        at = near if dice.random() < 0.7 else dice.uniform(0, seconds)
        troubles: list[Trouble] = []
        if world.troubles and dice.random() < 0.35:
            troubles = [
                Trouble(dice.choice(_TROUBLES), round(dice.expovariate(0.3), 3))
                for _ in range(dice.randint(1, 2))
            ]
        again = round(dice.expovariate(0.05), 3) if dice.random() < 0.2 else None
        arrivals.append(
            Arrival(
                number,
                round(min(at, seconds), 3),
                members[min(step, len(members) - 1)],
                subject,
                tuple(troubles),
                again,
            )
        )
    return tuple(sorted(arrivals, key=lambda each: each.at))


def _place(event_type: str) -> tuple[int, str]:
    last = event_type.rpartition(".")[2]
    return _LIFECYCLE.index(last) if last in _LIFECYCLE else 4, event_type


def _faults(
    dice: random.Random, world: World, seconds: float, globs: Sequence[str]
) -> tuple[Fault, ...]:
    impossible = {"suspend"} if not world.tenants else set()
    impossible |= {"upstream"} if world.upstream is None else set()
    kinds = sorted(kind for kind in world.faults if kind not in impossible)
    faults: list[Fault] = []
    crashes = 0
    for _ in range(dice.randint(0, world.most_faults) if kinds else 0):
        kind = dice.choice(kinds)
        if kind in ("kill", "power", "stall", "upstream"):
            crashes += 1
            if crashes > _MOST_CRASHES:
                continue
        at = round(dice.uniform(0, seconds), 3)
        lasts, value = _extent(dice, kind, world.tenants)
        glob = dice.choice(globs) if kind == "pause" else ""
        faults.append(Fault(at, kind, round(lasts, 3), value, glob))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _extent(dice: random.Random, kind: str, tenants: int) -> tuple[float, float]:
    if kind in ("kill", "power"):
        return dice.uniform(0.5, 20), dice.choice((0, 1, 2, 3, 5, 8, 13, 30))
    if kind == "stall":
        return dice.choice((2.0, 12.0, 70.0, 100.0)), 0
    if kind == "clock":
        step = dice.choice((2.5, 30, 200, 3600)) * dice.choice((-1, 1))
        return dice.uniform(5, 60), step
    if kind == "suspend":
        return dice.uniform(1, 30), dice.randrange(tenants)
    if kind == "pause":
        return dice.uniform(1, 30), 0
    if kind == "deploy":
        return dice.uniform(0.1, 3), 0
    if kind == "upstream":
        # An event that calls the upstream has eight attempts, and the circuit stays open for
        # longer.
        return dice.choice((0.3, 2.0, 8.0)) * dice.uniform(0.5, 1.5), 0
    return dice.choice((0.3, 2.0, 8.0, 20.0)) * dice.uniform(0.5, 1.5), 0
