"""``doctor`` on notifications: settings, variables, recipients, and messages in a real store."""

import time

import pytest
from support.doctor import Doctor
from support.notifications import VARIABLES
from support.notified import add_tenant, stores_of, transition

from sdk_trio.records.notifications import NotificationState, SendResult

CHECK = "notifications"


@pytest.fixture
def doctor(command_line, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    made = Doctor(command_line, monkeypatch)
    made.set("MultiTenant__Enabled", "true")
    set_keys(
        made,
        Enabled="true",
        EnabledChannels__Sms="true",
        EnabledChannels__Webhook="true",
        Email__FromAddress="noreply@platform-of-ours.com",
        Sms__SmsProviderA__FromNumber="+15550000000",
        Webhook__Url="https://hooks.platform-of-ours.com/in",
    )
    return made


def set_keys(doctor, **keys):
    for name, value in keys.items():
        doctor.set(f"MultiTenant__Notifications__{name}", value)


async def seed(doctor, *endings, age=0.0):
    """Put one email into each of these states, and leave one that waits."""
    doctor.data.mkdir(mode=0o700)
    now = time.time() - age
    async with stores_of("sqlite", doctor.data) as stores:
        store = await stores.open("seed")
        await store.notifications.create_messages({}, now=0.0, oldest=0.0)
        for number, state in enumerate(endings):
            await transition(store, f"t{number}", now=now)
            await store.notifications.create_messages({"email": False}, now=now, oldest=0.0)
            if state is not None:
                (record,) = (await store.notifications.claim_due("email", limit=9, now=now)).records
                await store.notifications.start(record.id, now=now)
                await store.notifications.finish(record.id, SendResult(state, "so"), now=now)
        await add_tenant(store, "bolt")


def test_a_good_configuration_has_nothing_to_say(doctor):
    (finding,) = doctor.alone().of(CHECK)
    assert finding["level"] == "ok"
    assert "email, sms, webhook: every credential is there" in finding["what"]


def test_channels_that_are_disabled_or_have_no_recipient(doctor):
    set_keys(doctor, Enabled="false")
    doctor.alone().one(CHECK, "note", "false: transitions are not announced")
    set_keys(doctor, Enabled="true")
    doctor.set("MultiTenant__Enabled", "false")
    doctor.alone().one("settings", "problem", "needs tenants, whose site managers are notified")
    doctor.set("MultiTenant__Enabled", "true")
    for name in ("Email", "Sms", "Webhook"):
        set_keys(doctor, **{f"EnabledChannels__{name}": "false"})
    found = doctor.alone()
    found.one("settings", "warning", "has no channel, so transitions are never announced")
    assert found.of(CHECK) == []


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", [None, " \n", "planted key"])
def test_credentials_that_are_missing_or_cannot_be_sent(doctor, name, value):
    if value is None:
        doctor.monkeypatch.delenv(name)
    else:
        doctor.monkeypatch.setenv(name, value)
    found = doctor.alone()
    if (name, value) == ("SDK_WEBHOOK_SECRET", "planted key"):
        # A text may hold a space; what else is wrong with it the settings say.
        found.one("settings", "problem", name)
        assert (found.status, "planted key" in found.text) == (78, False)
        return
    wrong = found.one(CHECK, "problem", name)
    assert f"set {name}" in wrong["remedy"]
    assert "planted key" not in found.text
    assert found.status == 1


@pytest.mark.parametrize("address", ["a@b.example", "a@example.com", "a@localhost", "a@x.LOCAL"])
def test_a_sender_that_no_provider_accepts(doctor, address):
    set_keys(doctor, Email__FromAddress=address)
    doctor.alone().one(CHECK, "warning", "cannot send mail")


async def test_messages_that_wait_for_an_operator(doctor):
    state = NotificationState
    await seed(doctor, state.FAILED, state.UNKNOWN, state.UNKNOWN, state.SKIPPED, state.SENT)
    found = await doctor.beside("--standalone")
    found.one(CHECK, "warning", "1 messages are failed")
    assert (
        "check at the provider" in found.one(CHECK, "warning", "2 messages are unknown")["remedy"]
    )
    found.one(CHECK, "note", "1 messages were skipped")
    # The tenant that is left active has neither address nor number.
    assert found.one(CHECK, "note", "no site manager's email address")["where"] == "tenants bolt"
    found.one(CHECK, "note", "1 of 1 active tenants have no site manager's phone number")
    assert "m@example.com" not in found.text


async def test_messages_that_no_process_sends(doctor):
    await seed(doctor, None, age=5 * 3600)
    found = await doctor.beside("--standalone")
    found.one(CHECK, "warning", "waited for its first attempt for 5 hours")
    found.one(CHECK, "ok", "0 were sent, none is failed or lost")
