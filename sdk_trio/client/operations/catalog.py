"""The seller's catalogue: products, the benefits that they grant, and the ways to offer them."""

from ..operation import Body
from ..resources import Resource, empty_endpoint, pages, record


class Products(Resource, path="products"):
    """Products and their prices."""

    list = pages("GET /products/")
    create = record("POST /products/")
    get = record("GET /products/{id}")
    delete = empty_endpoint("DELETE /products/{id}")
    update = record("PATCH /products/{id}")
    update_benefits = record("POST /products/{id}/benefits")


class Benefits(Resource, path="benefits"):
    """Benefits that buying a product grants."""

    list = pages("GET /benefits/")
    create = record("POST /benefits/")
    get = record("GET /benefits/{id}")
    delete = empty_endpoint("DELETE /benefits/{id}")
    update = record("PATCH /benefits/{id}")
    files = pages("GET /benefits/{id}/files")
    grants = pages("GET /benefits/{id}/grants")


class BenefitGrants(Resource, path="benefit_grants"):
    """Benefits as granted to customers."""

    list = pages("GET /benefit-grants/")


class Discounts(Resource, path="discounts"):
    """Discounts and their codes."""

    list = pages("GET /discounts/")
    create = record("POST /discounts/")
    get = record("GET /discounts/{id}")
    delete = empty_endpoint("DELETE /discounts/{id}")
    update = record("PATCH /discounts/{id}")


class CustomFields(Resource, path="custom_fields"):
    """Fields that checkouts ask for."""

    list = pages("GET /custom-fields/")
    create = record("POST /custom-fields/")
    get = record("GET /custom-fields/{id}")
    delete = empty_endpoint("DELETE /custom-fields/{id}")
    update = record("PATCH /custom-fields/{id}")


class CheckoutLinks(Resource, path="checkout_links"):
    """Lasting addresses that open a checkout."""

    list = pages("GET /checkout-links/")
    create = record("POST /checkout-links/")
    get = record("GET /checkout-links/{id}")
    delete = empty_endpoint("DELETE /checkout-links/{id}")
    update = record("PATCH /checkout-links/{id}")


class Checkouts(Resource, path="checkouts"):
    """Checkouts, by the seller and (``client_...``) by who holds the client secret."""

    list = pages("GET /checkouts/")
    create = record("POST /checkouts/")
    get = record("GET /checkouts/{id}")
    update = record("PATCH /checkouts/{id}")
    client_get = record("GET /checkouts/client/{client_secret}")
    client_update = record("PATCH /checkouts/client/{client_secret}")
    client_confirm = record("POST /checkouts/client/{client_secret}/confirm")


class Files(Resource, path="files"):
    """Files that products and benefits hold."""

    list = pages("GET /files/")
    create = record("POST /files/")
    uploaded = record("POST /files/{id_path}/uploaded")
    delete = empty_endpoint("DELETE /files/{id}")
    update = record("PATCH /files/{id}")


class LicenseKeys(Resource, path="license_keys"):
    """License keys, their activations and validation."""

    list = pages("GET /license-keys/")
    get = record("GET /license-keys/{id}")
    update = record("PATCH /license-keys/{id}")
    rotate = record("POST /license-keys/{id}/rotate", body=Body.NONE)
    get_activation = record("GET /license-keys/{id}/activations/{activation_id}")
    validate = record("POST /license-keys/validate")
    activate = record("POST /license-keys/activate")
    deactivate = empty_endpoint("POST /license-keys/deactivate")


class Meters(Resource, path="meters"):
    """Meters that add up events for billing by usage."""

    list = pages("GET /meters/")
    create = record("POST /meters/")
    get = record("GET /meters/{id}")
    update = record("PATCH /meters/{id}")
    quantities = record("GET /meters/{id}/quantities")
