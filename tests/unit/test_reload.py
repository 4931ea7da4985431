"""The changes of settings that a running program applies, and those that wait."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deliveries import settings

from sdk_trio.config.table import table
from sdk_trio.errors import OptionsValidationError, Problem
from sdk_trio.runtime.reload import Reloaded, SettingsReload, plan_reload
from sdk_trio.webhooks.endpoint import LIVE_KEYS

RUNNING = settings()

#: A valid change of each of these keys.
CHANGES = {
    "Webhooks:Secrets": ["whsec_c2VjcmV0LW9mLXRoaXMtdGVzdC0yNA=="],  # a test value
    "Webhooks:KeyDerivation": "Utf8",
    "Webhooks:ToleranceSeconds": 60,
    "Webhooks:AllowedSourceIpRanges": ["192.0.2.0/24"],
    "Webhooks:RateLimitPerMinute": 7,
    "Server:TrustedProxies": ["unix"],
    "Webhooks:Path": "/other",
    "Webhooks:Queue:Workers": 3,
    "Storage:Backend": "Sqlite",
    "MaxRetries": 1,
}


def changed(keys):
    return settings(**{key.replace(":", "__"): CHANGES[key] for key in keys})


@given(st.sets(st.sampled_from(sorted(CHANGES))))
def test_every_change_is_applied_or_reported_and_a_second_reload_reports_only_the_rest(keys):
    wanted = changed(keys)
    plan = plan_reload(RUNNING, wanted, live=LIVE_KEYS)
    full = {f"Sdk:{key}" for key in keys}
    assert set(plan.applied) == full & set(LIVE_KEYS)
    assert set(plan.restart) == full - set(LIVE_KEYS)
    for setting in table():
        source = wanted if setting.key in LIVE_KEYS else RUNNING
        assert setting.of(plan.settings) == setting.of(source), setting.key
    again = plan_reload(plan.settings, wanted, live=LIVE_KEYS)
    assert again.applied == ()
    assert again.restart == plan.restart
    assert again.settings == plan.settings


def test_a_key_of_a_section_covers_exactly_the_keys_below_it():
    wanted = settings(Webhooks__Queue__Workers=2, Webhooks__Queue__Capacity=5, MaxRetries=1)
    plan = plan_reload(RUNNING, wanted, live=["sdk:webhooks:queue", "Sdk:MaxRetrie"])
    assert plan.applied == ("Sdk:Webhooks:Queue:Capacity", "Sdk:Webhooks:Queue:Workers")
    assert plan.restart == ("Sdk:MaxRetries",)


@pytest.mark.parametrize(
    ("before", "after", "applied"),
    [("a.pem", "b.pem", True), (None, "b.pem", False), ("a.pem", None, False)],
)
def test_tls_cannot_be_switched_but_its_files_may_change(before, after, applied):
    running, wanted = (
        msgspec.structs.replace(
            RUNNING, server=msgspec.structs.replace(RUNNING.server, cert_file=path, key_file=path)
        )
        for path in (before, after)
    )
    keys = ("Sdk:Server:CertFile", "Sdk:Server:KeyFile")
    plan = plan_reload(running, wanted, live=keys)
    assert (plan.applied, plan.restart) == ((keys, ()) if applied else ((), keys))


class Part:
    """A part of the program, which can be made to refuse."""

    def __init__(self, refusing=None):
        self.refusing = refusing
        self.settings = RUNNING

    def prepare(self, settings):
        if self.refusing:
            raise OptionsValidationError([Problem("Sdk:Part", self.refusing)])
        return lambda: setattr(self, "settings", settings)


@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_one_part_that_refuses_keeps_every_part_at_the_old_settings(refusals):
    parts = [Part(f"part {i} refuses" if no else None) for i, no in enumerate(refusals)]
    reloader = SettingsReload(RUNNING, standalone=True)
    for part in parts:
        reloader.subscribe(part.prepare, LIVE_KEYS)
    wanted = changed({"Webhooks:RateLimitPerMinute"})
    if any(refusals):
        with pytest.raises(OptionsValidationError) as caught:
            reloader.reload(wanted)
        assert len(caught.value.problems) == sum(refusals)
        assert all(part.settings is RUNNING for part in (*parts, reloader))
    else:
        assert reloader.reload(wanted) == Reloaded(("Sdk:Webhooks:RateLimitPerMinute",))
        assert all(part.settings == wanted for part in (*parts, reloader))


def test_settings_that_are_valid_only_after_a_restart_are_refused():
    """Only with tenants may the host have no secret, and enabling tenants needs a restart."""
    reloader = SettingsReload(RUNNING, standalone=True)
    reloader.subscribe(Part().prepare, LIVE_KEYS)
    no_secret = msgspec.structs.replace(RUNNING.webhooks, secret=None)
    tenants = msgspec.structs.replace(RUNNING.multi_tenant, enabled=True)
    with pytest.raises(OptionsValidationError, match="Sdk:Webhooks:Secret"):
        reloader.reload(msgspec.structs.replace(RUNNING, webhooks=no_secret, multi_tenant=tenants))
    assert reloader.settings is RUNNING
