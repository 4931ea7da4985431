"""When a replicator that ended is started again, and what a new configuration asks for. Pure."""

import posixpath
import re
from collections.abc import Collection, Mapping
from typing import Final

import attrs

from ..config.replication_options import ReplicationOptions
from .manifest import TenantDatabaseFile, render_manifest, replica_url
from .yaml_text import quoted

#: Bounds of the wait before a restart, in seconds. Its jitter keeps the replicators of many hosts
#: from coming back to one target together.
BASE_SECONDS: Final = 0.5
CAP_SECONDS: Final = 30.0

_IDENTITY: Final = re.compile(r"\n    # file [^\n]*")

#: A replicator that worked for so long, in seconds, begins to count its failures anew.
STABLE_SECONDS: Final = 60.0


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


@attrs.frozen
class LiveChange:
    """What turns one configuration into another over the control socket, without a restart.

    ``gone`` are let go of first; ``added`` are registered then, each with its replica's address.
    """

    gone: tuple[str, ...]
    added: Mapping[str, str]


def live_change(
    old: Plan, new: Plan, options: ReplicationOptions, *, working_directory: str
) -> LiveChange | None:
    """Return how the replicator gets from ``old`` to ``new`` while it runs; None: by a restart.

    A restart is what takes another head; another target or file of a database, of which the
    replicator has the old one open; and a database whose entry an address cannot express, because
    it would be replicated otherwise than the configuration says.

    Args:
        old: what the replicator runs with.
        new: what it is to run with.
        options: the replication's; an entry that is not what they say is an operator's own.
        working_directory: where a relative ``LocalDisk:Path`` starts.
    """
    old_head, old_entries = _parts(old.text)
    new_head, new_entries = _parts(new.text)
    if old_head != new_head:
        return None
    names = {quoted(path): path for path in old.databases | new.databases}
    gone = _paths_of(set(old_entries) - set(new_entries), names)
    fresh = {entry: _paths_of({entry}, names) for entry in set(new_entries) - set(old_entries)}
    added = {}
    for entry, paths in fresh.items():
        for path in paths:
            url = _address_of(path, entry, options, working_directory)
            if url is None:
                return None
            added[path] = url
    # Every entry was understood, and none was changed.
    if gone & added.keys() or old.databases - gone | added.keys() != new.databases:
        return None
    return LiveChange(tuple(sorted(gone)), dict(sorted(added.items())))


def _paths_of(entries: Collection[str], names: Mapping[str, str]) -> set[str]:
    first_lines = (entry.partition("\n")[0] for entry in entries)
    return {names[line] for line in first_lines if line in names}


def _address_of(
    path: str, entry: str, options: ReplicationOptions, working_directory: str
) -> str | None:
    """Return the address of a database's replica, if its entry is the one of the options."""
    tenant_id = posixpath.basename(path).removesuffix(".db")
    file = TenantDatabaseFile(tenant_id, path)
    try:
        expected = render_manifest(options, [file], working_directory=working_directory)
    except ValueError:
        return None
    if _parts(expected)[1] != [_IDENTITY.sub("", entry)]:
        return None
    return replica_url(options, tenant_id, working_directory=working_directory)


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
