"""The duration of the queries of ``events list`` and of the metrics on a store, warm.

    python benchmarks/queries.py DATA_DIRECTORY

Each query uses the store's interface, as the commands do, without the start of a process. It prints
the milliseconds of each query as JSON, without the first two repetitions.
"""

import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

import trio

from sdk_trio.config import Settings
from sdk_trio.records.states import DeliveryState
from sdk_trio.storage.open import open_inbox
from sdk_trio.storage.ports import Inbox

REPETITIONS = 22
#: Seconds after which a slow query is not repeated.
ENOUGH_SECONDS = 1.0
#: A tenant without events.
UNKNOWN = "00000000-0000-4000-8000-000000000000"

Question = Callable[[Inbox], Awaitable[object]]


def questions(now: float) -> Mapping[str, Question]:
    """Return every query by name. One without a match has to search the whole store."""
    lists: dict[str, dict[str, object]] = {
        "newest": {},
        "--type, a common one": {"type": "order.paid"},
        "--type, a rarer one": {"type": "order.created"},
        "--type, no match": {"type": "refund.created"},
        **{f"--state {state.value}": {"state": state} for state in DeliveryState},
        "--since, all match": {"since": now - 86_400},
        "--since, no match": {"since": now - 1},
        "until, no match": {"until": now - 40 * 86_400},
        "--tenant, no match": {"tenant_id": UNKNOWN},
        "--type and --state, no match": {"type": "refund.created", "state": DeliveryState.DONE},
        "--type and --since, no match": {"type": "refund.created", "since": now - 86_400},
        "--tenant and --state, no match": {"tenant_id": UNKNOWN, "state": DeliveryState.DONE},
        "of one subject": {"subject": "subject-5"},
        "of one subject, no match": {"subject": "none"},
        "of one subject and --type, no match": {"subject": "none", "type": "order.paid"},
    }

    def asking(filters: dict[str, object]) -> Question:
        return lambda inbox: inbox.find(limit=50, **filters)  # type: ignore[arg-type]

    return {
        **{f"list {name}": asking(filters) for name, filters in lists.items()},
        "one event by its id, no match": lambda inbox: inbox.find_by_id(UNKNOWN),
        "counts by state": lambda inbox: inbox.counts(),
        "oldest waiting event": lambda inbox: inbox.oldest_waiting(),
    }


async def main(directory: str) -> None:
    """Run all queries and print their durations."""
    settings = Settings.from_mapping({"Storage:Path": directory}, standalone=True, receiver=False)
    found: dict[str, list[float]] = {}
    async with open_inbox(settings, owner="benchmark") as inbox:
        for name, ask in questions(time.time()).items():
            taken: list[float] = []
            begun = time.perf_counter()
            while len(taken) < REPETITIONS:
                before = time.perf_counter()
                await ask(inbox)
                now = time.perf_counter()
                taken.append(1000 * (now - before))
                if now - begun > ENOUGH_SECONDS and len(taken) > 3:
                    break
            found[name] = taken[2:]
    print(json.dumps(found))


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
