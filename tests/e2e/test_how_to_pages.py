"""Commands of how-to pages, word for word, in a separate directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.daemon import clean_environment
from support.deliveries import SECRET
from support.single_tenant import grants_in, write_database

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def commands(page):
    """Return the blocks of commands of a page, unchanged."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(python -m sdk_trio .*?)^```$", text, re.MULTILINE | re.DOTALL)


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


def test_the_embedded_host_of_the_upgrade_page_moves_its_data(tmp_path):
    text = (PAGES / "upgrade-from-a-single-tenant.md").read_text(encoding="utf-8")
    (block,) = [
        each
        for each in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if "quiescence.signal" in each
    ]
    write_database(tmp_path / "sdk-data" / "tenants" / "default.db", 6)
    ran = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={
            **clean_environment(),
            "SDK__WEBHOOKS__SECRET": SECRET,
            "SDK__SERVER__BIND": "127.0.0.1:0",
            "SDK__ADMIN__BIND": "127.0.0.1:0",
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("upgraded; receiving at http://127.0.0.1:")
    (copy,) = (
        file for file in (tmp_path / "sdk-data" / "tenants").glob("*.db") if len(file.stem) == 36
    )
    assert len(grants_in(copy)) == 6
