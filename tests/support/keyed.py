"""An inbox whose runs are named by key, for tests in which each key has one run at a time."""

from collections.abc import Iterable
from typing import Any

import msgspec

from sdk_trio.records.deliveries import Admission, Admitted, Due, Lease, NewDelivery


class ByKey:
    """Remembers the last lease of each key, and names it in the calls that take a lease.

    A key without one names a lease that no claim has returned. Everything else is the inbox's.
    Answers are without their leases, so that they can be compared, unless ``for_runner``: then a
    runner can use it as well, which names leases.
    """

    def __init__(self, inbox: Any, *, for_runner: bool = False) -> None:
        self.__dict__["raw"] = inbox
        self.__dict__["leases"] = {}
        self.__dict__["for_runner"] = for_runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.raw, name, value)

    def lease(self, key: str | Lease) -> Lease:
        """The last lease of a key."""
        if isinstance(key, Lease):
            return key
        found: Lease = self.leases.get(key) or Lease(key, -1, 1 << 40)
        return found

    def _held(self, keys: Iterable[str | Lease]) -> list[Lease]:
        return [self.lease(key) for key in keys]

    def _remember(self, admitted: Admitted) -> Admitted:
        if admitted.lease is not None:
            assert admitted.admission is Admission.NEW, "a lease of a delivery that must not run"
            self.leases[admitted.lease.key] = admitted.lease
        return admitted if self.for_runner else msgspec.structs.replace(admitted, lease=None)

    def _remember_due(self, due: Due) -> Due:
        self.leases.update(due.leases)
        return due

    async def accept(self, delivery: NewDelivery, **options: Any) -> Admitted:
        return self._remember(await self.raw.accept(delivery, **options))

    async def claim(self, delivery: NewDelivery, **options: Any) -> Admitted:
        return self._remember(await self.raw.claim(delivery, **options))

    def claim_unawaited(self, delivery: NewDelivery) -> Any:
        lease = self.raw.claim_unawaited(delivery)
        if lease is not None:
            self.leases[lease.key] = lease
        return lease if self.for_runner else lease is not None

    async def claim_due(self, **options: Any) -> Due:
        return self._remember_due(await self.raw.claim_due(**options))

    async def claim_suspects(self, **options: Any) -> Due:
        return self._remember_due(await self.raw.claim_suspects(**options))

    async def start(self, key: str | Lease, **options: Any) -> bool:
        return bool(await self.raw.start(self.lease(key), **options))

    async def join(self, key: str | Lease) -> bool:
        return bool(await self.raw.join(self.lease(key)))

    def start_unawaited(self, key: str | Lease, *, now: float) -> None:
        self.raw.start_unawaited(self.lease(key), now=now)

    def end_unawaited(self, key: str | Lease, *, now: float) -> bool:
        return bool(self.raw.end_unawaited(self.lease(key), now=now))

    async def finish(self, key: str | Lease, outcome: Any, *, now: float) -> bool:
        return bool(await self.raw.finish(self.lease(key), outcome, now=now))

    async def conclude(self, key: str | Lease, effects: Any, **options: Any) -> Any:
        return await self.raw.conclude(self.lease(key), effects, **options)

    async def release(self, keys: Iterable[str | Lease]) -> int:
        return int(await self.raw.release(self._held(keys)))

    async def renew(self, keys: Iterable[str | Lease], *, now: float) -> Any:
        return await self.raw.renew(self._held(keys), now=now)
