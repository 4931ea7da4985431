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


class Address(Embedded, frozen=True, gc=False):
    """A postal address."""

    line1: str | None = None
    line2: str | None = None
    postal_code: str | None = None
    city: str | None = None
    state: str | None = None
    country: str | None = None


class CustomerRef(Embedded, frozen=True, gc=False):
    """The customer as other records embed it."""

    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    metadata: Metadata | None = None
    external_id: str | None = None
    email: str | None = None
    email_verified: bool | None = None
    type: str | None = None
    name: str | None = None
    billing_name: str | None = None
    billing_address: Address | None = None
    tax_id: tuple[Any, ...] | None = None
    locale: str | None = None
    organization_id: str | None = None
    default_payment_method_id: str | None = None
    deleted_at: Time | None = None
    first_user_event_at: Time | None = None
    avatar_url: str | None = None


class MemberRef(Embedded, frozen=True, gc=False):
    """A member of a team as other records embed it."""

    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    customer_id: str | None = None
    email: str | None = None
    name: str | None = None
    external_id: str | None = None
    role: str | None = None


class Price(Embedded, frozen=True, gc=False):
    """One price of a product; which fields are set depends on ``amount_type``."""

    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    source: str | None = None
    amount_type: str | None = None
    price_currency: str | None = None
    tax_behavior: str | None = None
    is_archived: bool | None = None
    product_id: str | None = None
    minimum_amount: int | None = None
    maximum_amount: int | None = None
    preset_amount: int | None = None
    price_amount: int | None = None
    cap_amount: int | None = None
    meter_id: str | None = None
    meter: dict[str, Any] | None = None
    tiers: dict[str, Any] | None = None
    unit_amount: str | None = None
    seat_tiers: dict[str, Any] | None = None
    minimum_units: int | None = None
    maximum_units: int | None = None
    unit_label: dict[str, Any] | None = None
    type: str | None = None
    recurring_interval: str | None = None
    legacy: bool | None = None


class Media(Embedded, frozen=True, gc=False):
    """A picture of a product."""

    id: str | None = None
    organization_id: str | None = None
    name: str | None = None
    path: str | None = None
    mime_type: str | None = None
    size: int | None = None
    storage_version: str | None = None
    checksum_etag: str | None = None
    checksum_sha256_base64: str | None = None
    checksum_sha256_hex: str | None = None
    last_modified_at: Time | None = None
    version: str | None = None
    service: str | None = None
    is_uploaded: bool | None = None
    created_at: Time | None = None
    size_readable: str | None = None
    public_url: str | None = None


class BenefitRef(Embedded, frozen=True, gc=False):
    """A benefit as other records embed it."""

    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    type: str | None = None
    description: str | None = None
    selectable: bool | None = None
    deletable: bool | None = None
    is_deleted: bool | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    visibility: str | None = None
    properties: dict[str, Any] | None = None
    visibility_configurable: bool | None = None


class ProductRef(Embedded, frozen=True, gc=False):
    """The product as other records embed it; an order's has no prices, benefits and medias."""

    metadata: Metadata | None = None
    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    trial_interval: str | None = None
    trial_interval_count: int | None = None
    name: str | None = None
    description: str | None = None
    visibility: str | None = None
    recurring_interval: str | None = None
    recurring_interval_count: int | None = None
    meter_interval: str | None = None
    meter_interval_count: int | None = None
    is_recurring: bool | None = None
    is_archived: bool | None = None
    organization_id: str | None = None
    is_deletable: bool | None = None
    prices: tuple[Price, ...] | None = None
    benefits: tuple[BenefitRef, ...] | None = None
    medias: tuple[Media, ...] | None = None
    attached_custom_fields: tuple[dict[str, Any], ...] | None = None


class DiscountRef(Embedded, frozen=True, gc=False):
    """The discount as other records embed it: ``amount`` if fixed, else ``basis_points``."""

    duration: str | None = None
    type: str | None = None
    amount: int | None = None
    currency: str | None = None
    amounts: dict[str, Any] | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    metadata: Metadata | None = None
    name: str | None = None
    code: str | None = None
    starts_at: Time | None = None
    ends_at: Time | None = None
    max_redemptions: int | None = None
    max_redemptions_per_customer: int | None = None
    redemptions_count: int | None = None
    organization_id: str | None = None
    duration_in_months: int | None = None
    basis_points: int | None = None


class SubscriptionRef(Embedded, frozen=True, gc=False):
    """The subscription as an order embeds it."""

    metadata: Metadata | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    amount: int | None = None
    currency: str | None = None
    recurring_interval: str | None = None
    recurring_interval_count: int | None = None
    status: str | None = None
    current_period_start: Time | None = None
    current_period_end: Time | None = None
    current_meter_period_start: Time | None = None
    current_meter_period_end: Time | None = None
    trial_start: Time | None = None
    trial_end: Time | None = None
    cancel_at_period_end: bool | None = None
    canceled_at: Time | None = None
    started_at: Time | None = None
    ends_at: Time | None = None
    ended_at: Time | None = None
    past_due_at: Time | None = None
    pause_at_period_end: bool | None = None
    paused_at: Time | None = None
    resumes_at: Time | None = None
    customer_id: str | None = None
    product_id: str | None = None
    discount_id: str | None = None
    checkout_id: str | None = None
    seats: int | None = None
    units: int | None = None
    customer_cancellation_reason: str | None = None
    customer_cancellation_comment: str | None = None


class OrderItem(Embedded, frozen=True, gc=False):
    """One line of an order."""

    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    label: str | None = None
    amount: int | None = None
    tax_amount: int | None = None
    proration: bool | None = None
    product_price_id: str | None = None
    start_timestamp: Time | None = None
    end_timestamp: Time | None = None


class Meter(Embedded, frozen=True, gc=False):
    """A meter of a customer's usage."""

    metadata: Metadata | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    name: str | None = None
    unit: str | None = None
    custom_label: str | None = None
    custom_multiplier: int | None = None
    filter: dict[str, Any] | None = None
    aggregation: dict[str, Any] | None = None
    organization_id: str | None = None
    archived_at: Time | None = None


class SubscriptionMeter(Embedded, frozen=True, gc=False):
    """The usage that a subscription is billed for."""

    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    consumed_units: float | None = None
    credited_units: int | None = None
    amount: int | None = None
    meter_id: str | None = None
    meter: Meter | None = None


class PendingUpdate(Embedded, frozen=True, gc=False):
    """A change of a subscription that takes effect later."""

    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    applies_at: Time | None = None
    product_id: str | None = None
    seats: int | None = None
    units: int | None = None


class ActiveSubscription(Embedded, frozen=True, gc=False):
    """A subscription within a customer's state."""

    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    custom_field_data: dict[str, Any] | None = None
    metadata: Metadata | None = None
    status: str | None = None
    amount: int | None = None
    currency: str | None = None
    recurring_interval: str | None = None
    current_period_start: Time | None = None
    current_period_end: Time | None = None
    trial_start: Time | None = None
    trial_end: Time | None = None
    cancel_at_period_end: bool | None = None
    canceled_at: Time | None = None
    started_at: Time | None = None
    ends_at: Time | None = None
    product_id: str | None = None
    discount_id: str | None = None
    seats: int | None = None
    units: int | None = None
    meters: tuple[SubscriptionMeter, ...] | None = None


class GrantedBenefit(Embedded, frozen=True, gc=False):
    """A benefit within a customer's state."""

    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    granted_at: Time | None = None
    benefit_id: str | None = None
    benefit_type: str | None = None
    benefit_metadata: Metadata | None = None
    properties: dict[str, Any] | None = None


class CustomerMeter(Embedded, frozen=True, gc=False):
    """A balance of usage within a customer's state."""

    id: str | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    meter_id: str | None = None
    consumed_units: float | None = None
    credited_units: int | None = None
    balance: float | None = None


class Dispute(Embedded, frozen=True, gc=False):
    """A chargeback that a refund settles."""

    created_at: Time | None = None
    modified_at: Time | None = None
    id: str | None = None
    status: str | None = None
    resolved: bool | None = None
    closed: bool | None = None
    amount: int | None = None
    tax_amount: int | None = None
    currency: str | None = None
    reason: str | None = None
    evidence_due_by: Time | None = None
    past_due: bool | None = None
    order_id: str | None = None
    payment_id: str | None = None


class GrantError(Embedded, frozen=True, gc=False):
    """Why a benefit could not be granted."""

    message: str | None = None
    type: str | None = None
    timestamp: Time | None = None


class Order(Payload, frozen=True):
    """A purchase: one-time, or one billing cycle of a subscription."""

    created_at: Time | None = None
    modified_at: Time | None = None
    status: str | None = None
    paid: bool | None = None
    subtotal_amount: int | None = None
    discount_amount: int | None = None
    net_amount: int | None = None
    tax_amount: int | None = None
    total_amount: int | None = None
    applied_balance_amount: int | None = None
    due_amount: int | None = None
    refunded_amount: int | None = None
    refunded_tax_amount: int | None = None
    currency: str | None = None
    billing_reason: str | None = None
    billing_name: str | None = None
    billing_address: Address | None = None
    invoice_number: str | None = None
    is_invoice_generated: bool | None = None
    receipt_number: str | None = None
    seats: int | None = None
    units: int | None = None
    customer_id: str | None = None
    product_id: str | None = None
    discount_id: str | None = None
    subscription_id: str | None = None
    checkout_id: str | None = None
    next_payment_attempt_at: Time | None = None
    metadata: Metadata | None = None
    custom_field_data: dict[str, Any] | None = None
    platform_fee_amount: int | None = None
    platform_fee_currency: str | None = None
    customer: CustomerRef | None = None
    product: ProductRef | None = None
    discount: DiscountRef | None = None
    subscription: SubscriptionRef | None = None
    items: tuple[OrderItem, ...] | None = None
    description: str | None = None
    refundable_amount: int | None = None
    refundable_tax_amount: int | None = None


class Subscription(Payload, frozen=True):
    """A recurring purchase of a product."""

    created_at: Time | None = None
    modified_at: Time | None = None
    amount: int | None = None
    currency: str | None = None
    recurring_interval: str | None = None
    recurring_interval_count: int | None = None
    status: str | None = None
    current_period_start: Time | None = None
    current_period_end: Time | None = None
    current_meter_period_start: Time | None = None
    current_meter_period_end: Time | None = None
    trial_start: Time | None = None
    trial_end: Time | None = None
    cancel_at_period_end: bool | None = None
    canceled_at: Time | None = None
    started_at: Time | None = None
    ends_at: Time | None = None
    ended_at: Time | None = None
    past_due_at: Time | None = None
    pause_at_period_end: bool | None = None
    paused_at: Time | None = None
    resumes_at: Time | None = None
    customer_id: str | None = None
    product_id: str | None = None
    discount_id: str | None = None
    checkout_id: str | None = None
    seats: int | None = None
    units: int | None = None
    customer_cancellation_reason: str | None = None
    customer_cancellation_comment: str | None = None
    metadata: Metadata | None = None
    custom_field_data: dict[str, Any] | None = None
    customer: CustomerRef | None = None
    product: ProductRef | None = None
    discount: DiscountRef | None = None
    prices: tuple[Price, ...] | None = None
    meters: tuple[SubscriptionMeter, ...] | None = None
    pending_update: PendingUpdate | None = None


class Checkout(Payload, frozen=True):
    """A checkout session, from its opening to its success or expiry."""

    created_at: Time | None = None
    modified_at: Time | None = None
    custom_field_data: dict[str, Any] | None = None
    payment_processor: str | None = None
    status: str | None = None
    client_secret: str | None = None
    url: str | None = None
    expires_at: Time | None = None
    success_url: str | None = None
    return_url: str | None = None
    embed_origin: str | None = None
    amount: int | None = None
    seats: int | None = None
    min_seats: int | None = None
    max_seats: int | None = None
    units: int | None = None
    min_units: int | None = None
    max_units: int | None = None
    discount_amount: int | None = None
    net_amount: int | None = None
    tax_amount: int | None = None
    tax_behavior: str | None = None
    total_amount: int | None = None
    currency: str | None = None
    allow_trial: bool | None = None
    active_trial_interval: str | None = None
    active_trial_interval_count: int | None = None
    trial_end: Time | None = None
    organization_id: str | None = None
    product_id: str | None = None
    product_price_id: str | None = None
    discount_id: str | None = None
    allow_discount_codes: bool | None = None
    require_billing_address: bool | None = None
    is_discount_applicable: bool | None = None
    is_free_product_price: bool | None = None
    is_payment_required: bool | None = None
    is_payment_setup_required: bool | None = None
    is_payment_form_required: bool | None = None
    customer_id: str | None = None
    is_business_customer: bool | None = None
    customer_name: str | None = None
    customer_email: str | None = None
    customer_ip_address: str | None = None
    customer_billing_name: str | None = None
    customer_billing_address: Address | None = None
    customer_tax_id: str | None = None
    locale: str | None = None
    payment_method_type: str | None = None
    payment_processor_metadata: dict[str, Any] | None = None
    billing_address_fields: dict[str, Any] | None = None
    trial_interval: str | None = None
    trial_interval_count: int | None = None
    metadata: Metadata | None = None
    external_customer_id: str | None = None
    products: tuple[ProductRef, ...] | None = None
    product: ProductRef | None = None
    product_price: Price | None = None
    prices: dict[str, Any] | None = None
    discount: DiscountRef | None = None
    subscription_id: str | None = None
    attached_custom_fields: tuple[dict[str, Any], ...] | None = None
    customer_metadata: dict[str, Any] | None = None


class Customer(Payload, frozen=True):
    """A person or company that buys."""

    created_at: Time | None = None
    modified_at: Time | None = None
    metadata: Metadata | None = None
    external_id: str | None = None
    email: str | None = None
    email_verified: bool | None = None
    type: str | None = None
    name: str | None = None
    billing_name: str | None = None
    billing_address: Address | None = None
    tax_id: tuple[Any, ...] | None = None
    locale: str | None = None
    organization_id: str | None = None
    default_payment_method_id: str | None = None
    deleted_at: Time | None = None
    first_user_event_at: Time | None = None
    avatar_url: str | None = None


class CustomerState(Customer, frozen=True):
    """A customer together with all that the customer is entitled to at present."""

    active_subscriptions: tuple[ActiveSubscription, ...] | None = None
    granted_benefits: tuple[GrantedBenefit, ...] | None = None
    active_meters: tuple[CustomerMeter, ...] | None = None


class Product(Payload, frozen=True):
    """Something that is sold."""

    created_at: Time | None = None
    modified_at: Time | None = None
    trial_interval: str | None = None
    trial_interval_count: int | None = None
    name: str | None = None
    description: str | None = None
    visibility: str | None = None
    recurring_interval: str | None = None
    recurring_interval_count: int | None = None
    meter_interval: str | None = None
    meter_interval_count: int | None = None
    is_recurring: bool | None = None
    is_archived: bool | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    is_deletable: bool | None = None
    prices: tuple[Price, ...] | None = None
    benefits: tuple[BenefitRef, ...] | None = None
    medias: tuple[Media, ...] | None = None
    attached_custom_fields: tuple[dict[str, Any], ...] | None = None


class Benefit(Payload, frozen=True):
    """Something that buyers of a product receive: a licence key, a download, a role."""

    created_at: Time | None = None
    modified_at: Time | None = None
    type: str | None = None
    description: str | None = None
    selectable: bool | None = None
    deletable: bool | None = None
    is_deleted: bool | None = None
    organization_id: str | None = None
    metadata: Metadata | None = None
    visibility: str | None = None
    properties: dict[str, Any] | None = None
    visibility_configurable: bool | None = None


class BenefitGrant(Payload, frozen=True):
    """That one customer has, or had, one benefit."""

    created_at: Time | None = None
    modified_at: Time | None = None
    granted_at: Time | None = None
    is_granted: bool | None = None
    revoked_at: Time | None = None
    is_revoked: bool | None = None
    subscription_id: str | None = None
    order_id: str | None = None
    customer_id: str | None = None
    member_id: str | None = None
    benefit_id: str | None = None
    error: GrantError | None = None
    customer: CustomerRef | None = None
    member: MemberRef | None = None
    benefit: BenefitRef | None = None
    properties: dict[str, Any] | None = None
    previous_properties: dict[str, Any] | None = None


class Refund(Payload, frozen=True):
    """Money given back for an order."""

    created_at: Time | None = None
    modified_at: Time | None = None
    metadata: Metadata | None = None
    status: str | None = None
    reason: str | None = None
    amount: int | None = None
    tax_amount: int | None = None
    currency: str | None = None
    organization_id: str | None = None
    order_id: str | None = None
    subscription_id: str | None = None
    customer_id: str | None = None
    revoke_benefits: bool | None = None
    dispute: Dispute | None = None


class CustomerSeat(Payload, frozen=True):
    """One seat of a purchase that is sold by the seat."""

    created_at: Time | None = None
    modified_at: Time | None = None
    subscription_id: str | None = None
    order_id: str | None = None
    status: str | None = None
    customer_id: str | None = None
    member_id: str | None = None
    member: MemberRef | None = None
    email: str | None = None
    customer_email: str | None = None
    invitation_token_expires_at: Time | None = None
    claimed_at: Time | None = None
    revoked_at: Time | None = None
    seat_metadata: dict[str, Any] | None = None


class Member(Payload, frozen=True):
    """A person who belongs to a customer that is a team."""

    created_at: Time | None = None
    modified_at: Time | None = None
    customer_id: str | None = None
    email: str | None = None
    name: str | None = None
    external_id: str | None = None
    role: str | None = None


class Discount(Payload, frozen=True):
    """A reduction of the price: ``amount`` if fixed, ``basis_points`` if a percentage."""

    duration: str | None = None
    type: str | None = None
    amount: int | None = None
    currency: str | None = None
    amounts: dict[str, Any] | None = None
    created_at: Time | None = None
    modified_at: Time | None = None
    metadata: Metadata | None = None
    name: str | None = None
    code: str | None = None
    starts_at: Time | None = None
    ends_at: Time | None = None
    max_redemptions: int | None = None
    max_redemptions_per_customer: int | None = None
    redemptions_count: int | None = None
    organization_id: str | None = None
    products: tuple[ProductRef, ...] | None = None
    duration_in_months: int | None = None
    basis_points: int | None = None


class Organization(Payload, frozen=True):
    """The seller's own account."""

    created_at: Time | None = None
    modified_at: Time | None = None
    name: str | None = None
    slug: str | None = None
    avatar_url: str | None = None
    proration_behavior: str | None = None
    allow_customer_updates: bool | None = None
    email: str | None = None
    website: str | None = None
    socials: tuple[dict[str, Any], ...] | None = None
    status: str | None = None
    details_submitted_at: Time | None = None
    onboarding_resubmission_requested_at: Time | None = None
    sso_enforced: bool | None = None
    default_presentment_currency: str | None = None
    default_tax_behavior: str | None = None
    feature_settings: dict[str, Any] | None = None
    subscription_settings: dict[str, Any] | None = None
    customer_email_settings: dict[str, Any] | None = None
    customer_portal_settings: dict[str, Any] | None = None
    dispute_settings: dict[str, Any] | None = None
    embed_hosts: tuple[str, ...] | None = None
    country: str | None = None
    account_id: str | None = None
    payout_account_id: str | None = None
    capabilities: dict[str, Any] | None = None
