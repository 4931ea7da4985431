"""Every operation of the table sends what the upstream's own Python client sends.

``polar-sdk`` is the oracle: its methods are found by introspection, arguments for them are made
from their type hints, and both clients run under Trio on the same httpx mock transport.
"""

import inspect
import json
import types
import typing
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import attrs
import httpx
import polar.base
import pytest
import trio
import typing_extensions
from polar.v2026_10 import PolarAsync

from sdk_trio.client.client import Client
from sdk_trio.client.export import CsvExport
from sdk_trio.client.operations import (
    OPERATIONS,
    Body,
    Operation,
    OperationAnswer,
    Pagination,
    Resources,
    UnknownOperationError,
    bound,
    endpoints,
    find_operation,
)
from sdk_trio.client.pages import Listing
from sdk_trio.client.resources import Nested, Resource
from sdk_trio.config import Settings

BASE = "https://upstream.test"
SETTINGS = {"Mode": "Custom", "CustomBaseUrl": BASE, "AccessToken": "token"}


class Sent(Exception):  # noqa: N818 - carries the request past both clients
    def __init__(self, request: httpx.Request) -> None:
        self.request = request


def catch(request: httpx.Request) -> httpx.Response:
    raise Sent(request)


# --- what the oracle has -----------------------------------------------------------------------


def make_oracle() -> PolarAsync:
    client = PolarAsync("token", base_url=BASE)
    client._client._client = httpx.AsyncClient(base_url=BASE, transport=httpx.MockTransport(catch))
    return client


ORACLE_CLIENT = make_oracle()


def oracle_methods(service: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(service).items():
        if isinstance(value, polar.base.AsyncServiceBase):
            path = f"{prefix}{name}"
            for method_name, method in inspect.getmembers(value, inspect.ismethod):
                if not method_name.startswith("_") and method_name != "from_service":
                    yield f"{path}.{method_name}", method
            yield from oracle_methods(value, f"{path}.")


def oracle_operations() -> dict[str, Any]:
    return {
        name: method
        for name, method in oracle_methods(ORACLE_CLIENT)
        if inspect.iscoroutinefunction(method)
    }


ORACLE = oracle_operations()


# --- arguments made from type hints ------------------------------------------------------------

FULL, SINGLE, NULL, MINIMAL = "every field", "single values", "null where allowed", "required only"
MODES = (FULL, SINGLE, NULL, MINIMAL)


SCALARS = {str: "a b&c=ü/+%:é", int: 7, float: 1.5, bool: True, Any: "any", types.NoneType: None}


def sample(hint: Any, mode: str, depth: int = 0) -> Any:
    """Make a value of type ``hint``; lists are preferred in FULL mode, single values else."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return sample(arguments[0], mode, depth)
    if origin in (typing.Union, types.UnionType):
        return sample_union(arguments, mode, depth)
    if origin is typing.Literal:
        return arguments[-1]
    if origin is list:
        return [] if depth > 4 else [sample(arguments[0], mode, depth + 1) for _ in range(2)]
    if origin is dict:
        return {
            f"key {n} ü": sample(kind, mode, depth + 1)
            for n, kind in enumerate(typing.get_args(arguments[1]) or arguments[1:])
            if kind is not types.NoneType
        }
    if typing_extensions.is_typeddict(hint):
        return sample_fields(hint, mode, depth + 1)
    return SCALARS[hint]


def sample_union(arguments: tuple[Any, ...], mode: str, depth: int) -> Any:
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    if mode == NULL and len(kinds) < len(arguments):
        return None
    lists = [kind for kind in kinds if typing.get_origin(kind) is list]
    return sample((lists if mode == FULL and lists else kinds)[0], mode, depth)


def sample_fields(hint: Any, mode: str, depth: int = 0) -> dict[str, Any]:
    required = {
        name
        for name, kind in typing.get_type_hints(hint, include_extras=True).items()
        if typing.get_origin(kind) is not typing.NotRequired
    }
    return {
        name: sample(kind, mode, depth)
        for name, kind in typing.get_type_hints(hint).items()
        if name in required or (mode != MINIMAL and depth < 5)
    }


@attrs.frozen
class Case:
    """One call: the path's values by position, fields by name as the oracle takes them."""

    mode: str
    path: dict[str, str]
    fields: dict[str, Any]
    defaults: dict[str, Any]


def variants(method: Any) -> list[Any]:
    """The method itself, or its overloads: one for each kind of body."""
    return [*typing.get_overloads(method.__func__)] or [method.__func__]


def cases(method: Any) -> Iterator[Case]:
    for mode in MODES:
        for variant in variants(method):
            yield case(variant, inspect.signature(method), mode)


def case(variant: Any, implementation: inspect.Signature, mode: str) -> Case:
    hints = typing.get_type_hints(variant, vars(inspect.getmodule(variant)))
    path: dict[str, str] = {}
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(variant).parameters.items():
        if name == "self" or name.startswith("request_"):
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            path[name] = f"0d2{len(path)}-Ab_c~d.e"
        elif parameter.kind is parameter.VAR_KEYWORD:
            (body,) = typing.get_args(hints[name])
            fields |= sample_fields(body, mode)
        elif mode != MINIMAL or parameter.default is parameter.empty:
            fields[name] = sample(hints[name], mode)
        else:
            defaults[name] = implementation.parameters[name].default
    return Case(mode, path, fields, defaults)


# --- both clients ------------------------------------------------------------------------------


async def sent_by_oracle(name: str, case: Case) -> httpx.Request:
    client: Any = ORACLE_CLIENT
    for part in name.split("."):
        client = getattr(client, part)
    with pytest.raises(Sent) as caught:
        await client(*case.path.values(), **case.fields)
    return caught.value.request


async def sent_by_us(client: Client, operation: Operation, case: Case) -> httpx.Request:
    given = {key: value for key, value in case.defaults.items() if value is not None}
    result = bound(client, operation)(*case.path.values(), **given, **case.fields)
    if isinstance(result, CsvExport):
        result = result.__aenter__()
    elif isinstance(result, Listing):
        result = result.first_page()
    with pytest.raises(Sent) as caught:
        await result
    return caught.value.request


def seen(request: httpx.Request) -> tuple[Any, ...]:
    """A request as the upstream gets it: method, raw path, query as a multiset, media type, JSON
    body."""
    path, _, query = request.url.raw_path.partition(b"?")
    content = request.content
    return (
        request.method,
        path,
        Counter(parse_qsl(query.decode(), keep_blank_values=True, strict_parsing=bool(query))),
        request.headers.get("Content-Type"),
        json.loads(content) if content else None,
        bool(content),
    )


@pytest.fixture
async def client() -> Any:
    settings = Settings.from_mapping(SETTINGS, receiver=False)
    async with Client(settings, transport=httpx.MockTransport(catch)) as client:
        yield client


@pytest.mark.parametrize("name", sorted(ORACLE))
async def test_sends_what_the_oracle_sends(name: str, client: Client) -> None:
    operation = OPERATIONS[name]
    for case in cases(ORACLE[name]):
        theirs = seen(await sent_by_oracle(name, case))
        ours = seen(await sent_by_us(client, operation, case))
        assert ours == theirs, case


# --- completeness ------------------------------------------------------------------------------


def test_table_holds_exactly_the_operations_of_the_oracle() -> None:
    assert set(OPERATIONS) == set(ORACLE)
    assert len(OPERATIONS) == len(list(endpoints())) == 190


def test_every_kind_of_body_of_the_oracle_is_tried() -> None:
    kinds = sum(len(variants(method)) for method in ORACLE.values())
    tried = sum(len(list(cases(method))) for method in ORACLE.values())
    assert kinds > len(ORACLE)
    assert tried == kinds * len(MODES)


def test_lists_are_paginated_where_the_oracle_iterates() -> None:
    iterated = {
        name.replace(".iter_", ".")
        for name, method in oracle_methods(ORACLE_CLIENT)
        if inspect.isasyncgenfunction(method)
    }
    ours = {n for n, row in OPERATIONS.items() if row.pagination is not Pagination.NONE}
    # The oracle has no iterator for the list that may answer with a cursor.
    assert ours == iterated | {"events.list"}
    assert OPERATIONS["events.list"].pagination is Pagination.CURSOR


def test_path_parameters_have_the_oracles_names_in_its_order() -> None:
    for name, method in ORACLE.items():
        positional = [
            p.name
            for p in inspect.signature(method).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        assert list(OPERATIONS[name].parameters) == positional, name


def test_answers_are_of_the_kind_that_the_oracle_returns() -> None:
    for name, method in ORACLE.items():
        hint = typing.get_type_hints(method)["return"]
        first = (typing.get_args(hint) or [hint])[0] if isinstance(hint, types.UnionType) else hint
        answer = OPERATIONS[name].answer
        if hint is types.NoneType:
            assert answer is OperationAnswer.NOTHING, name
        elif hint is str:
            assert answer is OperationAnswer.CSV, name
        elif hint is Any:
            assert answer is OperationAnswer.JSON, name
        elif typing.get_origin(hint) is list:
            assert answer is OperationAnswer.RECORDS, name
        elif getattr(first, "__name__", "").startswith("ListResource"):
            assert answer in (OperationAnswer.PAGE, OperationAnswer.CURSOR_PAGE), name
        else:
            assert answer is OperationAnswer.RECORD, name


def test_resources_are_where_their_path_says() -> None:
    def walk(resource: type[Resource], path: str) -> None:
        assert resource.path == path
        for name, value in vars(resource).items():
            if isinstance(value, Nested):
                walk(value.resource, f"{path}.{name}".removeprefix("."))

    walk(Resources, "")


def test_no_argument_of_ours_hides_a_field_of_the_upstream() -> None:
    ours = {"body", "options"}
    for name, method in ORACLE.items():
        for case in cases(method):
            assert not ours & {*case.path, *case.fields}, name


def test_only_operations_known_to_be_harmless_may_run_twice() -> None:
    twice = {
        n for n, row in OPERATIONS.items() if row.idempotent and row.method in ("POST", "PATCH")
    }
    assert twice == {"oauth2.introspect_token", "oauth2.revoke_token"}
    assert all(
        row.idempotent for row in OPERATIONS.values() if row.method in ("GET", "PUT", "DELETE")
    )


async def test_oauth2_takes_form_fields(client: Client) -> None:
    assert OPERATIONS["oauth2.request_token"].body is Body.FORM
    with pytest.raises(Sent) as caught:
        await client.oauth2.request_token(grant_type="a b", client_id="1")
    request = caught.value.request
    assert request.headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert request.content == b"grant_type=a+b&client_id=1"


# --- by name, for the command line --------------------------------------------------------------


@pytest.mark.parametrize("words", ["{}", "{} ", "  {}"])
def test_every_operation_is_found_by_its_name(words: str) -> None:
    for name, row in OPERATIONS.items():
        assert find_operation(words.format(name)) is row
        assert find_operation(words.format(name.replace(".", " ").replace("_", "-"))) is row
        assert find_operation(name.upper().split(".")) is row


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("orders lst", "orders.list"),
        ("order list", "orders.list"),
        ("webhooks list", "webhooks.list_webhook_deliveries"),
        ("custmer portal orders get", "customer_portal.orders.get"),
        ("order", "orders.list"),
        ("orders", "orders.export"),
        ("customer portal", "customer_portal.wallets.get"),
    ],
)
def test_unknown_operations_suggest_similar_names(words: str, near: str) -> None:
    with pytest.raises(UnknownOperationError) as caught:
        find_operation(words)
    assert near in caught.value.near
    assert near.replace(".", " ") in str(caught.value)


def test_a_word_that_begins_many_names_gives_a_few() -> None:
    with pytest.raises(UnknownOperationError, match=r"custom_fields list, .*, \.\.\.\?$") as caught:
        find_operation("custom")
    assert len(str(caught.value)) < 700
    assert len(caught.value.near) > 12


def test_an_operation_without_likeness_is_unknown_all_the_same() -> None:
    for words in ("", "qqqq", "orders qqqq", "..."):
        with pytest.raises(UnknownOperationError):
            find_operation(words)


async def test_cancelling_a_call_that_hangs_ends_it() -> None:
    settings = Settings.from_mapping(SETTINGS, receiver=False)

    async def hang(request: httpx.Request) -> httpx.Response:
        await trio.sleep_forever()
        raise AssertionError

    async with Client(settings, transport=httpx.MockTransport(hang)) as client:
        with trio.move_on_after(0.01) as scope:
            await client.orders.get("1")
        assert scope.cancelled_caught
