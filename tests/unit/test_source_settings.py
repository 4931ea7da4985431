"""Settings of sources: what fails the start, with full keys, and the pages that show them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.deliveries import SECRET
from support.sources import BY_NAME, STRIPE, WHSEC, as_asgi

from sdk_trio.cli.doctor import Report
from sdk_trio.cli.doctor.settings import check_replays
from sdk_trio.config import Secret, Settings
from sdk_trio.config.load import read_settings
from sdk_trio.config.options.sources import SourceOptions
from sdk_trio.errors import OptionsValidationError
from sdk_trio.webhooks.sources.schemes import Genuine, Keys, Scheme
from sdk_trio.webhooks.verdict import Cause, Rejected

PAGES = sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("source*.md"))

OWN = {"Name": "own", "Scheme": "Hmac", "Secrets": [STRIPE], "Header": "X-Signature"}
PLAIN = {"Name": "plain", "Scheme": "Stripe", "Secrets": [STRIPE]}


def problems(*sources: dict[str, Any], **more: Any) -> list[str]:
    """Return the problems of these sources, ``KEY MESSAGE``."""
    mapping = {"Webhooks:Secret": SECRET, "Sources": list(sources), **more}
    try:
        Settings.from_mapping(mapping, standalone=True)
    except OptionsValidationError as error:
        return [f"{each.key} {each.message}" for each in error.problems]
    return []


def test_a_source_has_a_route_of_its_name_or_its_own() -> None:
    mapping = {"Webhooks:Secret": SECRET, "Sources": [PLAIN, {**OWN, "Path": "/in/own"}]}
    settings = Settings.from_mapping(mapping, standalone=True)

    assert [source.route for source in settings.sources] == ["/hooks/plain", "/in/own"]


@pytest.mark.parametrize(
    ("sources", "more", "expected"),
    [
        ([{**PLAIN, "Name": ""}], {}, "Sdk:Sources:0:Name is required"),
        ([{**PLAIN, "Name": "A b"}], {}, "Sdk:Sources:0:Name must be 1 to 64 lowercase"),
        ([PLAIN, {**PLAIN, "Path": "/b"}], {}, "Sdk:Sources:1:Name is another source's"),
        ([PLAIN, {**OWN, "Path": "/hooks/plain"}], {}, "Sdk:Sources:1:Path is /hooks/plain, the"),
        ([{**PLAIN, "Name": "sdk"}], {}, "Sdk:Sources:0:Path is /hooks/sdk, the route of Sdk:W"),
        (
            [{**PLAIN, "Path": "/hooks/sdk/acme"}],
            {"MultiTenant:Enabled": True},
            "Sdk:Sources:0:Path is /hooks/sdk/acme, which is the address of a tenant",
        ),
        (
            [{**PLAIN, "Path": "/test/webhook/simulate/x"}],
            {"Environment": "Development"},
            "Sdk:Sources:0:Path is a route of the simulator",
        ),
        ([{**PLAIN, "Path": "hooks"}], {}, "Sdk:Sources:0:Path must be a path"),
        ([{"Name": "a", "Scheme": "Stripe"}], {}, "Sdk:Sources:0:Secrets is required"),
        (
            [{"Name": "a", "Scheme": "Stripe", "SecretEnvVar": "NOT_SET"}],
            {},
            "Sdk:Sources:0:Secrets is empty, and the variable NOT_SET",
        ),
        ([{**PLAIN, "Secrets": ["short"]}], {}, "Sdk:Sources:0:Secrets:0 has 5 bytes of key"),
        ([{**PLAIN, "Secrets": [" " + STRIPE]}], {}, "Sdk:Sources:0:Secrets:0 begins or ends"),
        (
            [{**PLAIN, "Scheme": "Svix", "Secrets": ["whsec_not base64 at all"]}],
            {},
            "Sdk:Sources:0:Secrets:0 is not base64",
        ),
        (
            [{**PLAIN, "Secrets": ["aaaaaaaaaaaaaaaaaaaaaaaaaaaa"]}],
            {},
            "Sdk:Sources:0:Secrets:0 has a guessable pattern",
        ),
        ([{**PLAIN, "Header": "X-A"}], {}, "Sdk:Sources:0:Header is for Scheme Hmac only"),
        ([{**PLAIN, "ToleranceSeconds": 0}], {}, "Sdk:Sources:0:ToleranceSeconds must be"),
        ([{**PLAIN, "Scheme": "Other"}], {}, "Sdk:Sources:0:Scheme must be one of"),
        ([{**OWN, "Header": None}], {}, "Sdk:Sources:0:Header is required by Scheme Hmac"),
        ([{**OWN, "SignedContent": "x"}], {}, "Sdk:Sources:0:SignedContent must have {body}"),
        ([{**OWN, "SignedContent": "{body}{a}"}], {}, "Sdk:Sources:0:SignedContent knows only"),
        (
            [{**OWN, "SignedContent": "{timestamp}{body}"}],
            {},
            "Sdk:Sources:0:Timestamp must be a header",
        ),
        (
            [{**OWN, "SignedContent": "{id}{body}", "Id": "/id"}],
            {},
            "Sdk:Sources:0:Id must be a header",
        ),
        ([{**OWN, "Prefix": "HMAC "}], {}, "Sdk:Sources:0:Prefix has a comma, a semicolon or a"),
        ([{**OWN, "Prefix": "v1,"}], {}, "Sdk:Sources:0:Prefix has a comma, a semicolon or a"),
        ([{**PLAIN, "Path": "/%7Eme"}], {}, "Sdk:Sources:0:Path must be a path"),
        ([{**OWN, "Type": "a b"}], {}, "Sdk:Sources:0:Type must be the name of a header"),
        (
            [PLAIN],
            {"Forward:Routes": [{"Url": "http://127.0.0.1:9", "Sources": ["strpie"]}]},
            "Sdk:Forward:Routes:0:Sources:0 names no source",
        ),
    ],
)
def test_a_mistake_fails_the_start_with_its_key(
    sources: list[dict[str, Any]], more: dict[str, Any], expected: str
) -> None:
    found = problems(*sources, **more)

    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_secret_comes_from_its_variable_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "sdk.toml"
    file.write_text('[[Sdk.Sources]]\nName = "a"\nScheme = "Stripe"\nSecretEnvVar = "THE_SECRET"\n')
    environ = {"SDK__WEBHOOKS__SECRET": SECRET, "THE_SECRET": f"{STRIPE} {WHSEC}"}

    settings = read_settings(file, environ=environ, standalone=True).require()

    assert [secret.reveal() for secret in settings.sources[0].secrets] == [STRIPE, WHSEC]


def test_one_secret_at_two_addresses_is_a_warning(tmp_path: Path) -> None:
    mapping = {
        "Sdk": {"Webhooks": {"Secret": SECRET}, "Sources": [PLAIN, {**PLAIN, "Name": "other"}]}
    }
    found = read_settings(overrides=mapping["Sdk"], environ={}, standalone=True, directory=tmp_path)

    assert any("the same secret as Sdk:Sources:0:Secrets:0" in w.message for w in found.warnings)


# -- the pages -----------------------------------------------------------------------------------


def blocks() -> list[tuple[str, str]]:
    found = [
        (page.name, block)
        for page in PAGES
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(found) == len(PAGES) == 7
    return found


@pytest.mark.parametrize(("page", "block"), blocks(), ids=lambda text: text.partition("\n")[0])
def test_the_settings_of_each_page_start_a_receiver(page: str, block: str) -> None:
    (source,) = tomllib.loads(block)["Sdk"]["Sources"]
    source["Secrets"] = [WHSEC]

    assert problems(source) == [], page
    assert len(block.splitlines()) < 20


def of_custom_page() -> SourceOptions:
    (block,) = [block for page, block in blocks() if page == "source-custom.md"]
    (source,) = tomllib.loads(block)["Sdk"]["Sources"]
    secret = BY_NAME["paddle"].secret
    mapping = {"Webhooks:Secret": SECRET, "Sources": [{**source, "Secrets": [secret]}]}
    return Settings.from_mapping(mapping, standalone=True).sources[0]


def test_the_settings_of_the_custom_page_verify_what_that_sender_signs() -> None:
    paddle, options = BY_NAME["paddle"], of_custom_page()
    body = paddle.body("evt_1", 7)
    headers = as_asgi(paddle.headers("evt_1", 1_700_000_000, body))

    verdict = Scheme.of(options).verify(
        headers, body, now=1_700_000_100, keys=Keys.of(options), tolerance=300
    )

    assert verdict == Genuine("evt_1", 1_700_000_000, "transaction.completed", "txn_7")


def test_the_settings_of_the_custom_page_verify_the_vector_of_that_senders_library() -> None:
    # paddle-python-sdk 1.16.1, test_Verifier.py: a signature that does not match comes first, and
    # the third secret made the other.
    prefix = "pdl_ntf_01hbpjmytsa32fhr36nqgc3kgb_"
    ends = ("TjIG2BXbm83HPXqNfziwe506sBEdqL/4", "WvRO0eL4Bj9rgYYIBZY6wZhG4EHy9jzh")
    options = replace(
        of_custom_page(),
        secrets=tuple(Secret(prefix + end) for end in ends),
        id=None,
        type="X-Type",
    )
    signature = "d96299976a6eb066f484d7fde011ac56fc32b38fc9940bc419d6e537fdc6ef02"
    sent = {"Paddle-Signature": f"ts=1696195954;h1=dummy;h1={signature}", "X-Type": "any"}

    verdict = Scheme.of(options).verify(
        as_asgi(sent), b"hello-world", now=1_696_195_954, keys=Keys.of(options), tolerance=5
    )

    # The signature matches; the body of the vector is no JSON.
    assert isinstance(verdict, Rejected)
    assert verdict.cause is Cause.NOT_AN_EVENT


def test_the_doctor_names_the_sources_that_can_be_replayed() -> None:
    senders = [BY_NAME[name].options for name in ("stripe", "github", "paddle")]
    senders.append(replace(senders[2], name="other", id="X-Id"))
    mapping = {"Webhooks:Secret": SECRET}
    settings = replace(Settings.from_mapping(mapping, standalone=True), sources=tuple(senders))
    report = Report("replays")

    check_replays(settings, report)

    said = {finding.where: finding.what for finding in report.findings}
    assert "signs a timestamp" in said["Sdk:Sources:0"]
    assert "only deduplication stops a replay" in said["Sdk:Sources:1"]
    assert "its id is not signed either" in said["Sdk:Sources:1"]
    assert "signs a timestamp" in said["Sdk:Sources:2"]
    assert "not signed" not in said["Sdk:Sources:2"]
    assert "its id is not signed" in said["Sdk:Sources:3"]
