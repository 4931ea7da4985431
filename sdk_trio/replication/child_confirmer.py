"""Asks a replicator that was started or changed what it replicates, until that is right."""

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
