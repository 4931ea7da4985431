"""Run many events through handlers that use Django and SQLAlchemy, and count connections and rows.

    python tests/database_load.py [--events 10000] [--cut-each 5]

A daemon with SQLite's store and a PostgreSQL server of its own; now and then all connections of the
handlers are cut on the server's side. It stops by itself. The exit status is 1 if an acknowledged
event was not written, or more connections were open than there are places among the threads.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import trio
from support.database_handlers import APPLICATIONS, THREADS, run_handlers
from support.postgres import remove_server, running_server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--cut-each", type=float, default=5.0, metavar="SECONDS")
    arguments = parser.parse_args()
    failed = False
    print("| handlers | acknowledged | rows | connections at most | at the end | cuts | seconds |")
    print("|---|---|---|---|---|---|---|")
    try:
        for framework in APPLICATIONS:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                figures = trio.run(_run, framework, Path(directory), arguments)
            seconds = time.monotonic() - begun
            counts = (figures.acknowledged, figures.rows, figures.most, figures.left, figures.cuts)
            print(f"| {framework} | {' | '.join(map(str, counts))} | {seconds:.0f} |", flush=True)
            failed |= figures.rows != figures.acknowledged or figures.most > THREADS
    finally:
        remove_server()
    return int(failed)


async def _run(framework, directory, arguments):
    return await run_handlers(
        framework,
        running_server(),
        directory,
        events=arguments.events,
        cut_each=arguments.cut_each,
    )


if __name__ == "__main__":
    sys.exit(main())
