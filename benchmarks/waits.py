"""Shows what the slowest deliveries wait for, by a trace of the server's system calls.

    python benchmarks/waits.py [inline|enqueued] [--seconds 20] [--rate 500] [--directory /var/tmp]

The server runs under strace, which records when each call begins and ends, for the reads and
answers of connections and for the syncs and writes of the store. A delivery lasts from the read of
its request to its answer. Of that time, this counts what its connection spent while a sync ran,
while another call of the store or of the log ran, and the rest: the event loop, the threads' lock,
and the garbage collector. It prints these for all deliveries and for the slowest hundredth. It
needs two cores and an otherwise idle machine, and ends by itself.
"""

import argparse
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
from peers import ENQUEUED, INLINE, compile_all, our_servers
from serving import send, serving

_CALLS = ("recvfrom", "sendto", "fdatasync", "fsync", "pwrite64", "pread64", "write")
_SYNCS = frozenset(("fdatasync", "fsync"))
_LINE = re.compile(
    r"(?P<thread>\d+) +(?P<at>[\d.]+) (?P<name>\w+)\((?P<fd>\d+).* = (?P<result>-?\d+).*"
    r"<(?P<lasted>[\d.]+)>$"
)
#: A request of the generator has a body of 2 KB.
_LEAST_REQUEST = 1000


@attrs.frozen
class Call:
    """A system call, with its times in seconds."""

    name: str
    descriptor: int
    result: int
    begin: float
    end: float


@attrs.frozen
class Delivery:
    """The seconds of one delivery: all of them, those of syncs, and of the store's other calls."""

    all: float
    syncs: float
    others: float


def calls_of(trace: Path) -> list[Call]:
    """Return the finished calls of a trace, in the order of their beginnings."""
    found = []
    begun: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        thread, _, rest = line.partition(" ")
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        if " resumed>" in rest:
            head = begun.pop(thread, None)
            if head is None:
                continue
            rest = head + rest.partition(" resumed>")[2]
        if match := _LINE.match(f"{thread} {rest.lstrip()}"):
            at, lasted = float(match["at"]), float(match["lasted"])
            call = Call(match["name"], int(match["fd"]), int(match["result"]), at, at + lasted)
            found.append(call)
    return sorted(found, key=lambda call: call.begin)


def deliveries_of(calls: Sequence[Call]) -> list[Delivery]:
    """Return the deliveries of a trace, and what they have waited for."""
    syncs = [call for call in calls if call.name in _SYNCS]
    others = [call for call in calls if call.name in ("pwrite64", "pread64", "write")]
    read_at: dict[int, float] = {}
    found = []
    for call in calls:
        if call.name == "recvfrom" and call.result > _LEAST_REQUEST:
            read_at[call.descriptor] = call.begin
        elif call.name == "sendto" and (begin := read_at.pop(call.descriptor, None)) is not None:
            span = begin, call.end
            found.append(
                Delivery(call.end - begin, _overlap(syncs, *span), _overlap(others, *span))
            )
    return found


def _overlap(calls: Iterable[Call], begin: float, end: float) -> float:
    return sum(
        max(0.0, min(call.end, end) - max(call.begin, begin))
        for call in calls
        if call.begin < end and call.end > begin
    )


def main() -> None:
    """Trace one server, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("server", nargs="?", choices=[INLINE, ENQUEUED], default=INLINE)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    compile_all()
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        trace = Path(place) / "trace"
        under = ("strace", "-D", "-f", "--seccomp-bpf", "-qq", "-ttt", "-T", "-s", "0")
        under += ("-e", f"trace={','.join(_CALLS)}", "-e", "signal=none", "-o", str(trace))
        with serving(our_servers()[options.server], directory=Path(place), under=under) as process:
            send(process, rate=options.rate, seconds=options.seconds, connections=32, warm_up=2.0)
        found = sorted(deliveries_of(calls_of(trace)), key=lambda each: each.all)
    slowest = found[-(len(found) // 100) :]
    print(f"{options.server}: {len(found)} deliveries")
    print("| | all, ms | a sync, ms | other calls, ms | the rest, ms |")
    print("|---|---|---|---|---|")
    for name, chosen in (("all, mean", found), ("the slowest hundredth, mean", slowest)):
        whole = statistics.mean(each.all for each in chosen)
        syncs = statistics.mean(each.syncs for each in chosen)
        others = statistics.mean(each.others for each in chosen)
        rest = whole - syncs - others
        print(
            "| "
            + " | ".join([name, *(f"{1000 * n:.2f}" for n in (whole, syncs, others, rest))])
            + " |"
        )


if __name__ == "__main__":
    main()
