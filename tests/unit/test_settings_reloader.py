"""Reloads after the settings files have changed since the start."""

from functools import partial
from pathlib import Path

import pytest

from sdk_trio.cli.run import SettingsReloader
from sdk_trio.config import Loaded
from sdk_trio.config.load import read_settings
from sdk_trio.errors import OptionsValidationError

JSON = '{"Sdk": {"Webhooks": {"RateLimitPerMinute": 1}}}'
TOML = "[Sdk.Webhooks]\nRateLimitPerMinute = 1\n"


def reading(directory: Path, **environ: str) -> Loaded:
    return read_settings(
        directory=directory,
        secrets_directory=directory / "none",
        environ=environ,
        standalone=True,
        receiver=False,
    )


def reloader_of(read) -> SettingsReloader:
    reloader = SettingsReloader(read, Loaded.require, environ={})
    reloader.began_with(read())
    return reloader


@pytest.mark.parametrize(
    ("name", "text", "emptied"),
    [("sdk.toml", TOML, ""), ("sdk.toml", TOML, "# later\n"), ("appsettings.json", JSON, "{}")],
)
def test_a_file_that_was_emptied_keeps_its_settings(tmp_path, name, text, emptied):
    (tmp_path / name).write_text(text)
    reloader = reloader_of(partial(reading, tmp_path))
    (tmp_path / name).write_text(emptied)
    with pytest.raises(OptionsValidationError) as caught:
        reloader._read_all()
    assert [problem.origin for problem in caught.value.problems] == [str(tmp_path / name)]
    (tmp_path / name).write_text(text)
    assert reloader._read_all()[1].webhooks.rate_limit_per_minute == 1


def test_a_file_without_settings_may_stay_empty_or_disappear(tmp_path):
    (tmp_path / "sdk.toml").touch()
    reloader = reloader_of(partial(reading, tmp_path))
    reloader._read_all()
    (tmp_path / "sdk.toml").unlink()
    reloader._read_all()


def test_a_file_that_is_replaced_during_the_reload_is_read_again(tmp_path):
    file = tmp_path / "sdk.toml"
    file.write_text(TOML)
    moments = ["there", "away"]

    def read() -> Loaded:
        if (moments.pop(0) if moments else "there") == "there":
            return reading(tmp_path)
        file.unlink()
        loaded = reading(tmp_path)
        file.write_text(TOML)
        return loaded

    assert reloader_of(read)._read_all()[1].webhooks.rate_limit_per_minute == 1


def test_a_file_of_another_environment_is_ignored(tmp_path):
    (tmp_path / "appsettings.Production.json").write_text(JSON)
    environment = ["Production"]
    reloader = reloader_of(lambda: reading(tmp_path, SDK_ENVIRONMENT=environment[0]))
    environment[0] = "Staging"
    assert reloader._read_all()[1].webhooks.rate_limit_per_minute is None
