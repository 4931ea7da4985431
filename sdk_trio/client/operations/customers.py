"""Customers, their members, seats, meters and sessions."""

from ..operation import Body
from ..resources import Nested, Resource, csv, empty_endpoint, pages, record


class CustomerMembers(Resource, path="customers.members"):
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


class Customers(Resource, path="customers"):
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


class CustomerMeters(Resource, path="customer_meters"):
    """The usage of each meter by each customer."""

    list = pages("GET /customer-meters/")
    get = record("GET /customer-meters/{id}")


class CustomerSeats(Resource, path="customer_seats"):
    """Seats of a subscription or order, and who holds them."""

    list_seats = record("GET /customer-seats")
    assign_seat = record("POST /customer-seats")
    revoke_seat = record("DELETE /customer-seats/{seat_id}")
    resend_invitation = record("POST /customer-seats/{seat_id}/resend", body=Body.NONE)
    get_claim_info = record("GET /customer-seats/claim/{invitation_token}")
    claim_seat = record("POST /customer-seats/claim")


class CustomerSessions(Resource, path="customer_sessions"):
    """Sessions that let a customer into the customer portal."""

    create = record("POST /customer-sessions/")
