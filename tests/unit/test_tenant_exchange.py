"""Tenants as CSV: any names survive an export and import unchanged."""

import csv
import io
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.cli.tenant_import import ExportError, ImportFileError, csv_of, plan, read_tenants
from sdk_trio.records.tenants import EnvironmentVariable, KeyFile, Tenant, TenantCredentials
from sdk_trio.tenants.identity import check_name

#: Begins as a formula, as the guard against one, or with what separates cells and sources.
beginnings = st.sampled_from(
    ("", "=", "+", "-", "@", "'", "'=", "''", ",", ";", '"', " ", "\uff1d")
)
names = st.builds(
    lambda start, rest: f"{start}{rest}x",
    beginnings,
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=20),
)
sources = st.sampled_from(
    (EnvironmentVariable("A"), EnvironmentVariable("B_2"), KeyFile("/k/a b"), KeyFile("/k,c"))
)
tenants = st.builds(
    Tenant,
    id=st.just("i"),
    identifier=st.sampled_from(("a", "b-2", "c")),
    name=names,
    organization_id=st.none(),
    site_manager_email=st.sampled_from(("=a@x.example", "m@x.example")),
    site_manager_email_verified=st.booleans(),
    site_manager_phone=st.sampled_from((None, "+15551234567")),
    created_at=st.just(0.0),
    credentials=st.builds(
        TenantCredentials,
        access_token=st.none() | sources,
        webhook_secrets=st.lists(sources, max_size=3).map(tuple),
    ),
)


@given(tenants, st.booleans())
def test_exported_tenants_are_imported_unchanged_and_contain_no_formula(
    tenant: Tenant, mark: bool
) -> None:
    assert check_name(tenant.name) == tenant.name
    text = csv_of([tenant])
    for row in csv.reader(io.StringIO(text)):
        assert not [cell for cell in row if cell.startswith(("=", "+", "-", "@", "\uff1d"))]
    rows = read_tenants((b"\xef\xbb\xbf" if mark else b"") + text.encode())
    (step,) = plan(rows, [tenant])
    assert (step.verdict, step.reason) == ("unchanged", None)
    (fresh,) = plan(rows, [])
    assert fresh.verdict == "create"
    assert fresh.after == attrs.evolve(tenant, id="", created_at=0)


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: f"identifier\n{text}".encode())
)
def test_no_file_whatever_makes_more_than_refusals_and_steps(content: bytes) -> None:
    try:
        steps = plan(read_tenants(content), [])
    except ImportFileError:
        return
    assert {step.verdict for step in steps} <= {"refused", "create"}


def step_of(text: str, *known: Tenant) -> Any:
    return [(step.verdict, step.changes) for step in plan(read_tenants(text.encode()), known)]


def tenant(identifier: str, **values: Any) -> Tenant:
    return Tenant(id=identifier, identifier=identifier, name="N", created_at=0, **values)


def test_a_path_that_looks_like_two_is_not_written() -> None:
    two = TenantCredentials(webhook_secrets=(KeyFile("/k/a;b"),))
    with pytest.raises(ExportError, match="--format json"):
        csv_of([tenant("a", credentials=two)])


def test_tenants_that_a_file_does_not_name_are_unchanged() -> None:
    known = tenant(
        "a", site_manager_email="m@x.example", site_manager_email_verified=True, organization_id="o"
    )
    assert step_of("identifier,name\na,M\n", known) == [("change", ("name",))]
    assert step_of("identifier,site_manager_email\na,m@x.example\n", known) == [("unchanged", ())]
    other = step_of("identifier,site_manager_email\na,n@x.example\n", known)
    assert other == [("change", ("site_manager_email", "site_manager_email_verified"))]
    assert step_of("identifier,organization_id\na,\n", known) == [("change", ("organization_id",))]


@pytest.mark.parametrize(
    ("first", "verdicts"), [("a", ["change", "change"]), ("b", ["refused", "change"])]
)
def test_an_organization_moves_in_the_order_of_the_rows(first: str, verdicts: list[str]) -> None:
    known = (tenant("a", organization_id="o"), tenant("b"))
    rows = {"a": "a,\n", "b": "b,o\n"}
    text = rows.pop(first) + rows.popitem()[1]
    steps = step_of(f"identifier,organization_id\n{text}", *known)
    assert [verdict for verdict, _ in steps] == verdicts
