"""Texts of messages change with a reload, in a running program with its real senders."""

import json

import httpx
import pytest
import trio
from support.deliveries import settings
from support.notifications import EMAIL, VARIABLES, fake_provider, http_answer
from support.waiting import until

from sdk_trio.runtime import Runtime

PREFIX = "MultiTenant__Notifications__"
SUBJECT = f"{PREFIX}Templates__Suspended__EmailSubject"


def settings_with(provider, **keys):
    return settings(
        MultiTenant__Enabled=True,
        Admin__Enabled=True,
        **{
            f"{PREFIX}Enabled": True,
            f"{PREFIX}Email__FromAddress": "noreply@platform.example",
            f"{PREFIX}Email__EmailProviderA__BaseUrl": provider.url,
            **keys,
        },
    )


def subjects(provider):
    return [json.loads(request.body)["subject"] for request in provider.requests]


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


async def test_a_reload_changes_the_texts_of_the_messages_after_it():
    with trio.fail_after(60):
        async with fake_provider(http_answer(202, X_Message_Id="m1")) as provider:
            runtime = Runtime(settings_with(provider))
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                tenants = runtime.receiver.tenancy.service
                for name in ("acme", "bolt"):
                    await tenants.add(
                        name,
                        name=name,
                        site_manager_email=EMAIL,
                        site_manager_email_verified=True,
                    )
                await tenants.suspend("acme", reason="unpaid", actor="kim")
                await until(lambda: provider.requests)
                changed = settings_with(provider, **{SUBJECT: "Bad news for {TenantName}"})
                assert runtime.reload(changed).applied == (
                    "Sdk:MultiTenant:Notifications:Templates:Suspended:EmailSubject",
                )
                await tenants.suspend("bolt", reason="unpaid", actor="kim")
                await until(lambda: len(provider.requests) >= 2)
                before, after = subjects(provider)
                assert "Bad news" not in before
                assert after == "Bad news for bolt"
                async with httpx.AsyncClient(
                    base_url=runtime.started.admin[0], timeout=60
                ) as admin:
                    sent = 'sdk_notifications_total{channel="email",result="sent"} 2\n'
                    while sent not in (await admin.get("/metrics")).text:
                        await trio.sleep(0.01)
                runtime.shut_down("the test has seen it")
