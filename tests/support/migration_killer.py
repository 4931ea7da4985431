"""Kills the migration of an old store with -9 at every statement, and in the middle of long ones.

A program of its own, which imports everything once and forks a child for each run:
``python migration_killer.py DIRECTORY VERSION ROWS``. It prints how many runs were killed, and ends
with 1 at the first run after which the store was neither as before nor as after, or had lost a row.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import apsw

from sdk_trio.storage.engines.sqlite import connect_writer
from sdk_trio.storage.sql.schema import APPLICATION_ID, MIGRATIONS, VERSION

#: Steps of SQLite's machine between two places at which a long statement is killed.
STEPS = 20_000

_ROW = """
INSERT INTO inbox ({id}, type, state, queued, attempts, received_at, timestamp, ordered, subject)
VALUES (?, 't', ?, 0, 0, 1.0, 1, 1, 's')
"""


def make(file: Path, version: int, rows: int) -> None:
    """Write a store as an earlier version of the schema left it."""
    old = apsw.Connection(os.fspath(file))
    old.pragma("journal_mode", "wal")
    for statement in itertools.chain.from_iterable(MIGRATIONS[:version]):
        old.execute(statement)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {version}")
    row = _ROW.format(id="webhook_id" if version < 6 else "delivery_key")
    with old:
        states = itertools.cycle(("done", "dead", "parked", "received"))
        old.executemany(
            row, ((f"m{n}", state) for n, state in zip(range(rows), states, strict=False))
        )
        old.execute("INSERT INTO body SELECT sequence, randomblob(200) FROM inbox")
    old.close()


def migrate(file: Path, statement: int, part: int) -> None:
    """Open the store; end in that statement, after that part of it: 0 is before it begins."""
    begun = 0
    parts = 0

    def trace(_cursor: object, sql: str, _bindings: object) -> bool:
        nonlocal begun, parts
        begun, parts = begun + 1, 0
        if begun == statement and part == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def progress() -> bool:
        nonlocal parts
        parts += 1
        if begun == statement and parts == part:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def watch(connection: apsw.Connection) -> None:
        connection.set_exec_trace(trace)
        connection.set_progress_handler(progress, STEPS)

    apsw.connection_hooks.append(watch)
    connect_writer(os.fspath(file)).close()


def was_killed(file: Path, statement: int, part: int) -> bool:
    """Run :func:`migrate` in a child."""
    pid = os.fork()
    if not pid:
        try:
            migrate(file, statement, part)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if status:
        raise SystemExit("a migration failed by itself")
    return False


def look(file: Path, rows: int) -> int:
    """Return the version of the store, once it was seen to have all its rows."""
    connection = apsw.Connection(os.fspath(file))
    count = connection.execute("SELECT count(*) FROM inbox JOIN body USING (sequence)").get
    version = int(connection.pragma("user_version"))
    sound = connection.pragma("quick_check")
    connection.close()
    if (count, sound) != (rows, "ok"):
        raise SystemExit(f"{count} rows of {rows} are left, {sound}")
    return version


def main(directory: Path, version: int, rows: int) -> None:
    template = directory / "template.db"
    make(template, version, rows)
    file = directory / "inbox.db"
    killed = 0
    for statement in itertools.count(1):
        for part in itertools.count():
            for name in directory.glob("inbox.db*"):
                name.unlink()
            shutil.copyfile(template, file)
            died = was_killed(file, statement, part)
            killed += died
            if (found := look(file, rows)) not in (version, VERSION):
                raise SystemExit(f"killed in statement {statement}, the store has version {found}")
            connect_writer(os.fspath(file)).close()
            if look(file, rows) != VERSION:
                raise SystemExit(f"killed in statement {statement}, it was not brought up to date")
            if not died:
                break
        if part == 0:
            break
    sys.stdout.write(f"{killed}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
