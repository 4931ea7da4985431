"""``tenant ...`` in a shell, on one data directory."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from support.command_forker import run_command


class Shell:
    """Runs commands on one data directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *words: str, **keys: str) -> subprocess.CompletedProcess[str]:
        keys = {"Sdk:Storage:Path": str(self.directory), "Sdk:MultiTenant:Enabled": "true", **keys}
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        return run_command(
            ("tenant", *words, *settings),
            environ={**os.environ, "NO_COLOR": "1"},
            directory=self.directory.parent,
            seconds=60,
        )

    def json(self, *words: str, **keys: str) -> Any:
        done = self(*words, "--format", "json", **keys)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
