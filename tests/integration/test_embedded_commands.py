"""Commands beside a runtime that is a part of another program, such as examples/embedded.py."""

import json
import subprocess
import sys

from support.daemon import Place
from support.waiting import PATIENCE_SECONDS, wait_until

PROGRAM = """
import signal, trio, sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()

@handlers.on(OrderPaidEvent, enqueue=True)
async def grant(event):
    pass

async def main():
    runtime = sdk_trio.Runtime(sdk_trio.load_settings(standalone=True), handlers)
    with trio.open_signal_receiver(signal.SIGTERM) as arriving:
        async with trio.open_nursery() as nursery:
            started = await nursery.start(runtime.run)
            print(started.receiver[0], flush=True)
            async for _ in arriving:
                runtime.shut_down("asked to stop")
                break

trio.run(main)
"""


def test_an_embedded_runtime_is_found_by_the_commands(tmp_path):
    place = Place(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=place.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        ran = place.run("events", "trigger", "order.paid", "--format", "json")
        assert ran.returncode == 0, ran.stderr
        (row,) = json.loads(ran.stdout)
        assert (row["status"], row["state"]) == (200, "done")
        presence = json.loads((place.data / "runtime.json").read_text())
        assert (presence["address"], presence["pid"]) == (address, process.pid)
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
        wait_until(lambda: not (place.data / "runtime.json").exists())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
