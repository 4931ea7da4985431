"""Round trips on all five targets: settings, tenants, the supervised replicator, restore, verify.

The replicator is the real one, the targets are emulators on loopback.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import attrs
import pytest
from support.replica_host import Ended, ReplicaHost, rows_of
from support.replica_targets import all_targets

#: Where a database that comes is registered while the replicator runs, without a restart of it.
REGISTERED = {"ObjectStore", "CloudStorage", "LocalDisk"}

#: Targets whose replicas are found by the tenant's name alone.
LISTED = {"ObjectStore", "LocalDisk"}

KINDS = ("ObjectStore", "BlobStore", "CloudStorage", "Sftp", "LocalDisk")


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """The story of each target; they run at the same time, because most of each is waiting."""
    root = tmp_path_factory.mktemp("targets")
    with all_targets(root / "targets") as targets, ThreadPoolExecutor(len(KINDS)) as threads:
        yield {kind: threads.submit(run_story, targets[kind], root / kind) for kind in KINDS}


@attrs.frozen
class Story:
    """The result of a story: live and restored rows, by tenant."""

    live: dict[str, list[Any]]
    restored: dict[str, list[Any]]
    early: list[Any]
    restored_early: list[Any]
    verified: Ended
    restarted: bool
    by_name: list[Any] | str
    by_replica: list[Any]


def run_story(target, root):
    host = ReplicaHost(root, target)
    host.add("acme", 40)
    host.add("bolt", 30)
    with host.supervised():
        pid = host.replicator_pid()
        # A tenant that is added while it runs, and one that is suspended.
        host.add("cogs", 20)
        host.write("bolt", 5)
        host.wait_synced("bolt")
        host.suspend("bolt")
        host.apply_tenants("acme", "cogs")

        # Two states of one database, far enough apart for targets that keep whole seconds.
        early = host.rows("acme")
        time.sleep(1.1)
        between = time.time()
        time.sleep(1.1)
        host.write("acme", 25)
        host.wait_synced("acme")

        return Story(
            live={name: host.rows(name) for name in host.tenants},
            restored={name: host.restore(name) for name in host.tenants},
            early=early,
            restored_early=host.restore("acme", "--at", _iso(between)),
            verified=host.verify("--all"),
            **without_store(host),
            restarted=host.replicator_pid() != pid,
        )


def without_store(host):
    """Restore a tenant as on a new machine, by its name alone and by that of its replica."""
    output = host.root / "by-name.db"
    lost = ("--set", f"Sdk:Storage:Path={host.root / 'new'}")
    words = ("replication", "restore", "--tenant", "bolt", "--output", str(output), *lost)
    ended = host.run(*words)
    return {
        "by_name": rows_of(output) if ended.status == 0 else ended.err,
        "by_replica": host.restore(host.replica_name("bolt"), *lost),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_back_from(kind, stories):
    story = stories[kind].result()
    assert {name: len(rows) for name, rows in story.live.items()} == {
        "acme": 65,
        "bolt": 35,
        "cogs": 20,
    }
    assert story.restarted == (kind not in REGISTERED)
    assert story.restored == story.live
    assert story.restored_early == story.early
    assert len(story.early) == 40
    assert story.by_replica == story.live["bolt"]
    if kind in LISTED:
        assert story.by_name == story.live["bolt"]
    else:
        assert "cannot be listed from here" in story.by_name
        assert "--tenant IDENTIFIER.ID" in story.by_name
    assert story.verified.status == 0, story.verified.out
    assert {(row["tenant"], row["content"]) for row in story.verified.document} == {
        ("acme", "identical"),
        ("cogs", "identical"),
    }


def _iso(seconds):
    return datetime.fromtimestamp(seconds, UTC).isoformat()
