"""Compiles C libraries that are preloaded before the C library of a process."""

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@functools.cache
def compiled(source: Path) -> str:
    """Return the library of a source file, for ``LD_PRELOAD``.

    Skips the test without a compiler, or if the system does not support preloading.
    """
    if sys.platform != "linux":
        pytest.skip("it needs a preloaded library, as Linux has them")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("it needs a C compiler (cc)")
    directory = Path(tempfile.mkdtemp(prefix="sdk-trio-preloaded-"))
    library = directory / source.with_suffix(".so").name
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source, "-ldl"], check=True
    )
    return str(library)
