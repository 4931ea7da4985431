"""External programs of tests, and what happens without one.

`make emulators` installs those of the registries below ``tests/emulators``; Debian's come with the
system. A missing one skips the test, which SDK_TEST_REQUIRE_ALL turns into a failure.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

EMULATORS = Path(__file__).parents[1] / "emulators"

#: Directories of programs, in order; Debian's servers are not on a user's PATH.
_PLACES = (
    Path(sys.executable).parent,
    EMULATORS / "node_modules" / ".bin",
    EMULATORS / ".venv" / "bin",
    *(Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place),
    Path("/usr/sbin"),
)


def program(name: str) -> str:
    """Return the path of a program, or skip the test that needs it."""
    found = shutil.which(name, path=os.pathsep.join(str(place) for place in _PLACES))
    if found is None:
        pytest.skip(f"{name} is not installed: see 'make emulators' and .ci/debian-packages")
    return found


def node_package(name: str) -> Path:
    """Return the directory of an installed npm package, or skip the test that needs it."""
    directory = EMULATORS / "node_modules" / name
    if not directory.is_dir():
        pytest.skip(f"{name} is not installed: see 'make emulators'")
    return directory
