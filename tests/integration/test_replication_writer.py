"""The replicator's configuration is written whole or not at all."""

import os
from pathlib import Path

import pytest

from sdk_trio.errors import ReplicationError
from sdk_trio.replication.manifest import ManifestWriter


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "replicator.yml"


def test_a_file_is_written_for_its_owner_alone_and_nothing_stays_beside_it(file: Path) -> None:
    umask = os.umask(0o277)
    try:
        assert ManifestWriter(file).write("dbs: []\n")
    finally:
        os.umask(umask)
    assert file.read_text() == "dbs: []\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == [file.name]


def test_partial_files_of_killed_writers_are_removed_and_those_of_living_ones_are_not(
    file: Path,
) -> None:
    old, new = (file.with_name(f".{file.name}.{name}.partial") for name in ("old", "new"))
    for partial in (old, new):
        partial.touch()
    os.utime(old, (1, 1))
    ManifestWriter(file).write("a")
    assert {entry.name for entry in file.parent.iterdir()} == {file.name, new.name}


def test_a_current_file_is_not_written_again(file: Path) -> None:
    writer = ManifestWriter(file)
    assert writer.write("a")
    before = file.stat()
    assert not writer.write("a")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for other in ("b", "", "aa", "a" * 100_000):
        assert writer.write(other)
        assert file.read_text() == other


def test_a_file_that_others_can_read_is_replaced(file: Path) -> None:
    file.write_text("a")
    file.chmod(0o644)
    assert ManifestWriter(file).write("a")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user: needs root")
def test_a_link_that_another_user_has_planted_is_refused(file: Path) -> None:
    victim = file.with_name("victim")
    victim.write_text("precious")
    file.symlink_to(victim)
    # An operator's own link stays one.
    assert ManifestWriter(file).write("a")
    assert (file.is_symlink(), victim.read_text()) == (True, "a")
    os.chown(file, 65534, -1, follow_symlinks=False)
    with pytest.raises(ReplicationError, match="is a symbolic link of another user"):
        ManifestWriter(file).write("b")
    assert victim.read_text() == "a"


def test_a_reader_never_sees_half_a_file(file: Path) -> None:
    writer = ManifestWriter(file)
    writer.write("old" * 10_000)
    with open(file) as reader:
        writer.write("new" * 20_000)
        assert reader.read() == "old" * 10_000


def test_a_link_leads_to_what_is_replaced(file: Path) -> None:
    (file.parent / "real").mkdir()
    target = file.parent / "real" / "r.yml"
    file.symlink_to(target)
    assert ManifestWriter(file).write("a")
    assert file.is_symlink()
    assert target.read_text() == "a"


def test_a_failed_write_leaves_the_old_file(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplicationError, match="ConfigOutputPath"):
        ManifestWriter(tmp_path / "none" / "replicator.yml").write("a")
    file.mkdir()
    (file / "kept").touch()
    with pytest.raises(ReplicationError, match="cannot be written"):
        ManifestWriter(file).write("a")
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ManifestWriter(file)
    writer.write("old")
    real = os.open

    def full(path: object, flags: int, mode: int = 0o777) -> int:
        # The one fault that cannot be made for real without a file system of its own.
        if str(path).endswith(".partial"):
            real(path, flags, mode)  # type: ignore[arg-type]
            return real("/dev/full", os.O_WRONLY)
        return real(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ReplicationError, match="No space left"):
        writer.write("new")
    assert file.read_text() == "old"
    assert os.listdir(file.parent) == [file.name]
