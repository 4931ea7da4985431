"""Sales: orders, subscriptions and the money behind them."""

from ..operation import Body
from ..resources import Resource, csv, json_endpoint, pages, record


class Orders(Resource, path="orders"):
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


class Subscriptions(Resource, path="subscriptions"):
    """Subscriptions; ``revoke`` ends one at once."""

    list = pages("GET /subscriptions/")
    create = record("POST /subscriptions/")
    export = csv("GET /subscriptions/export")
    get = record("GET /subscriptions/{id}")
    revoke = record("DELETE /subscriptions/{id}")
    update = record("PATCH /subscriptions/{id}")


class Refunds(Resource, path="refunds"):
    """Refunds of orders."""

    list = pages("GET /refunds/")
    create = record("POST /refunds/")


class Disputes(Resource, path="disputes"):
    """Disputes that a customer raised at a bank."""

    list = pages("GET /disputes/")
    get = record("GET /disputes/{id}")
    accept = record("POST /disputes/{id}/accept", body=Body.NONE)


class Payments(Resource, path="payments"):
    """Attempts to pay, also those that failed."""

    list = pages("GET /payments/")
    get = record("GET /payments/{id}")
