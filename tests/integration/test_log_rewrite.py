"""The log and the pages of a store are written again, without a difference for anybody."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from sdk_trio.errors import StoreLostError
from sdk_trio.storage.engines import files
from sdk_trio.storage.engines.files import rewrite_log, rewrite_pages

ROWS = 50

#: In another process, as locks are a process's.
CHECKPOINT = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("SELECT count(*) FROM item").fetchall()
try:
    print(connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE))
except apsw.BusyError:
    print("busy")
"""


def checkpoint_elsewhere(file: Path) -> str:
    command = [sys.executable, "-c", CHECKPOINT, str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def log(file: Path) -> Path:
    return file.with_name("store.db-wal")


@pytest.fixture
def writer(file: Path) -> Iterator[apsw.Connection]:
    """A connection in a write transaction; half of the rows are in the database as well."""
    connection = apsw.Connection(str(file))
    for statement in ("PRAGMA journal_mode = WAL", "CREATE TABLE item (content)"):
        connection.execute(statement).fetchall()
    connection.wal_autocheckpoint(0)
    for row in range(ROWS):
        connection.execute("INSERT INTO item VALUES (randomblob(3000))")
        if row == ROWS // 2:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def test_the_same_bytes_are_written_and_every_page_of_the_log_is_named(
    writer: apsw.Connection, file: Path, log: Path
) -> None:
    before = file.read_bytes(), log.read_bytes()
    pages = rewrite_log(str(log), 1)
    rewrite_pages(str(file), pages, 4096)
    assert (file.read_bytes(), log.read_bytes()) == before
    assert pages
    assert pages <= set(range(1, writer.execute("PRAGMA page_count").get + 1))
    writer.execute("ROLLBACK")
    assert writer.execute("PRAGMA integrity_check").get == "ok"
    assert writer.execute("SELECT count(*) FROM item").get == ROWS


def test_a_log_that_cannot_be_read_back_is_lost(writer: apsw.Connection, log: Path) -> None:
    content = bytearray(log.read_bytes())
    content[100] ^= 1  # in the first frame
    log.write_bytes(content)
    with pytest.raises(StoreLostError, match="read back"):
        rewrite_log(str(log), 1)


def test_no_process_checkpoints_while_pages_are_rewritten(
    writer: apsw.Connection, file: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = rewrite_log(str(log), 1)
    during: list[str] = []
    write = files._rewrite

    def look_and_write(*arguments: object) -> None:
        during.append(checkpoint_elsewhere(file))
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_rewrite", look_and_write)
    rewrite_pages(str(file), pages, 4096)
    assert during == ["busy"]
    assert checkpoint_elsewhere(file) != "busy"
