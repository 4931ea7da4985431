"""A power cut: of the files of a process, what was synced is left."""

import shutil
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

    def happen(self) -> None:
        """Leave of the data directory what was synced; its processes have been killed before."""
        for file in self._data.iterdir():
            file.unlink()
        for file in self._kept.iterdir():
            if not file.name.endswith(".partial"):
                shutil.copy2(file, self._data / file.name)
