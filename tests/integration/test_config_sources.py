"""Settings from real files, directories and variables, in their order of precedence."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdk_trio.config import Loaded, Secret, describe, load_settings, read_settings
from sdk_trio.errors import EXIT_CONFIGURATION, OptionsValidationError, Problem

# A test value.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"
VALID = {"SDK__ACCESSTOKEN": "token", "SDK__WEBHOOKS__SECRET": SECRET}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def read(
    folder: Path, *files: Path, environ: dict[str, str] | None = None, **arguments: Any
) -> Loaded:
    return read_settings(
        *files,
        environ={**VALID, **(environ or {})},
        directory=folder,
        secrets_directory=folder / "secrets",
        **arguments,
    )


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps({"Sdk": content})
    path.write_text(text, "utf-8")
    return path


def only_problem(loaded: Loaded) -> Problem:
    (problem,) = loaded.problems
    return problem


def test_each_source_wins_over_the_one_before(folder: Path) -> None:
    environ: dict[str, str] = {"SDK_ENVIRONMENT": "Development"}
    overrides: dict[str, Any] = {}

    def path_and_origin() -> tuple[str, str]:
        loaded = read(folder, environ=environ, overrides=overrides)
        assert loaded.problems == ()
        row = next(r for r in describe(loaded.require(), loaded.origins) if r.key == key)
        return row.value, row.origin.removeprefix(f"{folder}/")

    key = "Sdk:Webhooks:Path"
    assert path_and_origin() == ("/hooks/sdk", "default")
    write(folder / "appsettings.json", {"Webhooks": {"Path": "/1"}})
    assert path_and_origin() == ("/1", "appsettings.json")
    write(folder / "appsettings.Development.json", {"Webhooks": {"Path": "/2"}})
    assert path_and_origin() == ("/2", "appsettings.Development.json")
    write(folder / "sdk.toml", '[Sdk.Webhooks]\nPath = "/3"\n')
    assert path_and_origin() == ("/3", "sdk.toml")
    write(folder / ".env", "# local\nSDK__WEBHOOKS__PATH=/4\n")
    assert path_and_origin() == ("/4", ".env:2")
    write(folder / "secrets" / "Sdk__Webhooks__Path", "/5\n")
    assert path_and_origin() == ("/5", "secrets/Sdk__Webhooks__Path")
    write(folder / "credentials" / "sdk__webhooks__path", "/6")
    environ["CREDENTIALS_DIRECTORY"] = str(folder / "credentials")
    assert path_and_origin() == ("/6", "credentials/sdk__webhooks__path")
    environ["sdk__Webhooks__PATH"] = "/7"
    assert path_and_origin() == ("/7", "variable sdk__Webhooks__PATH")
    overrides["Sdk:Webhooks:Path"] = "/8"
    assert path_and_origin() == ("/8", "argument Sdk:Webhooks:Path")


def test_named_files_are_read_in_their_order_with_their_siblings(folder: Path) -> None:
    write(folder / "appsettings.json", {"BasePath": "/ignored"})
    first = write(folder / "a.toml", "[Sdk]\nBasePath = '/a'\nMaxRetries = 1\nTimeoutMs = 1001\n")
    write(folder / "a.Production.toml", "[Sdk]\nMaxRetries = 2\nTimeoutMs = 1002\n")
    second = write(folder / "b.json", {"TimeoutMs": 1003})
    found = read(folder, first, second).require()
    assert (found.base_path, found.max_retries, found.timeout_ms) == ("/a", 2, 1003)


@pytest.mark.parametrize("name", ["Production", "Staging", "development", "DEVELOPMENT"])
def test_dotenv_counts_in_development_alone(folder: Path, name: str) -> None:
    write(folder / ".env", "SDK__BASEPATH=/dotenv")
    found = read(folder, environ={"SDK_ENVIRONMENT": name}).require()
    assert found.base_path == ("/dotenv" if name.casefold() == "development" else "/v1")


@pytest.mark.parametrize(
    ("environ", "overrides", "expected"),
    [
        ({}, {}, "File"),
        ({"SDK_ENVIRONMENT": "One"}, {}, "One"),
        ({"SDK_ENVIRONMENT": "One", "SDK__ENVIRONMENT": "Two"}, {}, "Two"),
        ({"SDK__ENVIRONMENT": "Two"}, {"Sdk:Environment": "Three"}, "Three"),
    ],
)
def test_the_environment_chooses_the_files(
    folder: Path, environ: dict[str, str], overrides: dict[str, Any], expected: str
) -> None:
    write(folder / "appsettings.json", {"Environment": "File"})
    for name in ("File", "One", "Two", "Three"):
        write(folder / f"appsettings.{name}.json", {"BasePath": f"/{name}"})
    found = read(folder, environ=environ, overrides=overrides).require()
    assert (found.environment, found.base_path) == (expected, f"/{expected}")


def test_an_environment_never_leaves_the_folder(folder: Path) -> None:
    write(folder / "appsettings.json", {})
    loaded = read(folder, environ={"SDK_ENVIRONMENT": "/../../etc/passwd"})
    assert only_problem(loaded).key == "Sdk:Environment"


def test_the_service_manager_names_the_data_directory(folder: Path) -> None:
    environ = {"STATE_DIRECTORY": "/var/lib/one:/var/lib/two"}
    loaded = read(folder, environ=environ)
    assert loaded.require().storage.path == "/var/lib/one"
    assert loaded.origins["Sdk:Storage:Path"] == "variable STATE_DIRECTORY"
    write(folder / "appsettings.json", {"Storage": {"Path": "mine"}})
    assert read(folder, environ=environ).require().storage.path == "mine"


def test_lists_from_variables(folder: Path) -> None:
    write(folder / "appsettings.json", {"Server": {"TrustedProxies": ["10.0.0.0/8", "unix"]}})
    indexed = read(folder, environ={"SDK__SERVER__TRUSTEDPROXIES__1": "192.0.2.0/24"}).require()
    assert indexed.server.trusted_proxies == ("10.0.0.0/8", "192.0.2.0/24")
    commas = read(folder, environ={"SDK__SERVER__TRUSTEDPROXIES": "::1, unix"}).require()
    assert commas.server.trusted_proxies == ("::1", "unix")
    array = read(folder, environ={"SDK__SERVER__TRUSTEDPROXIES": '["::1"]'}).require()
    assert array.server.trusted_proxies == ("::1",)


def test_a_secret_file_loses_one_line_break_and_no_more(folder: Path) -> None:
    path = folder / "secrets" / "Sdk__Webhooks__Secrets__0"
    for end in ("", "\n", "\r\n"):
        write(path, "")
        path.write_bytes(f"{SECRET}{end}".encode())
        assert read(folder).require().webhooks.secrets == (Secret(SECRET),)
    path.write_bytes(f"{SECRET}\n\n".encode())
    problem = only_problem(read(folder))
    assert problem.key == "Sdk:Webhooks:Secrets:0"
    assert problem.origin == str(path)


def test_an_unset_variable_read_as_empty_is_no_secret(folder: Path) -> None:
    problem = only_problem(read(folder, environ={"SDK__WEBHOOKS__SECRET": ""}))
    assert problem.key == "Sdk:Webhooks:Secret"
    assert problem.origin == "variable SDK__WEBHOOKS__SECRET"


def test_other_files_and_variables_are_left_alone(folder: Path) -> None:
    write(folder / "secrets" / "database_password", "x")
    (folder / "secrets" / "Sdk__Directory").mkdir()
    loaded = read(folder, environ={"SDK": "x", "SDK_HOME": "x", "SDKX__MODE": "x"})
    assert (loaded.problems, loaded.warnings) == ((), ())


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("SDK__BASEPATH=/a", "/a"),
        ("export SDK__BASEPATH = /a # comment", "/a"),
        ("SDK__BASEPATH='/a'", "/a"),
        ('SDK__BASEPATH="/a"  # comment', "/a"),
        ("SDK__BASEPATH=/a#b", None),
        ('SDK__BASEPATH="/a\\nb"', None),
        ("OTHER=value", "/v1"),
        ("", "/v1"),
    ],
)
def test_dotenv_lines(folder: Path, line: str, value: str | None) -> None:
    write(folder / ".env", f"\n{line}\n")
    loaded = read(folder, environ={"SDK_ENVIRONMENT": "Development"})
    if value is None:
        assert only_problem(loaded).origin == f"{folder / '.env'}:2"
    else:
        assert loaded.require().base_path == value


@pytest.mark.parametrize("line", ["SDK__MODE", "=x", 'SDK__MODE="x', "SDK MODE=x", "'a'=b"])
def test_a_malformed_dotenv_line_is_named(folder: Path, line: str) -> None:
    write(folder / ".env", f"A=b\n{line}\n")
    problem = only_problem(read(folder, environ={"SDK_ENVIRONMENT": "Development"}))
    assert "at line 2" in problem.message
    assert problem.origin == str(folder / ".env")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"Sdk": {\n  "Mode" "Live"}}', "line 2, column 10"),
        ("a.json", "", "line 1, column 1"),
        ("a.json", "[]", "line 1, column 1"),
        ("a.json", '{"Sdk": ' + '{"a":' * 100_000, "nested too deeply"),
        ("a.toml", "[Sdk]\nMode = Live\n", "line 2, column 8"),
        ("a.toml", "[Sdk]\nMode = 'a'\nMode = 'b'\n", "at line 3"),
        ("a.yaml", "Sdk: {}", ".json or .toml"),
    ],
)
def test_a_malformed_file_is_named_with_its_place(
    folder: Path, name: str, text: str, message: str
) -> None:
    path = write(folder / name, text)
    problem = only_problem(read(folder, path))
    assert message in problem.message
    assert str(problem).startswith(f"{path}: ")
    assert problem.origin == str(path)


def test_a_file_that_is_not_text_is_named_with_its_place(folder: Path) -> None:
    path = folder / "a.json"
    path.write_bytes(b'{"Sdk":\n {"a\xff": 1}}')
    assert "line 2, byte 5" in only_problem(read(folder, path)).message


def test_a_missing_file_and_a_directory_are_problems(folder: Path) -> None:
    found = read(folder, folder / "none.json", folder).problems
    assert [problem.origin for problem in found] == [str(folder / "none.json"), str(folder)]


def test_keys_of_a_broken_file_are_not_reported_as_missing(folder: Path) -> None:
    path = write(folder / "a.json", "{")
    loaded = read_settings(path, environ={"SDK__TIMEOUTMS": "1"}, secrets_directory=folder / "s")
    assert [problem.key for problem in loaded.problems] == ["Sdk", "Sdk:TimeoutMs"]


def test_a_byte_order_mark_and_long_numbers_are_read(folder: Path) -> None:
    path = folder / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"Sdk": {"TimeoutMs": ' + b"9" * 5000 + b"}}")
    assert only_problem(read(folder, path)).key == "Sdk:TimeoutMs"


def test_a_file_without_the_root_key_is_a_warning(folder: Path) -> None:
    path = write(folder / "a.json", '{"Mode": "Live"}')
    loaded = read(folder, path)
    assert loaded.problems == ()
    assert [warning.origin for warning in loaded.warnings] == [str(path)]


def test_keys_that_differ_in_case_alone_are_reported(folder: Path) -> None:
    path = write(folder / "a.json", '{"Sdk": {"Mode": "Live", "mode": "Test"}}')
    assert "given twice" in only_problem(read(folder, path)).message
    variables = {"SDK__MODE": "Live", "Sdk__Mode": "Test"}
    assert "given twice" in only_problem(read(folder, environ=variables)).message


def test_problems_name_where_the_value_came_from(folder: Path) -> None:
    path = write(folder / "a.json", {"TimeoutMs": 5, "Mode": "x"})
    loaded = read(folder, path, environ={"SDK__MAXRETRIES": "99"})
    assert [(p.key, p.origin) for p in loaded.problems] == [
        ("Sdk:Mode", str(path)),
        ("Sdk:TimeoutMs", str(path)),
        ("Sdk:MaxRetries", "variable SDK__MAXRETRIES"),
    ]


def test_load_settings_raises_with_everything(folder: Path) -> None:
    path = write(folder / "a.json", {"TimeoutMs": 5})
    with pytest.raises(OptionsValidationError) as caught:
        load_settings(path, environ={}, overrides={"Sdk:Mode": "x"})
    keys = {problem.key for problem in caught.value.problems}
    assert keys >= {"Sdk:TimeoutMs", "Sdk:Mode", "Sdk:AccessToken", "Sdk:Webhooks:Secret"}
    assert caught.value.exit_code == EXIT_CONFIGURATION


def test_load_settings_logs_warnings(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(folder / "a.json", {"Mdoe": SECRET})
    with caplog.at_level(logging.WARNING, logger="sdk_trio"):
        loaded = load_settings(path, environ={"SDK__WEBHOOKS__SECRET": SECRET}, standalone=True)
    assert loaded.webhooks.all_secrets == (Secret(SECRET),)
    (record,) = [r for r in caplog.records if r.name == "sdk_trio.config"]
    assert "config.warning" in record.getMessage()
    assert "Sdk:Mode?" in record.getMessage()
    assert SECRET not in record.getMessage()


def test_no_secret_is_in_what_was_loaded(folder: Path) -> None:
    loaded = read(folder, environ={"SDK__TIMEOUTMS": SECRET})
    assert SECRET not in repr(loaded)
    assert SECRET not in repr(read(folder))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), suffix=st.sampled_from(["json", "toml", "env"]))
def test_any_bytes_in_any_file_are_read_or_reported(
    folder: Path, content: bytes, suffix: str
) -> None:
    path = folder / ("a." + suffix if suffix != "env" else ".env")
    path.write_bytes(content)
    files = () if suffix == "env" else (path,)
    loaded = read(folder, *files, environ={"SDK_ENVIRONMENT": "Development"})
    assert (loaded.settings is None) == bool(loaded.problems)


def test_an_unread_dotenv_is_named_where_its_value_is_missing(folder: Path) -> None:
    write(folder / ".env", f"OTHER=1\nSDK__WEBHOOKS__SECRET={SECRET}\nSDK__BASEPATH=/dotenv")
    # docker compose and `set -a; . .env` have set the same variables.
    loaded = read(folder, environ={"SDK__BASEPATH": "/v1"})
    assert loaded.warnings == ()
    loaded = read_settings(environ={}, directory=folder, standalone=True)
    (warning,) = loaded.warnings
    assert (warning.key, warning.origin) == ("Sdk", f"{folder}/.env")
    assert "has Sdk:BASEPATH, Sdk:WEBHOOKS:SECRET, and is read in the Development" in str(warning)
    assert SECRET not in str(warning)
    development = {"SDK_ENVIRONMENT": "Development"}
    loaded = read_settings(environ=development, directory=folder, standalone=True)
    assert loaded.problems == ()
    assert "the file has" not in str(loaded.warnings)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SDK_WEBHOOKS__SECRET", "SDK__WEBHOOKS__SECRET"),
        ("sdk_Storage__Path", "sdk__Storage__Path"),
        ("SDK_WEBHOOKS_SECRET", "SDK__WEBHOOKS__SECRET"),
        ("SDK_ACCESS_TOKEN", "SDK__ACCESSTOKEN"),
        ("SDK_ADMIN_TOKEN", None),
        ("SDKX__PATH", None),
    ],
)
def test_a_variable_with_one_underscore_too_few_is_reported(
    folder: Path, name: str, meant: str | None
) -> None:
    messages = [str(warning) for warning in read(folder, environ={name: "x" * 40}).warnings]
    expected = f"{name}: the variable is not read: write {meant}"
    assert messages == ([] if meant is None else [expected])


@pytest.mark.parametrize(
    "text", ['{"Sdk": {"Mode": "Test",}}', '{"Sdk": {} // x\n}', '{\n# x\n"Sdk": {}}']
)
def test_json_with_syntax_of_other_formats_is_explained(folder: Path, text: str) -> None:
    file = write(folder / "a.json", text)
    assert "JSON has no comments and no comma after" in str(only_problem(read(folder, file)))
    file = write(folder / "b.json", '{"Sdk": {"Mode" "Test"}}')
    assert "comments" not in str(only_problem(read(folder, file)))


def test_a_key_without_its_unit_is_recognised(folder: Path) -> None:
    (warning,) = read(folder, overrides={"Webhooks:Tolerence": 3}).warnings
    assert "did you mean Sdk:Webhooks:ToleranceSeconds?" in str(warning)
