"""SDK_TEST_REQUIRE_ALL: a test that is skipped because a part is missing fails."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.daemon import clean_environment

TESTS = Path(__file__).parents[1]

IN_A_TEST = """
import pytest

def test_skips():
    pytest.importorskip("no_such_package")
"""
AS_A_MARK = """
import pytest

@pytest.mark.skipif(True, reason="a part is missing")
def test_is_skipped():
    pass
"""
AS_A_FILE = """
import pytest

pytest.importorskip("no_such_package")

def test_is_not_collected():
    pass
"""
ALLOWED = """
import pytest

@pytest.mark.may_skip
def test_skips():
    pytest.skip("it lies outside of the repository")
"""


@pytest.mark.parametrize(
    ("text", "is_a_failure"),
    [(IN_A_TEST, True), (AS_A_MARK, True), (AS_A_FILE, True), (ALLOWED, False)],
)
def test_a_skipped_test_fails_where_every_part_is_required(
    tmp_path: Path, text: str, is_a_failure: bool
) -> None:
    file = tmp_path / "test_inner.py"
    file.write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS.parent / "pyproject.toml")]
    command += ["-p", "conftest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")]
    environment = {n: v for n, v in clean_environment().items() if not n.startswith("PYTEST_")}
    ran = subprocess.run(
        [*command, str(file)],
        env={**environment, "PYTHONPATH": str(TESTS), "SDK_TEST_REQUIRE_ALL": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode != 0) == is_a_failure, ran.stdout + ran.stderr
    assert ("SDK_TEST_REQUIRE_ALL is set" in ran.stdout) == is_a_failure, ran.stdout + ran.stderr
