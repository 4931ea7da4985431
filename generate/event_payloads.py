"""Writes ``sdk_trio/events/payloads.py``: the data classes of events, after the upstream's models.

A class has every field that any API version sends; a union of models is one class with the fields
of all.
"""

import ast
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
from upstream_models import Models, is_time, names_in, read_models

FILE = Path(__file__).parent.parent / "sdk_trio" / "events" / "payloads.py"

_HEADER = '''\
"""The typed, lenient data of events: one class per shape (docs/reference/events.md).

Made from the upstream's own models by generate/event_payloads.py, which ``make generate`` runs.

Only ``id`` is certain. Every other field is None when the sender left it out or sent a value of
another kind; what is new in the sender's API is found in :attr:`Payload.extra`. Amounts are
integers in the currency's smallest unit, times are aware, and values that look like enumerations
stay ``str``, so that a new status is an ordinary value instead of an error. A record that another
one embeds has a class of its own (``CustomerRef``): the same fields, without ``extra``.
"""

from typing import Any

from .event import Embedded, Metadata, Payload, Time
'''


@attrs.frozen
class Shape:
    """A class to be written: after which models, what it says of itself, and its base.

    ``base`` is ``Payload`` for the data of an event, another class whose fields are inherited, or
    "" for a record inside of data. ``fields`` are those that the models lack: what the upstream
    sends before its own client knows of it, each with its type, such as ``{"total": "int"}``.
    """

    name: str
    models: tuple[str, ...]
    doc: str
    base: str = ""
    fields: Mapping[str, str] = attrs.field(factory=dict)


# In the order in which they are written: a class comes before those that mention it.
SHAPES = (
    Shape("Address", ("Address",), "A postal address."),
    Shape(
        "CustomerRef",
        ("OrderCustomer", "SubscriptionCustomer", "Customer"),
        "The customer as other records embed it.",
    ),
    Shape("MemberRef", ("Member",), "A member of a team as other records embed it."),
    Shape(
        "Price",
        ("ProductPrice", "LegacyRecurringProductPrice"),
        "One price of a product; which fields are set depends on ``amount_type``.",
    ),
    Shape("Media", ("ProductMediaFileRead",), "A picture of a product."),
    Shape("BenefitRef", ("Benefit", "BenefitPublic"), "A benefit as other records embed it."),
    Shape(
        "ProductRef",
        ("OrderProduct", "Product", "CheckoutProduct", "DiscountProduct"),
        "The product as other records embed it; an order's has no prices, benefits and medias.",
    ),
    Shape(
        "DiscountRef",
        (
            "DiscountFixedOnceForeverDurationBase",
            "DiscountFixedRepeatDurationBase",
            "DiscountPercentageOnceForeverDurationBase",
            "DiscountPercentageRepeatDurationBase",
            "CheckoutDiscountFixedOnceForeverDuration",
            "CheckoutDiscountFixedRepeatDuration",
            "CheckoutDiscountPercentageOnceForeverDuration",
            "CheckoutDiscountPercentageRepeatDuration",
        ),
        "The discount as other records embed it: ``amount`` if fixed, else ``basis_points``.",
    ),
    Shape("SubscriptionRef", ("OrderSubscription",), "The subscription as an order embeds it."),
    Shape("OrderItem", ("OrderItemSchema",), "One line of an order."),
    Shape("Meter", ("Meter",), "A meter of a customer's usage."),
    Shape(
        "SubscriptionMeter",
        ("SubscriptionMeter", "CustomerStateSubscriptionMeter"),
        "The usage that a subscription is billed for.",
    ),
    Shape(
        "PendingUpdate",
        ("PendingSubscriptionUpdate",),
        "A change of a subscription that takes effect later.",
    ),
    Shape(
        "ActiveSubscription",
        ("CustomerStateSubscription",),
        "A subscription within a customer's state.",
    ),
    Shape("GrantedBenefit", ("CustomerStateBenefitGrant",), "A benefit within a customer's state."),
    Shape(
        "CustomerMeter", ("CustomerStateMeter",), "A balance of usage within a customer's state."
    ),
    Shape("Dispute", ("RefundDispute",), "A chargeback that a refund settles."),
    Shape("GrantError", ("BenefitGrantError",), "Why a benefit could not be granted."),
    Shape(
        "Order",
        ("Order",),
        "A purchase: one-time, or one billing cycle of a subscription.",
        "Payload",
    ),
    Shape("Subscription", ("Subscription",), "A recurring purchase of a product.", "Payload"),
    Shape(
        "Checkout",
        ("Checkout",),
        "A checkout session, from its opening to its success or expiry.",
        "Payload",
    ),
    Shape("Customer", ("Customer",), "A person or company that buys.", "Payload"),
    Shape(
        "CustomerState",
        ("CustomerState",),
        "A customer together with all that the customer is entitled to at present.",
        "Customer",
    ),
    Shape("Product", ("Product",), "Something that is sold.", "Payload"),
    Shape(
        "Benefit",
        ("Benefit",),
        "Something that buyers of a product receive: a licence key, a download, a role.",
        "Payload",
    ),
    Shape(
        "BenefitGrant",
        ("BenefitGrantWebhook",),
        "That one customer has, or had, one benefit.",
        "Payload",
    ),
    Shape("Refund", ("Refund",), "Money given back for an order.", "Payload"),
    Shape(
        "CustomerSeat",
        ("CustomerSeat",),
        "One seat of a purchase that is sold by the seat.",
        "Payload",
    ),
    Shape("Member", ("Member",), "A person who belongs to a customer that is a team.", "Payload"),
    Shape(
        "Discount",
        ("Discount",),
        "A reduction of the price: ``amount`` if fixed, ``basis_points`` if a percentage.",
        "Payload",
    ),
    Shape("Organization", ("Organization",), "The seller's own account.", "Payload"),
)


def files() -> dict[Path, str]:
    """Return the file and its text."""
    return {FILE: render(read_models())}


def render(models: Models) -> str:
    """Return the file's text, formatted as ruff does."""
    embedded = {
        member: shape.name
        for shape in SHAPES
        if shape.base == ""
        for name in shape.models
        for member in _members(name, models)
    }
    written: dict[str, dict[str, str]] = {"Payload": {"id": "str"}}
    parts = [_HEADER]
    for shape in SHAPES:
        fields = _fields(shape, models, embedded)
        inherited = written.get(shape.base, {})
        own = {name: kind for name, kind in fields.items() if name not in inherited}
        written[shape.name] = {**inherited, **own}
        parts.append(_class(shape, own))
    return "\n\n".join(parts)


def _members(name: str, models: Models) -> list[str]:
    """Return the models that a model's name or an alias stands for."""
    if name in models.models:
        return [name]
    found = [_members(part, models) for part in sorted(names_in(models.aliases[name]))]
    return list(dict.fromkeys(model for members in found for model in members))


def _fields(shape: Shape, models: Models, embedded: dict[str, str]) -> dict[str, str]:
    members = [models.models[member] for name in shape.models for member in _members(name, models)]
    kinds: dict[str, list[str]] = {}
    for model in members:
        for field in model.fields.values():
            kind = _kind(field.name, ast.parse(field.type, mode="eval").body, models, embedded)
            kinds.setdefault(field.name, []).extend(kind)
    return {**{name: _join(found) for name, found in kinds.items()}, **shape.fields}


def _join(kinds: Iterable[str]) -> str:
    found = dict.fromkeys(kinds)
    if "float" in found:
        found.pop("int", None)
    return next(iter(found)) if len(found) == 1 else "Any"


def _kind(name: str, node: ast.expr, models: Models, embedded: dict[str, str]) -> list[str]:
    """Return the kinds of value that a type admits, without None, as source."""
    if isinstance(node, ast.BinOp):
        return [
            kind for side in (node.left, node.right) for kind in _kind(name, side, models, embedded)
        ]
    if isinstance(node, ast.Constant):
        return []
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value)
        if outer == "Literal":
            values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return [type(ast.literal_eval(value)).__name__ for value in values]
        if outer == "list":
            return [f"tuple[{_join(_kind(name, node.slice, models, embedded))}, ...]"]
        return ["dict[str, Any]"]
    text = ast.unparse(node)
    if text in embedded:
        return [embedded[text]]
    if name.endswith("metadata"):
        return ["Metadata"]
    if text in models.aliases:
        return _kind(name, ast.parse(models.aliases[text], mode="eval").body, models, embedded)
    if text in models.models:
        return ["dict[str, Any]"]
    if text == "str" and is_time(name):
        return ["Time"]
    return [text]


def _class(shape: Shape, fields: dict[str, str]) -> str:
    base = f"{shape.base}, frozen=True" if shape.base else "Embedded, frozen=True, gc=False"
    lines = [f"    {name}: {kind}{_default(kind)}" for name, kind in fields.items()]
    doc = textwrap.indent(f'"""{shape.doc}"""', "    ")
    return "\n".join([f"class {shape.name}({base}):", doc, "", *lines, ""])


def _default(kind: str) -> str:
    return " = None" if kind == "Any" else " | None = None"
