"""A small sample of tests/effects.py: receivers are killed while their handlers write."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.daemon import clean_environment
from support.postgres import binaries

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("engine", "way"), [("sqlite", "transaction"), ("postgres", "finish")])
def test_no_effect_is_doubled_or_lost(engine: str, way: str) -> None:
    if engine == "postgres":
        pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
        if binaries() is None:
            pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")
    ran = subprocess.run(
        [sys.executable, "effects.py", "--engine", engine, "--way", way, "--kills", "4"],
        cwd=TESTS,
        env={**clean_environment(), "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "doubled    0  lost 0" in ran.stdout
