"""The messages of a call's errors, and the secrets that they never contain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client import errors
from sdk_trio.client.errors import FailureKind, FieldError, api_error
from sdk_trio.errors import SdkError


def answered(status, content=b"", token="", **context):
    defaults = {"method": "POST", "path": "/customers/", "attempts": 1}
    defaults |= {"request_id": None, "retry_after": None}
    secrets = (token,)
    return api_error(status=status, content=content, secrets=secrets, **{**defaults, **context})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequestError),
        (401, errors.AuthenticationError),
        (403, errors.PermissionDeniedError),
        (404, errors.NotFoundError),
        (409, errors.ConflictError),
        (422, errors.UnprocessableEntityError),
        (429, errors.RateLimitedError),
        (500, errors.ServerError),
        (503, errors.ServerError),
        (599, errors.ServerError),
        (402, errors.ApiError),
        (418, errors.ApiError),
        (301, errors.ApiError),
    ],
)
def test_each_status_has_its_class(status, kind):
    error = answered(status)
    assert type(error) is kind
    assert error.status == status
    assert isinstance(error, errors.CallError)
    assert isinstance(error, SdkError)


def test_an_error_names_the_call_its_attempts_and_the_answer():
    body = b'{"error": "ResourceNotFound", "detail": "Not found"}'
    error = answered(404, body, attempts=3, request_id="req-1")
    assert str(error) == (
        "POST /customers/: 404 ResourceNotFound Not found after 3 attempts (request id req-1)"
    )
    assert (error.error_type, error.detail) == ("ResourceNotFound", "Not found")
    assert error.body == {"error": "ResourceNotFound", "detail": "Not found"}


def test_wrong_fields_are_listed():
    body = (
        b'{"error": "RequestValidationError", "detail": ['
        b'{"loc": ["body", "items", 0, "name"], "msg": "Field required", "type": "missing"}]}'
    )
    error = answered(422, body)
    assert error.fields == (FieldError("body.items.0.name", "Field required", "missing"),)
    assert "body.items.0.name: Field required" in str(error)


def test_a_redirect_hints_at_the_slash():
    assert "slash" in str(answered(307))


def test_the_token_is_masked_where_the_answer_repeats_it():
    error = answered(401, b'{"detail": "bad token polar_oat_x1"}', token="polar_oat_x1")
    assert "polar_oat_x1" not in f"{error} {error.body} {error!r}"
    assert errors.MASK in str(error)


def test_a_token_of_a_few_letters_garbles_no_message():
    assert "bad token" in str(answered(401, b'{"detail": "bad token"}', token="t"))


@given(st.integers(300, 599), st.binary())
def test_any_body_makes_an_error_that_can_be_shown(status, content):
    error = answered(status, content)
    assert str(error)
    assert error.outcome
    assert isinstance(getattr(error, "fields", ()), tuple)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["loc", "msg", "x"]), inner)
        ),
    )
)
def test_any_detail_can_be_read(detail):
    import json

    error = answered(422, json.dumps({"detail": detail}).encode())
    assert str(error)
    assert isinstance(error.fields, tuple)


def test_a_body_of_absurd_depth_is_a_text():
    assert answered(500, b"[" * 100_000).body.startswith("[[[")


def test_names_of_outcomes_for_metrics():
    assert answered(404).outcome == "not_found"
    assert answered(422).outcome == "unprocessable_entity"
    assert errors.CircuitOpenError("x", method="GET", path="/").outcome == "circuit_open"
    timeout = errors.AttemptTimeoutError("x", kind=FailureKind.UNCONFIRMED, method="GET", path="/")
    assert timeout.outcome == "attempt_timeout"
