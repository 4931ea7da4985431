"""Commands of how-to pages, word for word, in a directory of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.daemon import clean_environment

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def commands(page):
    """The blocks of commands of a page, each as it stands there."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(r"^```\n(python -m sdk_trio .*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_first_commands_on_tenants_work_one_after_the_other(tmp_path):
    first, second, *_ = commands("tenants.md")
    assert "tenant suspend" in first
    assert "tenant import" in second
    environment = {
        **clean_environment(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SDK__MULTITENANT__ENABLED": "true",
    }
    ran = subprocess.run(
        ["bash", "-euxc", first + second],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
