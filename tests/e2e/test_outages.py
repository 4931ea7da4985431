"""An outage of the sender, with the receiver killed while it catches up."""

import outages


async def test_after_an_outage_with_a_kill_every_newest_state_was_handled_once(tmp_path):
    words = ["--hours", "72", "--tenants", "2", "--objects", "80", "--kills", "1"]
    result = await outages.experiment(outages.parse(words), tmp_path, shares={"orders": 1})
    assert result.problems == []
    assert result.counts["newest states handled once"] == 80
    assert result.counts["kills"] == 1
