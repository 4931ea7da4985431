"""Completion as shells do it: the scripts are read by the shells that they are for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    (["ev"], {"events"}),
    (["events", "re"], {"replay", "resend", "reconcile", "rejected"}),
    (["help", "ver"], {"verify", "version"}),
    (["events", "list", "--ty"], {"--type"}),
    (["events", "list", "--state", "de"], {"dead"}),
    (["events", "list", "-n", "5", "--format", "j"], {"json"}),
    (["events", "trigger", "order.pa"], {"order.paid"}),
    (["events", "list", "--type", "order.pa"], {"order.paid"}),
    (["tenant", "credentials", "ro"], {"rotate"}),
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
    lines = [script("bash")]
    for words, _ in CASES:
        typed = " ".join(f"'{word}'" for word in ["sdk-trio", *words])
        lines += [
            f"COMP_WORDS=({typed}) COMP_CWORD={len(words)}",
            '_sdk_trio; echo "${COMPREPLY[*]}"',
        ]
    ran = subprocess.run(
        [program("bash"), "--norc", "-eu", "-o", "pipefail", "-c", "\n".join(lines)],
        env={"PATH": "", "ZSH_VERSION": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [set(line.split()) for line in ran.stdout.splitlines()] == [r for _, r in CASES]


def test_fish_completes_commands_options_and_values(tmp_path):
    fish = program("fish")
    typed = [f"complete -C 'sdk-trio {' '.join(words)}'; echo ." for words, _ in CASES]
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
        {line.partition("\t")[0] for line in answer.splitlines()}
        for answer in ran.stdout.split(".\n")[:-1]
    ]
    assert found == [expected for _, expected in CASES]


def test_zsh_reads_the_script_of_bash(tmp_path):
    ran = subprocess.run(
        [
            program("zsh"),
            "-f",
            "-c",
            f"autoload -Uz compinit; compinit -u -D\n{script('zsh')}\nprint $_comps[sdk-trio]",
        ],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "_bash_complete -o default -F _sdk_trio\n"
