"""The resources and their operations: a class per resource, a row per operation.

In order: the catalogue, sales and payments, customers, the customer portal (which needs a customer
session's token), and the seller's organization and account.
"""

from ..operation import Body
from ..resources import (
    Mode,
    Nested,
    Resource,
    csv,
    cursor_pages,
    empty_endpoint,
    json_endpoint,
    pages,
    record,
    records,
)


class Products(Resource[Mode], path="products"):
    """Products and their prices."""

    list = pages("GET /products/")
    create = record("POST /products/")
    get = record("GET /products/{id}")
    delete = empty_endpoint("DELETE /products/{id}")
    update = record("PATCH /products/{id}")
    update_benefits = record("POST /products/{id}/benefits")


class Benefits(Resource[Mode], path="benefits"):
    """Benefits granted by buying a product."""

    list = pages("GET /benefits/")
    create = record("POST /benefits/")
    get = record("GET /benefits/{id}")
    delete = empty_endpoint("DELETE /benefits/{id}")
    update = record("PATCH /benefits/{id}")
    files = pages("GET /benefits/{id}/files")
    grants = pages("GET /benefits/{id}/grants")


class BenefitGrants(Resource[Mode], path="benefit_grants"):
    """Benefits granted to customers."""

    list = pages("GET /benefit-grants/")


class Discounts(Resource[Mode], path="discounts"):
    """Discounts and their codes."""

    list = pages("GET /discounts/")
    create = record("POST /discounts/")
    get = record("GET /discounts/{id}")
    delete = empty_endpoint("DELETE /discounts/{id}")
    update = record("PATCH /discounts/{id}")


class CustomFields(Resource[Mode], path="custom_fields"):
    """Fields that checkouts ask for."""

    list = pages("GET /custom-fields/")
    create = record("POST /custom-fields/")
    get = record("GET /custom-fields/{id}")
    delete = empty_endpoint("DELETE /custom-fields/{id}")
    update = record("PATCH /custom-fields/{id}")


class CheckoutLinks(Resource[Mode], path="checkout_links"):
    """Permanent addresses that open a checkout."""

    list = pages("GET /checkout-links/")
    create = record("POST /checkout-links/")
    get = record("GET /checkout-links/{id}")
    delete = empty_endpoint("DELETE /checkout-links/{id}")
    update = record("PATCH /checkout-links/{id}")


class Checkouts(Resource[Mode], path="checkouts"):
    """Checkouts, by the seller or (``client_...``) by the owner of the client secret."""

    list = pages("GET /checkouts/")
    create = record("POST /checkouts/")
    get = record("GET /checkouts/{id}")
    update = record("PATCH /checkouts/{id}")
    client_get = record("GET /checkouts/client/{client_secret}")
    client_update = record("PATCH /checkouts/client/{client_secret}")
    client_confirm = record("POST /checkouts/client/{client_secret}/confirm")


class Files(Resource[Mode], path="files"):
    """Files of products and benefits."""

    list = pages("GET /files/")
    create = record("POST /files/")
    uploaded = record("POST /files/{id_path}/uploaded")
    delete = empty_endpoint("DELETE /files/{id}")
    update = record("PATCH /files/{id}")


class LicenseKeys(Resource[Mode], path="license_keys"):
    """License keys, their activations and validation."""

    list = pages("GET /license-keys/")
    get = record("GET /license-keys/{id}")
    update = record("PATCH /license-keys/{id}")
    rotate = record("POST /license-keys/{id}/rotate", body=Body.NONE)
    get_activation = record("GET /license-keys/{id}/activations/{activation_id}")
    validate = record("POST /license-keys/validate")
    activate = record("POST /license-keys/activate")
    deactivate = empty_endpoint("POST /license-keys/deactivate")


class Meters(Resource[Mode], path="meters"):
    """Meters that aggregate events for usage-based billing."""

    list = pages("GET /meters/")
    create = record("POST /meters/")
    get = record("GET /meters/{id}")
    update = record("PATCH /meters/{id}")
    quantities = record("GET /meters/{id}/quantities")


# -- Sales: orders, subscriptions and payments.


class Orders(Resource[Mode], path="orders"):
    """Orders, their invoices and receipts."""

    list = pages("GET /orders/")
    create = record("POST /orders/")
    export = csv("GET /orders/export")
    get = record("GET /orders/{id}")
    update = record("PATCH /orders/{id}")
    finalize = record("POST /orders/{id}/finalize")
    invoice = record("GET /orders/{id}/invoice")
    generate_invoice = json_endpoint("POST /orders/{id}/invoice", body=Body.NONE)
    receipt = record("GET /orders/{id}/receipt")


class Subscriptions(Resource[Mode], path="subscriptions"):
    """Subscriptions; ``revoke`` ends one at once."""

    list = pages("GET /subscriptions/")
    create = record("POST /subscriptions/")
    export = csv("GET /subscriptions/export")
    get = record("GET /subscriptions/{id}")
    revoke = record("DELETE /subscriptions/{id}")
    update = record("PATCH /subscriptions/{id}")


class Refunds(Resource[Mode], path="refunds"):
    """Refunds of orders."""

    list = pages("GET /refunds/")
    create = record("POST /refunds/")


class Disputes(Resource[Mode], path="disputes"):
    """Disputes that a customer raised at a bank."""

    list = pages("GET /disputes/")
    get = record("GET /disputes/{id}")
    accept = record("POST /disputes/{id}/accept", body=Body.NONE)


class Payments(Resource[Mode], path="payments"):
    """Payment attempts, including failed ones."""

    list = pages("GET /payments/")
    get = record("GET /payments/{id}")


# -- Customers, their members, seats, meters and sessions.


class CustomerMembers(Resource[Mode], path="customers.members"):
    """People who act for a customer that is a team."""

    list = pages("GET /customers/{id}/members")
    create = record("POST /customers/{id}/members")
    list_external = pages("GET /customers/external/{external_id}/members")
    create_external = record("POST /customers/external/{external_id_path}/members")
    get = record("GET /customers/{id}/members/{member_id}")
    delete = empty_endpoint("DELETE /customers/{id}/members/{member_id}")
    update = record("PATCH /customers/{id}/members/{member_id}")
    get_external = record("GET /customers/external/{external_id}/members/{member_external_id}")
    delete_external = empty_endpoint(
        "DELETE /customers/external/{external_id}/members/{member_external_id}"
    )
    update_external = record("PATCH /customers/external/{external_id}/members/{member_external_id}")


class Customers(Resource[Mode], path="customers"):
    """Customers, by the upstream's id or (``..._external``) by the application's."""

    members = Nested(CustomerMembers)

    list = pages("GET /customers/")
    create = record("POST /customers/")
    export = csv("GET /customers/export")
    get = record("GET /customers/{id}")
    delete = empty_endpoint("DELETE /customers/{id}")
    update = record("PATCH /customers/{id}")
    get_external = record("GET /customers/external/{external_id}")
    delete_external = empty_endpoint("DELETE /customers/external/{external_id}")
    update_external = record("PATCH /customers/external/{external_id}")
    get_state = record("GET /customers/{id}/state")
    get_state_external = record("GET /customers/external/{external_id}/state")
    list_payment_methods = pages("GET /customers/{id}/payment-methods")
    list_payment_methods_external = pages("GET /customers/external/{external_id}/payment-methods")


class CustomerMeters(Resource[Mode], path="customer_meters"):
    """The usage of each meter by each customer."""

    list = pages("GET /customer-meters/")
    get = record("GET /customer-meters/{id}")


class CustomerSeats(Resource[Mode], path="customer_seats"):
    """Seats of a subscription or order, and their holders."""

    list_seats = record("GET /customer-seats")
    assign_seat = record("POST /customer-seats")
    revoke_seat = record("DELETE /customer-seats/{seat_id}")
    resend_invitation = record("POST /customer-seats/{seat_id}/resend", body=Body.NONE)
    get_claim_info = record("GET /customer-seats/claim/{invitation_token}")
    claim_seat = record("POST /customer-seats/claim")


class CustomerSessions(Resource[Mode], path="customer_sessions"):
    """Sessions that give a customer access to the customer portal."""

    create = record("POST /customer-sessions/")


# -- The customer portal: a customer's own records and actions.


class PortalBenefitGrants(Resource[Mode], path="customer_portal.benefit_grants"):
    """Benefits granted to this customer."""

    list = pages("GET /customer-portal/benefit-grants/")
    get = record("GET /customer-portal/benefit-grants/{id}")
    update = record("PATCH /customer-portal/benefit-grants/{id}")


class PortalCustomers(Resource[Mode], path="customer_portal.customers"):
    """This customer: data, payment methods, email address."""

    get = record("GET /customer-portal/customers/me")
    update = record("PATCH /customer-portal/customers/me")
    list_payment_methods = pages("GET /customer-portal/customers/me/payment-methods")
    add_payment_method = record("POST /customer-portal/customers/me/payment-methods")
    confirm_payment_method = record("POST /customer-portal/customers/me/payment-methods/confirm")
    delete_payment_method = empty_endpoint(
        "DELETE /customer-portal/customers/me/payment-methods/{id}"
    )
    request_email_update = json_endpoint("POST /customer-portal/customers/me/email-update/request")
    check_email_update = empty_endpoint("GET /customer-portal/customers/me/email-update/check")
    verify_email_update = record("POST /customer-portal/customers/me/email-update/verify")


class PortalCustomerMeters(Resource[Mode], path="customer_portal.customer_meters"):
    """The usage of each meter by this customer."""

    list = pages("GET /customer-portal/meters/")
    get = record("GET /customer-portal/meters/{id}")


class PortalSeats(Resource[Mode], path="customer_portal.seats"):
    """Seats that this customer assigns or has claimed."""

    list_seats = record("GET /customer-portal/seats")
    assign_seat = record("POST /customer-portal/seats")
    revoke_seat = record("DELETE /customer-portal/seats/{seat_id}")
    resend_invitation = record("POST /customer-portal/seats/{seat_id}/resend", body=Body.NONE)
    list_claimed_subscriptions = pages("GET /customer-portal/seats/subscriptions")


class PortalCustomerSession(Resource[Mode], path="customer_portal.customer_session"):
    """The session that the token belongs to."""

    introspect = record("GET /customer-portal/customer-session/introspect")
    get_authenticated_user = record("GET /customer-portal/customer-session/user")


class PortalDownloadables(Resource[Mode], path="customer_portal.downloadables"):
    """Files that this customer may download."""

    list = pages("GET /customer-portal/downloadables/")


class PortalLicenseKeys(Resource[Mode], path="customer_portal.license_keys"):
    """License keys of this customer."""

    list = pages("GET /customer-portal/license-keys/")
    get = record("GET /customer-portal/license-keys/{id}")
    rotate = record("POST /customer-portal/license-keys/{id}/rotate", body=Body.NONE)
    validate = record("POST /customer-portal/license-keys/validate")
    activate = record("POST /customer-portal/license-keys/activate")
    deactivate = empty_endpoint("POST /customer-portal/license-keys/deactivate")


class PortalMembers(Resource[Mode], path="customer_portal.members"):
    """People who act for this customer."""

    list_members = pages("GET /customer-portal/members")
    add_member = record("POST /customer-portal/members")
    remove_member = empty_endpoint("DELETE /customer-portal/members/{id}")
    update_member = record("PATCH /customer-portal/members/{id}")


class PortalOrders(Resource[Mode], path="customer_portal.orders"):
    """Orders of this customer."""

    list = pages("GET /customer-portal/orders/")
    get = record("GET /customer-portal/orders/{id}")
    update = record("PATCH /customer-portal/orders/{id}")
    invoice = record("GET /customer-portal/orders/{id}/invoice")
    generate_invoice = json_endpoint("POST /customer-portal/orders/{id}/invoice", body=Body.NONE)
    receipt = record("GET /customer-portal/orders/{id}/receipt")
    get_payment_status = record("GET /customer-portal/orders/{id}/payment-status")
    confirm_retry_payment = record("POST /customer-portal/orders/{id}/confirm-payment")


class PortalOrganizations(Resource[Mode], path="customer_portal.organizations"):
    """The seller, as customers see it."""

    get = record("GET /customer-portal/organizations/{slug}")


class PortalSubscriptions(Resource[Mode], path="customer_portal.subscriptions"):
    """Subscriptions of this customer."""

    list = pages("GET /customer-portal/subscriptions/")
    get = record("GET /customer-portal/subscriptions/{id}")
    cancel = record("DELETE /customer-portal/subscriptions/{id}")
    update = record("PATCH /customer-portal/subscriptions/{id}")


class PortalWallets(Resource[Mode], path="customer_portal.wallets"):
    """Prepaid balances of this customer."""

    list = pages("GET /customer-portal/wallets/")
    get = record("GET /customer-portal/wallets/{id}")


class CustomerPortal(Resource[Mode], path="customer_portal"):
    """The customer portal's resources."""

    benefit_grants = Nested(PortalBenefitGrants)
    customers = Nested(PortalCustomers)
    customer_meters = Nested(PortalCustomerMeters)
    seats = Nested(PortalSeats)
    customer_session = Nested(PortalCustomerSession)
    downloadables = Nested(PortalDownloadables)
    license_keys = Nested(PortalLicenseKeys)
    members = Nested(PortalMembers)
    orders = Nested(PortalOrders)
    organizations = Nested(PortalOrganizations)
    subscriptions = Nested(PortalSubscriptions)
    wallets = Nested(PortalWallets)


# -- The seller's side: organizations, webhooks, events, metrics, OAuth 2.


class Organizations(Resource[Mode], path="organizations"):
    """Organizations that the token can access."""

    list = pages("GET /organizations/")
    create = record("POST /organizations/")
    get = record("GET /organizations/{id}")
    update = record("PATCH /organizations/{id}")


class Webhooks(Resource[Mode], path="webhooks"):
    """Webhook endpoints and their deliveries."""

    list_webhook_endpoints = pages("GET /webhooks/endpoints")
    create_webhook_endpoint = record("POST /webhooks/endpoints")
    get_webhook_endpoint = record("GET /webhooks/endpoints/{id}")
    delete_webhook_endpoint = empty_endpoint("DELETE /webhooks/endpoints/{id}")
    update_webhook_endpoint = record("PATCH /webhooks/endpoints/{id}")
    reset_webhook_endpoint_secret = record("PATCH /webhooks/endpoints/{id}/secret", body=Body.NONE)
    list_webhook_deliveries = pages("GET /webhooks/deliveries")
    redeliver_webhook_event = json_endpoint("POST /webhooks/events/{id}/redeliver", body=Body.NONE)


class Events(Resource[Mode], path="events"):
    """Usage events and the upstream's own events."""

    list = cursor_pages("GET /events/")
    list_names = pages("GET /events/names")
    get = record("GET /events/{id}")
    ingest = record("POST /events/ingest")


class EventTypes(Resource[Mode], path="event_types"):
    """Kinds of events, with their counts."""

    list = pages("GET /event-types/")
    update = record("PATCH /event-types/{id}")


class Metrics(Resource[Mode], path="metrics"):
    """Figures over time, and their dashboards."""

    get = record("GET /metrics/")
    export = csv("GET /metrics/export")
    limits = record("GET /metrics/limits")
    list_dashboards = records("GET /metrics/dashboards")
    create_dashboard = record("POST /metrics/dashboards")
    get_dashboard = record("GET /metrics/dashboards/{id}")
    delete_dashboard = empty_endpoint("DELETE /metrics/dashboards/{id}")
    update_dashboard = record("PATCH /metrics/dashboards/{id}")


class OAuth2Registrations(Resource[Mode], path="oauth2.clients.oauth2"):
    """Clients of the upstream's OAuth 2 server."""

    create_client = json_endpoint("POST /oauth2/register")
    get_client = json_endpoint("GET /oauth2/register/{client_id}")
    update_client = json_endpoint("PUT /oauth2/register/{client_id_path}")
    delete_client = empty_endpoint("DELETE /oauth2/register/{client_id}")


class OAuth2Clients(Resource[Mode], path="oauth2.clients"):
    """A namespace that contains only ``oauth2``."""

    oauth2 = Nested(OAuth2Registrations)


class OAuth2(Resource[Mode], path="oauth2"):
    """The upstream's OAuth 2 server; its token operations take form fields."""

    clients = Nested(OAuth2Clients)

    authorize = record("GET /oauth2/authorize")
    request_token = record("POST /oauth2/token", body=Body.FORM)
    revoke_token = record("POST /oauth2/revoke", body=Body.FORM, idempotent=True)
    introspect_token = record("POST /oauth2/introspect", body=Body.FORM, idempotent=True)
    userinfo = record("GET /oauth2/userinfo")


class Resources(Resource[Mode], path=""):
    """Every resource, as an attribute; the client is a subclass."""

    products = Nested(Products)
    benefits = Nested(Benefits)
    benefit_grants = Nested(BenefitGrants)
    discounts = Nested(Discounts)
    custom_fields = Nested(CustomFields)
    checkout_links = Nested(CheckoutLinks)
    checkouts = Nested(Checkouts)
    files = Nested(Files)
    license_keys = Nested(LicenseKeys)
    meters = Nested(Meters)

    orders = Nested(Orders)
    subscriptions = Nested(Subscriptions)
    refunds = Nested(Refunds)
    disputes = Nested(Disputes)
    payments = Nested(Payments)

    customers = Nested(Customers)
    customer_meters = Nested(CustomerMeters)
    customer_seats = Nested(CustomerSeats)
    customer_sessions = Nested(CustomerSessions)

    customer_portal = Nested(CustomerPortal)

    organizations = Nested(Organizations)
    webhooks = Nested(Webhooks)
    events = Nested(Events)
    event_types = Nested(EventTypes)
    metrics = Nested(Metrics)
    oauth2 = Nested(OAuth2)
