"""A realistic sample of every type: for the simulator, for tests, for the command line (spec 4.3).

Pure and deterministic: the same arguments give the same document. Records of one seed belong
together: the product of a sample order is the product of the sample subscription.
"""

import difflib
import hashlib
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import msgspec

from ..errors import EXIT_USAGE, SdkError

Data = dict[str, Any]


class UnknownEventTypeError(SdkError, KeyError):
    """There is no sample of this type. ``suggestions`` are the types with the closest names."""

    exit_code = EXIT_USAGE

    def __init__(self, wire_type: str) -> None:
        self.wire_type = wire_type
        near = difflib.get_close_matches(wire_type, sample_types(), n=3)
        self.suggestions: tuple[str, ...] = tuple(near)
        hint = f"did you mean {' or '.join(self.suggestions)}?" if self.suggestions else ""
        known = hint or "see the table of types in docs/reference/events.md"
        super().__init__(f"there is no event type {wire_type!r}: {known}")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes


@attrs.frozen
class _Story:
    """The seed and the moment of one sample; all ids and times follow from them."""

    seed: str
    now: datetime

    def id(self, kind: str) -> str:
        digest = hashlib.sha256(f"{self.seed}:{kind}".encode()).digest()
        return str(uuid.UUID(bytes=digest[:16], version=4))

    def at(self, **shift: float) -> str:
        moment = self.now.astimezone(UTC) + timedelta(**shift)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def common(self) -> Data:
        return {"organization_id": self.id("organization"), "metadata": {"source": "pricing-page"}}

    def customer(self) -> Data:
        return {"id": self.id("customer"), "email": "ada@example.com", "name": "Ada Example"}


def _order(story: _Story) -> Data:
    return {
        "id": story.id("order"),
        "status": "paid",
        "number": "EXAMPLE-0042",
        "amount": 2000,
        "subtotal_amount": 2400,
        "discount_amount": 400,
        "net_amount": 2000,
        "tax_amount": 400,
        "total_amount": 2400,
        "currency": "eur",
        "channel": "checkout",
        "billing_reason": "subscription_create",
        "invoice_number": "EXAMPLE-0042",
        "customer": story.customer(),
        "product_id": story.id("product"),
        "subscription_id": story.id("subscription"),
        "items": [
            {
                "product_id": story.id("product"),
                "product_name": "Studio Plan",
                "label": "Studio Plan, monthly",
                "price_amount": 2400,
                "amount": 2400,
                "currency": "eur",
            }
        ],
        **story.common(),
        "created_at": story.at(minutes=-1),
        "modified_at": story.at(),
    }


def _subscription(story: _Story) -> Data:
    return {
        "id": story.id("subscription"),
        "status": "active",
        "amount": 2400,
        "currency": "eur",
        "current_period_start": story.at(days=-10),
        "current_period_end": story.at(days=20),
        "canceled_at": None,
        "cancel_at_period_end": False,
        "started_at": story.at(days=-10),
        "ends_at": None,
        "ended_at": None,
        "customer_id": story.id("customer"),
        "customer": story.customer(),
        "product_id": story.id("product"),
        "product": {"id": story.id("product"), "name": "Studio Plan"},
        "price": {
            "id": story.id("price"),
            "name": "Monthly",
            "price_amount": 2400,
            "price_currency": "eur",
        },
        **story.common(),
        "created_at": story.at(days=-10),
        "modified_at": story.at(),
    }


def _checkout(story: _Story) -> Data:
    return {
        "id": story.id("checkout"),
        "status": "open",
        "amount": 2400,
        "total_amount": 2400,
        "currency": "eur",
        "customer_email": None,
        "customer_id": None,
        "customer": None,
        "product_id": story.id("product"),
        "expires_at": story.at(hours=1),
        "order_id": None,
        **story.common(),
        "created_at": story.at(minutes=-5),
    }


def _customer(story: _Story) -> Data:
    return {
        **story.customer(),
        "email_verified": True,
        "external_id": "user-1042",
        "active_subscriptions_count": 1,
        **story.common(),
        "created_at": story.at(days=-10),
    }


def _customer_state(story: _Story) -> Data:
    subscription = _subscription(story)
    active = {
        name: subscription[name]
        for name in (
            "id",
            "status",
            "amount",
            "currency",
            "current_period_start",
            "current_period_end",
            "cancel_at_period_end",
            "started_at",
            "product_id",
        )
    }
    granted = {
        "id": story.id("benefit_grant"),
        "benefit_id": story.id("benefit"),
        "benefit_type": "license_keys",
        "granted_at": story.at(days=-10),
    }
    return {
        **_customer(story),
        "active_subscriptions": [{**active, "recurring_interval": "month"}],
        "granted_benefits": [granted],
    }


def _product(story: _Story) -> Data:
    return {
        "id": story.id("product"),
        "name": "Studio Plan",
        "description": "Everything that a small studio needs.",
        "is_archived": False,
        "is_recurring": True,
        **story.common(),
        "created_at": story.at(days=-90),
    }


def _benefit(story: _Story) -> Data:
    return {
        "id": story.id("benefit"),
        "type": "license_keys",
        "description": "A licence key for the desktop application",
        **story.common(),
        "created_at": story.at(days=-90),
    }


def _benefit_grant(story: _Story) -> Data:
    return {
        "id": story.id("benefit_grant"),
        "customer_id": story.id("customer"),
        "benefit_id": story.id("benefit"),
        "benefit_type": "license_keys",
        "is_granted": True,
        "granted_at": story.at(days=-10),
        "is_revoked": False,
        "revoked_at": None,
        "subscription_id": story.id("subscription"),
        "order_id": story.id("order"),
        "organization_id": story.id("organization"),
        "created_at": story.at(days=-10),
    }


def _refund(story: _Story) -> Data:
    return {
        "id": story.id("refund"),
        "amount": 2000,
        "tax_amount": 400,
        "currency": "eur",
        "reason": "customer_request",
        "status": "pending",
        "order_id": story.id("order"),
        "subscription_id": story.id("subscription"),
        "customer_id": story.id("customer"),
        **story.common(),
        "created_at": story.at(minutes=-1),
    }


def _customer_seat(story: _Story) -> Data:
    return {
        "id": story.id("customer_seat"),
        "status": "pending",
        "subscription_id": story.id("subscription"),
        "order_id": story.id("order"),
        "customer_id": story.id("customer"),
        "customer_email": "grace@example.com",
        "invitation_token_expires_at": story.at(days=1),
        "claimed_at": None,
        "revoked_at": None,
        "seat_metadata": {"department": "design"},
        "created_at": story.at(hours=-2),
        "modified_at": story.at(),
    }


def _member(story: _Story) -> Data:
    return {
        "id": story.id("member"),
        "customer_id": story.id("customer"),
        "email": "grace@example.com",
        "name": "Grace Example",
        "external_id": "user-1043",
        "role": "member",
        "created_at": story.at(hours=-2),
        "modified_at": story.at(),
    }


def _discount(story: _Story) -> Data:
    return {
        "id": story.id("discount"),
        "name": "Spring offer",
        "type": "fixed",
        "code": "SPRING",
        "duration": "repeating",
        "duration_in_months": 3,
        "amount": 400,
        "basis_points": None,
        "currency": "eur",
        "starts_at": story.at(days=-1),
        "ends_at": story.at(days=30),
        "max_redemptions": 100,
        "redemptions_count": 0,
        **story.common(),
        "created_at": story.at(days=-2),
        "modified_at": story.at(),
    }


def _organization(story: _Story) -> Data:
    return {
        "id": story.id("organization"),
        "name": "Example Studio",
        "slug": "example-studio",
        "avatar_url": "https://example.com/avatar.png",
        "email": "hello@example.com",
        "website": "https://example.com",
        "status": "active",
        "created_at": story.at(days=-365),
        "modified_at": story.at(),
    }


def _nothing(_story: _Story) -> Data:
    return {}


def _always(**changes: Any) -> Callable[[_Story], Data]:
    return lambda _story: changes


def _completed(story: _Story) -> Data:
    customer = story.customer()
    return {
        "status": "succeeded",
        "customer_email": customer["email"],
        "customer_id": customer["id"],
        "customer": customer,
        "order_id": story.id("order"),
    }


def _ended(story: _Story) -> Data:
    end = story.at()
    return {"status": "canceled", "canceled_at": end, "ends_at": end, "ended_at": end}


def _to_be_ended(story: _Story) -> Data:
    return {
        "cancel_at_period_end": True,
        "canceled_at": story.at(),
        "ends_at": story.at(days=20),
    }


def _new_period(story: _Story) -> Data:
    return {
        "current_period_start": story.at(),
        "current_period_end": story.at(days=30),
        "started_at": story.at(days=-30),
        "created_at": story.at(days=-30),
    }


_SHAPES: dict[str, Callable[[_Story], Data]] = {
    "order": _order,
    "subscription": _subscription,
    "checkout": _checkout,
    "customer": _customer,
    "product": _product,
    "benefit": _benefit,
    "benefit_grant": _benefit_grant,
    "refund": _refund,
    "customer_seat": _customer_seat,
    "member": _member,
    "discount": _discount,
    "organization": _organization,
}

#: For each type what tells its subject from the shape's ordinary one.
_SAMPLES: dict[str, Callable[[_Story], Data]] = {
    "order.created": _always(status="pending"),
    "order.updated": _nothing,
    "order.paid": _nothing,
    "order.refunded": _always(status="refunded"),
    "subscription.created": _always(status="incomplete", started_at=None),
    "subscription.active": _nothing,
    "subscription.updated": _nothing,
    "subscription.canceled": _to_be_ended,
    "subscription.uncanceled": _nothing,
    "subscription.past_due": lambda story: {**_new_period(story), "status": "past_due"},
    "subscription.revoked": _ended,
    "checkout.created": _nothing,
    "checkout.updated": _completed,
    "checkout.expired": lambda story: {"status": "expired", "expires_at": story.at(minutes=-1)},
    "customer.created": _always(email_verified=False, active_subscriptions_count=0),
    "customer.updated": _nothing,
    "customer.state_changed": _customer_state,
    "customer.deleted": _always(active_subscriptions_count=0),
    "product.created": _nothing,
    "product.updated": _always(is_archived=True),
    "benefit.created": _nothing,
    "benefit.updated": _nothing,
    "benefit_grant.created": _nothing,
    "benefit_grant.updated": _nothing,
    "benefit_grant.cycled": _nothing,
    "benefit_grant.revoked": lambda story: {
        "is_granted": False,
        "is_revoked": True,
        "revoked_at": story.at(),
    },
    "refund.created": _nothing,
    "refund.updated": _always(status="succeeded"),
    "customer_seat.assigned": _nothing,
    "customer_seat.claimed": lambda story: {"status": "claimed", "claimed_at": story.at()},
    "customer_seat.revoked": lambda story: {"status": "revoked", "revoked_at": story.at()},
    "member.created": _nothing,
    "member.updated": _always(role="billing_manager"),
    "member.deleted": _nothing,
    "subscription.cycled": _new_period,
    "subscription.paused": _always(status="paused"),
    "subscription.resumed": _nothing,
    "discount.created": _nothing,
    "discount.updated": _always(redemptions_count=7),
    "discount.deleted": _nothing,
    "organization.updated": _nothing,
}


def sample_types() -> tuple[str, ...]:
    """Return every type that has a sample: the known ones, then the additional ones."""
    return tuple(_SAMPLES)


def sample(
    wire_type: str,
    *,
    now: datetime,
    overrides: Mapping[str, Any] | None = None,
    seed: str = "sample",
) -> dict[str, Any]:
    """Return a realistic document of ``wire_type``: ``type``, ``timestamp`` and ``data``.

    Args:
        wire_type: one of :func:`sample_types`.
        now: when the event happens, aware; every time in the sample is relative to it.
        overrides: merged into ``data`` as a JSON merge patch (RFC 7396): objects are merged, null
            removes a field, everything else replaces it. It is not changed.
        seed: any text; another seed gives other ids.

    Raises:
        UnknownEventTypeError: no such type; the message suggests the closest names.
        ValueError: ``now`` has no offset from UTC.
    """
    if wire_type not in _SAMPLES:
        raise UnknownEventTypeError(wire_type)
    if now.utcoffset() is None:
        raise ValueError("now must be an aware time, such as datetime.now(UTC)")
    story = _Story(seed, now)
    data = {**_SHAPES[wire_type.partition(".")[0]](story), **_SAMPLES[wire_type](story)}
    return {
        "type": wire_type,
        "timestamp": story.at(),
        "data": data if overrides is None else merge_patch(data, overrides),
    }


def sample_body(
    wire_type: str,
    *,
    now: datetime,
    overrides: Mapping[str, Any] | None = None,
    seed: str = "sample",
) -> bytes:
    """Return :func:`sample` as the bytes of a body: compact JSON in UTF-8, ready to be signed."""
    return msgspec.json.encode(sample(wire_type, now=now, overrides=overrides, seed=seed))


def merge_patch(target: Any, patch: Any) -> Any:
    """Return ``target`` changed by the JSON merge patch ``patch`` (RFC 7396); changes neither."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged
