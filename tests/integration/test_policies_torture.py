"""The short form of tests/policies_torture.py: processes that are killed keep the policies."""

import random
from pathlib import Path

import pytest
import trio
from policies_torture import Story
from support.postgres import running_server


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_policies_hold_over_four_processes_that_are_killed(
    store: str, tmp_path: Path
) -> None:
    place = str(tmp_path / "inbox.db") if store == "sqlite" else running_server().empty()
    story = Story(
        place, tmp_path, runs=60, kills=2, rate=600.0, seconds=5.0, random=random.Random(1)
    )
    with trio.fail_after(120):
        judged = await story.run()
    assert not judged.wrong
    assert judged.kills == 2
    assert judged.pauses > 0
    assert judged.superseded > 0
