"""The display of the settings: rows and JSON Schema."""

import re
from pathlib import Path
from typing import Any

import sdk_trio
from sdk_trio.config import Settings, describe, json_schema
from sdk_trio.config.table import full_key, sections, table

# A test value.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"


def rows(mapping: dict[str, Any], origins: dict[str, str] | None = None) -> dict[str, Any]:
    valid = {"AccessToken": "a-token", "Webhooks:Secret": SECRET}
    return {row.key: row for row in describe(Settings.from_mapping(valid | mapping), origins)}


def test_secrets_are_masked_by_type() -> None:
    shown = rows({"Webhooks:Secrets": ["whpk_7rKQLZBgBYUW8W62SNPiNnhjKBn0wefax7JyU9mCeJc="]})
    assert shown["Sdk:AccessToken"].value == "********"
    assert shown["Sdk:Webhooks:Secrets"].value == "[********]"
    assert shown["Sdk:Webhooks:Secret"].value == "********"
    assert shown["Sdk:Admin:TokenEnvVar"].value == "SDK_ADMIN_TOKEN"
    assert not re.search(r"z6fMa4Y|a-token|7rKQLZB", str(shown))


def test_of_a_url_that_lets_who_knows_it_send_only_the_host_is_shown() -> None:
    key = "MultiTenant:Notifications:Webhook:Url"
    on = {"MultiTenant:Notifications:EnabledChannels:Email": False}
    for url, shown in (
        ("https://example.com/in?sig=planted", "https://example.com/********"),
        ("https://example.com?sig=planted", "https://example.com/********"),
        ("https://example.com/services/planted", "https://example.com/********"),
        ("https://example.com:8443/", "https://example.com:8443/"),
    ):
        assert rows({**on, key: url})[f"Sdk:{key}"].value == shown


def test_values_are_shown_as_they_are_written() -> None:
    shown = rows({"Resilience:HedgeAfterMs": 50, "Webhooks:Queue:RetryBaseSeconds": 0.5})
    values = {key.removeprefix("Sdk:"): row.value for key, row in shown.items()}
    assert values["Mode"] == "Test"
    assert values["Webhooks:RequireHttps"] == "true"
    assert values["Resilience:HedgeAfterMs"] == "50"
    assert values["Webhooks:Queue:RetryBaseSeconds"] == "0.5"
    assert values["CustomBaseUrl"] == "null"
    assert values["Server:Bind"] == "[127.0.0.1:8080]"
    assert values["MultiTenant:SingleTenantUpgrade:MaxRunDuration"] == "00:30:00"


def test_each_row_names_its_origin() -> None:
    shown = rows({}, {"Sdk:AccessToken": "variable SDK__ACCESSTOKEN"})
    assert shown["Sdk:AccessToken"].origin == "variable SDK__ACCESSTOKEN"
    assert shown["Sdk:Mode"].origin == "default"


def test_the_schema_knows_every_setting() -> None:
    root = json_schema()["properties"]["Sdk"]
    for setting in table():
        place = root
        for part in setting.path:
            place = place["properties"][part]
        assert place["description"].startswith(setting.about.doc)


def test_the_schema_says_types_ranges_and_choices() -> None:
    core = json_schema()["properties"]["Sdk"]["properties"]
    assert core["TimeoutMs"]["type"] == "integer"
    assert (core["TimeoutMs"]["minimum"], core["TimeoutMs"]["maximum"]) == (1000, 300_000)
    assert core["Mode"]["enum"] == ["Test", "Live", "Custom"]
    assert core["CustomBaseUrl"]["type"] == ["string", "null"]
    webhooks = core["Webhooks"]["properties"]
    assert webhooks["Secrets"]["items"] == {"type": "string"}
    assert "default" not in webhooks["Secret"]
    upgrade = core["MultiTenant"]["properties"]["SingleTenantUpgrade"]["properties"]
    assert re.search(upgrade["MaxRunDuration"]["pattern"], upgrade["MaxRunDuration"]["default"])
    assert not re.search(upgrade["MaxRunDuration"]["pattern"], "24:00:00")
    assert core["Webhooks"]["additionalProperties"] is False


def test_the_defaults_fit_their_own_patterns() -> None:
    def visit(node: dict[str, Any]) -> None:
        if "pattern" in node and isinstance(node.get("default"), str):
            assert re.search(node["pattern"], node["default"])
        for inner in node.get("properties", {}).values():
            visit(inner)

    visit(json_schema())


def test_every_key_that_the_code_names_is_a_setting_or_a_section() -> None:
    known = {setting.key for setting in table()} | set(map(full_key, sections().values()))
    known |= {
        row.key.replace(":0:", ":") for s in table() if s.is_section_list for row in s.item(0)
    }
    named = {
        name
        for path in Path(sdk_trio.__file__).parent.rglob("*.py")
        for name in re.findall(r'"(Sdk(?::[A-Z]\w+)+)', path.read_text("utf-8"))
    }
    assert len(named) > 40
    assert named <= known
