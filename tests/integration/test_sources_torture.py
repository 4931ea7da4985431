"""The short form of tests/sources_torture.py: six senders and a receiver that is killed."""

import random
from pathlib import Path

import trio
from sources_torture import Story


async def test_events_of_six_senders_are_handled_once_by_a_receiver_that_is_killed(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path, deliveries=120, kills=1, random=random.Random(1))
    with trio.fail_after(120):
        judged = await story.run()
    assert not judged.wrong
    assert judged.handled == 120
    assert judged.kills == 1
    assert judged.forgeries > 0
