"""A daemon whose disk is full: its probes, and its recovery once there is space."""

import httpx
import pytest
import trio
from support.senders import Senders
from support.service_manager import service_manager

resource = pytest.importorskip("resource")


async def test_a_full_disk_makes_the_daemon_unready_until_there_is_space(tmp_path):
    """The remaining space would fit a smaller record: the store must not count as working."""
    with service_manager(tmp_path) as manager:
        manager.settings |= {"Admin:Enabled": "true", "Admin:Bind": "127.0.0.1:0"}
        daemon = manager.start()
        sender = Senders(await manager.url())
        assert await sender._attempt("with-space") == 200
        await manager.wait_for("webhook.handled")
        # The kernel's limit of a file's size simulates a full disk: three pages fit.
        log = tmp_path / "state" / "inbox.db-wal"
        unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        end = (log.stat().st_size + 14_000, unlimited[1])
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, end)
        assert await sender._attempt("without") == 503
        admin = manager.logged("admin.started")[0]["admin"][0]
        async with httpx.AsyncClient(base_url=admin, timeout=60) as client:
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert "free space" in answer.json()["checks"][0]["detail"]
            resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
            with trio.fail_after(60):
                while (await client.get("/readyz")).status_code != 200:
                    await trio.sleep(0.02)
        assert await sender._attempt("without") == 200
        assert await manager.stop(daemon) == 0
        assert manager.handled() == ["with-space", "without"]
