"""Asks a replicator what it replicates: until that is right, and whether it stays so."""

from collections.abc import Collection
from typing import Final

import trio

from ..errors import ReplicatorError
from .control_client import ControlClient
from .restarts import difference

#: Between two questions.
_POLL_SECONDS: Final = 0.1


async def confirm(
    client: ControlClient, pid: int, wanted: Collection[str], *, seconds: float
) -> None:
    """Wait until the replicator with process id ``pid`` has exactly the databases ``wanted``.

    It ignores what it does not understand, so its own answer is the only proof. Another process's
    answer does not count: a replicator that is about to end may still hold the socket.

    Raises:
        ReplicatorError: it has not, after ``seconds``; the message says what is different.
    """
    problem = "it has not answered"
    expected = frozenset(wanted)
    with trio.move_on_after(seconds):
        while True:
            try:
                if (await client.info()).pid == pid:
                    found = {each.path for each in await client.list_databases()}
                    if found == expected:
                        return
                    problem = difference(expected, found)
            except ReplicatorError as error:
                problem = str(error)
            await trio.sleep(_POLL_SECONDS)
    raise ReplicatorError(
        f"the replicator does not replicate what it should after {seconds:g} s: {problem}"
    )


class ChildLooker:
    """Looks from time to time whether a replicator still does what it was started for.

    Args:
        client: asks it.
        silent_looks: so many in a row without an answer mean that it hangs.
    """

    def __init__(self, client: ControlClient, *, silent_looks: int) -> None:
        self._client = client
        self._silent_looks = silent_looks
        self._silent = 0

    async def look(self, wanted: Collection[str]) -> None:
        """Look once.

        Raises:
            ReplicatorError: it hangs, or has other databases than ``wanted``.
        """
        problem: ReplicatorError
        try:
            found = {each.path for each in await self._client.list_databases()}
        except ReplicatorError as error:
            problem = error
        else:
            self._silent = 0
            if found != set(wanted):
                raise ReplicatorError(f"the replicator lost databases: {difference(wanted, found)}")
            return
        # What waits for a target that is away lists nothing, and works on all the same.
        self._silent = 0 if await self._client.answers() else self._silent + 1
        if self._silent >= self._silent_looks:
            raise ReplicatorError(f"the replicator hangs: {problem}") from problem
