"""``notify preview`` and ``notify test``."""

import pytest
from support.notifications import EMAIL, PHONE, SECRET, VARIABLES, listening

from sdk_trio.records.channels import CHANNELS
from sdk_trio.testing import verify_notification

NOTIFICATIONS = "Sdk:MultiTenant:Notifications"


@pytest.fixture
def command_line(command_line, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return command_line


def settings(**keys):
    chosen = {"Sdk:Environment": "Development"} | {
        f"{NOTIFICATIONS}:{key.replace('__', ':')}": value for key, value in keys.items()
    }
    return [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]


def email(url):
    base = {"Email__EmailProviderA__BaseUrl": url}
    return settings(Email__FromAddress="noreply@platform.example", **base)


def sms(url):
    return settings(Sms__SmsProviderA__FromNumber="+15550000000", Sms__SmsProviderA__BaseUrl=url)


@pytest.mark.parametrize("transition", ["Suspended", "Reactivated", "Deactivated", "Deleted"])
def test_preview_shows_every_text_of_made_up_values(command_line, transition):
    answer = command_line("notify", "preview", "--transition", transition)
    assert answer.status == 0
    happened = f"Example Ltd has been {transition.lower()}"
    assert f"--- Email subject ---\n{happened}\n" in answer.out
    assert "Reason: invoice 2026-117 is unpaid\n" in answer.out
    assert f"<title>{happened}</title>" in answer.out
    assert "--- SMS: 1 segment, " in answer.out


def test_preview_of_our_own_texts_as_json(command_line):
    key = f"{NOTIFICATIONS}:Templates:Deleted"
    document = command_line(
        "notify", "preview", "--transition", "Deleted", "--format", "json", "--reason", "<why>",
        "--set", f"{key}:EmailSubject=Goodbye {{TenantName}}",
        "--set", f"{key}:SmsBody=ж{{Reason}}",
    ).document  # fmt: skip
    assert document["email_subject"] == "Goodbye Example Ltd"
    assert "&lt;why&gt;" in document["email_html"]
    assert "Reason: <why>" in document["email_text"]
    assert document["sms_text"] == "ж<why>"
    sizes = {name: document[f"sms_{name}"] for name in ("encoding", "units", "segments")}
    assert sizes == {"encoding": "UCS-2", "units": 6, "segments": 1}


def test_preview_of_a_tenant(command_line):
    enabled = ["--set", "Sdk:MultiTenant:Enabled=true"]
    command_line("tenant", "add", "acme", "--name", "Acme {Reason}", *enabled)
    answer = command_line("notify", "preview", "--transition", "Suspended", "--tenant", "acme")
    assert answer.status == 0
    assert "Acme {Reason} has been suspended\n" in answer.out
    assert "Reason: none was given" in answer.out
    unknown = command_line("notify", "preview", "--transition", "Suspended", "--tenant", "none")
    assert unknown.status == 1
    assert "none" in unknown.err


def test_preview_writes_no_control_characters(command_line):
    key = f"{NOTIFICATIONS}:Templates:Deleted:EmailBody"
    answer = command_line(
        "notify", "preview", "--transition", "Deleted", "--set", f"{key}=a\x1b[2Jb\u202ec"
    )
    assert "\x1b" not in answer.out
    assert "\u202e" not in answer.out


def test_test_sends_a_real_email(command_line, monkeypatch):
    monkeypatch.setenv("EMAIL_API_KEY", VARIABLES["EMAIL_API_KEY"])
    with listening(202, x_message_id="m.1") as (url, arrived):
        answer = command_line("notify", "test", "--channel", "email", "--to", EMAIL, *email(url))
    assert (answer.status, answer.out) == (0, "sent as m.1\n")
    ((path, headers, body),) = arrived
    assert path == "/v3/mail/send"
    assert headers["authorization"] == f"Bearer {VARIABLES['EMAIL_API_KEY']}"
    assert b"this is a test of notifications" in body
    assert EMAIL.encode() in body


def test_test_of_a_wrong_credential_names_what_to_check(command_line, monkeypatch):
    monkeypatch.setenv("SMS_ACCOUNT_SID", VARIABLES["SMS_ACCOUNT_SID"])
    monkeypatch.setenv("SMS_AUTH_TOKEN", "wrong-token")
    with listening(401, b'{"code": 20003, "message": "Authenticate"}') as (url, _):
        answer = command_line("notify", "test", "--channel", "sms", "--to", PHONE, *sms(url))
    assert answer.status == 1
    assert answer.out.startswith("refused: answered 401: Authenticate; check the variables SMS_ACC")
    assert "wrong-token" not in answer.out + answer.err


def test_test_of_a_busy_provider(command_line, monkeypatch):
    monkeypatch.setenv("EMAIL_API_KEY", VARIABLES["EMAIL_API_KEY"])
    with listening(429, retry_after="30") as (url, _):
        words = ("notify", "test", "--channel", "email", "--to", EMAIL, *email(url))
        answer = command_line(*words)
        document = command_line(*words, "--format", "json").document
    assert answer.status == 69
    assert "not before 30 s from now" in answer.out
    assert (document["outcome"], document["after_seconds"]) == ("again", 30)


def test_test_without_a_credential_names_the_variable(command_line):
    answer = command_line(
        "notify", "test", "--channel", "email", "--to", EMAIL, *email("http://127.0.0.1:9")
    )
    assert answer.status == 78
    assert answer.out.startswith("skipped: the variable EMAIL_API_KEY is not set\nto do: ")


def test_test_posts_a_signed_webhook(command_line, monkeypatch):
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", SECRET)
    with listening(204) as (url, arrived):
        words = ("notify", "test", "--channel", "webhook", *settings(Webhook__Url=f"{url}/a"))
        configured = command_line(*words)
        given = command_line(*words, "--to", f"{url}/b")
    assert (configured.status, given.status) == (0, 0)
    assert [path for path, _, _ in arrived] == ["/a", "/b"]
    for _, headers, body in arrived:
        assert verify_notification(headers, body, SECRET)["tenantIdentifier"] == "test"


def test_test_of_a_private_address_names_the_key_that_allows_it(command_line, monkeypatch):
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", SECRET)
    answer = command_line("notify", "test", "--channel", "webhook", "--to", "https://10.0.0.1/in")
    assert answer.status == 1
    assert f"{NOTIFICATIONS}:Webhook:AllowPrivateAddresses" in answer.out


def test_an_address_that_a_channel_cannot_take_is_refused(command_line, monkeypatch):
    monkeypatch.setitem(CHANNELS, "webhook", CHANNELS["webhook"]._replace(target=None))
    answer = command_line("notify", "test", "--channel", "webhook", "--to", "https://x.example")
    assert answer.status == 2
    assert "takes no --to" in answer.err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--channel", "fax"], 2, "invalid choice: 'fax'"),
        (["--channel", "email"], 78, "Notifications:Email:FromAddress: is required"),
        (["--channel", "email", *email("https://x.example")], 2, "needs --to: email address"),
        (["--channel", "sms", *sms("https://x.example")], 2, "needs --to: phone number"),
        (["--channel", "sms", "--to", "5", *sms("https://x.example")], 2, "--to must be a phone"),
        (["--channel", "webhook"], 78, "Notifications:Webhook:Url: is required"),
        (["--channel", "webhook", "--to", "ftp://x"], 78, "Notifications:Webhook:Url: must be"),
    ],
)
def test_test_called_wrongly(command_line, words, status, message):
    answer = command_line("notify", "test", *words)
    assert answer.status == status
    assert message in answer.err


# -- one answer to one mistake -----------------------------------------------------------------

GOOD = {
    "Sdk:Environment": "Production",
    "Sdk:Webhooks:RequireHttps": "false",
    "Sdk:MultiTenant:Enabled": "true",
    f"{NOTIFICATIONS}:Enabled": "true",
    f"{NOTIFICATIONS}:EnabledChannels:Email": "false",
    f"{NOTIFICATIONS}:EnabledChannels:Webhook": "true",
    f"{NOTIFICATIONS}:Webhook:Url": "https://hooks.example.com/in?api-version=1&sig=planted",
}


@pytest.mark.parametrize("words", [("config", "check"), ("run",), ("doctor", "--offline")])
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("Sdk:MultiTenant:Enabled", "false", "needs tenants, whose site managers are notified"),
        (f"{NOTIFICATIONS}:Webhook:SigningSecretEnvVar", "SHORT", "at least 16 are needed"),
        (f"{NOTIFICATIONS}:Templates:Deleted:EmailBody", "{0}", "which is not a placeholder"),
        (f"{NOTIFICATIONS}:Webhook:Url", "https://h.example/in?sig=planted#x", "a fragment"),
        (f"{NOTIFICATIONS}:RetryCapSeconds", "1", "at least RetryBaseSeconds"),
    ],
)
def test_check_run_and_doctor_refuse_the_same(command_line, monkeypatch, words, key, value, said):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("SHORT", "planted")
    chosen = [f"--set={name}={text}" for name, text in {**GOOD, key: value}.items()]
    answer = command_line(*words, "--standalone", *chosen)
    # Doctor also checks the rest if the settings can be read, and exits with 1.
    assert answer.status in ((1, 78) if words[0] == "doctor" else (78,))
    assert said in " ".join((answer.out + answer.err).split())
    assert "planted" not in answer.out + answer.err


def test_the_query_of_the_url_is_shown_nowhere(command_line, monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", SECRET)
    chosen = [f"--set={name}={text}" for name, text in GOOD.items()]
    assert command_line("config", "check", "--standalone", *chosen).status == 0
    for words in (("config", "show"), ("config", "show", "--format", "json")):
        answer = command_line(*words, *chosen)
        assert "https://hooks.example.com/********" in answer.out
        assert "planted" not in answer.out + answer.err


@pytest.mark.parametrize("status", [204, 404])
def test_a_message_goes_to_a_url_with_a_query(command_line, monkeypatch, status):
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", SECRET)
    with listening(status) as (url, arrived):
        hook = f"{url}/in?api-version=1&sig=planted%2F"
        answer = command_line(
            "notify", "test", "--channel", "webhook", *settings(Webhook__Url=hook)
        )
    assert [path for path, _, _ in arrived] == ["/in?api-version=1&sig=planted%2F"]
    assert answer.status == (0 if status == 204 else 1)
    assert "planted" not in answer.out + answer.err
