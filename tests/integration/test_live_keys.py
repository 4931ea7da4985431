"""Which settings a reload changes: the running program, the metadata and the pages agree."""

import re
from pathlib import Path

import msgspec
import pytest
import trustme
from support.admin import TOKEN, administered
from support.deliveries import SECRET
from support.notifications import VARIABLES
from support.serving import running

from sdk_trio.client.client import Client
from sdk_trio.config import Secret, Settings
from sdk_trio.config.table import is_below, table
from sdk_trio.runtime import Runtime

DOCS = Path(__file__).parents[2] / "docs" / "reference"

#: The keys that the command line adds for its logs.
OF_THE_COMMAND = ("Sdk:Logging",)


def below(keys):
    return {setting.key for setting in table() if any(is_below(setting.key, key) for key in keys)}


@pytest.fixture
def everything(tmp_path, monkeypatch):
    """Settings with every part that can be notified of a change."""
    monkeypatch.chdir(tmp_path)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    certificate = trustme.CA().issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path("cert.pem")
    certificate.private_key_pem.write_to_path("key.pem")
    return Settings.from_mapping(
        {
            "Environment": "Development",
            "AccessToken": "not-a-real-token",
            "Server:Bind": ["127.0.0.1:0"],
            "Server:CertFile": "cert.pem",
            "Server:KeyFile": "key.pem",
            "Admin:Bind": "127.0.0.1:0",
            "Storage:Backend": "Memory",
            "Webhooks:Secret": SECRET,
            "MultiTenant:Enabled": True,
            "MultiTenant:Notifications:Enabled": True,
            "MultiTenant:Notifications:Email:FromAddress": "noreply@platform.example",
        }
    )


async def test_the_live_keys_of_the_program_are_those_of_the_pages(everything):
    runtime = Runtime(everything)
    async with running(runtime):
        live = below((*runtime.live_keys, *OF_THE_COMMAND))
    assert live == {setting.key for setting in table() if setting.about.live}
    page = (DOCS / "cli-run.md").read_text()
    rows = page.partition("HUP reads every source again")[2].partition("`runtime.reloaded` names")[
        0
    ]
    named = re.findall(r"`([A-Z][A-Za-z:]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", rows, re.M)))
    assert below([f"Sdk:{key}" for key in named]) == live


async def test_tenants_clients_change_beside_one_of_the_application(everything):
    runtime = Runtime(everything, client=Client(everything))
    async with running(runtime):
        tenancy = runtime.receiver.tenancy
        await tenancy.service.add("acme", name="Acme")
        async with tenancy.client_for("acme") as client:
            done = runtime.reload(
                msgspec.structs.replace(everything, timeout_ms=4000, access_token=Secret("another"))
            )
            assert done.applied == ("Sdk:AccessToken", "Sdk:TimeoutMs")
            assert client.plan.attempt_timeout == 4
        async with tenancy.client_for("acme") as client:
            assert client.plan.access_token == "another"
        own = runtime.client.plan
        assert (own.attempt_timeout, own.access_token) == (30, "not-a-real-token")


async def test_access_and_host_names_change_with_a_reload(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    async with administered(patience=60) as admin:
        runtime = admin.runtime

        def reload(**changes):
            options = msgspec.structs.replace(runtime.settings.admin, **changes)
            return runtime.reload(msgspec.structs.replace(runtime.settings, admin=options))

        assert (await admin.get("/healthz", host="shop.internal")).status_code == 403
        assert (await admin.replay({"ids": ["x"]})).status_code == 200
        done = reload(read_only=True, allowed_hosts=("shop.internal",))
        assert done.applied == ("Sdk:Admin:ReadOnly", "Sdk:Admin:AllowedHosts")
        assert (await admin.get("/healthz", host="shop.internal")).status_code == 200
        assert (await admin.replay({"ids": ["x"]})).status_code == 403
        assert (await admin.api("/status"))["read_only"] is True
        reload(read_only=False, allowed_hosts=())
        assert (await admin.get("/healthz", host="shop.internal")).status_code == 403
        assert (await admin.replay({"ids": ["x"]})).status_code == 200
