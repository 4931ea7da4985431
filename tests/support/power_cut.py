"""A power cut: of the files of a process, what was synced is left."""

import shutil
import sqlite3
import tempfile
from pathlib import Path

from .preloaded import compiled

_SOURCE = Path(__file__).with_suffix(".c")


class PowerCut:
    """The disk of the processes that were started with :attr:`environment`.

    Skips the test where it cannot be had; see :func:`.preloaded.compiled`.

    Args:
        data: the directory whose files are concerned.
        kept: a directory for what survives, made here.
    """

    def __init__(self, data: Path, kept: Path) -> None:
        self._data = data
        self._kept = kept
        kept.mkdir()
        self.environment = {
            "LD_PRELOAD": compiled(_SOURCE),
            "SDK_POWER_CUT_FROM": f"{data.resolve()}/",
            "SDK_POWER_CUT_TO": str(kept),
        }

    def kill_after_sync(self, wanted: bool) -> None:
        """Let the next sync end the process, as soon as what it has synced is safe."""
        if wanted:
            (self._kept / "kill").touch()
        else:
            (self._kept / "kill").unlink()

    def happen(self) -> None:
        """Leave of the data directory what was synced; its processes have been killed before."""
        for file in self._data.iterdir():
            file.unlink()
        self._copy_to(self._data)

    def left(self, statement: str) -> list[tuple[object, ...]]:
        """Ask the store that a power cut would leave, without touching it."""
        with tempfile.TemporaryDirectory() as name:
            self._copy_to(Path(name))
            connection = sqlite3.connect(Path(name) / "inbox.db")
            try:
                return connection.execute(statement).fetchall()
            finally:
                connection.close()

    def _copy_to(self, directory: Path) -> None:
        for file in self._kept.iterdir():
            if file.suffix not in ("", ".partial"):
                shutil.copy2(file, directory / file.name)
