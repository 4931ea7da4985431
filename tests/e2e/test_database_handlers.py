"""Handlers that write through Django and SQLAlchemy, in a real daemon, on a real PostgreSQL."""

import sys

import pytest
from support.database_handlers import APPLICATIONS, THREADS, run_handlers
from support.postgres import running_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("framework", APPLICATIONS)
async def test_every_event_is_written_once_and_connections_are_bounded(tmp_path, framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    server = running_server()
    figures = await run_handlers(framework, server, tmp_path, events=500, cut_each=0.4)
    assert (figures.acknowledged, figures.rows) == (500, 500)
    assert figures.states == {"done": 500}
    assert 0 < figures.most <= THREADS
    assert figures.cuts
    # Django closes at the end of each run; the pool of SQLAlchemy keeps what it has.
    assert figures.left == 0 if framework == "django" else figures.left <= THREADS
