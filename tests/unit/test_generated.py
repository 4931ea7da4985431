"""Generated files are not stale: types, data of events, pages, documents."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_make_generate_has_been_run() -> None:
    checked = subprocess.run(
        [sys.executable, "generate", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    said = checked.stdout + checked.stderr
    assert (checked.returncode, said) == (0, ""), f"run 'make generate':\n{said}"
