"""The cost of one call to the upstream, in function calls, garbage and iterations of the loop.

As in ``test_counted_work.py``: a change that makes a call dearer fails here on any machine. The
limits are slightly above the current numbers. When a number falls, lower its limit; when it has to
rise, state the reason in the commit.
"""

import gc
import ssl
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import trio
import trustme

import sdk_trio
from sdk_trio.net.transport import Transport

CALLS = 50
WARM_UP = 30

#: Other work of the interpreter may make one call more expensive, but not each.
ATTEMPTS = 4

SERVER = Path(__file__).parents[2] / "benchmarks" / "client_server.py"


@attrs.define
class Work:
    """Counted work, each figure for one call. ``garbage`` are objects that only gc can free."""

    calls: float = 0
    steps: float = 0
    garbage: float = 0


class Steps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def ports(authority, tmp_path_factory):
    """The ports of a server in a separate process, whose work is not counted."""
    certificate = tmp_path_factory.mktemp("server") / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    with subprocess.Popen(
        [sys.executable, SERVER, certificate], stdout=subprocess.PIPE, text=True
    ) as server:
        yield [int(port) for port in server.stdout.readline().split()]
        server.kill()


async def measure(url: str, context: ssl.SSLContext) -> Work:
    settings = sdk_trio.Settings.from_mapping(
        {
            "Mode": "Custom",
            "CustomBaseUrl": url,
            "BasePath": "/",
            "AccessToken": "loopback",
            "Environment": "Development",
        },
        receiver=False,
    )
    calls = 0
    steps = Steps()

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    async with sdk_trio.Client(settings, Transport(settings.connection, verify=context)) as client:
        for _ in range(WARM_UP):
            await client.orders.get("order_1")
        gc.collect()
        gc.disable()
        trio.lowlevel.add_instrument(steps)
        sys.setprofile(count)
        try:
            for _ in range(CALLS):
                await client.orders.get("order_1")
        finally:
            sys.setprofile(None)
            trio.lowlevel.remove_instrument(steps)
            garbage = gc.collect()
            gc.enable()
    return Work(*(figure / CALLS for figure in (calls, steps.count, garbage)))


@pytest.mark.parametrize(
    ("version", "most"),
    [
        pytest.param("HTTP/1.1", Work(520, 1.1, 0.1), id="http1"),
        pytest.param("HTTP/2", Work(1065, 2.1, 0.1), id="http2"),
    ],
)
async def test_a_call_costs_no_more_than_it_did(version, most, ports, authority):
    plain, secure = ports
    is_http2 = version == "HTTP/2"
    context = ssl.create_default_context()
    authority.configure_trust(context)
    url = f"https://127.0.0.1:{secure}" if is_http2 else f"http://127.0.0.1:{plain}"
    dearer = {}
    for _ in range(ATTEMPTS):
        with trio.fail_after(60):
            work = await measure(url, context)
        dearer = {
            name: value for name, value in attrs.asdict(work).items() if value > getattr(most, name)
        }
        if not dearer:
            break
    assert dearer == {}, f"{work}, at most {most}"
