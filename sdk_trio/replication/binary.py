"""Finds the replicator's binary."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..config.options.tenants import ReplicationOptions
from ..errors import ReplicatorError

#: The binary's name.
PROGRAM: Final = "litestream"

_KEY = "Sdk:MultiTenant:FileDb:Replication:ReplicatorPath"
_REMEDY = f"install it with: pip install 'sdk-trio[replication]', or name another one in {_KEY}"


def find_replicator(
    options: ReplicationOptions,
    *,
    environ: Mapping[str, str] | None = None,
    interpreter: str | None = None,
) -> str:
    """Return the absolute path of the replicator's binary.

    ``ReplicatorPath`` if it is set, and nothing else then; otherwise beside the interpreter, where
    pip puts it, then ``PATH``.

    Args:
        options: the replication's.
        environ: the environment whose ``PATH`` is searched; None: this process's.
        interpreter: the Python program beside which it is looked for; None: this one.

    Raises:
        ReplicatorError: there is none, or it cannot be executed; with the remedy.
    """
    if options.replicator_path is not None:
        chosen = os.path.abspath(options.replicator_path)
        if not (os.path.isfile(chosen) and os.access(chosen, os.X_OK)):
            raise ReplicatorError(
                f"the replicator {chosen} ({_KEY}) is no program that can be executed: correct "
                "the path, or remove the key to use the one of sdk-trio[replication]"
            )
        return chosen
    beside = Path(sys.executable if interpreter is None else interpreter).parent
    path = (os.environ if environ is None else environ).get("PATH", "")
    # shutil.which takes an empty PATH for the system's default one, and an empty or relative part
    # for the working directory, where anybody may have put a program.
    places = os.pathsep.join([str(beside), *filter(os.path.isabs, path.split(os.pathsep))])
    found = shutil.which(PROGRAM, path=places)
    if found is None:
        raise ReplicatorError(
            f"the replicator '{PROGRAM}' is neither beside {beside} nor on PATH: {_REMEDY}"
        )
    return os.path.abspath(found)
