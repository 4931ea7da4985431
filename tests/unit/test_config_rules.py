from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import BUNDLED_API_VERSION, Secret, Settings
from sdk_trio.config.bind import bind
from sdk_trio.config.check import Findings, check
from sdk_trio.config.sources import read_section
from sdk_trio.config.table import table
from sdk_trio.errors import OptionsValidationError
from sdk_trio.records.channels import CHANNELS

# Test values.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"
OTHER_SECRET = "whsec_ZYi2SptnRGqVWE69YmXzhwe3HB3GHULU"
PUBLIC_KEY = "whpk_7rKQLZBgBYUW8W62SNPiNnhjKBn0wefax7JyU9mCeJc="

VALID = {"AccessToken": "token", "Webhooks:Secret": SECRET}
REPLICATION = "MultiTenant:FileDb:Replication"
NOTIFICATIONS = "MultiTenant:Notifications"
UPGRADE = "MultiTenant:SingleTenantUpgrade"
OBJECT_STORE = {f"{REPLICATION}:UseReplication": True, f"{REPLICATION}:ObjectStore:Bucket": "b"}
EMAIL = {f"{NOTIFICATIONS}:Enabled": True, f"{NOTIFICATIONS}:Email:FromAddress": "a@example.com"}
SMS = {
    f"{NOTIFICATIONS}:Enabled": True,
    f"{NOTIFICATIONS}:EnabledChannels:Email": False,
    f"{NOTIFICATIONS}:EnabledChannels:Sms": True,
    f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber": "+15551234567",
}
WEBHOOK = {
    f"{NOTIFICATIONS}:Enabled": True,
    f"{NOTIFICATIONS}:EnabledChannels:Email": False,
    f"{NOTIFICATIONS}:EnabledChannels:Webhook": True,
    f"{NOTIFICATIONS}:Webhook:Url": "https://example.com/in",
}
DEVELOPMENT = {
    "Environment": "Development",
    "Webhooks:Secret": Secret(SECRET, made_for_tests=True),
}


def findings(changes: dict[str, Any], **arguments: Any) -> Findings:
    bound = bind([read_section({**VALID, **changes}, None)])
    assert bound.problems == ()
    assert bound.warnings == ()
    return check(bound.settings, **arguments)


def keys(changes: dict[str, Any], **arguments: Any) -> list[str]:
    found = findings(changes, **arguments).problems
    return [problem.key.removeprefix("Sdk:") for problem in found]


def target(name: str, **options: Any) -> dict[str, Any]:
    base = {f"{REPLICATION}:UseReplication": True, f"{REPLICATION}:ReplicaTargetType": name}
    return base | {f"{REPLICATION}:{name}:{key}": value for key, value in options.items()}


GOOD: list[dict[str, Any]] = [
    {},
    {"Mode": "Custom", "CustomBaseUrl": "https://example.com"},
    {"Mode": "Custom", "CustomBaseUrl": "https://[2001:db8::1]:8443/api"},
    {"Mode": "Custom", "CustomBaseUrl": "https://bücher.example./"},
    {"Mode": "Custom", "CustomBaseUrl": "http://localhost:9000", **DEVELOPMENT},
    {"Mode": "Custom", "CustomBaseUrl": "http://127.0.0.1:9000", **DEVELOPMENT,
     "Environment": "development"},
    {"Mode": "Custom", "CustomBaseUrl": "http://[::1]:9000", **DEVELOPMENT},
    {"ApiVersion": BUNDLED_API_VERSION, "ApiVersionStrictness": "Strict"},
    {"ApiVersion": "2025-01", "ApiVersionStrictness": "Off"},
    {"ApiVersion": BUNDLED_API_VERSION[:7], "ApiVersionStrictness": "Strict",
     "Upstream:VersionHeader": "Polar-Version"},
    {"Webhooks:Secret": None, "Webhooks:Secrets": [SECRET, OTHER_SECRET]},
    {"Webhooks:Secret": PUBLIC_KEY},
    {"Webhooks:Path": "/"},
    {"Server:Bind": ["localhost:0", "localhost:0", "[::]:443", "unix:/run/x.sock", "fd:3"]},
    {"Server:Bind": ["unix:/run/x.sock?mode=0660", "unix:/run/y.sock?mode=0600"]},
    {"Server:Bind": ["fd:web", "fd:sdk-trio.socket"]},
    {"Server:Bind": ["127.0.0.1:8081"], "Admin:Enabled": False},
    {"Server:Bind": ["0.0.0.0:0"], "Admin:Bind": "127.0.0.1:0"},
    {"Server:Bind": ["10.0.0.1:80"], "Admin:Bind": "127.0.0.1:80"},
    {"Server:Bind": ["fd:3"], "Admin:Bind": "unix:/run/admin.sock"},
    {"Server:TrustedProxies": ["10.0.0.0/8", "::1", "unix"]},
    {"Webhooks:AllowedSourceIpRanges": ["192.0.2.7", "2001:db8::/32"]},
    {"Server:CertFile": "cert.pem", "Server:KeyFile": "key.pem"},
    {"Webhooks:Queue:RetryBaseSeconds": 5, "Webhooks:Queue:RetryCapSeconds": 5},
    {f"{UPGRADE}:LiteralDefaultTenantSlug": "a"},
    {f"{UPGRADE}:LiteralDefaultTenantSlug": "a" * 64},
    {f"{UPGRADE}:LiteralDefaultTenantSlug": "a-b--c-9"},
    {f"{UPGRADE}:LiteralDefaultTenantSlug": "", f"{UPGRADE}:LiteralDefaultTenantName": "",
     f"{UPGRADE}:DefaultTenantStrategy": "HostSupplied"},
    # Disabled sections are not checked.
    {f"{REPLICATION}:SyncIntervalSeconds": 0, f"{REPLICATION}:ReplicaTargetType": "Sftp"},
    {f"{NOTIFICATIONS}:EnabledChannels:Sms": True, f"{NOTIFICATIONS}:Webhook:TimeoutSeconds": 0},
    {**OBJECT_STORE, f"{REPLICATION}:Sftp:Port": 0},
    {**OBJECT_STORE, f"{REPLICATION}:ConfigOutputPath": ""},
    {**OBJECT_STORE, f"{REPLICATION}:ObjectStore:EndpointUrl": "http://127.0.0.1:5001"},
    {**EMAIL, f"{NOTIFICATIONS}:Webhook:Url": "nonsense"},
    target("BlobStore", AccountName="a"),
    target("CloudStorage", Bucket="b", CredentialsJsonPath="/key.json"),
    target("Sftp", Host="h", User="u", PrivateKeyPath="/key", HostKey="ssh-ed25519 AAAA"),
    target("Sftp", Host="h", User="u", PrivateKeyPath="C:\\key", HostKey="ssh-rsa AAAA"),
    target("LocalDisk"),
    EMAIL, SMS, WEBHOOK,
    {**WEBHOOK, f"{NOTIFICATIONS}:Webhook:Url": "http://localhost/in", **DEVELOPMENT},
]  # fmt: skip


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_allowed(changes: dict[str, Any]) -> None:
    assert findings(changes) == Findings()


def test_a_setting_that_may_not_be_below_another_names_a_number_of_its_section() -> None:
    kinds = {setting.attributes: setting.kind for setting in table()}
    pairs = [(s.attributes, s.about.at_least) for s in table() if s.about.at_least is not None]
    assert pairs
    for (*section, name), other in pairs:
        assert kinds[(*section, name)] in (int, float)
        assert kinds[(*section, other)] in (int, float), (name, other)


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"AccessToken": None}, ["AccessToken"]),
    ({"AccessToken": " \t"}, ["AccessToken"]),
    ({"AccessToken": "token\n"}, ["AccessToken"]),
    ({"AccessToken": "t\u00f6ken"}, ["AccessToken"]),
    ({"Mode": "Custom"}, ["CustomBaseUrl"]),
    ({"Mode": "Custom", "CustomBaseUrl": "http://localhost:9000"}, ["CustomBaseUrl"]),
    ({"BasePath": "v1"}, ["BasePath"]),
    ({"BasePath": ""}, ["BasePath"]),
    ({"Upstream:SandboxUrl": ""}, ["Upstream:SandboxUrl"]),
    ({"Upstream:VersionHeader": "Sdk Version"}, ["Upstream:VersionHeader"]),
    ({"Environment": "../etc"}, ["Environment"]),
    ({"Environment": " "}, ["Environment"]),
    ({"ApiVersion": "2025-13", "ApiVersionStrictness": "Off"}, ["ApiVersion"]),
    ({"ApiVersion": "2025-01-01", "ApiVersionStrictness": "Strict"}, ["ApiVersion"]),
    ({"ApiVersion": BUNDLED_API_VERSION[:7], "ApiVersionStrictness": "Strict"}, ["ApiVersion"]),
    ({"ApiVersion": BUNDLED_API_VERSION, "ApiVersionStrictness": "Strict",
      "Upstream:VersionHeader": "Polar-Version"}, ["ApiVersion"]),
    ({"Webhooks:Secret": None}, ["Webhooks:Secret"]),
    ({"Webhooks:Secret": ""}, ["Webhooks:Secret"]),
    ({"Webhooks:Secret": "", "Webhooks:Secrets": [SECRET]}, ["Webhooks:Secret"]),
    ({"Webhooks:Secrets": [OTHER_SECRET, "whsec_", " "]},
     ["Webhooks:Secrets:1", "Webhooks:Secrets:2"]),
    ({"Webhooks:Secret": f"{SECRET}\n"}, ["Webhooks:Secret"]),
    ({"Webhooks:Secret": "whsec_not base64, but long", "Webhooks:KeyDerivation": "Standard"},
     ["Webhooks:Secret"]),
    ({"Webhooks:Path": "hooks"}, ["Webhooks:Path"]),
    ({"Webhooks:Path": "/a b"}, ["Webhooks:Path"]),
    ({"Webhooks:Path": "/a?b"}, ["Webhooks:Path"]),
    ({"Webhooks:AllowedSourceIpRanges": ["10.0.0.0/8", "10.0.0.1/8", "unix", ""]},
     [f"Webhooks:AllowedSourceIpRanges:{index}" for index in (1, 2, 3)]),
    ({"Webhooks:Queue:RetryCapSeconds": 0.5}, ["Webhooks:Queue:RetryCapSeconds"]),
    ({"Server:TrustedProxies": ["proxy.example.com"]}, ["Server:TrustedProxies:0"]),
    ({"Server:CertFile": "cert.pem"}, ["Server:KeyFile"]),
    ({"Server:KeyFile": "key.pem"}, ["Server:CertFile"]),
    ({"Server:Bind": []}, ["Server:Bind"]),
    ({"Server:Bind": ["a:1", "unix:/x?mode=0777"]}, ["Server:Bind:1"]),
    ({"Server:Bind": ["a:1", "A:1"]}, ["Server:Bind:1"]),
    ({"Server:Bind": ["127.0.0.1:8081"]}, ["Admin:Bind"]),
    ({"Server:Bind": ["0.0.0.0:8081"]}, ["Admin:Bind"]),
    ({"Server:Bind": ["[::]:8080", "127.0.0.1:9"], "Admin:Bind": "127.0.0.1:8080"}, ["Admin:Bind"]),
    ({"Server:Bind": ["127.0.0.1:80"], "Admin:Bind": "0.0.0.0:80"}, ["Admin:Bind"]),
    ({"Admin:Bind": "8081"}, ["Admin:Bind"]),
    ({"Admin:AllowedHosts": ["a.example", "b.example:80"]}, ["Admin:AllowedHosts:1"]),
    ({"Admin:TokenEnvVar": "not a name"}, ["Admin:TokenEnvVar"]),
    ({"Storage:Path": " "}, ["Storage:Path"]),
    ({f"{UPGRADE}:LiteralDefaultTenantSlug": "a_b"}, [f"{UPGRADE}:LiteralDefaultTenantSlug"]),
    ({f"{UPGRADE}:LiteralDefaultTenantName": " "}, [f"{UPGRADE}:LiteralDefaultTenantName"]),
    ({f"{UPGRADE}:MaxRunDuration": "00:00:00"}, [f"{UPGRADE}:MaxRunDuration"]),
    (target("ObjectStore"), [f"{REPLICATION}:ObjectStore:Bucket"]),
    (target("BlobStore"), [f"{REPLICATION}:BlobStore:AccountName"]),
    (target("CloudStorage", CredentialsJsonPath="key.json"),
     [f"{REPLICATION}:CloudStorage:Bucket",
      f"{REPLICATION}:CloudStorage:CredentialsJsonPath"]),
    (target("Sftp"),
     [f"{REPLICATION}:Sftp:{name}" for name in ("Host", "User", "PrivateKeyPath")]),
    (target("LocalDisk", Path=""), [f"{REPLICATION}:LocalDisk:Path"]),
    ({**OBJECT_STORE, f"{REPLICATION}:ObjectStore:SecretAccessKeyEnvVar": "wJalr/Utn+FEMI"},
     [f"{REPLICATION}:ObjectStore:SecretAccessKeyEnvVar"]),
    ({**OBJECT_STORE, f"{REPLICATION}:ObjectStore:EndpointUrl": "store:9000"},
     [f"{REPLICATION}:ObjectStore:EndpointUrl"]),
    ({**OBJECT_STORE, f"{REPLICATION}:AutoRegenerateOnTenantChange": True,
      f"{REPLICATION}:ConfigOutputPath": "", f"{REPLICATION}:ReplicatorPidFilePath": " "},
     [f"{REPLICATION}:ConfigOutputPath", f"{REPLICATION}:ReplicatorPidFilePath"]),
    ({**EMAIL, f"{NOTIFICATIONS}:Email:FromAddress": ""}, [f"{NOTIFICATIONS}:Email:FromAddress"]),
    ({**EMAIL, f"{NOTIFICATIONS}:Email:FromAddress": "A <a@example.com>"},
     [f"{NOTIFICATIONS}:Email:FromAddress"]),
    ({**EMAIL, f"{NOTIFICATIONS}:Email:FromDisplayName": "A\r\nBcc: b"},
     [f"{NOTIFICATIONS}:Email:FromDisplayName"]),
    ({**EMAIL, f"{NOTIFICATIONS}:Templates:Deleted:EmailSubject": "\n"},
     [f"{NOTIFICATIONS}:Templates:Deleted:EmailSubject"]),
    ({**SMS, f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber": ""},
     [f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber"]),
    ({**SMS, f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber": "+1 555"},
     [f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber"]),
    ({**WEBHOOK, f"{NOTIFICATIONS}:Webhook:Url": ""}, [f"{NOTIFICATIONS}:Webhook:Url"]),
    ({**WEBHOOK, f"{NOTIFICATIONS}:Webhook:Url": "http://example.com/in"},
     [f"{NOTIFICATIONS}:Webhook:Url"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=str)
def test_refused(changes: dict[str, Any], expected: list[str]) -> None:
    assert keys(changes) == expected


def test_plain_http_elsewhere_is_refused_in_development_too() -> None:
    assert keys({"CustomBaseUrl": "http://example.com", **DEVELOPMENT}) == ["CustomBaseUrl"]


EVERYTHING_ON = {
    **OBJECT_STORE,
    **EMAIL,
    **{f"{NOTIFICATIONS}:EnabledChannels:{row.key}": True for row in CHANNELS.values()},
    f"{NOTIFICATIONS}:Webhook:Url": "https://example.com/in",
    f"{NOTIFICATIONS}:Sms:SmsProviderA:FromNumber": "+15550000000",
    "Alerts:Enabled": True,
    "Alerts:Channels": ["Email", "Webhook", "Chat"],
    "Alerts:To": ["ops@example.com"],
    "Alerts:Email:FromAddress": "a@example.com",
    "Alerts:Webhook:Url": "https://example.com/in",
}
#: Values that ``EVERYTHING_ON`` lacks, such as the address of a new channel.
MISSING = set(keys(EVERYTHING_ON))
NUMBERS = [s for s in table() if s.kind in (int, float) and "Sftp" not in s.path]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.key)
def test_ranges_are_inclusive(setting: Any) -> None:
    key = setting.key.removeprefix("Sdk:")
    others = {
        **EVERYTHING_ON,
        "Webhooks:Queue:RetryBaseSeconds": 0,
        f"{NOTIFICATIONS}:RetryBaseSeconds": 0,
    }
    for bound, beyond in zip(setting.bounds, (-1, 1), strict=True):
        if bound is not None:
            assert key in keys({**others, key: bound + beyond})
            assert key not in keys({**others, key: bound})


def test_a_huge_number_is_a_problem_of_its_own() -> None:
    assert keys({"TimeoutMs": 10**5000, "Webhooks:ToleranceSeconds": -(10**5000)}) == [
        "TimeoutMs",
        "Webhooks:ToleranceSeconds",
    ]


def test_the_standalone_receiver_needs_no_token() -> None:
    assert keys({"AccessToken": None}, standalone=True) == []
    assert keys({"AccessToken": " "}, standalone=True) == []
    assert keys({"AccessToken": "a b"}, standalone=True) == ["AccessToken"]


def test_without_the_receiver_no_secret_is_needed_but_bad_ones_are_reported() -> None:
    assert keys({"Webhooks:Secret": None}, receiver=False) == []
    assert keys({"Webhooks:Secret": "whsec_"}, receiver=False) == ["Webhooks:Secret"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"ApiVersion": "2025-01-01"}, "ApiVersion"),
        ({"Webhooks:Secret": "an-old-secret-of-some-length"}, "Webhooks:Secret"),
        ({"Webhooks:Secrets": [OTHER_SECRET, SECRET]}, "Webhooks:Secrets:1"),
        ({"Environment": "Developement"}, "Environment"),
    ],
)
def test_warnings(changes: dict[str, Any], key: str) -> None:
    found = findings(changes)
    assert found.problems == ()
    assert [warning.key for warning in found.warnings] == [f"Sdk:{key}"]


@pytest.mark.parametrize("name", ["production", "Prod", "PRODUCTION"])
def test_the_usual_names_of_production_cause_no_warning(name: str) -> None:
    assert findings({"Environment": name}) == Findings()


@pytest.mark.parametrize("name", ["Staging", "staging", "Tests", "QA", "Developement"])
def test_every_other_name_counts_as_production_and_is_reported(name: str) -> None:
    [warning] = findings({"Environment": name}).warnings
    assert "counts as Production" in warning.message
    assert ("did you mean Development" in warning.message) == (name == "Developement")


@pytest.mark.parametrize("name", ["dev", "Dev", "development", "DEVELOPMENT"])
def test_the_names_of_development_count_as_it(name: str) -> None:
    assert Settings(environment=name).is_development
    assert not any("counts as" in w.message for w in findings({"Environment": name}).warnings)


def problem_keys(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(OptionsValidationError) as caught:
        Settings.from_mapping(mapping)
    return [problem.key.removeprefix("Sdk:") for problem in caught.value.problems]


def test_types_and_rules_are_reported_together_and_once() -> None:
    mapping = {"AccessToken": 5, "TimeoutMs": 1, "Mode": "x", "Webhooks": {"Secrets": [5]}}
    assert problem_keys(mapping) == ["Mode", "AccessToken", "Webhooks:Secrets:0", "TimeoutMs"]


def test_wrong_types_are_ignored_where_the_section_is_off() -> None:
    off = {**VALID, f"{REPLICATION}:RetentionDays": "many", f"{NOTIFICATIONS}:Email": "text"}
    assert not Settings.from_mapping(off).multi_tenant.file_db.replication.use_replication
    on = {**off, **OBJECT_STORE, f"{NOTIFICATIONS}:Enabled": "maybe"}
    assert problem_keys(on) == [f"{REPLICATION}:RetentionDays", f"{NOTIFICATIONS}:Enabled"]


def test_an_unknown_target_hides_the_sub_options() -> None:
    mapping = {**VALID, **target("ObjectStore"), f"{REPLICATION}:ReplicaTargetType": "Tape"}
    assert problem_keys(mapping) == [f"{REPLICATION}:ReplicaTargetType"]


@given(st.text())
def test_any_text_is_a_secret_or_a_problem_with_its_key(text: str) -> None:
    assert keys({"Webhooks:Secret": text}) in ([], ["Webhooks:Secret"])


#: A certificate and its key speak of each other.
TEXTS = [s for s in table() if s.kind is str and not s.path[-1].endswith(("CertFile", "KeyFile"))]


@given(st.sampled_from(TEXTS), st.text(max_size=30))
def test_any_text_in_any_setting_is_allowed_or_a_problem(setting: Any, text: str) -> None:
    key = setting.key.removeprefix("Sdk:")
    value = [text] if setting.many else text
    found = set(keys({**EVERYTHING_ON, key: value})) - MISSING
    assert all(name.startswith(key) for name in found)


@pytest.mark.parametrize("processes", [0, 2])
def test_several_processes_need_a_store_that_they_share(processes: int) -> None:
    mapping = {"Server:Processes": processes, "Storage:Backend": "Memory"}
    (problem,) = check(
        bind([read_section(mapping, None)]).settings, standalone=True, receiver=False
    ).problems
    assert problem.key == "Sdk:Server:Processes"
    assert "set Backend to Sqlite or Postgres" in problem.message


def test_reconciliation_needs_the_client_and_a_memory_that_reaches_as_far() -> None:
    on = {"Webhooks:Reconciliation:Enabled": True}
    assert keys(on) == []
    assert keys({**on, "Webhooks:Reconciliation:MaxLookbackHours": 168}) == []
    too_far = {"Webhooks:Reconciliation:MaxLookbackHours": 169}
    assert keys(too_far) == []
    reenables = {"Webhooks:Reconciliation:ReenableEndpoint": True}
    assert keys(reenables) == ["Webhooks:Reconciliation:ReenableEndpoint"]
    assert keys({**on, **reenables}) == []
    assert keys({**on, **too_far}) == ["Webhooks:Reconciliation:MaxLookbackHours"]
    soon_forgotten = {
        "Webhooks:PayloadRetentionDays": 1,
        "Webhooks:Reconciliation:MaxLookbackHours": 25,
    }
    assert keys({**on, **soon_forgotten}) == ["Webhooks:Reconciliation:MaxLookbackHours"]
    settings = bind([read_section({**on, "Webhooks:Secret": SECRET}, None)]).settings
    alone = check(settings, standalone=True)
    assert [p.key for p in alone.problems] == ["Sdk:Webhooks:Reconciliation:Enabled"]
    # A command on the store runs no receiver, and so no reconciliation.
    assert not check(settings, standalone=True, receiver=False).problems
