"""The data classes against the upstream's own models: a handler can read all data that it sends.

The models are those of ``polar-sdk``, in every API version it has; nothing here is made from
the classes under test.
"""

import dataclasses
import functools
import importlib
import json
import random
import types
import typing
from datetime import UTC, datetime
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from sdk_trio.events import (
    DEFAULT_CATALOG,
    Drift,
    Event,
    decode_envelope,
    decode_event,
    organization_of,
)
from sdk_trio.events.samples import sample

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
VERSIONS = ("v2026_04", "v2026_10", "v2027_01")
#: From the catalogue, as the models take a second to load, in each process that collects the tests.
WIRE_TYPES = sorted(row.wire_type for row in DEFAULT_CATALOG)
SAMPLES = 20


@functools.cache
def payload_classes(version: str) -> dict[str, type]:
    module = importlib.import_module(f"polar.{version}.webhooks")
    classes = get_args(module.WebhookPayload)
    return {get_args(typing.get_type_hints(found)["type"])[0]: found for found in classes}


# -- documents made from the models --------------------------------------------------------------

_TIMES = ("_at", "_start", "_end", "_timestamp", "timestamp", "evidence_due_by")


def made(kind: Any, name: str, dice: random.Random) -> Any:
    """A JSON value that the model's type admits, chosen at random."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return made(dice.choice(get_args(kind)), name, dice)
    if origin is Literal:
        return dice.choice(get_args(kind))
    if origin is list:
        return [made(get_args(kind)[0], name, dice) for _ in range(dice.randint(0, 2))]
    if origin is dict:
        value = get_args(kind)[1]
        return {f"key {n}": made(value, name, dice) for n in range(dice.randint(0, 2))}
    if dataclasses.is_dataclass(kind):
        return made_record(kind, dice)
    if kind is str:
        return made_text(name, dice)
    if kind is Any:
        return dice.choice(["text", 1, None, True])
    if typing.is_typeddict(kind):
        return {}
    simple = {int: 2**53 + 1, float: 0.125, bool: dice.random() < 0.5, type(None): None}
    if kind in (int, float):
        return dice.choice([0, -3, simple[kind]])
    return simple[kind]


def made_text(name: str, dice: random.Random) -> str:
    if name == "organization_id":
        return f"org-{dice.randrange(10**9)}"
    if name.endswith(_TIMES):
        return dice.choice(["2026-11-22T01:02:03Z", "2026-11-22T01:02:03.123456+02:00"])
    return dice.choice(["", "plain", "Zoë 🎁 \u2028", "x" * 300, 'quo"te\\'])


@functools.cache
def hints_of(model: Any) -> dict[str, Any]:
    return typing.get_type_hints(model)


def made_record(model: Any, dice: random.Random) -> dict[str, Any]:
    hints = hints_of(model)
    fields = [
        field
        for field in dataclasses.fields(model)
        # Fields with a default may be omitted.
        if field.default is dataclasses.MISSING or dice.random() < 0.7
    ]
    record = {field.name: made(hints[field.name], field.name, dice) for field in fields}
    if "id" in record:
        record["id"] = f"id-{dice.randrange(10**9)}"
    return record


def decoded(document: dict[str, Any]) -> tuple[Event[Any], list[Drift]]:
    raw = json.dumps(document).encode()
    drifts: list[Drift] = []
    event = decode_event(
        decode_envelope(raw),
        webhook_id="msg_1",
        raw=raw,
        header_timestamp=0,
        received_at=0,
        on_drift=drifts.append,
    )
    return event, drifts


def same(found: Any, sent: Any, path: str) -> None:
    """Compare the data that a handler gets with the sent data, member by member."""
    if isinstance(found, msgspec.Struct):
        assert isinstance(sent, dict), path
        for name, value in sent.items():
            assert name in found.__struct_fields__, f"{path}.{name} is not a field"
            same(getattr(found, name), value, f"{path}.{name}")
        for name in set(found.__struct_fields__) - set(sent):
            assert getattr(found, name) is None, f"{path}.{name} was not sent"
    elif isinstance(found, tuple):
        assert len(found) == len(sent), path
        for index, (one, other) in enumerate(zip(found, sent, strict=True)):
            same(one, other, f"{path}[{index}]")
    elif isinstance(found, datetime):
        assert found.utcoffset() is not None
        assert found == datetime.fromisoformat(sent), path
    else:
        assert found == sent, path
        assert isinstance(found, bool) == isinstance(sent, bool), path


#: Where the models have the organization; seats and members do not name it anywhere.
WHERE_IT_STANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "order": (("customer", "organization_id"), ("product", "organization_id")),
    "subscription": (("customer", "organization_id"), ("product", "organization_id")),
    "benefit_grant": (("customer", "organization_id"), ("benefit", "organization_id")),
    "organization": (("id",),),
    "customer_seat": (),
    "member": (),
}


def organization_in(document: dict[str, Any]) -> str | None:
    """The organization of a document, read by the models and not by the code under test."""
    kind = document["type"].partition(".")[0]
    for path in WHERE_IT_STANDS.get(kind, (("organization_id",),)):
        value: Any = document["data"]
        for part in path:
            value = value[part] if isinstance(value, dict) and part in value else None
        if isinstance(value, str):
            return value
    return None


def sent_types() -> list[str]:
    return sorted({name for version in VERSIONS for name in payload_classes(version)})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_upstream_samples_are_read_completely(wire_type: str, version: str) -> None:
    model = payload_classes(version)[wire_type]
    for seed in range(SAMPLES):
        document = made_record(model, random.Random(f"{version} {wire_type} {seed}"))
        event, drifts = decoded(document)
        assert drifts == []
        assert type(event) is DEFAULT_CATALOG.by_type(wire_type).event_class  # type: ignore[union-attr] # it is there
        assert event.api_version == document["api_version"]
        assert event.data.extra == {}
        assert event.json == document
        found = organization_of(wire_type, decode_envelope(event.raw).data_raw)
        assert found == organization_in(document)
        same(event.data, document["data"], "data")


def test_the_catalogue_has_every_type_of_the_upstream() -> None:
    assert sent_types() == WIRE_TYPES, "declare the missing ones in sdk_trio/events/additional.py"
    # Fields that its models lack may be declared, but are not counted.
    assert {row.wire_type for row in DEFAULT_CATALOG.known} <= set(sent_types())


# -- our samples against the models --------------------------------------------------------------


# The SDK reads a union as the first of its members that fits, and drops what that one has not.
LOST_BY_THE_SDK = (
    ".duration_in_months",  # of a discount that repeats
    ".user_provided_key",  # of a granted licence key
    ".license_key_id",
    ".display_key",
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_a_sample_is_a_document_of_the_upstream(wire_type: str, version: str) -> None:
    document = sample(wire_type, now=NOW)
    if wire_type == "customer.state_changed":
        # The SDK gives two lists of statuses the name Status and refuses its server's values.
        document["data"]["active_subscriptions"][0]["status"] = "granted"
    model = payload_classes(version)[wire_type]
    # A model drops unknown fields.
    lost = missing(document, through(model, document), "")
    assert [path for path in lost if not path.endswith(LOST_BY_THE_SDK)] == []


def through(model: Any, document: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a document that a model keeps, read and written member by member.

    Several models have the same type of data, for which the SDK then makes its reader once; for
    each whole model it would take a third of a second.
    """
    retort = importlib.import_module("polar.base")._retort
    required = {f.name for f in dataclasses.fields(model) if f.default is dataclasses.MISSING}
    assert required <= set(document)
    hints = hints_of(model)
    return {
        name: retort.dump(retort.load(value, hints[name]), hints[name])
        for name, value in document.items()
        if name in hints
    }


def missing(sent: Any, kept: Any, path: str) -> list[str]:
    if isinstance(sent, dict):
        if not isinstance(kept, dict):
            return [path]
        return [
            gone
            for name, value in sent.items()
            for gone in (
                missing(value, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"]
            )
        ]
    if isinstance(sent, list):
        return [
            gone
            for index, (one, other) in enumerate(zip(sent, kept, strict=True))
            for gone in missing(one, other, f"{path}[{index}]")
        ]
    return [] if sent == kept else [path]
