import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from support.deliveries import SECRET

from sdk_trio.cli.application import APPSETTINGS, FILES, import_registry
from sdk_trio.cli.dev import sample_of
from sdk_trio.config import read_settings
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent, RefundUpdatedEvent
from sdk_trio.webhooks import HandlerRegistry

EXAMPLE = Path(__file__).parents[2] / "examples" / "config" / "appsettings.json"


def test_init_writes_an_application_that_is_valid_once_the_secret_is_set(command_line, monkeypatch):
    answer = command_line("init", "--directory", "new/app")
    assert answer.status == 0
    written = {Path(line).name for line in answer.out.splitlines()}
    assert written == {*FILES, ".gitignore"}
    directory = command_line.directory / "new" / "app"
    assert (directory / ".gitignore").read_text() == ".env\nsdk-data/\n"
    monkeypatch.chdir(directory)
    assert command_line("config", "check", "--standalone").status == 78
    variables = [
        line.removesuffix("=")
        for line in (directory / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for name in variables:
        monkeypatch.setenv(name, SECRET)
    answer = command_line("config", "check", "--standalone")
    assert (answer.status, answer.err) == (0, "errors: 0, warnings: 0\n")
    monkeypatch.setenv("SDK__ACCESSTOKEN", "not-a-real-token")
    assert command_line("config", "check").status == 0


@pytest.mark.parametrize(("words", "enter"), [((), ""), (("--directory", "a b"), "cd 'a b' && ")])
def test_the_suggested_next_step_is_an_existing_command(command_line, words, enter, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/sdk_trio/__main__.py"])
    monkeypatch.setenv("PATH", "")
    answer = command_line("init", *words)
    interpreter = sys.executable if enter else shlex.quote(relative_interpreter())
    assert f"next: {enter}{interpreter} -m sdk_trio dev --app app:handlers\n" in answer.err


def relative_interpreter():
    relative = os.path.relpath(sys.executable)
    return sys.executable if relative.startswith("..") else relative


@pytest.mark.skipif(os.name != "posix", reason="links are made by others there")
@pytest.mark.parametrize("name", ["app.py", ".gitignore"])
def test_no_file_is_written_through_a_planted_link(command_line, name):
    victim = command_line.directory / "victim"
    (command_line.directory / name).symlink_to(victim)
    answer = command_line("init")
    assert not victim.exists()
    if name in FILES:
        assert (answer.status, f"{name} exists" in answer.err) == (1, True)
        victim.write_text("precious")
        assert command_line("init", "--force").status == 0
        assert victim.read_text() == "precious"
    assert not (command_line.directory / name).is_symlink()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="gives a link away")
def test_no_private_file_is_copied_from_a_planted_link(command_line):
    """The copy, ``.gitignore``, can be read by all users."""
    victim = command_line.directory / "victim"
    victim.write_text("precious\n")
    victim.chmod(0o600)
    planted = command_line.directory / ".gitignore"
    planted.symlink_to(victim)
    os.chown(planted, 65534, -1, follow_symlinks=False)
    assert command_line("init").status == 0
    assert planted.read_text() == ".env\nsdk-data/\n"


def test_the_application_it_writes_has_a_handler(command_line, monkeypatch):
    command_line("init")
    monkeypatch.syspath_prepend(str(command_line.directory))
    (command_line.directory / "app.py").rename(command_line.directory / "app_of_init.py")
    assert list(import_registry("app_of_init:handlers")) == ["order.paid"]


def test_the_example_is_what_init_writes():
    assert EXAMPLE.read_text(encoding="utf-8") == APPSETTINGS
    assert json.loads(APPSETTINGS)["Sdk"]["Webhooks"]["Path"] == "/hooks/sdk"


def test_its_settings_leave_the_data_directory_to_the_service_manager():
    loaded = read_settings(EXAMPLE, environ={"STATE_DIRECTORY": "/var/lib/x"}, standalone=True)
    assert "STATE_DIRECTORY" in loaded.origins["Sdk:Storage:Path"]


def test_init_never_overwrites_without_force(command_line):
    (command_line.directory / "app.py").write_text("mine")
    answer = command_line("init")
    assert (answer.status, answer.out) == (1, "")
    assert "app.py exists in" in answer.err
    assert "--force" in answer.err
    assert [path.name for path in command_line.directory.iterdir()] == ["app.py"]
    assert command_line("init", "--force").status == 0
    assert "HandlerRegistry" in (command_line.directory / "app.py").read_text()


def test_gitignore_keeps_its_lines_and_gets_the_missing_ones(command_line):
    file = command_line.directory / ".gitignore"
    file.write_text("*.pyc\n.env")
    command_line("init")
    assert file.read_text() == "*.pyc\n.env\nsdk-data/\n"
    assert ".gitignore" not in command_line("init", "--force").out
    assert file.read_text() == "*.pyc\n.env\nsdk-data/\n"


def test_a_directory_that_cannot_be_made_is_named(command_line):
    (command_line.directory / "file").write_text("")
    answer = command_line("init", "--directory", "file/below")
    assert answer.status == 1
    assert "file/below" in answer.err
    assert "cannot be written" in answer.err


@pytest.mark.parametrize(
    ("classes", "sample"),
    [
        ([], "order.created"),
        ([RefundUpdatedEvent, OrderCreatedEvent], "order.created"),
        ([RefundUpdatedEvent, OrderPaidEvent], "order.paid"),
    ],
)
def test_the_sample_is_of_a_type_that_is_handled(classes, sample):
    handlers = HandlerRegistry()
    for each in classes:
        handlers.register(each, lambda event: None)
    assert sample_of(handlers) == sample
