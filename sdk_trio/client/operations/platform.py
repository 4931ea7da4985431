"""The seller's side of the upstream: organizations, webhooks, events, metrics, OAuth 2."""

from ..operation import Body
from ..resources import (
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


class Organizations(Resource, path="organizations"):
    """Organizations that the token reaches."""

    list = pages("GET /organizations/")
    create = record("POST /organizations/")
    get = record("GET /organizations/{id}")
    update = record("PATCH /organizations/{id}")


class Webhooks(Resource, path="webhooks"):
    """Webhook endpoints, and what was delivered to them."""

    list_webhook_endpoints = pages("GET /webhooks/endpoints")
    create_webhook_endpoint = record("POST /webhooks/endpoints")
    get_webhook_endpoint = record("GET /webhooks/endpoints/{id}")
    delete_webhook_endpoint = empty_endpoint("DELETE /webhooks/endpoints/{id}")
    update_webhook_endpoint = record("PATCH /webhooks/endpoints/{id}")
    reset_webhook_endpoint_secret = record("PATCH /webhooks/endpoints/{id}/secret", body=Body.NONE)
    list_webhook_deliveries = pages("GET /webhooks/deliveries")
    redeliver_webhook_event = json_endpoint("POST /webhooks/events/{id}/redeliver", body=Body.NONE)


class Events(Resource, path="events"):
    """Events of usage and of the upstream itself."""

    list = cursor_pages("GET /events/")
    list_names = pages("GET /events/names")
    get = record("GET /events/{id}")
    ingest = record("POST /events/ingest")


class EventTypes(Resource, path="event_types"):
    """Kinds of events, with their counts."""

    list = pages("GET /event-types/")
    update = record("PATCH /event-types/{id}")


class Metrics(Resource, path="metrics"):
    """Figures over time, and dashboards of them."""

    get = record("GET /metrics/")
    export = csv("GET /metrics/export")
    limits = record("GET /metrics/limits")
    list_dashboards = records("GET /metrics/dashboards")
    create_dashboard = record("POST /metrics/dashboards")
    get_dashboard = record("GET /metrics/dashboards/{id}")
    delete_dashboard = empty_endpoint("DELETE /metrics/dashboards/{id}")
    update_dashboard = record("PATCH /metrics/dashboards/{id}")


class OAuth2Registrations(Resource, path="oauth2.clients.oauth2"):
    """Clients of the upstream's OAuth 2 server."""

    create_client = json_endpoint("POST /oauth2/register")
    get_client = json_endpoint("GET /oauth2/register/{client_id}")
    update_client = json_endpoint("PUT /oauth2/register/{client_id_path}")
    delete_client = empty_endpoint("DELETE /oauth2/register/{client_id}")


class OAuth2Clients(Resource, path="oauth2.clients"):
    """A level of the upstream's own naming."""

    oauth2 = Nested(OAuth2Registrations)


class OAuth2(Resource, path="oauth2"):
    """The upstream's OAuth 2 server; its tokens' operations take form fields."""

    clients = Nested(OAuth2Clients)

    authorize = record("GET /oauth2/authorize")
    request_token = record("POST /oauth2/token", body=Body.FORM)
    revoke_token = record("POST /oauth2/revoke", body=Body.FORM, idempotent=True)
    introspect_token = record("POST /oauth2/introspect", body=Body.FORM, idempotent=True)
    userinfo = record("GET /oauth2/userinfo")
