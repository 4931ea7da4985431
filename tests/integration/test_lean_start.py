"""Modules that a receiver loads at its start: none that it does not need yet."""

import gc
import json
import os
import subprocess
import sys

import httpx
import pytest
from support.daemon import Daemon, Place
from support.deliveries import SECRET

from sdk_trio.testing import sign_delivery

#: Packages that cost milliseconds and megabytes, each with who needs it.
FORBIDDEN = {
    "httpx": "calls of the upstream",
    "httpcore": "calls of the upstream",
    "cryptography": "ed25519 secrets",
    "apsw": "the store in SQLite",
    "opentelemetry": "traces, once an SDK is configured",
    "pytest": "tests",
    "h11": "the replicator's control socket, and hypercorn",
    "sdk_trio.replication": "replication",
    "hypercorn": "TLS, and protocols other than HTTP/1.1",
    "h2": "calls of the upstream, and hypercorn",
    "filelock": "the data directory",
    "sdk_trio.tenants": "tenants",
    "sdk_trio.records.tenants": "tenants",
    "sdk_trio.records.notifications": "tenants",
    "sdk_trio.webhooks.simulator": "the Development environment",
    "sdk_trio.events.samples": "the simulator",
    "sdk_trio.testing": "tests",
    "sdk_trio.cli": "the command line",
}

#: The modules among these that the store on disk needs.
NEEDED_BY_THE_DISK = {name: FORBIDDEN[name] for name in ("apsw", "filelock")}

START = """
import json, sys
import trio
import sdk_trio

async def main(settings):
    runtime = sdk_trio.Runtime(settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        print(json.dumps(sorted(sys.modules)))
        runtime.shut_down("seen")

settings = sdk_trio.Settings.from_mapping(json.loads(sys.argv[1]), standalone=True)
trio.run(main, settings)
"""


def modules_after_start(**keys: object) -> set[str]:
    mapping = {
        "Server:Bind": ["127.0.0.1:0"],
        "Admin:Bind": "127.0.0.1:0",
        "Storage:Backend": "Memory",
        "Webhooks:RequireHttps": False,
        "Webhooks:Secret": "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg",  # a test value
        **keys,
    }
    ended = subprocess.run(
        [sys.executable, "-c", START, json.dumps(mapping)],
        env={**os.environ, "SDK_ADMIN_TOKEN": "token-of-a-test"},  # a test value
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout))


def test_a_standalone_start_loads_nothing_that_it_does_not_use():
    loaded = modules_after_start()
    assert "sdk_trio.webhooks.receiver" in loaded
    assert {name: why for name, why in FORBIDDEN.items() if name in loaded} == {}


def test_the_store_on_disk_adds_only_its_own_parts(tmp_path):
    more = modules_after_start(
        **{"Storage:Backend": "Sqlite", "Storage:Path": str(tmp_path / "data")}
    )
    assert "apsw" in more
    assert {name: FORBIDDEN[name] for name in more & FORBIDDEN.keys()} == NEEDED_BY_THE_DISK
    packages = {name.partition(".")[0] for name in more - modules_after_start()}
    assert packages - set(sys.stdlib_module_names) <= {"apsw", "filelock", "sdk_trio"}


#: Classes of attrs' own that ``run`` makes: attrs writes and compiles the methods of each, which
#: takes 3 million instructions and 30 KB; a struct takes a twentieth and a quarter of that.
MOST_COMPILED = 15

LOOK_AT_A_START = """
import gc, sys, sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
at_import = gc.get_threshold()[0]

@handlers.on(OrderPaidEvent)
async def look(event):
    at_work = gc.isenabled() and gc.get_threshold()[0]
    counted = gc.get_freeze_count(), len(gc.get_objects()), compiled()
    print("LOOKED", at_import, at_work, *counted, flush=True)

def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("sdk_trio.")]
    named = [value for module in modules for value in vars(module).values()]
    kinds = {kind for kind in named if isinstance(kind, type) and kind.__module__ in sys.modules}
    ours = [kind for kind in kinds if kind.__module__.startswith("sdk_trio.")]
    return sum("__attrs_attrs__" in vars(kind) for kind in ours)
"""


TWICE = "gc.set_threshold(*(2 * each for each in gc.get_threshold()))"


@pytest.mark.parametrize("wish", ["", "gc.disable()", TWICE])
def test_a_start_compiles_little_and_leaves_the_collector_little_to_look_at(tmp_path, wish):
    (tmp_path / "app.py").write_text(f"{LOOK_AT_A_START}\n{wish}\n", encoding="utf-8")
    place = Place(tmp_path)
    signed = sign_delivery("order.paid", secret=SECRET)
    command = [sys.executable, "-m", "sdk_trio", "run", "--standalone", "--app", "app:handlers"]
    # A new process: a forked one has the modules that its parent had loaded.
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=place.environ, stdout=log, stderr=log)
    try:
        daemon = Daemon(process, tmp_path / "log")
        url = f"{daemon.receiver}/hooks/sdk"
        answer = httpx.post(url, content=signed.body, headers=signed.headers, timeout=60)
        assert answer.status_code == 200
        printed = daemon.log.read_text()
    finally:
        process.kill()
        process.wait()
    (looked,) = (line.split()[1:] for line in printed.splitlines() if line.startswith("LOOKED"))
    at_import, at_work, frozen, watched, compiled = looked
    assert int(compiled) <= MOST_COMPILED
    # No garbage collection while modules are imported; then the application's own setting.
    assert int(at_import) == 10_000_000
    if wish == "gc.disable()":
        assert at_work == "False"
    else:
        assert int(at_work) == gc.get_threshold()[0] * (2 if wish else 1)
    assert int(watched) < int(frozen) / 10
