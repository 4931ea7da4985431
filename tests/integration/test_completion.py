"""Completion as shells do it: the scripts are read by the shells that they are for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    (["ev"], {"events"}),
    (["events", "re"], {"replay", "resend", "reconcile", "rejected", "resume"}),
    (["help", "ver"], {"verify"}),
    (["events", "list", "--ty"], {"--type"}),
    (["events", "list", "--state", "de"], {"dead"}),
    (["events", "list", "-n", "5", "--format", "j"], {"json"}),
    (["events", "trigger", "order.pa"], {"order.paid"}),
    (["events", "list", "--type", "order.pa"], {"order.paid"}),
    (["tenant", "se"], {"set"}),
    (["init", "--directory", "here/"], {"here/app"}),
    (["completion", "f"], {"fish"}),
]


def script(shell):
    ran = subprocess.run(
        [sys.executable, "-m", "sdk_trio", "completion", shell],
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def program(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_bash_completes_commands_options_and_values(tmp_path):
    (tmp_path / "here" / "app").mkdir(parents=True)
    lines = [script("bash")]
    for words, _ in CASES:
        typed = " ".join(f"'{word}'" for word in ["sdk-trio", *words])
        lines += [
            f"COMP_WORDS=({typed}) COMP_CWORD={len(words)}",
            '_shtab_sdk_trio; echo "${COMPREPLY[*]}"',
        ]
    ran = subprocess.run(
        [program("bash"), "--norc", "-eu", "-o", "pipefail", "-c", "\n".join(lines)],
        env={"PATH": ""},  # no program is started during completion
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [set(line.split()) for line in ran.stdout.splitlines()] == [r for _, r in CASES]


def test_fish_completes_commands_options_and_values(tmp_path):
    fish = program("fish")
    (tmp_path / "here" / "app").mkdir(parents=True)
    typed = [f"complete -C 'sdk-trio {' '.join(words)}'; echo =" for words, _ in CASES]
    ran = subprocess.run(
        [fish, "--no-config", "-c", "\n".join([script("fish"), *typed])],
        env={"HOME": str(tmp_path), "PATH": str(Path(fish).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found = [
        {line.partition("\t")[0].removesuffix("/") for line in answer.splitlines()}
        for answer in ran.stdout.split("=\n")[:-1]
    ]
    assert found == [expected for _, expected in CASES]


def test_zsh_registers_the_script(tmp_path):
    (tmp_path / "script").write_text(script("zsh"))
    ran = subprocess.run(
        [
            program("zsh"),
            "-f",
            "-c",
            'autoload -Uz compinit; compinit -u -D; eval "$(< script)"; print $_comps[sdk-trio]',
        ],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "_shtab_sdk_trio\n"


def test_without_the_extra_it_names_the_package_to_install(command_line, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    answer = command_line("completion", "bash")
    assert (answer.status, answer.out) == (69, "")
    assert "needs the module shtab: pip install 'sdk-trio[completion]'" in answer.err
