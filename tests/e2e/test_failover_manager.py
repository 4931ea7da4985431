"""A failover by Patroni under load, a small sample of the long run (tests/failovers.py)."""

from pathlib import Path

from failovers import SERVER, fail_over
from support.patroni import patroni_cluster


async def test_a_failover_by_patroni_loses_nothing_and_keeps_the_order(tmp_path: Path) -> None:
    with patroni_cluster(2) as cluster:
        before = cluster.leader()
        report = await fail_over(tmp_path, cluster, kills=[SERVER])
        assert cluster.leader() not in (before, None)
    table = "\n".join(f"{name}: {value}" for name, value in report.rows())
    assert not report.account.broken, table
    assert report.account.states == {"done": report.account.acknowledged}, table
    # There was load, and a time without a primary.
    assert report.account.acknowledged > 20, table
    assert report.answers.get("503", 0) > 0, table
