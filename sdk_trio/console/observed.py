"""What the admin address is told of the program that it belongs to. Pure."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from ..base.metrics import CheckSource, SampleSource
from ..storage.ports import Inbox

if TYPE_CHECKING:
    from ..storage.tenant_records import TenantStatus

TenantCounts = Callable[[], Awaitable[Mapping["TenantStatus", int]]]


class Observed(Protocol):
    """The running program, as far as its admin address looks at it or asks it for something."""

    @property
    def state(self) -> str:
        """``starting``, ``running`` or ``draining``."""
        ...

    def stores(self) -> tuple[Inbox, TenantCounts | None]:
        """Return the open inbox, and what counts the tenants where there are any.

        Raises:
            NotRunningError: it is not open.
        """
        ...

    async def tenant_id(self, name: str) -> str:
        """Return the id of the tenant with this identifier or id.

        Raises:
            UnknownTenantError: there is none.
            NotRunningError: the store is not open.
        """
        ...

    def status(self) -> Mapping[str, Any]:
        """Return addresses and figures of this moment for ``GET /api/status``."""
        ...

    def wake(self) -> None:
        """Make the workers look into the store: due events were put there."""
        ...


@attrs.frozen
class Sources:
    """Who says how the parts are. A part joins with one line: ``sources.checks.append(...)``."""

    checks: list[CheckSource] = attrs.Factory(list)
    samples: list[SampleSource] = attrs.Factory(list)
