"""Faults that make a start impossible: `config check` finds them, and `run` refuses before it
listens."""

import os

import pytest
from support.daemon import Place

TENANTS = "Sdk:MultiTenant:Enabled=true"
UPGRADE = "Sdk:MultiTenant:SingleTenantUpgrade"
STRATEGY = f"{UPGRADE}:DefaultTenantStrategy"

#: Name: settings, the key that is named, the exit status of `run`, a part of the message.
CASES = {
    "FirstUserOrganization": (
        [TENANTS, f"{STRATEGY}=FirstUserOrganization"],
        STRATEGY,
        78,
        "FirstUserOrganization is not supported",
    ),
    "FirstUserOrganization without automatic upgrade": (
        [TENANTS, f"{STRATEGY}=FirstUserOrganization", f"{UPGRADE}:EnableAutomaticUpgrade=false"],
        STRATEGY,
        78,
        "FirstUserOrganization is not supported",
    ),
    "HostSupplied without a resolver": (
        [TENANTS, f"{STRATEGY}=HostSupplied"],
        STRATEGY,
        78,
        "no resolver is registered",
    ),
    "a name that is too long": (
        [TENANTS, f"{UPGRADE}:LiteralDefaultTenantName={'x' * 300}"],
        STRATEGY,
        78,
        "200 are allowed",
    ),
    "an organization with a space": (
        [TENANTS, f"{UPGRADE}:LiteralDefaultTenantOrganizationId=a b"],
        STRATEGY,
        78,
        "visible ASCII",
    ),
    "a certificate that is none": (
        ["Sdk:Server:CertFile=garbage", "Sdk:Server:KeyFile=garbage"],
        "Sdk:Server:CertFile",
        78,
        "must be PEM",
    ),
    "a data directory that is a file": (
        ["Sdk:Storage:Path=garbage"],
        "Sdk:Storage:Path",
        69,
        "cannot be created",
    ),
    "a data directory that others can write": (
        ["Sdk:Storage:Path=open"],
        "Sdk:Storage:Path",
        78,
        "open to other users",
    ),
    "a directory of tenants that is a file": (
        [TENANTS, "Sdk:MultiTenant:FileDb:Directory=garbage"],
        "Sdk:MultiTenant:FileDb:Directory",
        69,
        "cannot be created",
    ),
    "no connection string": (
        ["Sdk:Storage:Backend=Postgres"],
        "Sdk:Storage:PostgresDsnEnvVar",
        78,
        "not set",
    ),
}


@pytest.mark.parametrize(("words", "key", "status", "says"), CASES.values(), ids=CASES)
def test_it_is_found_by_config_check_and_before_anything_listens(
    tmp_path, words, key, status, says
):
    place = Place(tmp_path)
    (tmp_path / "garbage").write_text("garbage")
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    # With a token of its own the admin address needs no file of the data directory.
    place.environ["SDK_ADMIN_TOKEN"] = "0123456789abcdef" * 2  # of this test alone
    errors = [found for found in place.checked(*words) if found["level"] == "error"]
    assert [(each["key"], says in each["message"]) for each in errors] == [(key, True)]
    ran = place.run("run", "--standalone", *(f"--set={word}" for word in words))
    assert (ran.returncode, says in ran.stderr) == (status, True), ran.stderr
    assert "admin.started" not in ran.stderr
    assert "runtime.started" not in ran.stderr
    assert not (tmp_path / "sdk-data").exists()


def test_config_check_takes_the_resolver_that_run_is_given(tmp_path):
    place = Place(tmp_path)
    (tmp_path / "hosted.py").write_text(
        "from sdk_trio import HostUpgrade\n"
        "class Resolver:\n"
        "    async def resolve(self, tenants):\n"
        "        return await tenants.add('acme', name='Acme')\n"
        "upgrade = HostUpgrade(resolver=Resolver())\n"
    )
    words = (f"--set={TENANTS}", f"--set={STRATEGY}=HostSupplied")
    given = "--upgrade-host=hosted:upgrade"
    assert place.run("config", "check", "--standalone", *words).returncode == 78
    checked = place.run("config", "check", "--standalone", *words, given)
    assert checked.returncode == 0, checked
    with place.daemon(*words, given):
        pass
    # Without the automatic upgrade only the command asks the resolver.
    with place.daemon(*words, f"--set={UPGRADE}:EnableAutomaticUpgrade=false"):
        pass


def test_a_store_in_use_is_refused_before_anything_listens(tmp_path):
    place = Place(tmp_path)
    with place.daemon() as first:
        ran = place.run("run", "--standalone")
        assert ran.returncode == 69
        assert f"in use by process {first.process.pid}" in ran.stderr
        assert "admin.started" not in ran.stderr


@pytest.mark.parametrize("key", ["CaFile", "ClientCertFile"])
def test_config_check_reads_the_certificates_of_the_client(tmp_path, key):
    place = Place(tmp_path)
    (tmp_path / "garbage").write_text("garbage")
    words = [f"Sdk:Connection:{key}=garbage"]
    if key == "ClientCertFile":
        words.append("Sdk:Connection:ClientKeyFile=garbage")
    # Without a token there is no client.
    assert [each for each in place.checked(*words) if each["level"] == "error"] == []
    found = place.checked(*words, SDK__ACCESSTOKEN="a-token-of-this-test")
    errors = [(each["key"], "PEM" in each["message"]) for each in found if each["level"] == "error"]
    assert errors == [(f"Sdk:Connection:{key}", True)]


def test_config_check_warns_of_a_missing_single_tenant_database(tmp_path):
    found = Place(tmp_path).checked(TENANTS, f"{UPGRADE}:SourceDatabase=old.db")
    assert [(each["level"], each["key"]) for each in found if "old.db" in each["message"]] == [
        ("warning", f"{UPGRADE}:SourceDatabase")
    ]
