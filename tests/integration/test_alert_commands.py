"""``alerts list`` and ``alerts test``, the findings of ``doctor``, and ``GET /api/alerts``."""

import json
import time

import attrs
import pytest
import trio
from support.admin import TOKEN, administered
from support.alerts import alert_keys
from support.doctor import Doctor
from support.notifications import SECRET, VARIABLES, listening
from support.notified import stores_of

from sdk_trio.records.alerts import Alert, AlertMessage, AlertName, MessageKind
from sdk_trio.records.states import NotificationState
from sdk_trio.testing import verify_notification

OPEN = Alert(
    name=AlertName.DEAD_LETTERS,
    detail="3 events became dead letters",
    opened_at=1_800_000_000.0,
    announced_open=True,
    sent=(1_800_000_000.0,),
)
CLOSED = Alert(
    name=AlertName.SILENCE,
    detail="No delivery",
    opened_at=1_800_000_100.0,
    closed_at=1_800_000_200.0,
    openings=2,
)
FAILED = AlertMessage(
    id="m",
    channel="chat",
    alert=AlertName.DEAD_LETTERS,
    kind=MessageKind.OPENED,
    detail=OPEN.detail,
    opened_at=OPEN.opened_at,
    closed_at=None,
    created_at=OPEN.opened_at,
    state=NotificationState.FAILED,
    finished_at=time.time(),
    reason="answered 404",
)


def seed(data):
    """Put alerts into the store of a command line."""

    async def write():
        async with stores_of("sqlite", data) as stores:
            store = (await stores.open("seed")).alerts
            await store.save([CLOSED, OPEN], [FAILED], now=time.time())

    data.mkdir(mode=0o700)
    trio.run(write)


def words(**keys):
    chosen = {"Sdk:Environment": "Development"} | {
        f"Sdk:Alerts:{key.replace('__', ':')}": value for key, value in keys.items()
    }
    return [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]


def test_the_list_has_open_alerts_first_and_the_state_of_their_messages(command_line):
    seed(command_line.data)
    first, second = command_line("alerts", "list", "--format", "json").document
    assert (first["name"], first["state"], first["openings"]) == ("dead_letters", "open", 1)
    assert first["messages"] == {"chat": "failed"}
    assert (second["name"], second["state"], second["openings"]) == ("silence", "closed", 2)
    assert first.keys() == second.keys()
    (only,) = command_line("alerts", "list", "--open", "--format", "json").document
    assert only == first
    table = command_line("alerts", "list").out
    assert "chat failed" in table
    assert table.index("dead_letters") < table.index("silence")


def test_the_test_sends_one_message_on_each_channel(command_line, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with listening(202) as (url, arrived):
        monkeypatch.setenv("SDK_ALERTS_CHAT_URL", f"{url}/chat")
        keys = words(
            Channels="Email,Webhook,Chat",
            To="ops@shop.example",
            Email__FromAddress="noreply@platform.example",
            Email__EmailProviderA__BaseUrl=url,
            Webhook__Url=f"{url}/in",
        )
        answer = command_line("alerts", "test", *keys, "--format", "json")
        assert answer.status == 0, answer.err
        assert {row["channel"]: row["outcome"] for row in answer.document} == {
            "email": "sent",
            "webhook": "sent",
            "chat": "sent",
        }
        bodies = {path: body for path, _, body in arrived}
        headers = {path: sent for path, sent, _ in arrived}
    assert set(bodies) == {"/v3/mail/send", "/in", "/chat"}
    document = json.loads(bodies["/in"])
    assert (document["type"], document["alert"]) == ("alert.test", None)
    verify_notification(headers["/in"], bodies["/in"], SECRET)


def test_the_test_of_a_channel_without_its_credential_has_the_status_of_a_wrong_setting(
    command_line, monkeypatch
):
    monkeypatch.delenv("SDK_ALERTS_CHAT_URL", raising=False)
    answer = command_line("alerts", "test", "--channel", "chat", *words(), "--format", "json")
    assert answer.status == 78
    (row,) = answer.document
    assert row["outcome"] == "skipped"
    assert "SDK_ALERTS_CHAT_URL" in row["reason"]


def test_alerts_without_a_channel_or_a_recipient_are_a_problem(command_line):
    without = command_line("alerts", "test", *words())
    assert without.status == 78
    assert "Sdk:Alerts:Channels" in without.err
    email = command_line("alerts", "test", "--channel", "email", *words())
    assert email.status == 78
    assert "Sdk:Alerts:To" in email.err
    assert "Sdk:Alerts:Email:FromAddress" in email.err


@pytest.fixture
def doctor(command_line, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    made = Doctor(command_line, monkeypatch)
    made.set("Alerts__Enabled", "true")
    made.set("Alerts__Channels", "Webhook,Chat")
    made.set("Alerts__Webhook__Url", "https://hooks.platform-of-ours.com/in")
    return made


def test_doctor_names_the_missing_credential_and_what_is_open(doctor, monkeypatch):
    monkeypatch.delenv("SDK_ALERTS_CHAT_URL", raising=False)
    seed(doctor.data)
    findings = {each["where"]: each for each in doctor.alone().of("alerts")}
    assert findings["Sdk:Alerts:Chat:UrlEnvVar"]["level"] == "problem"
    assert findings["dead_letters"]["what"] == OPEN.detail
    assert "answered 404" in findings["messages"]["what"]
    assert "silence" not in findings


async def test_the_api_has_every_alert_and_404_without_alerts(monkeypatch):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", SECRET)
    async with administered(**alert_keys("http://127.0.0.1:9/in")) as admin:
        store = admin.runtime.receiver.whole_store.alerts
        await store.save([attrs.evolve(CLOSED, announced_open=False)], [], now=time.time())
        (row,) = await admin.api("/alerts")
        assert (row["name"], row["state"], row["messages"]) == ("silence", "closed", {})
        assert "alerts" in (await admin.api("/overview"))["features"]
        await admin.runtime.alerts.watch.check()
        metrics = await admin.metrics()
        assert metrics['sdk_alert_open{alert="silence"}'] == 0
        assert metrics['sdk_alert_messages_total{channel="webhook",result="sent"}'] == 0
    async with administered() as admin:
        answer = await admin.get("/api/alerts", TOKEN)
        assert answer.status_code == 404
        assert "Sdk:Alerts:Enabled is false" in answer.json()["error"]


CHAT = "https://hooks.chat.example/services/T0/key"


def check_of_settings(command_line, monkeypatch, **variables):
    for name in ("SDK_WEBHOOK_SECRET", "SDK_ALERTS_CHAT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = command_line(
        "config",
        "check",
        "--standalone",
        *words(
            Enabled="true",
            Channels="Webhook,Chat",
            Webhook__Url="https://hooks.platform-of-ours.com/in",
        ),
        "--set",
        "Sdk:Environment=Production",
        "--format",
        "json",
    )
    return {
        row["key"]: row["message"] for row in answer.document if row["level"] == "error"
    }, answer


def test_a_channel_without_its_credential_is_a_start_error(command_line, monkeypatch):
    found, _ = check_of_settings(command_line, monkeypatch)
    assert set(found) == {"Sdk:Alerts:Webhook:SigningSecretEnvVar", "Sdk:Alerts:Chat:UrlEnvVar"}
    assert "SDK_ALERTS_CHAT_URL, which is not set" in found["Sdk:Alerts:Chat:UrlEnvVar"]
    given = {"SDK_WEBHOOK_SECRET": SECRET, "SDK_ALERTS_CHAT_URL": CHAT}
    assert check_of_settings(command_line, monkeypatch, **given)[0] == {}


@pytest.mark.parametrize(
    "url",
    [
        "hooks.chat.example/services/the-key",
        "http://hooks.chat.example/services/the-key",
        "https://hooks.chat.example/services/ the-key",
        "https://user:the-key@hooks.chat.example/",
        "https://[the-key",
    ],
)
def test_a_malformed_url_of_the_chat_is_refused_without_being_shown(command_line, monkeypatch, url):
    given = {"SDK_WEBHOOK_SECRET": SECRET, "SDK_ALERTS_CHAT_URL": url}
    found, answer = check_of_settings(command_line, monkeypatch, **given)
    assert set(found) == {"Sdk:Alerts:Chat:UrlEnvVar"}
    assert "the-key" not in answer.out + answer.err
