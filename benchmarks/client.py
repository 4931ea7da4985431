"""GET/s and CPU per GET of the client's transport, compared with stock httpx and aiohttp.

    python benchmarks/client.py [--rounds 5] [--seconds 0.5] [--json FILE]

One server process (``client_server.py``) runs on one core, the clients on another. In each round
every client runs once for a short time, in an order that changes between rounds, so a disturbance
of the machine affects all of them. Ratios are computed within a round and reported as median and
range. Compare ratios, not rates.

The clients:

- ``httpx``: ``httpx.AsyncClient`` with its defaults, on trio
- ``sdk+httpx``: the same client with this package's transport
- ``httpx transport``, ``sdk transport``: the two transports without a client, as our pipeline uses
  them
- ``sdk client``: the whole ``sdk_trio.Client``
- aiohttp, on asyncio, which has no HTTP/2

``make bench-client`` installs the peers.
"""

import argparse
import asyncio
import gc
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import httpx
import trio
import trustme

import sdk_trio
from sdk_trio.config.options.client import ConnectionOptions
from sdk_trio.net.transport import Transport

TASKS = (1, 16, 100)
BASELINE = "httpx"
WARM_UP_REQUESTS = 2  # a task


class Timing:
    """Counts requests until the end of the time; the same for every client."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.done = 0

    def start(self):
        gc.collect()
        self.wall, self.cpu, self.done = time.perf_counter(), time.process_time(), 0

    @property
    def goes_on(self):
        return time.perf_counter() - self.wall < self.seconds

    def result(self):
        wall = time.perf_counter() - self.wall
        cpu = time.process_time() - self.cpu
        return {"rate": self.done / wall, "cpu": cpu / self.done * 1e6}


async def on_trio(get, tasks, timing):
    async def warm_up():
        for _ in range(WARM_UP_REQUESTS):
            await get()

    async def work():
        while timing.goes_on:
            await get()
            timing.done += 1

    for task in (warm_up, work):
        timing.start()
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(task)
    return timing.result()


def trio_client(make_transport):
    def measure(url, context, http2, tasks, timing):
        async def main():
            transport = make_transport(context, http2)
            async with httpx.AsyncClient(transport=transport, timeout=30) as client:

                async def get():
                    response = await client.get(url)
                    assert response.status_code == 200

                return await on_trio(get, tasks, timing)

        return trio.run(main)

    return measure


def trio_transport(make_transport):
    def measure(url, context, http2, tasks, timing):
        async def main():
            async with make_transport(context, http2) as transport:

                async def get():
                    request = httpx.Request("GET", url, headers={"accept": "application/json"})
                    response = await transport.handle_async_request(request)
                    await response.aread()
                    await response.aclose()
                    assert response.status_code == 200

                return await on_trio(get, tasks, timing)

        return trio.run(main)

    return measure


def stock(context, http2):
    return httpx.AsyncHTTPTransport(verify=context, http2=http2)


def ours(context, http2):
    return Transport(ConnectionOptions(enable_http2=http2), verify=context)


def whole_client(url, context, http2, tasks, timing):
    """``sdk_trio.Client`` as an application uses it: retries, breaker, budget and deadline."""
    settings = sdk_trio.Settings.from_mapping(
        {
            "Mode": "Custom",
            "CustomBaseUrl": url,
            "BasePath": "/",
            "AccessToken": "only-for-the-loopback-address",
            "Environment": "Development",
        },
        receiver=False,
    )

    async def main():
        transport = ours(context, http2)
        async with sdk_trio.Client(settings, transport) as client:

            async def get():
                answer = await client.request("GET", "/")
                assert answer.status_code == 200

            return await on_trio(get, tasks, timing)

    return trio.run(main)


def aiohttp_client(url, context, http2, tasks, timing):
    async def main():
        async with aiohttp.ClientSession() as session:

            async def get():
                async with session.get(url, ssl=context) as response:
                    assert response.status == 200
                    await response.read()

            async def warm_up():
                for _ in range(WARM_UP_REQUESTS):
                    await get()

            async def work():
                while timing.goes_on:
                    await get()
                    timing.done += 1

            for task in (warm_up, work):
                timing.start()
                await asyncio.gather(*(task() for _ in range(tasks)))
            return timing.result()

    return asyncio.run(main())


CLIENTS = {
    "httpx": trio_client(stock),
    "sdk+httpx": trio_client(ours),
    "httpx transport": trio_transport(stock),
    "sdk transport": trio_transport(ours),
    "sdk client": whole_client,
    "aiohttp": aiohttp_client,
}


def measure_all(rounds, seconds):
    authority = trustme.CA()

    def context():
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(made)
        return made

    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = ["--cpu", str(cpus[-1])] if len(cpus) > 1 else []
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(file.name)
        script = Path(__file__).with_name("client_server.py")
        server = subprocess.Popen(
            [sys.executable, str(script), file.name, *pinned], stdout=subprocess.PIPE, text=True
        )
        try:
            plain, secure = map(int, server.stdout.readline().split())
            if pinned:
                os.sched_setaffinity(0, {cpus[0]})
            urls = {
                "HTTP/1.1": (f"http://127.0.0.1:{plain}/", False),
                "HTTP/2": (f"https://127.0.0.1:{secure}/", True),
            }
            for version, (url, http2) in urls.items():
                for tasks in TASKS:
                    names = [n for n in CLIENTS if not (http2 and n == "aiohttp")]
                    results = {name: [] for name in names}
                    for number in range(rounds):
                        turn = number % len(names)
                        for name in names[turn:] + names[:turn]:
                            timing = Timing(seconds)
                            results[name].append(
                                CLIENTS[name](url, context(), http2, tasks, timing)
                            )
                    yield version, tasks, results
        finally:
            server.kill()
            server.wait()


def ratio(results, name, key):
    """Return median and range of the ratio to stock httpx of each round; above 1 is better."""
    pairs = zip(results[name], results[BASELINE], strict=True)
    ratios = [b[key] / a[key] if key == "cpu" else a[key] / b[key] for a, b in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one client in one round")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    arguments = parser.parse_args()
    everything = []
    head = f"{'':10}{'tasks':>6}  {'client':16}{'GET/s':>8}{'us CPU':>8}"
    print(f"{head}   {'rate over httpx':>20}   {'CPU under httpx':>20}")
    for version, tasks, results in measure_all(arguments.rounds, arguments.seconds):
        everything.append({"version": version, "tasks": tasks, "results": results})
        for name, measured in results.items():
            rate = statistics.median(result["rate"] for result in measured)
            cpu = statistics.median(result["cpu"] for result in measured)
            line = f"{version:10}{tasks:>6}  {name:16}{rate:>8.0f}{cpu:>8.0f}"
            for key in ("rate", "cpu"):
                middle, least, most = ratio(results, name, key)
                line += f"   {middle:>6.2f} ({least:.2f}-{most:.2f})"
            print(line, flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
