import base64
import io
import json
import sys
import time

import pytest
from support.deliveries import SECRET

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.webhooks.signature import Keyring
from sdk_trio.webhooks.verdict import Accepted, Delivery, verify_delivery

OTHER = "whsec_ZYi2SptnRGqVWE69YmXzhwe3HB3GHULU"
BODY = b'{"type":"order.paid","data":{"id":"o-1"}}'


@pytest.fixture
def command_line(command_line, monkeypatch):
    monkeypatch.setenv("SIGNING", SECRET)
    (command_line.directory / "body.json").write_bytes(BODY)
    return command_line


def sign(command_line, *words):
    answer = command_line("sign", "--secret-env", "SIGNING", *words, "body.json")
    assert answer.status == 0, answer.err
    return answer.out


def verify(command_line, *words, file="body.json", env="SIGNING"):
    return command_line("verify", "--secret-env", env, "--headers", "headers", *words, file)


def test_the_signature_is_the_one_of_the_public_vector(command_line, monkeypatch):
    monkeypatch.setenv("SIGNING", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")  # published
    (command_line.directory / "body.json").write_bytes(b'{"test": 2432232314}')
    id_, at = "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330"
    out = sign(command_line, "--id", id_, "--timestamp", at)
    assert out.splitlines() == [
        "content-type: application/json",
        f"webhook-id: {id_}",
        f"webhook-timestamp: {at}",
        "webhook-signature: v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    ]


@pytest.mark.parametrize("format_", ["headers", "json"])
def test_signed_deliveries_are_verified(command_line, format_):
    (command_line.directory / "headers").write_text(sign(command_line, "--format", format_))
    answer = verify(command_line)
    assert answer.status == 0
    assert answer.out.startswith("authentic: msg_")
    assert "with secret 0 (key derivation Standard)" in answer.out
    document = verify(command_line, "--format", "json").document
    assert list(document) == ["authentic", "cause", "detail", "hint", "webhook_id", "secret_index"]
    assert document["authentic"] is True


def test_curl_posts_the_exact_bytes_to_the_configured_receiver(command_line):
    out = sign(command_line, "--format", "curl", "--set", "Sdk:Server:Bind=0.0.0.0:9000")
    assert out.startswith("curl --url http://127.0.0.1:9000/hooks/sdk --header ")
    assert out.endswith("--data-binary @body.json\n")
    unix = sign(command_line, "--format", "curl", "--set", "Sdk:Server:Bind=unix:/run/s.sock")
    assert unix.startswith("curl --unix-socket /run/s.sock --url http://localhost/hooks/sdk ")


def test_the_body_may_come_from_standard_input(command_line, monkeypatch):
    class Piped(io.StringIO):
        buffer = io.BytesIO(BODY)

    monkeypatch.setattr(sys, "stdin", Piped())
    words = ("--secret-env", "SIGNING", "--id", "m", "--timestamp", "1800000000")
    assert command_line("sign", *words).out == sign(command_line, *words[2:])


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (BODY + b"\n", "without the line break at the end"),
        (BODY.replace(b",", b",\r\n"), "with LF instead of CRLF"),
        (b"\xef\xbb\xbf" + BODY.replace(b",", b",\n"), "without the byte order mark"),
    ],
)
def test_verify_recognises_what_files_often_suffer(command_line, body, hint):
    original = BODY if b"\n" not in body.rstrip() else BODY.replace(b",", b",\n")
    (command_line.directory / "body.json").write_bytes(original)
    (command_line.directory / "headers").write_text(sign(command_line))
    (command_line.directory / "saved.json").write_bytes(body)
    answer = verify(command_line, file="saved.json")
    assert answer.status == 1
    assert answer.out.startswith("rejected: no_match: signature made with another secret")
    assert f"hint: it is authentic {hint}" in answer.out


def test_verify_says_which_check_failed(command_line, monkeypatch):
    monkeypatch.setenv("OTHER", OTHER)
    headers = command_line.directory / "headers"
    headers.write_text(sign(command_line))
    answer = verify(command_line, env="OTHER")
    assert (answer.status, answer.out.split()[1]) == (1, "no_match:")
    assert "hint" not in answer.out

    headers.write_text("webhook-id: m\nwebhook-timestamp: 1\n")
    assert "rejected: missing_header: webhook-signature missing" in verify(command_line).out

    headers.write_text(sign(command_line, "--timestamp", "1800000000"))
    old = verify(command_line)
    assert old.out.split()[1] in ("too_old:", "too_new:")
    assert "hint: to check an earlier delivery" in old.out
    assert verify(command_line, "--at", "1800000300").status == 0
    assert verify(command_line, "--at", "1800000301").status == 1
    assert verify(command_line, "--at", "2027-01-15T08:00:00Z").status == 0


def test_a_signed_body_that_is_no_event_is_no_delivery(command_line):
    (command_line.directory / "body.json").write_bytes(b"[]")
    (command_line.directory / "headers").write_text(sign(command_line))
    answer = verify(command_line)
    assert answer.status == 1
    assert answer.out.startswith("rejected: not_an_event: the signature is good, but")


def test_without_a_variable_the_configured_secrets_count(command_line, monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__SECRETS__0", OTHER)
    monkeypatch.setenv("SDK__WEBHOOKS__SECRETS__1", SECRET)
    (command_line.directory / "headers").write_text(sign(command_line))
    answer = command_line("verify", "--headers", "headers", "body.json")
    assert "with secret 1" in answer.out
    assert answer.status == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["sign", "--secret-env", "NOT_THERE", "body.json"], 2, "variable NOT_THERE is not set"),
        (["sign", "--secret-env", SECRET, "body.json"], 2, "never the secret itself"),
        (["sign", "body.json"], 78, "there is no webhook secret"),
        (["sign", "--secret-env", "SIGNING", "nowhere"], 1, "the file nowhere cannot be read"),
        (["sign", "--secret-env", "SIGNING", "--id", "a.b", "body.json"], 2, "without a dot"),
        (["sign", "--secret-env", "SIGNING", "--timestamp", "soon", "body.json"], 2, "--timestamp"),
        (["verify", "--headers", "-"], 2, "cannot both come from standard input"),
        (["verify", "--secret-env", "SIGNING", "--headers", "nowhere", "body.json"], 1, "nowhere"),
        (["verify", "--secret-env", "SIGNING", "--headers", ".", "body.json"], 1, "file . cannot"),
        (["secrets", "new", "--count", "0"], 2, "--count"),
    ],
)
def test_bad_input_is_named_and_no_secret_is_shown(command_line, words, status, message):
    answer = command_line(*words)
    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err
    assert SECRET not in answer.err


def test_new_secrets_are_new_and_usable(command_line):
    lines = command_line("secrets", "new", "--count", "3").out.splitlines()
    assert len(set(lines)) == 3
    for line in lines:
        assert len(base64.b64decode(line.removeprefix("whsec_"), validate=True)) == 32
    document = command_line("secrets", "new", "--format", "json").document
    assert [list(row) for row in document] == [["secret"]]


def test_the_settings_choose_the_key_derivation(command_line, monkeypatch):
    monkeypatch.setenv("SIGNING", "a plain text as secret")
    out = sign(command_line, "--set", "Sdk:Webhooks:KeyDerivation=Utf8", "--format", "json")
    headers = [(name.encode(), value.encode()) for name, value in json.loads(out).items()]
    keyring = Keyring.from_secrets([Secret("a plain text as secret")], KeyDerivation.UTF8)
    delivery = Delivery(headers, BODY, time.time())
    assert isinstance(verify_delivery(delivery, keyring, tolerance_seconds=300), Accepted)
