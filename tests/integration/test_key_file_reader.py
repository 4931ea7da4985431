"""Which changes of files count: another content, however it came there, and nothing else."""

import os

import pytest

from sdk_trio.config.sources import KeyFileReader, key_directories


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "Sdk__Webhooks__Secret").write_text("one")
    return tmp_path / "keys"


@pytest.fixture
def reader(directory):
    reader = KeyFileReader()
    assert reader.read([directory]) == ()
    assert reader.read([directory]) == ()
    return reader


def write(file):
    file.write_text("two")


def link(file):
    other = file.parent.parent / "other"
    other.write_text("two")
    file.unlink()
    file.symlink_to(other)


def remove(file):
    file.unlink()


def forbid(file):
    file.unlink()
    file.symlink_to(file)  # no user, not even root, can read that


@pytest.mark.parametrize("change", [write, link, remove, forbid])
def test_another_content_is_noticed_once(directory, reader, change):
    file = directory / "Sdk__Webhooks__Secret"
    change(file)
    assert reader.read([directory]) == (str(file),)
    assert reader.read([directory]) == ()


def test_a_file_that_appears_is_noticed(directory, reader):
    file = directory / "Sdk__Webhooks__Secrets__1"
    file.write_text("two")
    assert reader.read([directory]) == (str(file),)


def test_a_file_that_was_only_touched_or_is_no_key_is_not(directory, reader):
    os.utime(directory / "Sdk__Webhooks__Secret", (1, 1))
    (directory / "README").write_text("no key")
    (directory / "Sdk__Directory").mkdir()
    assert reader.read([directory]) == ()


def test_a_place_that_is_new_has_not_changed_yet(directory, reader, tmp_path):
    certificate = tmp_path / "cert.pem"
    certificate.write_text("one")
    assert reader.read([directory, certificate]) == ()
    certificate.write_text("two!")
    assert reader.read([directory, certificate]) == (str(certificate),)
    assert reader.read([directory]) == ()


def test_a_directory_that_comes_later_is_noticed(reader, tmp_path):
    later = tmp_path / "later"
    reader.read([later])
    later.mkdir()
    (later / "Sdk__Mode").write_text("Live")
    assert reader.read([later]) == (str(later / "Sdk__Mode"),)


def test_the_directories_are_those_of_the_settings(tmp_path):
    names = [str(path) for path in key_directories({"CREDENTIALS_DIRECTORY": "/creds"})]
    assert names == ["/run/secrets", "/creds"]
    assert [str(path) for path in key_directories({})] == ["/run/secrets"]
