"""``tenant ...`` as a user runs it: output, exit status, beside a daemon or without one."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio
from support.command_forker import run_command

from sdk_trio.testing import running_app, settings_for_tests


class Shell:
    """Runs commands on one data directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *words: str, **keys: str) -> subprocess.CompletedProcess[str]:
        keys = {"Sdk:Storage:Path": str(self.directory), "Sdk:MultiTenant:Enabled": "true", **keys}
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        return run_command(
            ("tenant", *words, *settings),
            environ={**os.environ, "NO_COLOR": "1"},
            directory=self.directory.parent,
            seconds=60,
        )

    def json(self, *words: str, **keys: str) -> Any:
        done = self(*words, "--format", "json", **keys)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


def add(shell: Shell, identifier: str = "acme", *more: str) -> Any:
    return shell.json("add", identifier, "--name", "Acme Ltd", *more)


def test_a_tenant_s_life_from_a_shell(shell: Shell) -> None:
    manager = ("--email", "m@example.com", "--email-verified", "--phone", "+15551234567")
    added = add(shell, "acme", *manager, "--organization-id", "org_1")
    assert shell.json("list") == [added]
    assert shell.json("show", "acme") == shell.json("show", added["id"]) == added
    assert {name: added[name] for name in ("identifier", "name", "status", "version")} == {
        "identifier": "acme",
        "name": "Acme Ltd",
        "status": "Active",
        "version": 1,
    }
    why = ("--reason", "unpaid", "--actor", "kim")
    for verb, status in (
        ("suspend", "Suspended"),
        ("reactivate", "Active"),
        ("deactivate", "Deactivated"),
        ("delete", "Deleted"),
    ):
        result = shell.json(verb, "acme", *why)
        assert (result["new_status"], result["no_op"]) == (status, False)
        again = shell(verb, "acme", *why)
        assert (again.returncode, "already" in again.stderr) == (0, True)
    assert shell.json("list", "--status", "Deleted")[0]["identifier"] == "acme"
    assert shell.json("list", "--status", "Active") == []
    trail = shell.json("audit", "acme")
    assert [(row["action"], row["actor"], row["reason"]) for row in trail[1:]] == [
        (action, "kim", "unpaid")
        for action in ("Suspended", "Reactivated", "Deactivated", "Deleted")
    ]
    assert shell.json("audit") == trail


def test_the_contact_changes_in_what_is_named(shell: Shell) -> None:
    add(shell, "acme", "--email", "m@example.com", "--email-verified", "--phone", "+15551234567")

    def contact(*words: str) -> tuple[object, ...]:
        shown = shell.json("contact", "acme", *words)
        assert shown == shell.json("show", "acme")
        return (
            shown["site_manager_email"],
            shown["site_manager_email_verified"],
            shown["site_manager_phone"],
        )

    assert contact("--no-phone") == ("m@example.com", True, None)
    assert contact("--email", "m@example.com") == ("m@example.com", True, None)
    why = ("--reason", "new manager", "--actor", "kim")
    other = contact("--email", "n@example.com", "--phone", "+15557654321", *why)
    assert other == ("n@example.com", False, "+15557654321")
    assert contact("--email-verified") == ("n@example.com", True, "+15557654321")
    assert contact("--email-not-verified") == ("n@example.com", False, "+15557654321")
    assert contact("--no-email") == (None, False, "+15557654321")
    again = shell("contact", "acme", "--no-email")
    assert "nothing was changed" in again.stderr
    assert "+15557654321" in again.stdout
    trail = shell.json("audit", "acme")[1:]
    assert [row["action"] for row in trail] == ["ContactChanged"] * 5
    assert (trail[1]["actor"], trail[1]["reason"]) == ("kim", "new manager")
    assert "example.com" not in json.dumps(trail)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("contact", "acme"), 2, "say what changes"),
        (("contact", "acme", "--email", "nobody"), 2, "email"),
        (("contact", "acme", "--email", ""), 2, "email"),
        (("contact", "acme", "--email-verified"), 2, "there is no address"),
        (("contact", "acme", "--email", "a@b.example", "--no-email"), 2, "not allowed with"),
        (("contact", "nobody", "--no-phone"), 1, "no tenant 'nobody'"),
        (("add", "No Slug", "--name", "x"), 2, "identifier must be 1 to 64"),
        (("add", "b", "--name", "x", "--email", "nobody"), 2, "email"),
        (("add", "b", "--name", " "), 2, "name is empty"),
        (("add", "b"), 2, "--name"),
        (("add", "acme", "--name", "x"), 1, "'acme' already"),
        (("add", "b", "--name", "x", "--webhook-secret-env", "whsec_+"), 2, "source"),
        (("suspend", "nobody"), 1, "no tenant 'nobody'"),
        (("suspend", "acme"), 1, "not verified"),
        (("suspend", "acme", "--bypass-email-verification"), 1, "SuspendUnverifiedTenantsAnyway"),
        (("audit", "nobody"), 1, "no tenant 'nobody'"),
        (("list", "--limit", "none"), 2, "--limit"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_changes_nothing(
    shell: Shell, words: tuple[str, ...], status: int, said: str
) -> None:
    add(shell)
    done = shell(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(shell.json("audit")) == 1


def test_the_bypass_counts_while_the_setting_permits_it(shell: Shell) -> None:
    add(shell)
    permitted = {"Sdk:MultiTenant:TenantStatus:SuspendUnverifiedTenantsAnyway": "true"}
    assert shell("suspend", "acme", **permitted).returncode == 1
    assert shell("suspend", "acme", "--bypass-email-verification", **permitted).returncode == 0
    assert shell.json("audit", "acme")[-1]["relaxation"] == next(iter(permitted))


def test_without_a_store_a_look_creates_none(shell: Shell) -> None:
    for words in (("list",), ("suspend", "acme"), ("audit",)):
        assert shell(*words).returncode == 69
    assert not shell.directory.exists()


async def test_a_running_daemon_notices_what_a_command_has_changed(shell: Shell) -> None:
    settings = settings_for_tests(
        {
            "Storage:Backend": "Sqlite",
            "Storage:Path": str(shell.directory),
            "MultiTenant:Enabled": True,
        }
    )
    async with running_app(None, settings) as app:
        tenants = app.runtime.receiver.tenancy.service
        with tenants.subscribe() as feed, trio.fail_after(60):
            verified = ("--email", "m@example.com", "--email-verified")
            await trio.to_thread.run_sync(add, shell, "acme", *verified)
            await trio.to_thread.run_sync(shell, "suspend", "acme")
            (transition,) = await feed.next()
    assert (transition.tenant_identifier, transition.new_status) == ("acme", "Suspended")
