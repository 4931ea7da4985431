"""A receiver on PostgreSQL whose clock is wrong, or whose connections are half-open."""

import json
import signal
import urllib.error
import urllib.request

import httpx
import pytest
from support.clock_steps import ClockSteps
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.postgres import running_server
from support.silent_proxy import silent_proxy
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery

APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def handle(event):
    pass
"""


@pytest.fixture
def place(tmp_path) -> Place:
    (tmp_path / "application.py").write_text(APPLICATION)
    place = Place(tmp_path)
    place.environ.update(
        SDK_POSTGRES_DSN=running_server().fresh(), SDK__STORAGE__BACKEND="Postgres"
    )
    return place


def token(daemon: Daemon) -> str:
    return (daemon.log.parent / "sdk-data" / "admin-token").read_text().strip()


def readiness(daemon: Daemon) -> tuple[int, dict[str, dict]]:
    """The status of the probe, and its checks by name."""
    request = urllib.request.Request(
        f"{daemon.admin}/readyz", headers={"Authorization": f"Bearer {token(daemon)}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    checks = json.loads(text)["checks"]
    return status, {check["name"]: check for check in checks}


def deliver(daemon: Daemon, webhook_id: str) -> int:
    signed = sign_delivery("order.paid", secret=SECRET, webhook_id=webhook_id)
    return httpx.post(
        f"{daemon.receiver}/hooks/sdk",
        content=signed.body,
        headers=dict(signed.headers),
        timeout=PATIENCE_SECONDS,
    ).status_code


@pytest.mark.parametrize("ahead", [-600, 600])
def test_a_host_whose_clock_refuses_every_delivery_is_not_ready(place, ahead):
    clock = ClockSteps(place.directory)
    place.environ.update(clock.environment)
    clock.set(ahead)
    with place.daemon("--app", "application:handlers") as daemon:
        wait_until(lambda: "clock" in readiness(daemon)[1])
        status, checks = readiness(daemon)
        assert (status, checks["clock"]["ok"]) == (503, False)
        side = "ahead of" if ahead > 0 else "behind"
        assert f"s {side} the database's" in checks["clock"]["detail"]
        assert abs(daemon.wait_for("runtime.clock_differs")["seconds"] - ahead) < 60
        metrics = httpx.get(
            f"{daemon.admin}/metrics", headers={"Authorization": f"Bearer {token(daemon)}"}
        ).text
        assert "sdk_clock_offset_seconds" in metrics
        # A clock that is a little off is worth a warning, and no outage.
        clock.set(ahead / 60)
        wait_until(lambda: readiness(daemon)[0] == 200)
        assert "synchronize" in readiness(daemon)[1]["clock"]["detail"]


def test_a_receiver_with_half_open_connections_goes_on_and_stops_in_order(place):
    server = running_server()
    name = place.environ["SDK_POSTGRES_DSN"].rpartition("=")[2]
    with silent_proxy(server.directory) as proxy:
        place.environ["SDK_POSTGRES_DSN"] = (
            f"host=127.0.0.1 port={proxy.port} user=owner dbname={name}"
        )
        with place.daemon("--app", "application:handlers") as daemon:
            assert deliver(daemon, "before") == 200
            proxy.fall_silent()
            wait_until(lambda: deliver(daemon, "after") == 200)
            assert daemon.logged("store.connection_cut")
            proxy.fall_silent(new=True)
            assert deliver(daemon, "never") == 503
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(120) == 0, daemon.log.read_text()
