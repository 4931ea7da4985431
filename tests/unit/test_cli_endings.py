"""Exit statuses and messages of commands, and secrets that they do not show."""

import inspect
import json
import os
import subprocess
import sys

import pytest
from support.deliveries import SECRET

from sdk_trio import HandlerRegistry
from sdk_trio.cli import main as command_line_main
from sdk_trio.cli.application import AppBrokenError, AppNotFoundError, import_registry
from sdk_trio.cli.main import main
from sdk_trio.cli.parse import UsageError
from sdk_trio.errors import (
    NotSupportedError,
    OptionsValidationError,
    Problem,
    SdkError,
    StoreUnavailableError,
    only_member,
)
from sdk_trio.runtime.presence import Presence, announced

MODULES = {
    "good": "import sdk_trio\nhandlers = sdk_trio.HandlerRegistry()\nother = 1",
    "fails": "1 / 0",
    "ends": "raise SystemExit(0)",
    "wants": "import a_missing_module",
    "broken_syntax": "def",
    "empty": "",
}


@pytest.fixture
def command_line(command_line, monkeypatch):
    # sys.path and sys.modules as they were: the modules of one test are not those of another.
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in MODULES.items():
        (command_line.directory / f"{name}.py").write_text(text)
    yield command_line
    for name in MODULES:
        sys.modules.pop(name, None)


def failing_with(monkeypatch, error):
    def fail(_arguments):
        raise error

    monkeypatch.setattr(command_line_main, "_command", fail)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SdkError("x"), 1),
        (UsageError("x"), 2),
        (StoreUnavailableError("x"), 69),
        (OptionsValidationError([Problem("Sdk:Mode", "x")]), 78),
        (NotSupportedError("x"), 78),
        (ExceptionGroup("", [ExceptionGroup("", [StoreUnavailableError("x")])]), 69),
        (KeyboardInterrupt(), 130),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130),
        (BrokenPipeError(), 141),
        (ValueError("x"), 1),
        (ExceptionGroup("two", [ValueError("a"), ValueError("b")]), 1),
    ],
)
def test_every_end_has_its_status(command_line, monkeypatch, error, status):
    # Its real work on the file descriptor is seen in test_a_closed_pipe_is_quiet.
    monkeypatch.setattr(command_line_main, "_forget_output", lambda: None)
    failing_with(monkeypatch, error)
    answer = command_line("secrets", "new")
    assert answer.status == status
    assert "Traceback" not in answer.err
    quiet = isinstance(only_member(error), KeyboardInterrupt | BrokenPipeError)
    assert answer.err.startswith("" if quiet else "sdk-trio: error: ")
    assert bool(answer.err) != quiet


def test_an_unexpected_exception_is_one_line_with_advice(command_line, monkeypatch):
    failing_with(monkeypatch, ValueError("odd"))
    answer = command_line("secrets", "new")
    assert answer.err == (
        "sdk-trio: error: unexpected ValueError: odd; "
        "run with Sdk:Environment=Development for details\n"
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SDK_ENVIRONMENT": "Development"}, []),
        ({"SDK__ENVIRONMENT": "development"}, []),
        ({}, ["--set", "Sdk:Environment=Development"]),
    ],
)
def test_in_development_the_traceback_comes_first(command_line, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    failing_with(monkeypatch, ValueError("odd"))
    answer = command_line("secrets", "new", *words)
    assert answer.err.startswith("Traceback")
    assert answer.err.endswith("sdk-trio: error: unexpected ValueError: odd\n")


def test_an_error_that_quotes_a_program_elsewhere_writes_no_escapes(command_line, monkeypatch):
    failing_with(monkeypatch, SdkError("it answered \x1b]0;owned\x07\r\u202e\nand no more"))
    answer = command_line("secrets", "new")
    assert "owned" in answer.err
    assert all(line.isprintable() for line in answer.err.splitlines())


@pytest.mark.parametrize("words", [["config", "schema"], ["secrets", "new"], ["--help"]])
def test_a_closed_pipe_is_quiet(tmp_path, words):
    command = f"import sys; from sdk_trio.cli.main import main; sys.exit(main({words}))"
    # Buffered as usual, a short output meets the closed pipe only when it is flushed.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-c", command],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


registry_file = inspect.getfile(HandlerRegistry)


# -- run, before it serves -----------------------------------------------------------------------


def test_run_without_a_token_or_secret_is_a_configuration_error(command_line):
    answer = command_line("run")
    assert answer.status == 78
    assert "Sdk:AccessToken: is required, except with --standalone" in answer.err
    assert "Sdk:Webhooks:Secret" in answer.err
    assert "Traceback" not in answer.err
    standalone = command_line("run", "--standalone")
    assert standalone.status == 78
    assert "AccessToken" not in standalone.err


def test_run_shows_full_detail_in_development(command_line):
    answer = command_line("run", "--set", "Sdk:Environment=Development")
    assert answer.status == 78
    assert answer.err.startswith("Traceback")
    assert "sdk-trio: error: " in answer.err


@pytest.mark.parametrize("command", [["run", "--standalone"], ["dev"]])
@pytest.mark.parametrize(
    ("reference", "status", "message"),
    [
        ("good", 2, "--app takes MODULE:ATTR, such as app:handlers"),
        (":handlers", 2, "--app takes MODULE:ATTR"),
        ("nowhere:handlers", 78, "--app nowhere:handlers: there is no module 'nowhere' in "),
        ("good.below:handlers", 78, "there is no module 'good.below'"),
        ("good.py:handlers", 78, ": a module is named without .py, good\n"),
        ("good:handler", 78, "good has no attribute 'handler'; it has handlers"),
        ("good:other", 78, "other is of type int, not HandlerRegistry; it has handlers"),
        ("empty:handlers", 78, "empty has no attribute 'handlers'; it has no HandlerRegistry: "),
        ("fails:handlers", 1, "fails.py:1: ZeroDivisionError: division by zero"),
        ("ends:handlers", 1, "ends.py:1: SystemExit: 0"),
        ("wants:handlers", 78, "No module named 'a_missing_module'"),
        ("broken_syntax:handlers", 78, "broken_syntax.py:1: SyntaxError"),
    ],
)
def test_an_application_that_cannot_be_imported(
    command_line, monkeypatch, command, reference, status, message
):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    answer = command_line(*command, "--app", reference)
    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err
    assert SECRET not in answer.err
    if command[0] == "run":
        assert "Traceback" not in answer.err
    # In Development the application's own lines and no others.
    assert "importlib" not in answer.err
    assert answer.err.count("Traceback") <= 1
    assert "sdk_trio/cli" not in answer.err


REGISTRY = """\
from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

handlers = HandlerRegistry()
"""


@pytest.mark.parametrize("command", [["run", "--standalone"], ["dev"]])
@pytest.mark.parametrize(
    ("name", "code", "line", "message"),
    [
        (
            "generator",
            "@handlers.on(OrderPaidEvent)\ndef grant(event):\n    yield\n",
            5,
            "grant is a generator function, which is never iterated over",
        ),
        (
            "bare",
            "@handlers.on\nasync def grant(event): ...\n",
            5,
            "@handlers.on above grant has no event class: write @handlers.on(OrderPaidEvent)",
        ),
        (
            "named",
            "\nhandlers.on('order.paid')\n",
            6,
            "'order.paid' is a type's name: give its class, OrderPaidEvent of sdk_trio.events.",
        ),
        (
            "twice",
            "async def grant(event): ...\n"
            "handlers.register(OrderPaidEvent, grant)\n"
            "handlers.register(OrderPaidEvent, grant)\n",
            7,
            "already has a handler: grant, registered at ",
        ),
        ("number", "handlers.register(OrderPaidEvent, 5)\n", 5, "int is not a handler"),
    ],
)
def test_a_wrong_registration_names_the_users_line(
    command_line, monkeypatch, command, name, code, line, message
):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    (command_line.directory / f"{name}.py").write_text(REGISTRY + code)
    answer = command_line(*command, "--app", f"{name}:handlers")
    assert (answer.status, answer.out) == (78, "")  # nothing of the user's ran
    assert "Traceback" not in answer.err
    said = answer.err.splitlines()[-1]
    assert f"{name}.py:{line}: " in said
    assert message in said
    assert str(registry_file) not in said


def test_an_application_is_found_in_the_current_directory(command_line):
    assert len(import_registry("good:handlers")) == 0
    with pytest.raises(AppNotFoundError):
        import_registry("good:handlers.missing")
    with pytest.raises(AppBrokenError) as caught:
        import_registry("fails:handlers")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_dev_is_development_and_nothing_else(command_line):
    answer = command_line("dev", "--set", "Sdk:Environment=Production")
    assert answer.status == 2
    assert "use 'run' for another one" in answer.err


# -- trigger, before it sends ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["order.craeted"], 2, "did you mean order.created"),
        (["order.created", "--data", "{"], 2, "--data is not valid JSON"),
        (["order.created", "--data", "[]"], 2, "--data takes a JSON object"),
        (["order.created", "--count", "0"], 2, "--count takes a whole number from 1"),
        (["order.created", "--url", "localhost:80"], 2, "--url takes http://"),
        (["order.created", "--url", "http://127.0.0.1:1/"], 78, "there is no webhook secret"),
        (["order.created"], 69, "no receiver is running on the data directory"),
    ],
)
def test_events_that_cannot_be_triggered(command_line, words, status, message):
    answer = command_line("events", "trigger", *words)
    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err


def test_no_receiver_listens(command_line, monkeypatch, free_port):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    url = f"http://127.0.0.1:{free_port}/hooks/sdk"
    answer = command_line("events", "trigger", "order.created", "--url", url)
    assert (answer.status, answer.out) == (69, "")
    assert f"cannot deliver to {url}" in answer.err
    assert "Check that the receiver is running there" in answer.err


@pytest.fixture
def free_port():
    import socket

    # Bound and not listening: connections are refused, and no other process takes the port.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"pid": "ended"}, "was left behind by process"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
        ('{"pid": 1}', "cannot be read"),
    ],
)
def test_a_stale_record_of_a_receiver_is_a_clear_error(command_line, content, message):
    command_line.data.mkdir()
    if isinstance(content, dict):
        # The number of a process that has ended may be another one's by now; Linux has none above.
        record = {"address": "a", "url": "u", "secret": "settings", "pid": 2**22 + 1}
        content = json.dumps(record)
    (command_line.data / "runtime.json").write_text(content)
    answer = command_line("events", "trigger", "order.created")
    assert answer.status == 69
    assert message in answer.err
    assert "--url" in answer.err


def test_the_record_of_a_receiver_is_private_and_goes_with_it(tmp_path):
    with announced(tmp_path, Presence("a", "u", os.getpid(), "settings")):
        (file,) = tmp_path.iterdir()
        assert file.name == "runtime.json"
        assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_main_takes_the_arguments_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sdk-trio", "nothing"])
    assert main() == 2
    assert "there is no command" in capsys.readouterr().err
