"""When a replicator that ended is started again, and what a new configuration asks for. Pure."""

from collections.abc import Collection
from typing import Final

import attrs

from .yaml_text import quoted

#: Bounds of the wait before a restart, in seconds.
BASE_SECONDS: Final = 0.5
CAP_SECONDS: Final = 30.0

#: A replicator that worked for so long, in seconds, begins to count its failures anew.
STABLE_SECONDS: Final = 60.0


def restart_delay(failures: int, fraction: float) -> float:
    """Return the wait in seconds after ``failures`` (at least 1) failures in a row.

    ``fraction`` is a random number from 0 to 1: full jitter, so that the replicators of many
    hosts do not come back to one target together.
    """
    return fraction * min(CAP_SECONDS, BASE_SECONDS * 2.0 ** min(failures - 1, 16))


@attrs.frozen
class Patience:
    """How long the supervisor waits for what, in seconds.

    ``stop``: for the last sync of an orderly stop, of which the replicator itself takes up to 30;
    ``last_sync``: the least of that, where others have used up the time; ``reload_stop``: the
    same before a restart, after which a sync follows anyway; ``tell``: of
    :meth:`Supervisor.reload` for the outcome; ``start``: until it replicates what it should, and
    ``start_each`` more for every database; ``lock``: for the child of a killed predecessor;
    ``watch``: between two looks at what it replicates, of which ``silent_looks`` in a row without
    an answer mean that it hangs.
    """

    stop: float = 35.0
    last_sync: float = 2.0
    reload_stop: float = 10.0
    tell: float = 10.0
    start: float = 60.0
    start_each: float = 0.5
    lock: float = 10.0
    watch: float = 15.0
    silent_looks: int = 4


@attrs.frozen
class Plan:
    """A configuration that the replicator itself has read: its text, and its databases."""

    text: str
    databases: frozenset[str]


def can_unregister(old: Plan, new: Plan) -> bool:
    """Return whether ``new`` is ``old`` without some databases, and nothing else is different.

    Then they are let go of over the control socket. All else takes a restart: the replicator reads
    its configuration once, ignores a changed target of a database that it has, and gives none of
    the configured intervals to one that is added.
    """
    if not new.databases < old.databases:
        return False
    old_head, old_entries = _parts(old.text)
    new_head, new_entries = _parts(new.text)
    return old_head == new_head and set(new_entries) < set(old_entries)


def difference(wanted: Collection[str], found: Collection[str]) -> str:
    """Say how ``found`` is not what was ``wanted``: counts, and one example of each kind."""
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing, such as {missing[0]}")
    if extra:
        parts.append(f"{len(extra)} not wanted, such as {extra[0]}")
    return "; ".join(parts) or "none missing"


def _parts(text: str) -> tuple[str, list[str]]:
    """Split a configuration of ours into its head and its databases' entries."""
    if "\ndbs: []" in text:
        return text.replace("\ndbs: []", "\ndbs:").rstrip("\n"), []
    head, *entries = text.split("\n  - path: ")
    return head.rstrip("\n"), [entry.rstrip("\n") for entry in entries]


def completed(text: str, socket_path: str) -> str:
    """Return a configuration with what the supervisor needs, where an operator's own lacks it.

    That is the control socket, and logs as JSON on standard error. ``socket_path`` must need no
    escapes in YAML but those of ``quoted``.
    """
    keys = {line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()}
    lines = [text.rstrip("\n")]
    if "socket" not in keys:
        lines.append(f"socket: {{enabled: true, path: {quoted(socket_path)}, permissions: 0600}}")
    if "logging" not in keys:
        lines.append("logging: {type: json, stderr: true}")
    return "\n".join(lines) + "\n"
