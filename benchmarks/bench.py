"""Measures the default configuration against FastAPI, and other figures, in one run.

    python benchmarks/bench.py [--rows everyday full ...] [--rounds 5] [--quick]

A whole run takes about half an hour, ``--quick`` about five minutes. After each group, its
figures replace the earlier ones in ``benchmarks/figures.json``; at the end the documentation is
updated. A quick run is only printed and written to ``benchmarks/results/quick.json``. Absolute
figures depend on the machine; ratios almost do not.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import apsw
import attrs
import report
from groups import CONNECTIONS, GROUPS, QUICK, WHOLE, Bench, Scale
from peers import HERE, compile_all, our_servers, peer_servers, versions
from serving import CORES, GENERATOR_CORE
from stores import issue_certificate

import sdk_trio


def main() -> int:
    """Run the requested groups and write the figures; return 1 if one is not reliable."""
    options = _parser().parse_args()
    scale = _scale(options)
    output = options.output or (HERE / "results/quick.json" if options.quick else report.FIGURES)
    stores = options.directory / f"sdk-trio-benchmark-{os.getuid()}"
    stores.mkdir(mode=0o700, exist_ok=True, parents=True)
    # This program mostly sleeps; the rest of its work must not run on the server's core.
    os.sched_setaffinity(0, {GENERATOR_CORE})
    # End a started server even if this program is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    compile_all()
    servers = our_servers() | ({} if options.without_peers else peer_servers())
    facts = _facts(stores, {} if options.without_peers else versions())
    kept = _read(output)
    with tempfile.TemporaryDirectory(dir=stores, prefix="run") as place:
        bench = Bench(servers, stores, issue_certificate(Path(place)), scale, _say)
        for name in options.rows:
            begun = time.monotonic()
            runs = GROUPS[name](bench)
            kept["groups"][name] = {
                "facts": facts,
                "quick": options.quick,
                "rounds": scale.rounds,
                "seconds": scale.seconds,
                "connections": CONNECTIONS,
                "sizes": {
                    key: getattr(scale, key) for key in ("finished", "backlog", "expired", "some")
                },
                "took_seconds": round(time.monotonic() - begun),
                "runs": runs,
            }
            _write(output, kept)
            _say(f"{name}: {time.monotonic() - begun:.0f} s")
    measured = {"groups": {name: kept["groups"][name] for name in options.rows}}
    print(report.sections(measured))
    if output == report.FIGURES:
        report.main()
    return 1 if report.problems(measured) and not options.quick else 0


def _scale(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else WHOLE
    names = ("rounds", "seconds", "warm_up", "finished", "backlog", "expired", "some", "counted")
    given = {name: getattr(options, name) for name in names}
    return attrs.evolve(scale, **{name: value for name, value in given.items() if value})


def _facts(directory: Path, peers: dict[str, str]) -> dict[str, object]:
    """Return the facts about the machine that the figures depend on."""
    processor = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": CORES,
        "processor": processor[0] if processor else platform.machine(),
        "memory_gb": pages / 1e9,
        "disk": _disk(directory),
        "sync_ms": _sync_ms(directory),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "version": sdk_trio.__version__,
        "peers": peers,
    }


def _disk(directory: Path) -> str:
    """Return the file system of a directory and its device."""
    number = directory.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    kind = "unknown file system"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            kind = " on ".join(rest.split()[:2])
    return kind


def _sync_ms(directory: Path) -> float:
    """Return the milliseconds to sync one page to the disk: the median of fifty."""
    taken = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(50):
            before = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            taken.append(1000 * (time.perf_counter() - before))
    return statistics.median(taken)


def _read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {"groups": {}}


def _write(file: Path, kept: dict) -> None:
    """Write the figures so far, so that an interrupted run is not lost."""
    file.parent.mkdir(exist_ok=True)
    rounded = json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 3))
    # A line for each round of a server.
    file.write_text(json.dumps(rounded).replace('{"count"', '\n{"count"') + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    groups = tuple(GROUPS)
    made.add_argument("--rows", nargs="+", choices=groups, default=groups, help="these groups only")
    made.add_argument("--quick", action="store_true", help="one short round of everything")
    made.add_argument(
        "--without-peers", action="store_true", help="only our servers; installs nothing"
    )
    made.add_argument("--rounds", type=int, help="number of measurements of each server")
    made.add_argument("--seconds", type=float, help="of each load")
    made.add_argument("--warm-up", type=float, help="seconds of warm-up before them")
    made.add_argument("--finished", type=int, help="finished events in the full store")
    made.add_argument("--backlog", type=int, help="waiting events at the start")
    made.add_argument("--some", type=int, help="finished events in the smaller store")
    made.add_argument("--counted", type=int, help="deliveries whose instructions are counted")
    made.add_argument("--expired", type=int, help="events that the retention removes")
    made.add_argument(
        "--directory",
        type=Path,
        default=Path("/var/tmp"),
        help="a directory on a real disk; filled stores are kept there",
    )
    made.add_argument("--output", type=Path, help="a file for the figures; the page is not changed")
    return made


if __name__ == "__main__":
    sys.exit(main())
