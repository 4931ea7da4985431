"""The customer portal: a customer's own records and actions, with a customer session's token."""

from ..operation import Body
from ..resources import Nested, Resource, empty_endpoint, json_endpoint, pages, record


class PortalBenefitGrants(Resource, path="customer_portal.benefit_grants"):
    """Benefits granted to this customer."""

    list = pages("GET /customer-portal/benefit-grants/")
    get = record("GET /customer-portal/benefit-grants/{id}")
    update = record("PATCH /customer-portal/benefit-grants/{id}")


class PortalCustomers(Resource, path="customer_portal.customers"):
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


class PortalCustomerMeters(Resource, path="customer_portal.customer_meters"):
    """The usage of each meter by this customer."""

    list = pages("GET /customer-portal/meters/")
    get = record("GET /customer-portal/meters/{id}")


class PortalSeats(Resource, path="customer_portal.seats"):
    """Seats that this customer assigns or has claimed."""

    list_seats = record("GET /customer-portal/seats")
    assign_seat = record("POST /customer-portal/seats")
    revoke_seat = record("DELETE /customer-portal/seats/{seat_id}")
    resend_invitation = record("POST /customer-portal/seats/{seat_id}/resend", body=Body.NONE)
    list_claimed_subscriptions = pages("GET /customer-portal/seats/subscriptions")


class PortalCustomerSession(Resource, path="customer_portal.customer_session"):
    """The session that the token belongs to."""

    introspect = record("GET /customer-portal/customer-session/introspect")
    get_authenticated_user = record("GET /customer-portal/customer-session/user")


class PortalDownloadables(Resource, path="customer_portal.downloadables"):
    """Files that this customer may download."""

    list = pages("GET /customer-portal/downloadables/")


class PortalLicenseKeys(Resource, path="customer_portal.license_keys"):
    """License keys of this customer."""

    list = pages("GET /customer-portal/license-keys/")
    get = record("GET /customer-portal/license-keys/{id}")
    rotate = record("POST /customer-portal/license-keys/{id}/rotate", body=Body.NONE)
    validate = record("POST /customer-portal/license-keys/validate")
    activate = record("POST /customer-portal/license-keys/activate")
    deactivate = empty_endpoint("POST /customer-portal/license-keys/deactivate")


class PortalMembers(Resource, path="customer_portal.members"):
    """People who act for this customer."""

    list_members = pages("GET /customer-portal/members")
    add_member = record("POST /customer-portal/members")
    remove_member = empty_endpoint("DELETE /customer-portal/members/{id}")
    update_member = record("PATCH /customer-portal/members/{id}")


class PortalOrders(Resource, path="customer_portal.orders"):
    """Orders of this customer."""

    list = pages("GET /customer-portal/orders/")
    get = record("GET /customer-portal/orders/{id}")
    update = record("PATCH /customer-portal/orders/{id}")
    invoice = record("GET /customer-portal/orders/{id}/invoice")
    generate_invoice = json_endpoint("POST /customer-portal/orders/{id}/invoice", body=Body.NONE)
    receipt = record("GET /customer-portal/orders/{id}/receipt")
    get_payment_status = record("GET /customer-portal/orders/{id}/payment-status")
    confirm_retry_payment = record("POST /customer-portal/orders/{id}/confirm-payment")


class PortalOrganizations(Resource, path="customer_portal.organizations"):
    """The seller, as customers see it."""

    get = record("GET /customer-portal/organizations/{slug}")


class PortalSubscriptions(Resource, path="customer_portal.subscriptions"):
    """Subscriptions of this customer."""

    list = pages("GET /customer-portal/subscriptions/")
    get = record("GET /customer-portal/subscriptions/{id}")
    cancel = record("DELETE /customer-portal/subscriptions/{id}")
    update = record("PATCH /customer-portal/subscriptions/{id}")


class PortalWallets(Resource, path="customer_portal.wallets"):
    """Prepaid balances of this customer."""

    list = pages("GET /customer-portal/wallets/")
    get = record("GET /customer-portal/wallets/{id}")


class CustomerPortal(Resource, path="customer_portal"):
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
