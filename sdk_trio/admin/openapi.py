"""The OpenAPI 3.1 document of the admin address. Pure."""

from typing import Any, Final

from ..records.deliveries import REPLAYABLE, DeliveryState
from .queries import (
    LARGEST_LIMIT,
    LARGEST_REPLAY,
    LARGEST_SEQUENCE,
    LONGEST_ACTOR,
    MOMENT,
    USUAL_LIMIT,
)

_STATES: Final = [str(state) for state in DeliveryState]

_TEXT: Final = {"type": "string"}
_ACTOR: Final = {
    **_TEXT,
    "minLength": 1,
    "maxLength": LONGEST_ACTOR,
    "description": "Who orders it, for the log; nobody vouches for that.",
}
_FLAG: Final = {"type": "boolean"}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_STATE: Final = {"type": "string", "enum": _STATES}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of an object that has these fields and no other."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


def _map_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


def _list_of(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_EVENT_FIELDS: Final[dict[str, Any]] = {
    "sequence": {"type": "integer", "minimum": 1},
    "webhook_id": _TEXT,
    "type": _TEXT,
    "state": _STATE,
    "queued": _FLAG,
    "attempts": _COUNT,
    "received_at": _NUMBER,
    "timestamp": {"type": "integer"},
    "subject": _or_null(_TEXT),
    "ordered": _FLAG,
    "next_attempt_at": _or_null(_NUMBER),
    "started_at": _or_null(_NUMBER),
    "finished_at": _or_null(_NUMBER),
    "last_error": _or_null(_TEXT),
    "tenant_id": _or_null(_TEXT),
    "process_ends": _COUNT,
    "ran_alone": _FLAG,
    "earlier_attempts": _COUNT,
    "signer": _or_null(_TEXT),
    "key": _TEXT,
}

_SCHEMAS: Final[dict[str, Any]] = {
    "Error": _object({"error": _TEXT}),
    "Alive": _object({"alive": {"const": True}}),
    "Check": _object({"name": _TEXT, "ok": _FLAG, "degraded": _FLAG}, {"detail": _TEXT}),
    "Ready": _object({"ready": _FLAG, "checks": _list_of("Check")}),
    "Health": _object(
        {
            "status": {"enum": ["ok", "degraded", "failing"]},
            "state": {"enum": ["starting", "running", "draining"]},
            "version": _TEXT,
            "uptime_seconds": _NUMBER,
            "checks": _list_of("Check"),
        }
    ),
    "Status": _object(
        {
            "version": _TEXT,
            "state": {"enum": ["starting", "running", "draining"]},
            "status": {"enum": ["ok", "degraded", "failing"]},
            "started_at": _NUMBER,
            "uptime_seconds": _NUMBER,
            "read_only": _FLAG,
            "receiver": {"type": "array", "items": _TEXT},
            "admin": {"type": "array", "items": _TEXT},
            "path": _TEXT,
            "storage": _TEXT,
            "standalone": _FLAG,
            "draining": _FLAG,
            "queue_depth": _COUNT,
            "queue_capacity": _COUNT,
            "oldest_seconds": _NUMBER,
            "deliveries": _map_of(_COUNT),
            "events": {"type": ["object", "null"], "additionalProperties": _COUNT},
            "tenants": {"type": ["object", "null"], "additionalProperties": _COUNT},
            "checks": _list_of("Check"),
        }
    ),
    "Event": _object(_EVENT_FIELDS),
    "Attempt": _object(
        {
            "number": {"type": "integer"},
            "started_at": _NUMBER,
            "finished_at": _NUMBER,
            "error": _TEXT,
            "place": _or_null(_TEXT),
            "traceback": _or_null(_TEXT),
        }
    ),
    "EventDetails": _object(
        {
            **_EVENT_FIELDS,
            "failed_attempts": _list_of("Attempt"),
            "other_bodies": _list_of("OtherBody"),
        },
        {"raw": _or_null(_TEXT), "raw_base64": _TEXT},
    ),
    "OtherBody": _object(
        {"received_at": _NUMBER, "address": _or_null(_TEXT), "tenant_id": _or_null(_TEXT)},
        {"raw": _or_null(_TEXT), "raw_base64": _TEXT},
    ),
    "ReplayOrder": {
        "oneOf": [
            _object(
                {
                    "ids": {
                        "type": "array",
                        "items": _TEXT,
                        "minItems": 1,
                        "maxItems": LARGEST_REPLAY,
                    }
                },
                {"actor": _ACTOR},
            ),
            _object(
                {"state": {"enum": [str(state) for state in REPLAYABLE]}},
                {"type": _TEXT, "actor": _ACTOR},
            ),
        ]
    },
    "Replayed": _object(
        {
            "events": _list_of("ReplayedEvent"),
            "replayed": _COUNT,
            "more": {**_FLAG, "description": "Call again: there are more events of the state."},
        }
    ),
    "ReplayedEvent": _object(
        {
            "key": _TEXT,
            "webhook_id": _TEXT,
            "type": _or_null(_TEXT),
            "state": {"enum": [*_STATES, None]},
            "replayed": _FLAG,
            "reason": _or_null(_TEXT),
        }
    ),
}

_ERRORS: Final = {
    400: "The query or the body is not understood.",
    401: "The token is missing or wrong.",
    403: "The Host is not known, the call comes from another site, or nothing may be changed.",
    404: "There is no such event.",
    409: "Several senders use this id; the answer names the keys to ask for.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too many wrong tokens are being answered; the right one is taken all the same.",
    503: "The store is not open, or does not answer.",
}


def admin_document(*, version: str) -> dict[str, Any]:
    """Return the document of the admin address; ``version`` is that of this package."""
    read = (400, 401, 403, 429, 503)
    health = _json_answer("Every check passes.", "Health")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sdk_trio admin",
            "version": version,
            "description": "Probes, metrics and the API of the admin address.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"token": []}],
        "paths": {
            "/livez": {"get": _probe("live", "Whether the event loop moves", "Alive")},
            "/readyz": {
                "get": _probe("ready", "Whether deliveries should be sent here", "Ready", 503)
            },
            "/healthz": {
                "get": {
                    **_read("health", "How every part is", health, (401, 403)),
                    "security": [{}, {"token": []}],
                }
            },
            "/metrics": {
                "get": {
                    **_read("metrics", "Metrics for Prometheus", _METRICS, (401, 403)),
                    "security": [{}, {"token": []}],
                }
            },
            "/api/status": {
                "get": _read(
                    "status", "What runs, and how much", _json_answer("Now.", "Status"), read[1:]
                )
            },
            "/api/events": {"get": _events(read)},
            "/api/events/{webhook_id}": {"get": _event((*read, 404, 409))},
            "/api/events/replay": {"post": _replay((*read, 413, 415))},
        },
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The variable that Sdk:Admin:TokenEnvVar names, or the file "
                    "admin-token of the data directory.",
                }
            },
            "schemas": _SCHEMAS,
        },
    }


_MOMENT: Final = {"type": "string", "pattern": MOMENT}
_MOMENT_FORM: Final = "Unix seconds, or RFC 3339 with Z or an offset."
_CURSOR: Final = {"type": "integer", "minimum": 0, "maximum": LARGEST_SEQUENCE}

_METRICS: Final = {
    "description": "The text format of Prometheus.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


def _events(errors: tuple[int, ...]) -> dict[str, Any]:
    listed = {
        "description": "One page.",
        "headers": {
            "Link": {
                "description": "The pages beside this one, next and prev (RFC 8288), where there "
                "are any.",
                "schema": _TEXT,
            }
        },
        "content": {"application/json": {"schema": _list_of("Event")}},
    }
    return {
        **_read("listEvents", "List events without their bodies", listed, errors),
        "parameters": [
            _query("type", _TEXT, "Only this event type."),
            _query("state", _STATE, "Only this state."),
            _query("tenant", _TEXT, "Only of this tenant: its identifier or its id."),
            _query("subject", _TEXT, "Only about this object: the id in the event's data."),
            _query("since", _MOMENT, "Only received at or after this time. " + _MOMENT_FORM),
            _query("until", _MOMENT, "Only received before this time. " + _MOMENT_FORM),
            _query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": USUAL_LIMIT},
                "At most this many.",
            ),
            _query("after", _CURSOR, "The events next to this sequence whose own is greater."),
            _query("before", _CURSOR, "The events next to this sequence whose own is smaller."),
            _query(
                "order",
                {"type": "string", "enum": ["newest", "oldest"]},
                "In which order they are shown; with after alone oldest first, else newest first.",
            ),
        ],
    }


def _event(errors: tuple[int, ...]) -> dict[str, Any]:
    answer = _json_answer("The event.", "EventDetails")
    return {
        **_read("showEvent", "Show one event with its failed runs", answer, errors),
        "parameters": [
            {
                "name": "webhook_id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            },
            _query("body", {"type": "string", "enum": ["0", "1"]}, "1 adds the exact body."),
        ],
    }


def _replay(errors: tuple[int, ...]) -> dict[str, Any]:
    answer = _json_answer("What was put back, and what was not, with the reason.", "Replayed")
    return {
        **_read("replayEvents", "Run dead, parked or retrying events again", answer, errors),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("ReplayOrder")}},
        },
    }


def _read(
    operation: str, summary: str, answer: dict[str, Any], errors: tuple[int, ...]
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": answer}
    for status in errors:
        responses[str(status)] = _json_answer(_ERRORS[status], "Error")
    if operation == "health":
        responses["503"] = _json_answer("A check fails.", "Health")
    return {"operationId": operation, "summary": summary, "responses": responses}


def _probe(operation: str, summary: str, schema: str, failing: int | None = None) -> dict[str, Any]:
    responses = {"200": _json_answer("Yes.", schema)}
    if failing is not None:
        responses[str(failing)] = _json_answer("No: a check fails.", schema)
    return {"operationId": operation, "summary": summary, "responses": responses, "security": []}


def _json_answer(description: str, schema: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": _ref(schema)}},
    }


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}
