import json

import pytest
from support.deliveries import SECRET


def test_check_reports_every_problem_and_warning_at_once(command_line, monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    (command_line.directory / "bad.json").write_text(
        json.dumps({"Sdk": {"TimeoutMs": 1, "MaxRetries": 99, "Webhoks": {"Path": "/x"}}})
    )
    answer = command_line("config", "check", "--config", "bad.json")
    assert answer.status == 78
    assert "error: Sdk:TimeoutMs: must be 1000 to 300000 milliseconds, not 1" in answer.out
    assert "error: Sdk:MaxRetries:" in answer.out
    assert "error: Sdk:AccessToken:" in answer.out
    assert "warning: Sdk:Webhoks: is not a known key: did you mean Sdk:Webhooks?" in answer.out
    assert "(from bad.json)" in answer.out
    assert answer.err == "errors: 3, warnings: 1\n"

    rows = command_line("config", "check", "--config", "bad.json", "--format", "json").document
    assert [row["level"] for row in rows] == ["error"] * 3 + ["warning"]
    assert {tuple(row) for row in rows} == {("level", "key", "message", "origin")}


def test_a_failed_start_also_lists_warnings(command_line):
    """A misspelt section is why the secret is missing."""
    (command_line.directory / "bad.json").write_text(
        json.dumps({"Sdk": {"Webhoks": {"Secret": SECRET}}})
    )
    for command in (["run", "--standalone"], ["events", "list", "--set", "MaxRetries=99"]):
        answer = command_line(*command, "--config", "bad.json")
        assert answer.status == 78
        first, *_, last = answer.err.splitlines()
        assert first == "sdk-trio: error: 1 problem in the settings:"
        assert last == (
            "sdk-trio: warning: Sdk:Webhoks: is not a known key: did you mean Sdk:Webhooks? "
            "(from bad.json)"
        )
        assert SECRET not in answer.err


def test_check_says_that_processes_need_a_store_that_they_share(command_line, monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    several = ["--set", "Sdk:Server:Processes=2", "--set", "Sdk:Storage:Backend=Memory"]
    answer = command_line("config", "check", "--standalone", *several)
    assert answer.status == 78
    assert "Sdk:Server:Processes: several processes need a store that they share" in answer.out


def test_check_of_good_settings_is_zero(command_line, monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    answer = command_line("config", "check", "--standalone")
    assert (answer.status, answer.out, answer.err) == (0, "", "errors: 0, warnings: 0\n")
    assert command_line("config", "check").status == 78  # full stack: the token is missing


def test_a_file_that_is_missing_is_named(command_line):
    answer = command_line("events", "list", "--config", "nowhere.json")
    assert answer.status == 78
    assert "  nowhere.json: the file does not exist: check its path\n" in answer.err
    assert "Sdk" not in answer.err


def test_show_names_origins_and_masks_secrets(command_line, monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRETS__0", SECRET)
    monkeypatch.setenv("SDK__ACCESSTOKEN", "token-that-must-stay-secret")
    answer = command_line("config", "show", "--set", "webhooks:path=/other", "--format", "json")
    assert answer.status == 0
    rows = {row["key"]: row for row in answer.document}
    assert rows["Sdk:Webhooks:Path"]["value"] == "/other"
    assert "argument" in rows["Sdk:Webhooks:Path"]["origin"]
    assert rows["Sdk:AccessToken"]["value"] == "********"
    assert "SDK__ACCESSTOKEN" in rows["Sdk:AccessToken"]["origin"]
    assert "Sdk:Mode" not in rows

    everything = command_line("config", "show", "--all")
    assert "Sdk:Mode" in everything.out
    for text in (answer.out, everything.out):
        assert SECRET not in text
        assert "must-stay-secret" not in text


def test_show_without_any_setting_explains_that(command_line):
    answer = command_line("config", "show")
    assert (answer.status, answer.out) == (0, "")
    assert "every setting is at its default" in answer.err


def test_schema_is_json_schema(command_line):
    schema = command_line("config", "schema").document
    assert "Path" in schema["properties"]["Sdk"]["properties"]["Webhooks"]["properties"]


@pytest.mark.parametrize(
    "key",
    ["Sdk:Webhooks:Secret", "webhooks:secrets", "SDK:WEBHOOKS:SECRETS:3", "Sdk__AccessToken"],
)
def test_secrets_on_the_command_line_are_refused_with_advice(command_line, key):
    answer = command_line("config", "show", "--set", f"{key}={SECRET}")
    assert answer.status == 2
    assert "secrets are not taken from the command line" in answer.err
    assert "SDK__" in answer.err
    assert SECRET not in answer.out + answer.err


@pytest.mark.parametrize("text", ["Sdk:Mode", "=Custom", ""])
def test_an_assignment_needs_key_and_value(command_line, text):
    answer = command_line("config", "show", "--set", text)
    assert answer.status == 2
    assert "--set takes KEY=VALUE" in answer.err


def test_keys_with_and_without_the_root_go_together(command_line):
    words = ["--set", "Sdk:MaxRetries=1", "--set", "Webhooks:Queue:MaxAttempts=2"]
    rows = command_line("config", "show", "--format", "json", *words).document
    assert {row["key"]: row["value"] for row in rows} == {
        "Sdk:MaxRetries": "1",
        "Sdk:Webhooks:Queue:MaxAttempts": "2",
    }


def test_the_last_assignment_of_a_key_wins_however_it_is_spelled(command_line):
    answer = command_line(
        *("config", "show", "--format", "json"),
        *("--set", "Sdk:TimeoutMs=2000", "--set", "sdk:timeoutms=3000"),
    )
    assert [row["value"] for row in answer.document] == ["3000"]


@pytest.mark.parametrize("command", [("config", "check"), ("doctor", "--offline")])
def test_a_part_without_its_requirements_is_reported_beside_other_problems(command_line, command):
    answer = command_line(
        *command,
        *("--standalone", "--set", "Sdk:TimeoutMs=1"),
        *("--set", "Sdk:MultiTenant:Notifications:Enabled=true"),
    )
    said = " ".join((answer.out + answer.err).split())
    assert "must be 1000 to 300000 milliseconds" in said
    assert "needs tenants, whose site managers are notified" in said


@pytest.mark.parametrize(
    ("dsn", "status", "reported"),
    [
        (None, 78, "SDK_POSTGRES_DSN, which is not set"),
        ("postgres//x", 78, "holds no connection string of PostgreSQL"),
        ("postgresql://user@db.example/app", 0, "errors: 0, warnings: 0"),
    ],
)
def test_a_check_reads_the_connection_string_that_a_start_will_need(
    command_line, monkeypatch, dsn, status, reported
):
    pytest.importorskip("psycopg")
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    if dsn is not None:
        monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    answer = command_line("config", "check", "--standalone", "-s", "Storage:Backend=Postgres")
    assert answer.status == status
    assert reported in answer.out + answer.err
    assert "warning" not in answer.out
