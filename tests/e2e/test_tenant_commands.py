"""``tenant ...`` as a user runs it: output, exit status, beside a daemon or without one."""

import json
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
from support.tenant_shell import Shell
from support.waiting import until

from sdk_trio.testing import running_app, settings_for_tests


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


@pytest.fixture(scope="module")
def with_acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the tenant ``acme``, to be copied."""
    shell = Shell(tmp_path_factory.mktemp("acme") / "data")
    add(shell)
    return shell.directory


def add(shell: Shell, identifier: str = "acme", *more: str) -> Any:
    return shell.json("add", identifier, "--name", "Acme Ltd", *more)


def test_a_tenant_s_life_from_a_shell(shell: Shell) -> None:
    manager = ("--email", "m@example.com", "--email-verified", "--phone", "+15551234567")
    added = add(shell, "acme", *manager, "--organization-id", "org_1")
    assert (added["webhook_path"], added["own_webhook_path"]) == ("/hooks/sdk", False)
    address = {"webhook_path", "own_webhook_path", "sources"}
    listed = {name: value for name, value in added.items() if name not in address}
    assert shell.json("list") == [listed]
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
        shown = shell.json("set", "acme", *words)
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
    again = shell("set", "acme", "--no-email")
    assert "nothing was changed" in again.stderr
    assert "+15557654321" in again.stdout
    trail = shell.json("audit", "acme")[1:]
    assert [row["action"] for row in trail] == ["Changed"] * 5
    assert (trail[1]["actor"], trail[1]["reason"]) == ("kim", "new manager")
    assert "example.com" not in json.dumps(trail)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("set", "acme"), 2, "nothing to change"),
        (("set", "acme", "--email", "unknown"), 2, "email"),
        (("set", "acme", "--email", ""), 2, "email"),
        (("set", "acme", "--email-verified"), 2, "there is no address"),
        (("set", "acme", "--email", "a@b.example", "--no-email"), 2, "not allowed with"),
        (("set", "unknown", "--no-phone"), 1, "no tenant 'unknown'"),
        (("add", "No Slug", "--name", "x"), 2, "identifier must be 1 to 64"),
        (("add", "b", "--name", "x", "--email", "unknown"), 2, "email"),
        (("add", "b", "--name", " "), 2, "name is empty"),
        (("add", "b"), 2, "--name"),
        (("add", "b", "--name", "x", "--email-verified"), 2, "there is no address"),
        (("add", "b", "--name", "a\u202eb"), 2, "U+202E"),
        (("add", "b", "--name", "a\x85b"), 2, "U+0085"),
        (("add", "b", "--name", "a\u2028b"), 2, "U+2028"),
        (("add", "b", "--name", "a\u00adb"), 2, "U+00AD, which cannot be seen"),
        (("add", "b", "--name", "a\ufff9b"), 2, "U+FFF9, which cannot be seen"),
        (("add", "b", "--name", "ad\u200dmin"), 2, "U+200D, which cannot be seen"),
        (("add", "b", "--name", "\u200b\u3164"), 2, "U+200B, which cannot be seen"),
        (("add", "b", "--name", "\u3164"), 2, "no visible character"),
        (("add", "b", "--name", "x", "--email", "a\u202e@x.de"), 2, "U+202E"),
        (("add", "b", "--name", "x", "--actor", "kim\u2066"), 2, "U+2066"),
        (("deactivate", "acme", "--reason", "a\u009bb"), 2, "U+009B"),
        (("set", "acme", "--name", ""), 2, "name is empty"),
        (("set", "acme", "--organization-id", ""), 2, "--no-organization"),
        (("set", "acme", "--organization-id", "a b"), 2, "visible ASCII"),
        (("set", "unknown", "--name", "x"), 1, "no tenant 'unknown'"),
        (("set", "acme", "--webhook-secret-env", "a b"), 2, "source"),
        (("set", "acme", "--keep-webhook-secrets"), 2, "name the new source"),
        (("set", "acme", "--remove-webhook-secret", "X"), 2, "a source must be env:"),
        (("set", "acme", "--remove-webhook-secret", "env:X"), 2, "has no env:X"),
        (("set", "acme", "--no-webhook-secrets", "--webhook-secret-env", "X"), 2, "not allowed"),
        (("set", "acme", "--access-token-env", "X", "--no-access-token"), 2, "not allowed with"),
        (("change", "acme"), 2, "did you mean 'tenant set'"),
        (("audit", "--after", "x"), 2, "--after"),
        (("add", "acme", "--name", "x"), 1, "'acme' already"),
        (("add", "b", "--name", "x", "--webhook-secret-env", "whsec_+"), 2, "source"),
        (("suspend", "unknown"), 1, "no tenant 'unknown'"),
        (("suspend", "acme"), 1, "not verified"),
        (("suspend", "acme", "--bypass-email-verification"), 1, "SuspendUnverifiedTenantsAnyway"),
        (("audit", "unknown"), 1, "no tenant 'unknown'"),
        (("list", "--limit", "none"), 2, "--limit"),
    ],
)
def test_errors_are_reported_in_one_line_and_change_nothing(
    shell: Shell, with_acme: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    shutil.copytree(with_acme, shell.directory)
    done = shell(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    connection = apsw.Connection(str(shell.directory / "inbox.db"))
    actions = [action for (action,) in connection.execute("SELECT action FROM audit")]
    connection.close()
    # What the rules of tenants refuse is kept; what is not a request at all is not.
    refused = words[:2] == ("suspend", "acme")
    assert actions == ["Created", "Refused"][: 1 + refused]


def test_the_bypass_counts_while_the_setting_permits_it(shell: Shell) -> None:
    add(shell)
    permitted = {"Sdk:MultiTenant:TenantStatus:SuspendUnverifiedTenantsAnyway": "true"}
    assert shell("suspend", "acme", **permitted).returncode == 1
    assert shell("suspend", "acme", "--bypass-email-verification", **permitted).returncode == 0
    assert shell.json("audit", "acme")[-1]["relaxation"] == next(iter(permitted))


def test_a_read_command_creates_no_store(shell: Shell) -> None:
    for words in (("list",), ("suspend", "acme"), ("audit",)):
        assert shell(*words).returncode == 69
    assert not shell.directory.exists()


@pytest.mark.parametrize("backdoor", [(), ("--bypass-email-verification",)])
def test_a_refused_transition_is_in_the_trail_with_who_why_and_why_not(
    shell: Shell, backdoor: tuple[str, ...]
) -> None:
    added = add(shell)
    why = ("--reason", "unpaid", "--actor", "kim")
    assert shell("suspend", "acme", *why, *backdoor).returncode == 1
    assert shell("delete", "acme", "--yes").returncode == 0
    assert shell("deactivate", "acme").returncode == 1
    refused, _, illegal = shell.json("audit", "acme")[1:]
    assert (refused["action"], refused["actor"], refused["reason"]) == ("Refused", "kim", "unpaid")
    assert refused["details"].startswith("Suspended: the tenant 'acme' is not suspended: its site")
    assert refused["previous_status"] == refused["new_status"] == "Active"
    assert illegal["details"].startswith("Deactivated: the tenant 'acme' is Deleted and cannot be")
    assert shell.json("show", "acme")["version"] == added["version"] + 1


def test_every_actor_on_the_command_line_has_the_same_name(shell: Shell) -> None:
    add(shell)
    keys = {"Sdk:MultiTenant:TenantStatus:DeletedTenantRetentionDays": "0"}
    for words in (("set", "acme", "--name", "x"), ("delete", "acme"), ("purge", "--yes")):
        assert shell(*words, **keys).returncode == 0
    trail = shell.json("audit")
    assert [row["action"] for row in trail] == ["Created", "Changed", "Deleted", "Purged"]
    (actor,) = {row["actor"] for row in trail}
    assert actor.startswith("cli:")


def test_a_tenant_gets_another_name_and_organization(shell: Shell) -> None:
    add(shell, "acme", "--organization-id", "org_1")
    add(shell, "other")
    why = ("--reason", "merger", "--actor", "kim")
    changed = shell.json("set", "acme", "--name", "Acme AG", *why)
    assert (changed["name"], changed["organization_id"]) == ("Acme AG", "org_1")
    taken = shell("set", "other", "--organization-id", "org_1")
    assert (taken.returncode, taken.stdout) == (1, "")
    assert "acme" in taken.stderr
    assert shell.json("set", "acme", "--no-organization")["organization_id"] is None
    assert shell.json("set", "other", "--organization-id", "org_1")["organization_id"] == "org_1"
    again = shell("set", "other", "--organization-id", "org_1")
    assert "nothing was changed" in again.stderr
    trail = shell.json("audit")[2:]
    assert [(row["action"], row["details"]) for row in trail] == [
        ("Changed", "name"),
        ("Changed", "organization_id"),
        ("Changed", "organization_id"),
    ]
    assert (trail[0]["actor"], trail[0]["reason"]) == ("kim", "merger")


def test_lists_and_trails_are_searched_and_paged(shell: Shell) -> None:
    for name in ("alpha", "beta", "delta", "gamma"):
        add(shell, name, "--email", f"M@{name}.example", "--email-verified")
    shell("suspend", "beta", "--reason", "Unpaid")
    shell("suspend", "delta", "--reason", "asked for")

    def names(*words: str) -> list[str]:
        return [row["identifier"] for row in shell.json("list", *words)]

    assert names("--limit", "2") == ["alpha", "beta"]
    assert names("--limit", "2", "--after", "beta") == ["delta", "gamma"]
    assert names("--search", "m@GAMMA") == ["gamma"]
    assert names("--search", "lta", "--status", "Suspended") == ["delta"]
    assert names("--search", "a", "--status", "Active", "--limit", "1", "--after", "b") == ["gamma"]
    assert "stopped at 2; there are more: --after beta" in shell("list", "--limit", "2").stderr
    assert shell("list", "--limit", "4").stderr == ""
    trail = shell.json("audit")
    assert shell.json("audit", "--limit", "2", "--after", str(trail[1]["sequence"])) == trail[2:4]
    (row,) = shell.json("audit", "--status", "Suspended", "--search", "unpaid")
    assert row["tenant_identifier"] == "beta"
    assert shell.json("audit", "delta", "--search", "created") == [trail[2]]


def test_a_secret_is_rotated_without_a_moment_without_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(shell, "acme", "--webhook-secret-env", "ACME_OLD")
    add(shell, "other", "--webhook-secret-env", "OTHER")
    monkeypatch.setenv("ACME_OLD", "planted-old-value\nplanted-second-value")
    key = shell.directory.parent / "new.key"

    def sources(*words: str) -> list[str]:
        done = shell(*words, "--format", "json")
        assert done.returncode == 0, done.stderr
        assert "planted" not in done.stdout + done.stderr
        return [row["source"] for row in json.loads(done.stdout)["sources"]]

    new = ("set", "acme", "--webhook-secret-file", str(key))
    early = shell(*new, "--keep-webhook-secrets")
    assert early.returncode == 78
    assert f"--webhook-secret-file {key}: the file does not exist: write it" in early.stderr
    assert sources("show", "acme") == ["env:ACME_OLD"]
    key.write_text("planted-new-value\n")
    added = shell(*new, "--keep-webhook-secrets")
    assert (added.returncode, "old and new secrets sign now" in added.stderr) == (0, True)
    rows = shell.json("show", "acme")["sources"]
    assert [(row["use"], row["source"], row["found"]) for row in rows] == [
        ("webhook_secret", f"file:{key}", 1),
        ("webhook_secret", "env:ACME_OLD", 2),
    ]
    remove = ("set", "acme", "--remove-webhook-secret")
    assert sources(*remove, "env:ACME_OLD") == [f"file:{key}"]
    last = shell(*remove, f"file:{key}")
    assert (last.returncode, "it is the last one" in last.stderr) == (2, True)
    once = sources("set", "acme", "--webhook-secret-env", "ACME_OLD", *remove[2:], f"file:{key}")
    assert once == ["env:ACME_OLD"]
    assert sources(*new) == [f"file:{key}"]
    key.unlink()
    assert "cannot be read" in shell("show", "acme").stdout
    # Several fields are one change.
    token = ("--access-token-env", "TOKEN", "--name", "Acme", "--phone", "+15551234567")
    assert sources("set", "acme", *token) == ["env:TOKEN", f"file:{key}"]
    assert sources("set", "acme", "--no-webhook-secrets") == ["env:TOKEN"]
    assert sources("set", "acme", "--no-access-token") == []
    assert "credentials" not in shell("show", "acme").stdout
    trail = shell.json("audit", "acme")[1:]
    assert [row["action"] for row in trail] == ["Changed"] * 7
    assert trail[4]["details"] == "name, site_manager_phone, credentials"


def test_two_tenants_with_one_source_are_warned_of(shell: Shell) -> None:
    own = ("--webhook-secret-env", "SHARED")
    assert "SHARED" not in shell("add", "acme", "--name", "x", *own).stderr
    for words in (
        ("add", "other", "--name", "x", *own),
        ("show", "other"),
        ("set", "other", "--webhook-secret-env", "OTHER", "--keep-webhook-secrets"),
    ):
        assert "warning: env:SHARED of other is named by acme too" in shell(*words).stderr
    rows = shell.json("show", "other")["sources"]
    assert [row["shared_with"] for row in rows] == [[], ["acme"]]


@pytest.mark.parametrize("option", ["--webhook-secret-file", "--access-token-file"])
def test_a_key_file_that_does_not_exist_is_refused(
    shell: Shell, tmp_path: Path, option: str
) -> None:
    missing = (option, str(tmp_path / "nowhere"))
    assert shell("add", "first", "--name", "x", *missing).returncode == 78
    assert not shell.directory.exists()
    add(shell, "acme")
    for words in (("add", "other", "--name", "x"), ("set", "acme")):
        refused = shell(*words, *missing)
        assert refused.returncode == 78
        assert f"{option} {missing[1]}: the file does not exist" in refused.stderr
    assert [row["identifier"] for row in shell.json("list")] == ["acme"]


def test_adding_a_tenant_without_a_store_reports_that_it_is_created(shell: Shell) -> None:
    first = shell("add", "acme", "--name", "Acme")
    where = shell.directory / "inbox.db"
    assert f"note: there is no store at {where}, so a new one is created\n" in first.stderr
    assert "a new one is created" not in shell("add", "other", "--name", "Other").stderr


def test_tenants_travel_from_one_store_to_another(shell: Shell, tmp_path: Path) -> None:
    manager = ("--email", "m@example.com", "--email-verified", "--phone", "+15551234567")
    (tmp_path / "key").write_text("whsec_x")  # no secret of anybody
    secrets = ("--webhook-secret-env", "A", "--webhook-secret-file", str(tmp_path / "key"))
    add(shell, "acme", *manager, "--organization-id", "org_1", *secrets)
    shell("add", "evil", "--name", '=HYPERLINK("http://evil.example","x")')
    shell("add", "quoted", "--name", "'=1+1 \u00fc")
    everything = shell.json("list")
    assert json.loads(shell("export", "--format", "json").stdout) == everything
    table = shell("export").stdout
    lines = table.splitlines()
    assert lines[0].startswith("identifier,name,organization_id,")
    assert not [cell for line in lines for cell in line.split(",") if cell[:1] in "=+-@" and cell]
    for number, text in enumerate((table, "\ufeff" + table, json.dumps(everything))):
        file = tmp_path / f"tenants-{number}"
        file.write_text(text, encoding="utf-8")
        other = Shell(tmp_path / f"data-{number}")
        dry = other.json("import", str(file), "--dry-run")
        assert ([row["verdict"] for row in dry], other.directory.exists()) == (
            ["create"] * 3,
            False,
        )
        assert other.json("import", str(file)) == dry
        apart = {"id", "created_at"}
        assert [
            {k: v for k, v in tenant.items() if k not in apart} for tenant in other.json("list")
        ] == [{k: v for k, v in tenant.items() if k not in apart} for tenant in everything]
        again = other.json("import", str(file))
        assert [row["verdict"] for row in again] == ["unchanged"] * 3
        assert len(other.json("audit")) == 3


def test_an_import_reports_each_row_and_is_atomic(shell: Shell, tmp_path: Path) -> None:
    add(shell, "acme", "--organization-id", "org_1", "--email", "m@example.com")
    add(shell, "same")
    file = tmp_path / "tenants.csv"
    rows = [
        "identifier,name,organization_id,site_manager_email,site_manager_email_verified",
        "acme,Acme AG,org_1,n@example.com,yes",
        "same,Acme Ltd,,,",
        "new,New,org_2,,",
    ]
    wrong = [
        "bad one,x,,,",
        "acme,x,,,",
        "third,x,org_1,,",
        "fourth,,,,",
        "fifth,x,,,yes",
        "sixth,x,,unknown,",
        "seventh,x,,m@x.example,perhaps",
        "eighth,x",
        "nin\u202eth,x,,,",
    ]
    file.write_text("\n".join(rows + wrong), encoding="utf-8")
    refused = shell("import", str(file), "--format", "json")
    assert refused.returncode == 1
    assert "nothing was changed: fix the refused rows" in refused.stderr
    verdicts = json.loads(refused.stdout)
    assert [row["verdict"] for row in verdicts] == [
        *("change", "unchanged", "create"),
        *["refused"] * len(wrong),
    ]
    assert [row["row"] for row in verdicts] == list(range(2, 2 + len(verdicts)))
    for row, said in zip(
        verdicts[3:],
        (
            *(
                "identifier must be",
                "row 2 is about the same",
                "is that of 'acme'",
                "name is empty",
            ),
            *("there is no address", "email address", "true or false", "has 2 cells", "identifier"),
        ),
        strict=True,
    ):
        assert said in row["reason"]
    assert len(shell.json("audit")) == 2
    file.write_text("\n".join(rows), encoding="utf-8")
    dry = shell("import", str(file), "--dry-run")
    assert (dry.returncode, "change: 1, create: 1, unchanged: 1" in dry.stderr) == (0, True)
    assert len(shell.json("audit")) == 2
    done = shell.json("import", str(file), "--actor", "kim", "--reason", "migration")
    assert done[0]["changes"] == "name, site_manager_email, site_manager_email_verified"
    acme, new, _ = shell.json("list")
    assert (acme["name"], acme["site_manager_email_verified"]) == ("Acme AG", True)
    assert new["organization_id"] == "org_2"
    trail = shell.json("audit")[2:]
    assert [row["action"] for row in trail] == ["Changed", "Created"]
    assert {(row["actor"], row["reason"]) for row in trail} == {("kim", "migration")}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "byte 0"),
        (b"[1", "is not JSON"),
        (b'{"identifier": "a"}', "JSON array"),
        (b"name,email\n", "unknown fields: email"),
        (b"name\nx\n", "no column identifier"),
        (b'identifier,name\na,"x\n', "line 2 is not CSV"),
        (b"", "no column identifier"),
    ],
)
def test_a_file_that_is_none_of_tenants(
    shell: Shell, tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    done = shell("import", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert not shell.directory.exists()


def test_an_import_changes_no_status_and_believes_no_types(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    items: list[Any] = [
        {"identifier": "a", "name": "A", "status": "Suspended"},
        {"identifier": "b", "name": 7},
        {"identifier": "c", "name": "C", "credentials": {"webhook_secrets": "env:C"}},
        {"identifier": "d", "name": "D", "credentials": {"access_token": "planted-token"}},
        {"identifier": "e", "name": "E", "site_manager_email_verified": "yes"},
        {"identifier": "f", "name": "F", "colour": "red"},
        "g",
        {"identifier": ["h"], "name": "H"},
    ]
    file.write_text(json.dumps(items))
    done = shell("import", str(file), "--format", "json")
    assert (done.returncode, "planted" in done.stdout + done.stderr) == (1, False)
    assert [row["verdict"] for row in json.loads(done.stdout)] == ["refused"] * len(items)
    assert shell.json("list") == []


async def test_a_running_daemon_gives_the_next_event_to_the_organization_s_new_tenant(
    shell: Shell,
) -> None:
    settings = settings_for_tests(
        {
            "Storage:Backend": "Sqlite",
            "Storage:Path": str(shell.directory),
            "MultiTenant:Enabled": True,
        }
    )
    async with running_app(None, settings) as app:
        tenants = app.runtime.receiver.tenancy.service
        await trio.to_thread.run_sync(add, shell, "acme")
        assert await tenants.find_by_organization("org_9") is None
        words = ("set", "acme", "--organization-id", "org_9")
        assert (await trio.to_thread.run_sync(shell, *words)).returncode == 0
        await until(lambda: tenants.find_by_organization("org_9"))
        found = await tenants.find_by_organization("org_9")
    assert found is not None
    assert found.identifier == "acme"


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
