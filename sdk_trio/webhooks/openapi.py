"""The OpenAPI 3.1 document of the receiver. Pure."""

from typing import Any, Final

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
_JSON_ERROR: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Deliver again after so many seconds.",
        "schema": {"type": "integer", "minimum": 1},
    }
}

_REFUSALS: Final = {
    "400": "Not authentic, no event, or not HTTPS where HTTPS is required; always the same body.",
    "403": "The source address is not allowed.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "415": "The media type is not JSON, or the body is encoded.",
    "500": "The handler failed: deliver again.",
}


def receiver_document(*, path: str, version: str, tenants: bool = False) -> dict[str, Any]:
    """Return the document of a receiver.

    Args:
        path: the configured route of deliveries.
        version: of this package.
        tenants: whether there are addresses of tenants below the route.
    """
    responses: dict[str, Any] = {
        "200": {
            "description": "Handled, committed to the queue, kept, or known already.",
            "content": {"application/json": {"schema": {"type": "object", "maxProperties": 0}}},
        },
        **{status: _refusal(text) for status, text in _REFUSALS.items()},
        "429": {
            "description": "Over the rate of this source address.",
            "headers": _RETRY_AFTER,
            "content": _JSON_ERROR,
        },
        "503": {
            "description": "Nothing was kept: the queue is full, the store is unavailable, a "
            "handler asked for a later attempt, or the receiver starts or stops.",
            "headers": _RETRY_AFTER,
            "content": _JSON_ERROR,
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sdk_trio receiver",
            "version": version,
            "description": "Receives deliveries that are signed as Standard Webhooks describes: "
            "the signature covers {webhook-id}.{webhook-timestamp}.{body}, the exact bytes.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            path: {"post": _delivery("deliver", responses)},
            **({f"{path.rstrip('/')}/{{identifier}}": _at_tenant(responses)} if tenants else {}),
        },
        "components": {
            "schemas": {
                "Error": _ERROR,
                "Event": {
                    "type": "object",
                    "required": ["type"],
                    "properties": {
                        "type": {"type": "string", "examples": ["order.paid"]},
                        "timestamp": {"type": "string"},
                        "data": {"type": "object"},
                    },
                },
            }
        },
    }


def _delivery(operation: str, responses: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": "Deliver one event",
        "parameters": [
            _header("webhook-id", "The id of the event; the same for every attempt."),
            _header("webhook-timestamp", "When it was signed, in Unix seconds."),
            _header(
                "webhook-signature",
                "One or more signatures, such as v1,BASE64, separated by spaces.",
            ),
            *more,
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Event"}}},
        },
        "responses": responses,
    }


def _at_tenant(responses: dict[str, Any]) -> dict[str, Any]:
    identifier = {
        "name": "identifier",
        "in": "path",
        "required": True,
        "description": "Whose secrets sign here: a tenant that has some of its own.",
        "schema": {"type": "string"},
    }
    return {"post": _delivery("deliverToTenant", responses, identifier)}


def _refusal(description: str) -> dict[str, Any]:
    return {"description": description, "content": _JSON_ERROR}


def _header(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }
