"""A handler that blocks the event loop is named while it does, in the log and in the metrics."""

import re
import signal

import httpx
from support.supervised import Daemon, running
from support.waiting import wait_until


def test_a_blocked_loop_is_reported_once_with_the_handler_that_blocks_it(tmp_path):
    daemon = Daemon(tmp_path, environment={"BLOCK": "4", "ASIDE": "600"})
    with running(daemon):
        assert daemon.deliver("aside-1") == 200  # another handler is at work and blocks nothing
        wait_until(lambda: daemon.runs("aside-1"), daemon.log)
        assert not daemon.logged("runtime.blocked")
        daemon.deliver("block-late")
        wait_until(lambda: daemon.logged("runtime.blocked"), daemon.log)
        assert not daemon.runs("block-late", "ended"), "it is seen while it still blocks"
        daemon.wait_for_state("block-late", "done")
        wait_until(lambda: daemon.logged("runtime.unblocked"), daemon.log)
        (blocked,) = daemon.logged("runtime.blocked")
        assert blocked["level"] == "warning"
        assert (blocked["handler"], blocked["webhook_id"]) == ("queued", "block-late")
        assert "application.py" in blocked["place"]
        assert blocked["seconds"] >= 1
        (over,) = daemon.logged("runtime.unblocked")
        assert over["seconds"] >= 2
        (token,) = (tmp_path / "data").glob("admin*token*")
        metrics = httpx.get(
            f"http://127.0.0.1:{daemon.admin_port}/metrics",
            headers={"authorization": f"Bearer {token.read_text().strip()}"},
        ).text
        assert "\nsdk_runtime_blocked_total 1\n" in metrics
        (seconds,) = re.findall(r"\nsdk_runtime_blocked_seconds_total (\S+)", metrics)
        assert float(seconds) >= 2
        daemon.signal(signal.SIGKILL)
