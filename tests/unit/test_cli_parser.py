import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.deliveries import SECRET

from sdk_trio.cli.main import main
from sdk_trio.cli.parse import COMMANDS, EXAMPLES, build_parser, parse

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_command_has_code_help_and_the_settings_options(command, capsys):
    module, _, function = command.target.partition(":")
    imported = __import__(f"sdk_trio.cli.{module}", fromlist=[function])
    assert callable(getattr(imported, function))
    assert main([*command.words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "--config FILE" in text
    assert "--set KEY=VALUE" in text


@pytest.mark.parametrize("words", ["--help", "events types", "events trigger not.a.type"])
def test_nothing_that_is_printed_names_a_page_which_an_installed_package_lacks(words, command_line):
    answer = command_line(*words.split())
    assert "docs/" not in answer.out + answer.err
    assert "events types" in answer.out + answer.err or words == "events types"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "there is no command 'rnu': did you mean 'run'?"),
        (["evnts", "list"], "there is no command 'evnts': did you mean 'events'?"),
        (["events", "lst"], "there is no command 'events lst': did you mean 'events list'?"),
        (["tenant", "create"], "there is no command 'tenant create': did you mean 'tenant add'?"),
        (
            ["run", "--standalone", "--set", "Sdk:Webhoks:Path=/x"],
            "--set Sdk:Webhoks is not a known key: did you mean Sdk:Webhooks?",
        ),
        (
            ["run", "--standalone", "--set", "Sdk:Webhooks:Zzzzzz=/x"],
            "--set Sdk:Webhooks:Zzzzzz is not a known key\n",
        ),
        (["zzz"], "there is no command 'zzz': choose from run, health, dev"),
        (
            ["events", "list", "--stat", "dead"],
            "unrecognized arguments: --stat dead; did you mean --state?\nusage: sdk-trio events",
        ),
        (["run", "--zzz"], "unrecognized arguments: --zzz\nusage: sdk-trio run"),
        (["events", "list", "--state", "lost"], "invalid choice: 'lost'"),
        (["verify"], "the following arguments are required: --headers"),
    ],
)
def test_wrong_words_are_a_usage_error_with_advice(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sdk-trio: error: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("words", "below"),
    [
        ([], ["run", "events", "secrets"]),
        (["events"], ["list", "trigger", "types"]),
        (["tenant"], ["show", "set", "purge"]),
    ],
)
def test_a_group_alone_prints_its_list_and_fails(words, below, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *shown, last = captured.err.splitlines()
    assert {line.split()[0] for line in shown if line.startswith("    ")} >= set(below)
    assert last == "sdk-trio: error: a command is missing: choose one from this list"


@pytest.mark.parametrize("words", ["events list", "events", ""])
def test_help_is_a_command_too(words, capsys):
    assert main(["help", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert main([*words.split(), "--help"]) == 0
    assert shown == capsys.readouterr().out
    assert shown.startswith("usage: sdk-trio")


def test_help_of_an_unknown_command_is_an_error(capsys):
    assert main(["help", "evnts"]) == 2
    assert "did you mean 'events'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_help_ends_with_examples_that_parse(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.words.split(), "--help"]) == 0
    examples = capsys.readouterr().out.partition("\nexamples:\n")[2]
    lines = [line.strip().removeprefix("sdk-trio ") for line in examples.splitlines()]
    assert lines
    for line in lines:
        assert len(line) <= 70
        words = shlex.split(re.split(" [|>] ", line)[0])
        assert parse(words).words == command.words


def test_each_example_stands_below_the_help_of_one_command():
    for line in EXAMPLES.splitlines():
        words = [c.words for c in COMMANDS if f"{line} ".startswith(f"{c.words} ")]
        assert len(words) == 1, line


def test_options_that_are_typed_often_have_a_short_form():
    short = parse(["events", "list", "-n", "3", "-f", "json", "-c", "a.toml", "-s", "A=b"])
    assert (short.limit, short.format, short.config, short.set) == (
        3,
        "json",
        ["a.toml"],
        ["A=b"],
    )
    assert parse(["dev", "-a", "app:handlers", "-p", "0"]).port == 0
    assert parse(["events", "replay", "x", "-y"]).yes


@pytest.mark.parametrize("port", ["", "x", "65536", "-1", "1.5"])
def test_a_port_is_a_number(port, capsys):
    assert main(["dev", f"--port={port}"]) == 2
    assert "--port takes a whole number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["events", "list", "--subject", "a\udcff"], "--subject"),
        (["events", "show", "a\udcff"], "ID"),
        (["events", "replay", "a", "b\udcff"], "ID"),
        (["tenant", "add", "a", "--name", "a\udcff"], "--name"),
        (["call", "orders", "list", "--organization-id", "a\udcff"], "an argument"),
    ],
)
def test_a_text_that_is_no_utf_8_is_a_wrong_argument_and_a_file_is_none(words, name, command_line):
    answer = command_line(*words)
    assert (answer.status, answer.out) == (2, "")
    assert f"{name}: '" in answer.err
    assert "\\udcff' is not UTF-8" in answer.err
    assert "is not UTF-8" not in command_line("config", "check", "--config", "a\udcff").err


@pytest.mark.parametrize("words", ["--version", "version"])
def test_version(words, capsys):
    assert main([words]) == 0
    assert re.fullmatch(r"sdk-trio \d+\.\d+\.\d+\n", capsys.readouterr().out)


#: Packages that a help text must not import; the packages of the states to choose from are none of
#: them.
HEAVY = "email trio httpx apsw hypercorn msgspec sdk_trio.config sdk_trio.storage sdk_trio.tenants"


def test_help_imports_no_part_of_the_program():
    code = f"""
import sys
from sdk_trio.cli.parse import COMMANDS
from sdk_trio.cli.main import main
for command in COMMANDS:
    if main([*command.words.split(), "--help"]):
        sys.exit(command.words)
    loaded = {{name for name in {HEAVY.split()!r} if name in sys.modules}}
    # A half of a group that stayed would be taken for the whole by the next command.
    names = {{name for name in sys.modules if name.startswith("sdk_trio.cli.")}}
    loaded |= names - {{f"sdk_trio.cli.{{name}}" for name in ("main", "parse", "doctor")}}
    if loaded:
        sys.exit(f"{{command.words}}: {{loaded}}")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_command_runs_in_a_process_that_has_shown_its_help():
    code = (
        "import sys; from sdk_trio.cli.main import main; main(['secrets', 'new', '--help']); "
        "sys.stdout.flush(); sys.stdout = sys.stderr; sys.exit(main(['secrets', 'new']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stderr.startswith("whsec_")


def test_an_argument_that_only_looks_like_a_question_for_help_is_taken(tmp_path):
    code = "import sys; from sdk_trio.cli.main import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "--help").write_text("{}")
    words = ["sign", "--secret-env", "GIVEN", "--", "--help"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "GIVEN": SECRET},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "webhook-signature: " in ran.stdout


def _options(parser):
    parser.fill()
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def test_the_page_names_every_command_and_every_option():
    index = PAGE.read_text(encoding="utf-8")
    pages = re.findall(r"^\| \[[^]]+\]\((cli-[a-z]+\.md)\)", index, re.MULTILINE)
    assert sorted(pages) == sorted(page.name for page in PAGE.parent.glob("cli-*.md"))
    text = "".join((PAGE.parent / page).read_text(encoding="utf-8") for page in pages)
    headings = re.findall(r"^##+ `([a-z -]+)", text, re.MULTILINE)
    words = [command.words for command in COMMANDS]
    assert [heading.strip() for heading in headings] == words
    assert re.findall(r"\[`([a-z -]+)`\]\(cli-", index) == words
    text += index
    missing = {option for option in _options(build_parser()) if not re.search(rf"{option}\b", text)}
    assert not missing
