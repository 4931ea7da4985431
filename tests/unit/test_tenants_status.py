"""Which transitions are possible, and what suspends a tenant: pure, all cases."""

import itertools

import attrs
import pytest

from sdk_trio.errors import IllegalTransitionError, InvalidTenantError, SuspensionRefusedError
from sdk_trio.records.tenants import (
    EnvironmentVariable,
    KeyFile,
    Tenant,
    TenantCredentials,
    TenantStatus,
    Transition,
)
from sdk_trio.tenants import identity
from sdk_trio.tenants.service import TenantCache
from sdk_trio.tenants.status import DAY_SECONDS, StatusPolicy, decide

ACTIVE, SUSPENDED, DEACTIVATED, DELETED = TenantStatus
POLICY = StatusPolicy()
TENANT = Tenant(
    id="8c5c4c9e-6f0f-4a52-9c3b-0a8f4b7e2d11",
    identifier="acme",
    name="Acme",
    site_manager_email="a@example.com",
    site_manager_email_verified=True,
    created_at=0.0,
)

#: The table of transitions, written out here so that the code is not compared with itself.
EXPECTED = {
    (ACTIVE, Transition.SUSPENDED): SUSPENDED,
    (ACTIVE, Transition.DEACTIVATED): DEACTIVATED,
    (ACTIVE, Transition.REACTIVATED): "no-op",
    (ACTIVE, Transition.DELETED): DELETED,
    (SUSPENDED, Transition.SUSPENDED): "no-op",
    (SUSPENDED, Transition.DEACTIVATED): DEACTIVATED,
    (SUSPENDED, Transition.REACTIVATED): ACTIVE,
    (SUSPENDED, Transition.DELETED): DELETED,
    (DEACTIVATED, Transition.SUSPENDED): "illegal",
    (DEACTIVATED, Transition.DEACTIVATED): "no-op",
    (DEACTIVATED, Transition.REACTIVATED): ACTIVE,
    (DEACTIVATED, Transition.DELETED): DELETED,
    (DELETED, Transition.SUSPENDED): "illegal",
    (DELETED, Transition.DEACTIVATED): "illegal",
    (DELETED, Transition.REACTIVATED): ACTIVE,
    (DELETED, Transition.DELETED): "no-op",
}


def tenant_in(status: TenantStatus, **changes: object) -> Tenant:
    deleted_at = 100.0 if status is DELETED else None
    return attrs.evolve(TENANT, status=status, deleted_at=deleted_at, **changes)  # type: ignore[arg-type] # names of fields


@pytest.mark.parametrize(
    ("status", "transition"), list(itertools.product(TenantStatus, Transition))
)
def test_every_pair_of_status_and_transition(status: TenantStatus, transition: Transition) -> None:
    expected = EXPECTED[status, transition]
    if expected == "illegal":
        with pytest.raises(
            IllegalTransitionError, match=f"acme.* is {status} and cannot"
        ) as caught:
            decide(tenant_in(status), transition, POLICY, now=200.0)
        assert (caught.value.status, caught.value.transition) == (status, transition)
        return
    decision = decide(tenant_in(status), transition, POLICY, now=200.0)
    assert decision.no_op == (expected == "no-op")
    assert decision.new_status == (status if decision.no_op else expected)
    assert decision.relaxation is None


@pytest.mark.parametrize("days", [0, 1, 90])
def test_a_deleted_tenant_comes_back_until_its_retention_has_passed(days: int) -> None:
    policy = StatusPolicy(retention_seconds=days * DAY_SECONDS)
    last = 100.0 + days * DAY_SECONDS
    assert decide(tenant_in(DELETED), Transition.REACTIVATED, policy, now=last).new_status is ACTIVE
    with pytest.raises(IllegalTransitionError, match=f"retention of {days} days.*RetentionDays"):
        decide(tenant_in(DELETED), Transition.REACTIVATED, policy, now=last + 1)


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("anyway", [True, False])
@pytest.mark.parametrize("bypass", [True, False])
def test_suspension_asks_for_a_verified_email_unless_a_setting_relaxes_that(
    verified: bool, required: bool, anyway: bool, bypass: bool
) -> None:
    policy = StatusPolicy(require_verified_email=required, suspend_unverified_anyway=anyway)
    tenant = tenant_in(ACTIVE, site_manager_email_verified=verified)

    def ask() -> str | None:
        return decide(
            tenant, Transition.SUSPENDED, policy, now=0, bypass_email_verification=bypass
        ).relaxation

    if verified:
        assert ask() is None
    elif not required:
        assert ask() == "Sdk:MultiTenant:TenantStatus:RequireVerifiedEmailForSuspension"
    elif anyway and bypass:
        assert ask() == "Sdk:MultiTenant:TenantStatus:SuspendUnverifiedTenantsAnyway"
    else:
        with pytest.raises(SuspensionRefusedError, match=r"acme.*not verified"):
            ask()


def test_no_other_transition_asks_for_a_verified_email() -> None:
    unverified = tenant_in(ACTIVE, site_manager_email_verified=False)
    for transition in (Transition.DEACTIVATED, Transition.DELETED):
        assert not decide(unverified, transition, POLICY, now=0).no_op


@pytest.mark.parametrize(
    "slug",
    ["", "-a", "a-", "A", "a_b", "a b", "a" * 65, "ä", "a\n", "../a", "a.b", TENANT.id],
)
def test_an_invalid_identifier_is_refused(slug: str) -> None:
    with pytest.raises(InvalidTenantError, match="the identifier"):
        identity.check_identifier(slug)


@pytest.mark.parametrize("slug", ["a", "0", "a-b", "a--b", "a" * 64, "default"])
def test_a_valid_identifier_is_accepted(slug: str) -> None:
    assert identity.check_identifier(slug) == slug


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (identity.check_name, " "),
        (identity.check_name, "a\nb"),
        (identity.check_name, "x" * 201),
        (identity.check_name, "\ud800"),
        (identity.check_email, ""),
        (identity.check_email, "unknown"),
        (identity.check_email, "A <a@example.com>"),
        (identity.check_email, "a@" + "x" * 300),
        (identity.check_phone, "0555"),
        (identity.check_phone, "+1 555"),
        (identity.check_organization_id, ""),
        (identity.check_organization_id, "o" * 129),
        (identity.check_organization_id, "a b"),
        (identity.check_organization_id, "ö"),
        (identity.check_actor, ""),
        (identity.check_reason, "two\nlines"),
        (identity.check_reason, "r" * 1001),
    ],
)
def test_invalid_input_is_named_but_not_quoted(check, bad) -> None:  # type: ignore[no-untyped-def] # any check
    with pytest.raises(InvalidTenantError) as caught:
        check(bad)
    assert len(str(caught.value)) < 200
    assert not bad.strip() or bad not in str(caught.value)


@pytest.mark.parametrize(
    "credentials",
    [
        TenantCredentials(access_token=EnvironmentVariable("whsec_not-a-name")),
        TenantCredentials(access_token=EnvironmentVariable("")),
        TenantCredentials(access_token=KeyFile("relative/path")),
        TenantCredentials(webhook_secrets=(KeyFile("/a\0b"),)),
        TenantCredentials(webhook_secrets=(KeyFile("/a"),) * 9),
    ],
)
def test_sources_of_credentials_are_names_and_absolute_paths(
    credentials: TenantCredentials,
) -> None:
    with pytest.raises(InvalidTenantError, match="source"):
        identity.check_credentials(credentials)


def test_the_directory_evicts_the_least_recently_used() -> None:
    directory = TenantCache(capacity=3)  # a tenant is remembered by its id as well
    for key in ("a", "b"):
        directory.remember(key, None, generation=0)
    directory.recall("a")
    directory.remember("c", TENANT, generation=0)
    assert [key in directory for key in "abc"] == [True, False, True]
    assert directory.recall("c") is TENANT


def test_an_answer_from_before_a_change_is_not_remembered() -> None:
    directory = TenantCache()
    generation = directory.generation
    directory.forget_all()
    directory.remember("a", TENANT, generation=generation)
    assert "a" not in directory
