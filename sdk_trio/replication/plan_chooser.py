"""Chooses from which configuration the replicator starts: the new one, or one that worked."""

from ..base.logs import get_logger
from ..errors import ReplicationError
from .plan_reader import PlanReader
from .restarts import Plan

_log = get_logger("replication")


class PlanChooser:
    """Knows the configuration in force, the last one that worked, and one that did not.

    Args:
        reader: of the configuration.
    """

    def __init__(self, reader: PlanReader) -> None:
        self._reader = reader
        self._good: Plan | None = None
        self._rejected: str | None = None
        #: The configuration in force; None: there was none yet.
        self.plan: Plan | None = None

    @property
    def databases(self) -> frozenset[str]:
        """The paths of the databases that the configuration in force names."""
        return frozenset() if self.plan is None else self.plan.databases

    @property
    def running_path(self) -> str:
        """The copy from which the replicator starts."""
        return str(self._reader.running_path)

    async def choose(self, binary: str) -> None:
        """Put the configuration to start from into force: the new one, else the last good one.

        Raises:
            ReplicationError: there is none that can be read, or the copy cannot be written.
        """
        try:
            plan = await self._reader.read(binary, self.plan)
        except ReplicationError as error:
            if self.plan is None:
                raise
            self._complain(error)
            plan = self.plan
        if plan.text == self._rejected and self._good is not None:
            # The one before worked; what is asked for is tried again when it is asked for again.
            plan = self._good
        await self.adopt(plan)

    async def look_again(self, binary: str) -> Plan | None:
        """Return the configuration as it is now, also one that did not work; None if unreadable.

        The one in force stays so until :meth:`adopt` or :meth:`choose`.
        """
        try:
            plan = await self._reader.read(binary, self.plan)
        except ReplicationError as error:
            self._complain(error)
            return None  # noqa: ASYNC910 - whoever raised has been waited for
        self._rejected = None
        return plan

    async def adopt(self, plan: Plan) -> None:
        """Put ``plan`` into force.

        Raises:
            ReplicationError: the copy cannot be written.
        """
        await self._reader.adopt(plan)
        self.plan = plan

    def confirm(self) -> None:
        """Remember that the configuration in force works."""
        self._good = self.plan

    def reject(self) -> None:
        """Remember that it does not, if there is another one to go back to."""
        if self._good is not None and self._good is not self.plan and self.plan is not None:
            self._rejected = self.plan.text

    def _complain(self, error: ReplicationError) -> None:
        _log.error(
            "replication.failed",
            error=str(error),
            kept=len(self.databases),
            hint="the configuration before it stays in force",
        )
