"""Which store is found in a file or a schema, whether a program opens it, and what prepares a file.

PostgreSQL's half is in ``engines/postgres_migration.py``.
"""

from typing import Any, NamedTuple

from ...errors import StoreVersionError
from .dialect import Dialect
from .schema import LATER_SQLITE, MARK_AS_WIPED, VERSION, statements

#: Versions that mark a store as moved to the other engine, or as being filled by a move or a
#: restore. No program opens such a store.
MOVED = -1
FILLING = -2

#: Marks a SQLite file as a store of this package: the bytes of "SdkT" (PRAGMA application_id).
APPLICATION_ID = 0x53646B54

#: The engines' names: for people, and of the setting.
_BACKENDS = {"SQLite": "Sqlite", "PostgreSQL": "Postgres"}

#: By engine, what to do if another program's data is found.
_ELSEWHERE = {
    "SQLite": "set Sdk:Storage:Path to a directory of its own, or move the file away",
    "PostgreSQL": "name a schema of its own in Sdk:Storage:PostgresSchema",
}


class StoreState(NamedTuple):
    """The store, or the other content, that is found in a file or a schema.

    ``place`` is where it is, in words. ``engine`` is SQLite or PostgreSQL. ``version`` is that of
    the schema, :data:`MOVED` or :data:`FILLING`; None without one. ``foreign``: what another
    program has there; None: nothing.
    """

    place: str
    engine: str
    version: int | None
    foreign: str | None = None

    @property
    def backend(self) -> str:
        """The name of the engine in the settings."""
        return _BACKENDS[self.engine]

    @property
    def other_engine(self) -> str:
        """The engine that a move leads to."""
        return next(name for name in _BACKENDS if name != self.engine)

    def problem(self, newest: int = VERSION) -> tuple[str, str] | None:
        """Return why no program opens it, and the remedy; None: a start opens or migrates it.

        Args:
            newest: the newest version that this package knows.
        """
        if self.foreign is not None:
            return self.foreign, _ELSEWHERE[self.engine]
        if self.version is None or 0 <= self.version <= newest:
            return None
        if self.version == FILLING:
            return (
                "is being filled by 'storage migrate' or 'storage restore', which has not ended",
                "repeat that command, and start when it is done",
            )
        if self.version == MOVED:
            return (
                f"was moved to {self.other_engine} by 'storage migrate'",
                f"set Sdk:Storage:Backend to {_BACKENDS[self.other_engine]}; events that the new "
                "store has received since are missing here",
            )
        if self.version < 0:
            return (
                f"has version {self.version}, and is not a store of this program",
                _ELSEWHERE[self.engine],
            )
        return (
            f"has schema version {self.version}, and this version of sdk_trio knows up to {newest}",
            "install the version that wrote it, or restore a backup from before the upgrade",
        )

    def refusal(self, newest: int = VERSION) -> str | None:
        """Return :meth:`problem` as one text that names the store."""
        found = self.problem(newest)
        return None if found is None else f"{self.place} {found[0]}: {found[1]}"

    def known_version(self, newest: int = VERSION) -> int | None:
        """Return the version that a start finds; None: there is no schema yet.

        Raises:
            StoreVersionError: no program opens the store, see :meth:`refusal`.
        """
        if (reason := self.refusal(newest)) is not None:
            raise StoreVersionError(reason)
        return self.version

    def require_current(self) -> None:
        """Raise StoreVersionError unless a start opens the store as it is."""
        if self.known_version() != VERSION:
            raise StoreVersionError(
                f"{self.place} does not have the schema of version {VERSION}: start this version "
                "once"
            )

    def require_current_or_moved(self) -> None:
        """Raise StoreVersionError unless it is a store of this version, moved or not."""
        if self.version not in (VERSION, MOVED):
            raise StoreVersionError(
                f"{self.place} is not a store of version {VERSION}: 'storage status' shows what it "
                "is"
            )


# One statement reads all three at one moment: another process may be creating the tables.
_STATE_OF_FILE = """
SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
FROM pragma_application_id, pragma_user_version
"""


def state_of_file(connection: Any, file: str) -> StoreState:
    """Return what is in a SQLite file.

    Args:
        connection: one of apsw.
        file: its path, for messages.
    """
    application_id, version, tables = connection.execute(_STATE_OF_FILE).fetchone()
    if application_id == APPLICATION_ID or not (application_id or version or tables):
        return StoreState(file, "SQLite", version or None)
    foreign = f"is a SQLite database of another program (application id {application_id:#x})"
    return StoreState(file, "SQLite", None, foreign)


def prepare_sqlite(connection: Any, file: str) -> None:
    """Create the tables in a new SQLite file, or bring them up to date, one step at a time.

    Args:
        connection: one of apsw, outside of any transaction.
        file: its path, for messages.

    Raises:
        StoreVersionError: the file is of another program or of a later version, was moved, or is
            being filled.
        apsw.Error: it cannot be read or written.
    """
    while (version := state_of_file(connection, file).known_version()) != VERSION:
        # Two processes may open a file at once: the second waits, and checks again.
        connection.execute("BEGIN IMMEDIATE")
        try:
            if state_of_file(connection, file).version == version:
                new = statements(Dialect("sqlite"))
                for statement in new if version is None else LATER_SQLITE[version - 1]:
                    connection.execute(statement)
                if version is None:
                    # Nothing was deleted yet, so no remnant has to be overwritten.
                    connection.execute(MARK_AS_WIPED)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {(version or 0) + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
