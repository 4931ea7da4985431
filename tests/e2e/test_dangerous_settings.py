"""Settings that would let strangers in end the start or are reported, by each command that reads
them."""

import base64
import json

import pytest
from support.daemon import Place
from support.deliveries import SECRET

PUBLISHED = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # of the Standard Webhooks documentation
PUBLIC_KEY = "7rKQLZBgBYUW8W62SNPiNnhjKBn0wefax7JyU9mCeJc="  # a test value, and no secret
TOKEN = "0123456789abcdef0123456789abcdef"  # a test value


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def reported(found, level):
    return {(f["key"], f["message"]) for f in found if f["level"] == level}


def keys(found, level):
    return sorted(f["key"] for f in found if f["level"] == level)


@pytest.mark.parametrize(
    ("settings", "environ", "key", "says"),
    [
        (["Webhooks:ToleranceSeconds=0"], {}, "Webhooks:ToleranceSeconds", "must be 1 to"),
        (["Admin:Bind=0.0.0.0:0"], {"SDK_ADMIN_TOKEN": "a"}, "Admin:TokenEnvVar", "1 characters"),
        (
            ["Admin:Bind=0.0.0.0:0"],
            {"SDK_ADMIN_TOKEN": f'"{TOKEN}"'},
            "Admin:TokenEnvVar",
            "remove both quotes",
        ),
        ([], {"SDK__WEBHOOKS__SECRET": f'"{SECRET}"'}, "Webhooks:Secret", "remove both quotes"),
        ([], {"SDK__WEBHOOKS__SECRET": f"'{SECRET}'"}, "Webhooks:Secret", "remove both quotes"),
        ([], {"SDK__ACCESSTOKEN": '"a-token"'}, "AccessToken", "remove both quotes"),
        ([], {"SDK__WEBHOOKS__SECRET": PUBLISHED}, "Webhooks:Secret", "published"),
        ([], {"SDK__WEBHOOKS__SECRET": PUBLISHED[6:]}, "Webhooks:Secret", "published"),
        ([], {"SDK__WEBHOOKS__SECRET": "whsec_" + "A" * 32}, "Webhooks:Secret", "pattern"),
        ([], {"SDK__WEBHOOKS__SECRET": "password" * 4}, "Webhooks:Secret", "pattern"),
        ([], {"SDK__WEBHOOKS__SECRET": PUBLIC_KEY}, "Webhooks:Secret", "write whpk_"),
        ([], {"SDK__WEBHOOKS__SECRET": f"WHPK_{PUBLIC_KEY}"}, "Webhooks:Secret", "capitals"),
        (
            [],
            {"SDK__WEBHOOKS__SECRET": "whpk_" + base64.b64encode(b"\1" + bytes(31)).decode()},
            "Webhooks:Secret",
            "small order",
        ),
        ([], {"SDK__WEBHOOKS__SECRET": "whsec_" + "A" * 10}, "Webhooks:Secret", "at least 16"),
        (
            [
                "MultiTenant:Enabled=true",
                "MultiTenant:FileDb:Replication:UseReplication=true",
                "MultiTenant:FileDb:Replication:ReplicaTargetType=LocalDisk",
                "MultiTenant:FileDb:Replication:ConfigOutputPath=/tmp/never.yml",
                "MultiTenant:FileDb:Replication:ReplicatorPath=./evil.sh",
            ],
            {},
            "MultiTenant:FileDb:Replication:ReplicatorPath",
            "absolute path",
        ),
        (["ApiVersion=latest"], {}, "ApiVersion", "ISO date"),
    ],
    ids=lambda value: None if isinstance(value, list | dict) else value,
)
def test_it_does_not_start(place, settings, environ, key, says):
    found = place.checked(*(f"Sdk:{setting}" for setting in settings), **environ)
    [(named, message)] = reported(found, "error")
    assert (named, says in message) == (f"Sdk:{key}", True), message
    for value in environ.values():
        assert len(value) < 8 or value.strip("\"'") not in message
    place.environ.update(environ)
    words = [word for setting in settings for word in ("--set", f"Sdk:{setting}")]
    ran = place.run("run", "--standalone", *words)
    assert (ran.returncode, f"Sdk:{key}: " in ran.stderr) == (78, True), ran.stderr


def test_a_version_that_is_no_date_is_reported_once(place):
    found = place.checked("Sdk:ApiVersion=latest")
    assert [(f["level"], f["key"]) for f in found] == [("error", "Sdk:ApiVersion")]


def test_all_problems_are_reported_together(place):
    found = place.checked(
        *("Sdk:Webhooks:ToleranceSeconds=0", "Sdk:Admin:Bind=0.0.0.0:0"),
        SDK_ADMIN_TOKEN="a",
        SDK__WEBHOOKS__SECRET=PUBLISHED,
    )
    assert keys(found, "error") == [
        *("Sdk:Admin:TokenEnvVar", "Sdk:Webhooks:Secret", "Sdk:Webhooks:ToleranceSeconds")
    ]


@pytest.mark.parametrize(
    ("settings", "environ", "key", "says"),
    [
        (["Webhooks:ToleranceSeconds=3601"], {}, "Webhooks:ToleranceSeconds", "for 1.0 hours"),
        (["Webhooks:ToleranceSeconds=86400"], {}, "Webhooks:ToleranceSeconds", "for 24.0 hours"),
        (
            ["Webhooks:ToleranceSeconds=7200", "Webhooks:DedupRetentionHours=1"],
            {},
            "Webhooks:ToleranceSeconds",
            "handled twice",
        ),
        (["Server:TrustedProxies=0.0.0.0/0"], {}, "Server:TrustedProxies:0", "contains strangers"),
        (["Server:TrustedProxies=10.0.0.1,::/0"], {}, "Server:TrustedProxies:1", "(::/0)"),
        (["Server:TrustedProxies=0.0.0.0/2"], {}, "Server:TrustedProxies:0", "contains strangers"),
        (["Server:Bind=0.0.0.0:0"], {}, "Webhooks:RequireHttps", "is false"),
        (["Admin:Bind=[::]:0"], {}, "Admin:Bind", "plain HTTP"),
        (["Admin:Bind=unix:a?mode=0666"], {}, "Admin:Bind", "every user of this machine"),
        ([], {"SDK_ADMIN_TOKEN": "a"}, "Admin:TokenEnvVar", "1 characters"),
        ([], {"SDK_ENVIRONMENT": "staging"}, "Environment", "counts as Production"),
        ([], {"SDK_ENVIRONMENT": "Developement"}, "Environment", "did you mean Development?"),
        ([], {"SDK_ENVIRONMENT": "dev"}, "Environment", "a webhook secret is configured"),
        (
            [],
            {"SDK__WEBHOOKS__SECRET": "whsec_" + base64.b64encode(b"sixteen-and-more!").decode()},
            "Webhooks:Secret",
            "17 bytes of key, and the scheme issues 24 to 64",
        ),
    ],
    ids=lambda value: None if isinstance(value, list | dict) else value,
)
def test_it_is_reported(place, settings, environ, key, says):
    found = place.checked(*(f"Sdk:{setting}" for setting in settings), **environ)
    assert keys(found, "error") == []
    [(named, message)] = reported(found, "warning")
    assert (named, says in message) == (f"Sdk:{key}", True), message


def test_development_on_a_public_address_is_reported_together_with_its_secret(place):
    found = place.checked("Sdk:Server:Bind=0.0.0.0:0", SDK_ENVIRONMENT="development")
    assert keys(found, "warning") == ["Sdk:Environment"] * 2 + ["Sdk:Webhooks:RequireHttps"]


@pytest.mark.parametrize("secret", [PUBLISHED, "whsec_" + "A" * 32])
def test_examples_serve_in_development(place, secret):
    found = place.checked(SDK_ENVIRONMENT="dev", SDK__WEBHOOKS__SECRET=secret)
    assert keys(found, "error") == []
    assert "Sdk:Webhooks:Secret" in keys(found, "warning")


@pytest.mark.parametrize("name", ["prod", "Production", "PRODUCTION"])
def test_usual_settings_are_not_reported(place, name):
    found = place.checked(
        *("Sdk:Webhooks:ToleranceSeconds=3600", "Sdk:Server:TrustedProxies=10.0.0.0/8,unix"),
        SDK_ENVIRONMENT=name,
        SDK_ADMIN_TOKEN=TOKEN,
    )
    assert found == []


def test_the_warnings_are_shown_by_run_and_doctor_too(place):
    place.environ["SDK__SERVER__TRUSTEDPROXIES__0"] = "0.0.0.0/0"
    with place.daemon() as daemon:
        [warning] = daemon.logged("config.warning")
        assert warning["key"] == "Sdk:Server:TrustedProxies:0"
    ran = place.run("doctor", "--standalone", "--offline", "--format", "json")
    [finding] = [f for f in json.loads(ran.stdout) if "strangers" in f["what"]]
    assert (finding["level"], finding["check"]) == ("warning", "settings")


def test_dev_and_its_full_detail_can_be_asked_for_in_the_file(place):
    """Also when the settings are invalid, so that nothing but the file says it."""
    file = place.directory / "appsettings.json"
    for name, shown in (("Development", True), ("Production", False)):
        file.write_text(json.dumps({"Sdk": {"Environment": name, "TimeoutMs": 1}}))
        ran = place.run("run", "--standalone")
        assert ran.returncode == 78
        assert ("Traceback" in ran.stderr) is shown


def test_a_handler_that_is_registered_twice_is_a_wrong_application(place):
    (place.directory / "twice.py").write_text(
        "import sdk_trio\n"
        "from sdk_trio.events import OrderPaidEvent\n"
        "handlers = sdk_trio.HandlerRegistry()\n"
        "async def grant(event): ...\n"
        "handlers.register(OrderPaidEvent, grant)\n"
        "handlers.register(OrderPaidEvent, grant)\n"
    )
    ran = place.run("run", "--standalone", "--app", "twice:handlers")
    assert (ran.returncode, "already has a handler" in ran.stderr) == (78, True), ran.stderr
    assert "twice.py:6: " in ran.stderr


def test_the_address_of_notifications_is_shown_without_its_path(place):
    """Anyone who knows the path of such an address can post to it."""
    url = "https://hooks.example.com/services/T000/B000/XXXXXXXX"
    place.environ["SDK__MULTITENANT__NOTIFICATIONS__WEBHOOK__URL"] = url
    for words in ((), ("--all",), ("--format", "json")):
        shown = place.run("config", "show", *words).stdout
        assert "https://hooks.example.com/********" in shown
        assert "T000" not in shown
