"""The cost of a call of the synchronous client, compared with the asynchronous one.

    python benchmarks/blocking.py [--rounds 9] [--calls 300]

One server process on loopback answers each request at once; both clients get one record after the
other in one process. Each client runs once in a round, ratios are computed within a round, and the
result is the median of the ratios. A list needs one switch to the client's thread for each page, an
export one for each received part of the file, so neither cost grows per record.
"""

import argparse
import statistics
import subprocess
import sys
import time

import trio

import sdk_trio

BODY = b'{"id":"ord_1","status":"paid"}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


async def serve_one(stream):
    received = b""
    while more := await stream.receive_some():
        received += more
        while b"\r\n\r\n" in received:
            received = received.partition(b"\r\n\r\n")[2]
            await stream.send_all(ANSWER)


async def serve():
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve_one, 0)
        print(listeners[0].socket.getsockname()[1], flush=True)


def settings_for(port):
    address = f"http://127.0.0.1:{port}"
    keys = {"Environment": "Development", "Mode": "Custom", "CustomBaseUrl": address}
    return sdk_trio.Settings.from_mapping({**keys, "AccessToken": "none"}, receiver=False)


def timed_sync(client, calls):
    begin = time.perf_counter(), time.process_time()
    for _ in range(calls):
        client.orders.get("ord_1")
    return elapsed(begin, calls)


def timed_async(settings, calls):
    async def main():
        async with sdk_trio.Client(settings) as client:
            await client.orders.get("ord_1")
            begin = time.perf_counter(), time.process_time()
            for _ in range(calls):
                await client.orders.get("ord_1")
            return elapsed(begin, calls)

    return trio.run(main)


def elapsed(begin, calls):
    """Return the microseconds for a call, of wall-clock time and of CPU time."""
    wall, cpu = begin
    scale = 1e6 / calls
    return (time.perf_counter() - wall) * scale, (time.process_time() - cpu) * scale


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(serve)
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE)
    try:
        settings = settings_for(int(server.stdout.readline()))
        with sdk_trio.SyncClient(settings) as client:
            timed_sync(client, 10)
            rows = [
                (timed_async(settings, options.calls), timed_sync(client, options.calls))
                for _ in range(options.rounds)
            ]
    finally:
        server.kill()
        server.wait()
    for number, what in enumerate(("wall clock", "processor")):
        both = [(one[number], other[number]) for one, other in rows]
        ratios = sorted(other / one for one, other in both)
        print(
            f"{what}: async {statistics.median(a for a, _ in both):.0f} us, "
            f"sync {statistics.median(b for _, b in both):.0f} us a call, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
