"""The upgrade's plan: the tenant, the steps, and the position at which a run continues."""

import re

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config.fields import DefaultTenantStrategy
from sdk_trio.config.options.tenants import SingleTenantUpgradeOptions
from sdk_trio.errors import DefaultTenantError, NotSupportedError, UpgradeError
from sdk_trio.records.upgrades import UpgradeMarker, UpgradeState
from sdk_trio.tenants.identity import is_tenant_id
from sdk_trio.tenants.upgrade import (
    HostTenant,
    KnownOrganizations,
    NewTenant,
    begin,
    choose_tenant,
    enter,
    finish,
    leave,
    remaining_steps,
    step_names,
)


@attrs.frozen
class Named:
    name: str


def options(**changes):
    return SingleTenantUpgradeOptions(**changes)


def test_the_default_is_a_tenant_of_the_literal_name():
    assert choose_tenant(options(), None) == NewTenant("default", "Default Tenant")


def test_the_strategy_of_the_specification_that_is_not_supported():
    strategy = DefaultTenantStrategy.FIRST_USER_ORGANIZATION
    with pytest.raises(NotSupportedError, match="use LiteralDefault, or HostSupplied"):
        choose_tenant(options(default_tenant_strategy=strategy), None)


def test_host_supplied_is_the_resolver_or_an_error_that_says_how_to_register_one():
    chosen = options(default_tenant_strategy=DefaultTenantStrategy.HOST_SUPPLIED)
    resolver = object()
    assert choose_tenant(chosen, resolver) == HostTenant(resolver)
    with pytest.raises(DefaultTenantError, match="no resolver is registered"):
        choose_tenant(chosen, None)


@given(st.text(alphabet="abz059-A_ .ä\n", max_size=66) | st.text(max_size=10))
def test_a_slug_is_lowercase_letters_digits_and_hyphens_1_to_64_no_hyphen_at_either_end(slug):
    allowed = re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?", slug) and not is_tenant_id(slug)
    try:
        chosen = choose_tenant(options(literal_default_tenant_slug=slug), None)
    except DefaultTenantError:
        assert not allowed
    else:
        assert allowed
        assert chosen == NewTenant(slug, "Default Tenant")


@pytest.mark.parametrize("length", [1, 64])
def test_the_lengths_that_a_slug_may_just_have(length):
    choose_tenant(options(literal_default_tenant_slug="a" * length), None)


@pytest.mark.parametrize("slug", ["", "a" * 65, "-a", "a-", "a\n"])
def test_the_slugs_that_just_may_not(slug):
    with pytest.raises(DefaultTenantError, match="LiteralDefaultTenantSlug"):
        choose_tenant(options(literal_default_tenant_slug=slug), None)


@pytest.mark.parametrize("name", ["", "  ", "two\nlines"])
def test_the_names_that_may_not(name):
    with pytest.raises(DefaultTenantError, match="LiteralDefaultTenantName"):
        choose_tenant(options(literal_default_tenant_name=name), None)


def test_the_hosts_steps_come_after_our_own_in_their_order():
    assert step_names([Named("b"), Named("a")]) == (
        "database",
        "deliveries",
        "organization",
        "host:b",
        "host:a",
    )


@pytest.mark.parametrize("names", [("a", "a"), ("",), ("a b",), ("a" * 65,)])
def test_the_hosts_steps_have_names_of_their_own(names):
    with pytest.raises(UpgradeError):
        step_names([Named(name) for name in names])


@given(
    st.lists(st.sampled_from("abcdef"), unique=True, max_size=5),
    st.lists(st.integers(0, 12), max_size=30),
)
def test_every_step_ends_once_in_its_order_however_often_a_run_is_cut_short(names, lengths):
    """``lengths``: how many moves (enter, batch, end of a step) each run makes before it dies."""
    steps = step_names([Named(name) for name in names])
    batches = 3
    marker, ended = None, []
    for length in [*lengths, 10_000]:
        moves = iter(range(length))
        for step in remaining_steps(steps, marker):
            if next(moves, None) is None:
                break
            marker = enter(marker or begin("t", step=step, now=0.0), step)
            while int(marker.position or 0) < batches and next(moves, None) is not None:
                marker = msgspec.structs.replace(
                    marker, position=str(int(marker.position or 0) + 1)
                )
            if int(marker.position or 0) < batches:
                break
            assert step not in ended
            marker = leave(marker)
            ended.append(step)
    assert ended == list(steps)
    assert marker is not None
    done = finish(marker, now=5.0)
    assert (done.state, done.finished_at) == (UpgradeState.DONE, 5.0)
    assert not remaining_steps(steps, done)


def test_a_marker_of_a_step_that_is_gone_is_an_error_that_names_it():
    with pytest.raises(UpgradeError, match="'host:gone', which is not registered"):
        remaining_steps(step_names([]), begin("t", step="host:gone", now=0.0))


def old_marker(state, step):
    """The marker of a version that did not keep which steps are finished."""
    return UpgradeMarker(state=state, tenant_id="t", step=step, started_at=0.0)


def test_a_step_that_was_never_seen_is_left_also_after_the_end():
    old = old_marker(UpgradeState.DONE, "deliveries")
    assert list(remaining_steps(step_names([Named("a")]), old)) == ["organization", "host:a"]
    new = leave(
        enter(msgspec.structs.replace(old, finished=("database", "deliveries")), "organization")
    )
    assert list(remaining_steps(step_names([Named("a")]), finish(new, now=1.0))) == ["host:a"]
    assert list(remaining_steps(step_names([]), finish(new, now=1.0))) == []


def test_an_old_marker_names_the_last_step_and_an_earlier_one_of_the_host_is_run_again():
    steps = step_names([Named("a"), Named("b")])
    assert list(remaining_steps(steps, old_marker(UpgradeState.DONE, "host:b"))) == [
        "organization",
        "host:a",
    ]
    running = old_marker(UpgradeState.RUNNING, "host:b")
    assert list(remaining_steps(steps, running)) == ["host:b", "organization", "host:a"]
    running = old_marker(UpgradeState.RUNNING, "database")
    assert list(remaining_steps(steps, running)) == list(steps)


@given(st.lists(st.sampled_from("abcdefghijklm"), max_size=30))
def test_the_only_organization_is_one_and_the_position_keeps_what_was_seen(names):
    found = KnownOrganizations()
    for after, name in enumerate(names, start=1):
        found = KnownOrganizations.at(found.with_next(after, name).position)
    assert found.seen == tuple(dict.fromkeys(names))
    assert found.only == (names[0] if len(set(names)) == 1 else None)
    assert found.after == len(names)
