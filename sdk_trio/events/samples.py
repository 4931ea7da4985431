"""A realistic sample of every type: for the simulator, for tests, for the command line.

Pure and deterministic: the same arguments give the same document. Records of one seed are
consistent: the product of a sample order is the product of the sample subscription.
"""

import difflib
import hashlib
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import msgspec

from ..base.times import rfc3339_of
from ..errors import EXIT_USAGE, SdkError
from .catalog import DEFAULT_CATALOG
from .event import Payload
from .payloads import (
    Benefit,
    BenefitGrant,
    Checkout,
    Customer,
    CustomerSeat,
    CustomerState,
    Discount,
    Member,
    Order,
    Organization,
    Product,
    Refund,
    Subscription,
)

Data = dict[str, Any]

#: The upstream API version of the samples; all its versions send the same data.
API_VERSION = "2026-04"


class UnknownEventTypeError(SdkError, KeyError):
    """There is no sample of this type. ``suggestions`` are the types with the closest names."""

    exit_code = EXIT_USAGE

    def __init__(self, wire_type: str) -> None:
        self.wire_type = wire_type
        near = difflib.get_close_matches(wire_type, sample_types(), n=3)
        self.suggestions: tuple[str, ...] = tuple(near)
        hint = f"did you mean {' or '.join(self.suggestions)}?" if self.suggestions else ""
        known = hint or "'sdk-trio events types' lists them"
        super().__init__(f"there is no event type {wire_type!r}: {known}")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes


@attrs.frozen
class _Story:
    """The seed and the time of one sample; all ids and times follow from them."""

    seed: str
    now: datetime
    organization: str | None = None

    def id(self, kind: str) -> str:
        if kind == "organization" and self.organization is not None:
            return self.organization
        # Derived from the seed, so that ids of one kind are the same in all documents of a seed.
        digest = hashlib.sha256(f"{self.seed}:{kind}".encode()).digest()
        return str(uuid.UUID(bytes=digest[:16], version=4))

    def at(self, **shift: float) -> str:
        # In the upstream's format: UTC, milliseconds, Z.
        moment = self.now.astimezone(UTC) + timedelta(**shift)
        return rfc3339_of(moment, timespec="milliseconds")

    def record(self, kind: str, *, days: float = 10) -> Data:
        """Return the common fields of every record: its id, and its times."""
        return {
            "id": self.id(kind),
            "created_at": self.at(days=-days),
            "modified_at": self.at() if days > 1 else None,
        }

    def owned(self, kind: str, *, days: float = 10) -> Data:
        """Return the common fields of records that the organization owns directly."""
        return {
            **self.record(kind, days=days),
            "organization_id": self.id("organization"),
            "metadata": {"source": "pricing-page"},
        }


def _address(_story: _Story) -> Data:
    return {
        "line1": "12 Example Street",
        "line2": None,
        "postal_code": "1010",
        "city": "Vienna",
        "state": None,
        "country": "AT",
    }


def _customer(story: _Story) -> Data:
    return {
        **story.owned("customer"),
        "external_id": "user-1042",
        "email": "ada@example.com",
        "email_verified": True,
        "type": "individual",
        "name": "Ada Example",
        "billing_name": "Ada Example",
        "billing_address": _address(story),
        "tax_id": None,
        "locale": "en",
        "default_payment_method_id": story.id("payment_method"),
        "deleted_at": None,
        "first_user_event_at": None,
        "avatar_url": "https://example.com/ada.png",
    }


def _interval(name: str | None = "month") -> Data:
    return {"recurring_interval": name, "recurring_interval_count": 1}


def _bare_product(story: _Story) -> Data:
    return {
        **story.owned("product", days=90),
        "trial_interval": None,
        "trial_interval_count": None,
        "name": "Studio Plan",
        "description": "Everything that a small studio needs.",
        "visibility": "public",
        **_interval(),
        "meter_interval": None,
        "meter_interval_count": None,
        "is_recurring": True,
        "is_archived": False,
    }


def _price(story: _Story) -> Data:
    return {
        **story.record("price", days=90),
        "source": "catalog",
        "amount_type": "fixed",
        "price_currency": "eur",
        "tax_behavior": "exclusive",
        "is_archived": False,
        "product_id": story.id("product"),
        "price_amount": 2400,
    }


def _product(story: _Story) -> Data:
    return {
        **_bare_product(story),
        "is_deletable": False,
        "prices": [_price(story)],
        "benefits": [_benefit(story)],
        "medias": [],
        "attached_custom_fields": [],
    }


def _public_benefit(story: _Story) -> Data:
    return {
        **story.record("benefit", days=90),
        "type": "license_keys",
        "description": "A licence key for the desktop application",
        "selectable": True,
        "deletable": True,
        "is_deleted": False,
        "organization_id": story.id("organization"),
    }


def _benefit(story: _Story) -> Data:
    return {
        **_public_benefit(story),
        "metadata": {"team": "desktop"},
        "visibility": "public",
        "visibility_configurable": True,
        "properties": {
            "prefix": "STUDIO",
            "expires": None,
            "activations": {"limit": 3, "enable_customer_admin": True},
            "limit_usage": None,
        },
    }


def _periods(story: _Story) -> Data:
    return {
        "status": "active",
        "amount": 2400,
        "currency": "eur",
        **_interval(),
        "current_period_start": story.at(days=-10),
        "current_period_end": story.at(days=20),
        "current_meter_period_start": None,
        "current_meter_period_end": None,
        "trial_start": None,
        "trial_end": None,
        "cancel_at_period_end": False,
        "canceled_at": None,
        "started_at": story.at(days=-10),
        "ends_at": None,
        "ended_at": None,
        "past_due_at": None,
        "pause_at_period_end": False,
        "paused_at": None,
        "resumes_at": None,
        "customer_id": story.id("customer"),
        "product_id": story.id("product"),
        "discount_id": None,
        "checkout_id": story.id("checkout"),
        "seats": None,
        "units": None,
        "customer_cancellation_reason": None,
        "customer_cancellation_comment": None,
    }


def _embedded_subscription(story: _Story) -> Data:
    """A subscription as embedded in an order: without an organization."""
    return {
        **story.record("subscription"),
        "metadata": {"source": "pricing-page"},
        **_periods(story),
    }


def _subscription(story: _Story) -> Data:
    return {
        **_embedded_subscription(story),
        "custom_field_data": {},
        "customer": _customer(story),
        "product": _product(story),
        "discount": None,
        "prices": [_price(story)],
        "meters": [],
        "pending_update": None,
    }


def _order(story: _Story) -> Data:
    return {
        **story.record("order", days=0.001),
        "status": "paid",
        "paid": True,
        "subtotal_amount": 2400,
        "discount_amount": 400,
        "net_amount": 2000,
        "tax_amount": 400,
        "total_amount": 2400,
        "applied_balance_amount": 0,
        "due_amount": 2400,
        "refunded_amount": 0,
        "refunded_tax_amount": 0,
        "refundable_amount": 2000,
        "refundable_tax_amount": 400,
        "currency": "eur",
        "billing_reason": "subscription_create",
        "billing_name": "Ada Example",
        "billing_address": _address(story),
        "invoice_number": "EXAMPLE-0042",
        "is_invoice_generated": True,
        "receipt_number": None,
        "seats": None,
        "units": None,
        "customer_id": story.id("customer"),
        "product_id": story.id("product"),
        "discount_id": story.id("discount"),
        "subscription_id": story.id("subscription"),
        "checkout_id": story.id("checkout"),
        "next_payment_attempt_at": None,
        "metadata": {"source": "pricing-page"},
        "custom_field_data": {},
        "platform_fee_amount": 120,
        "platform_fee_currency": "eur",
        "customer": _customer(story),
        "product": _bare_product(story),
        "discount": _bare_discount(story),
        "subscription": _embedded_subscription(story),
        "items": [
            {
                **story.record("order_item", days=0.001),
                "label": "Studio Plan, monthly",
                "amount": 2400,
                "tax_amount": 400,
                "proration": False,
                "product_price_id": story.id("price"),
                "start_timestamp": story.at(),
                "end_timestamp": story.at(days=30),
            }
        ],
        "description": "Studio Plan",
    }


def _checkout(story: _Story) -> Data:
    return {
        **story.owned("checkout", days=0.003),
        "custom_field_data": {},
        "payment_processor": "stripe",
        "status": "open",
        "client_secret": "polar_c_example",
        "url": "https://example.com/checkout/polar_c_example",
        "expires_at": story.at(hours=1),
        "success_url": "https://example.com/thanks",
        "return_url": None,
        "embed_origin": None,
        "amount": 2400,
        "discount_amount": 0,
        "net_amount": 2400,
        "tax_amount": None,
        "tax_behavior": None,
        "total_amount": 2400,
        "currency": "eur",
        "seats": None,
        "min_seats": None,
        "max_seats": None,
        "units": None,
        "min_units": None,
        "max_units": None,
        "allow_trial": True,
        "active_trial_interval": None,
        "active_trial_interval_count": None,
        "trial_interval": None,
        "trial_interval_count": None,
        "trial_end": None,
        "product_id": story.id("product"),
        "product_price_id": story.id("price"),
        "discount_id": None,
        "allow_discount_codes": True,
        "require_billing_address": False,
        "is_discount_applicable": True,
        "is_free_product_price": False,
        "is_payment_required": True,
        "is_payment_setup_required": True,
        "is_payment_form_required": True,
        "customer_id": None,
        "is_business_customer": False,
        "customer_name": None,
        "customer_email": None,
        "customer_ip_address": None,
        "customer_billing_name": None,
        "customer_billing_address": None,
        "customer_tax_id": None,
        "locale": "en",
        "payment_method_type": None,
        "payment_processor_metadata": {},
        "billing_address_fields": {
            "country": "required",
            "state": "disabled",
            "city": "disabled",
            "postal_code": "disabled",
            "line1": "disabled",
            "line2": "disabled",
        },
        "external_customer_id": None,
        "products": [_checkout_product(story)],
        "product": _checkout_product(story),
        "product_price": _price(story),
        "prices": {story.id("product"): [_price(story)]},
        "discount": None,
        "subscription_id": None,
        "attached_custom_fields": [],
        "customer_metadata": {},
    }


def _checkout_product(story: _Story) -> Data:
    # A checkout is shown to strangers, so its product has no metadata.
    product = {name: value for name, value in _bare_product(story).items() if name != "metadata"}
    return {
        **product,
        "prices": [_price(story)],
        "benefits": [_public_benefit(story)],
        "medias": [],
    }


def _customer_state(story: _Story) -> Data:
    left_out = {
        "current_meter_period_start",
        "current_meter_period_end",
        "ended_at",
        "past_due_at",
        "pause_at_period_end",
        "paused_at",
        "resumes_at",
        "recurring_interval_count",
        "customer_id",
        "checkout_id",
        "customer_cancellation_reason",
        "customer_cancellation_comment",
    }
    active = {
        name: value for name, value in _embedded_subscription(story).items() if name not in left_out
    }
    granted = {
        **story.record("benefit_grant"),
        "granted_at": story.at(days=-10),
        "benefit_id": story.id("benefit"),
        "benefit_type": "license_keys",
        "benefit_metadata": {"team": "desktop"},
        "properties": _granted_key(story),
    }
    return {
        **_customer(story),
        "active_subscriptions": [{**active, "custom_field_data": {}, "meters": []}],
        "granted_benefits": [granted],
        "active_meters": [],
    }


def _granted_key(story: _Story) -> Data:
    return {
        "user_provided_key": None,
        "license_key_id": story.id("license_key"),
        "display_key": "STUDIO-****-1042",
    }


def _benefit_grant(story: _Story) -> Data:
    return {
        **story.record("benefit_grant"),
        "granted_at": story.at(days=-10),
        "is_granted": True,
        "revoked_at": None,
        "is_revoked": False,
        "subscription_id": story.id("subscription"),
        "order_id": None,
        "customer_id": story.id("customer"),
        "member_id": None,
        "benefit_id": story.id("benefit"),
        "error": None,
        "customer": _customer(story),
        "member": None,
        "benefit": _benefit(story),
        "properties": _granted_key(story),
        "previous_properties": None,
    }


def _refund(story: _Story) -> Data:
    return {
        **story.owned("refund", days=0.001),
        "status": "pending",
        "reason": "customer_request",
        "amount": 2000,
        "tax_amount": 400,
        "currency": "eur",
        "order_id": story.id("order"),
        "subscription_id": story.id("subscription"),
        "customer_id": story.id("customer"),
        "revoke_benefits": True,
        "dispute": None,
    }


def _customer_seat(story: _Story) -> Data:
    return {
        **story.record("customer_seat", days=2),
        "subscription_id": story.id("subscription"),
        "order_id": None,
        "status": "pending",
        "customer_id": story.id("customer"),
        "member_id": story.id("member"),
        "member": _member(story),
        "email": "grace@example.com",
        "customer_email": "ada@example.com",
        "invitation_token_expires_at": story.at(days=1),
        "claimed_at": None,
        "revoked_at": None,
        "seat_metadata": {"department": "design"},
    }


def _member(story: _Story) -> Data:
    return {
        **story.record("member", days=2),
        "customer_id": story.id("customer"),
        "email": "grace@example.com",
        "name": "Grace Example",
        "external_id": "user-1043",
        "role": "member",
    }


def _bare_discount(story: _Story) -> Data:
    return {
        **story.owned("discount", days=2),
        "name": "Spring offer",
        "type": "fixed",
        "code": "SPRING",
        "duration": "repeating",
        "duration_in_months": 3,
        "amount": 400,
        "currency": "eur",
        "amounts": {"eur": 400},
        "starts_at": story.at(days=-1),
        "ends_at": story.at(days=30),
        "max_redemptions": 100,
        "max_redemptions_per_customer": 1,
        "redemptions_count": 0,
    }


def _discount(story: _Story) -> Data:
    return {**_bare_discount(story), "products": [_bare_product(story)]}


_CUSTOMER_EMAILS = (
    "order_confirmation",
    "payment_method_expiration_reminder",
    "subscription_cancellation",
    "subscription_confirmation",
    "subscription_cycled",
    "subscription_cycled_after_trial",
    "subscription_past_due",
    "subscription_paused",
    "subscription_renewal_reminder",
    "subscription_resumed",
    "subscription_revoked",
    "subscription_trial_conversion_reminder",
    "subscription_uncanceled",
    "subscription_updated",
)

_CAPABILITIES = (
    "checkout_payments",
    "subscription_renewals",
    "payouts",
    "refunds",
    "api_access",
    "dashboard_access",
)


def _organization(story: _Story) -> Data:
    return {
        **story.record("organization", days=365),
        "name": "Example Studio",
        "slug": "example-studio",
        "avatar_url": "https://example.com/avatar.png",
        "proration_behavior": "prorate",
        "allow_customer_updates": True,
        "email": "hello@example.com",
        "website": "https://example.com",
        "socials": [{"platform": "github", "url": "https://example.com/studio"}],
        "status": "active",
        "details_submitted_at": story.at(days=-364),
        "onboarding_resubmission_requested_at": None,
        "sso_enforced": False,
        "default_presentment_currency": "eur",
        "default_tax_behavior": "exclusive",
        "feature_settings": None,
        "subscription_settings": {
            "allow_multiple_subscriptions": False,
            "proration_behavior": "prorate",
            "benefit_revocation_grace_period": 0,
            "prevent_trial_abuse": True,
            "allow_customer_updates": True,
        },
        "customer_email_settings": dict.fromkeys(_CUSTOMER_EMAILS, True),
        "customer_portal_settings": {
            "usage": {"show": True},
            "subscription": {"update_seats": True, "update_plan": True},
        },
        "dispute_settings": {"auto_accept_below_amount": None},
        "embed_hosts": [],
        "country": "AT",
        "account_id": None,
        "payout_account_id": None,
        "capabilities": dict.fromkeys(_CAPABILITIES, True),
    }


def _always(**changes: Any) -> Callable[[_Story], Data]:
    return lambda _story: changes


def _completed(story: _Story) -> Data:
    customer = _customer(story)
    return {
        "status": "succeeded",
        "tax_amount": 480,
        "total_amount": 2880,
        "customer_email": customer["email"],
        "customer_name": customer["name"],
        "customer_id": customer["id"],
        "subscription_id": story.id("subscription"),
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


#: The usual subject of the events with this data.
_SHAPES: dict[type[Payload], Callable[[_Story], Data]] = {
    Order: _order,
    Subscription: _subscription,
    Checkout: _checkout,
    Customer: _customer,
    CustomerState: _customer_state,
    Product: _product,
    Benefit: _benefit,
    BenefitGrant: _benefit_grant,
    Refund: _refund,
    CustomerSeat: _customer_seat,
    Member: _member,
    Discount: _discount,
    Organization: _organization,
}

#: Changes to the usual subject, by type; other types show it unchanged.
_CHANGES: dict[str, Callable[[_Story], Data]] = {
    "order.created": _always(status="pending", paid=False),
    "order.refunded": _always(
        status="refunded",
        refunded_amount=2000,
        refunded_tax_amount=400,
        refundable_amount=0,
        refundable_tax_amount=0,
    ),
    "subscription.created": _always(status="incomplete", started_at=None),
    "subscription.canceled": _to_be_ended,
    "subscription.past_due": lambda story: {
        **_new_period(story),
        "status": "past_due",
        "past_due_at": story.at(),
    },
    "subscription.revoked": _ended,
    "checkout.updated": _completed,
    "checkout.expired": lambda story: {"status": "expired", "expires_at": story.at(minutes=-1)},
    "customer.created": _always(email_verified=False),
    "customer.deleted": lambda story: {"deleted_at": story.at()},
    "product.updated": _always(is_archived=True),
    "benefit_grant.revoked": lambda story: {
        "is_granted": False,
        "is_revoked": True,
        "revoked_at": story.at(),
    },
    "refund.updated": _always(status="succeeded"),
    "customer_seat.claimed": lambda story: {"status": "claimed", "claimed_at": story.at()},
    "customer_seat.revoked": lambda story: {"status": "revoked", "revoked_at": story.at()},
    "member.updated": _always(role="billing_manager"),
    "subscription.cycled": _new_period,
    "subscription.paused": lambda story: {"status": "paused", "paused_at": story.at()},
    "discount.updated": _always(redemptions_count=7),
}


#: Members of a type besides ``data``.
_BESIDE_DATA: Mapping[str, Data] = {
    "subscription.migrated": {"provider": "stripe", "provider_subscription_id": "sub_example"},
}


def sample_types() -> tuple[str, ...]:
    """Return every type that has a sample: the known ones, then the additional ones."""
    return tuple(row.wire_type for row in DEFAULT_CATALOG)


def sample(
    wire_type: str,
    *,
    now: datetime,
    overrides: Mapping[str, Any] | None = None,
    seed: str = "sample",
    organization: str | None = None,
) -> dict[str, Any]:
    """Return a realistic document of ``wire_type``.

    It has ``type``, ``timestamp``, ``api_version``, and ``data`` with every field that the
    upstream sends.

    Args:
        wire_type: one of :func:`sample_types`.
        now: when the event happens, aware; every time in the sample is relative to it.
        overrides: merged into ``data`` as a JSON merge patch (RFC 7396): objects are merged, null
            removes a field, everything else replaces it. It is not changed.
        seed: any text; another seed gives different ids.
        organization: the owner of the records; None: one derived from the seed.

    Raises:
        UnknownEventTypeError: no such type; the message suggests the closest names.
        ValueError: ``now`` has no offset from UTC.
    """
    row = DEFAULT_CATALOG.by_type(wire_type)
    if row is None:
        raise UnknownEventTypeError(wire_type)
    if now.utcoffset() is None:
        raise ValueError("now must be an aware time, such as datetime.now(UTC)")
    story = _Story(seed, now, organization)
    data = {**_SHAPES[row.data_class](story), **_CHANGES.get(wire_type, _always())(story)}
    return {
        "type": wire_type,
        "timestamp": story.at(),
        "api_version": API_VERSION,
        "data": data if overrides is None else merge_patch(data, overrides),
        **_BESIDE_DATA.get(wire_type, {}),
    }


def sample_body(
    wire_type: str,
    *,
    now: datetime,
    overrides: Mapping[str, Any] | None = None,
    seed: str = "sample",
    organization: str | None = None,
) -> bytes:
    """Return :func:`sample` as the bytes of a body: compact JSON in UTF-8, ready to be signed."""
    document = sample(wire_type, now=now, overrides=overrides, seed=seed, organization=organization)
    return msgspec.json.encode(document)


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
