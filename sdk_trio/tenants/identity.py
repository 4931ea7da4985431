"""The checks of a tenant's fields: identifier, name, contact, organization, credentials. Pure."""

import uuid
from typing import Any

from ..config.fields import Form, check_form
from ..errors import InvalidTenantError
from ..records.tenants import EnvironmentVariable, TenantCredentials

MAX_NAME_CHARACTERS = 200
MAX_EMAIL_CHARACTERS = 254
MAX_ACTOR_CHARACTERS = 200
MAX_REASON_CHARACTERS = 1000
#: The longest organization id. The upstream's are UUIDs; longer texts come from forged bodies, and
#: would fill the cache of organizations.
MAX_ORGANIZATION_CHARACTERS = 128
#: The most sources of webhook secrets, because a delivery may be verified with each of them.
MAX_SECRET_SOURCES = 8

_MAX_PATH_CHARACTERS = 4096


def is_tenant_id(text: str) -> bool:
    """Return whether this is a tenant's id: a UUID in canonical form."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def check_identifier(identifier: str) -> str:
    """Return a slug, or raise.

    Raises:
        InvalidTenantError: it is not a slug, or has the form of an id.
    """
    _check(identifier, "identifier", Form.SLUG)
    # Commands take an identifier or an id; one text must never mean two tenants.
    if is_tenant_id(identifier):
        raise _invalid("identifier", "has the form of a tenant id: choose a name for people")
    return identifier


def check_name(name: str) -> str:
    """Return a display name, or raise InvalidTenantError."""
    return _line(name, "name", MAX_NAME_CHARACTERS)


def check_email(email: str | None) -> str | None:
    """Return the site manager's email address or None, or raise InvalidTenantError."""
    return _optional(email, "email", Form.EMAIL, MAX_EMAIL_CHARACTERS)


def check_phone(phone: str | None) -> str | None:
    """Return the site manager's phone number or None, or raise InvalidTenantError."""
    return _optional(phone, "phone", Form.PHONE, 16)


def check_organization_id(organization_id: str | None) -> str | None:
    """Return an organization of the upstream or None, or raise InvalidTenantError."""
    if organization_id is None:
        return None
    if is_organization_id(organization_id):
        return organization_id
    raise _invalid(
        "organization id",
        f"must be 1 to {MAX_ORGANIZATION_CHARACTERS} visible ASCII characters",
    )


def is_organization_id(text: str) -> bool:
    """Return whether this can be an organization id of the upstream."""
    return 0 < len(text) <= MAX_ORGANIZATION_CHARACTERS and all("!" <= c <= "~" for c in text)


def check_actor(actor: str) -> str:
    """Return the name of a change's actor, or raise InvalidTenantError."""
    return _line(actor, "actor", MAX_ACTOR_CHARACTERS)


def check_reason(reason: str | None) -> str | None:
    """Return the reason of a change or None, or raise InvalidTenantError."""
    return None if reason is None else _line(reason, "reason", MAX_REASON_CHARACTERS)


def check_credentials(credentials: TenantCredentials) -> TenantCredentials:
    """Return sources of credentials, or raise InvalidTenantError."""
    if len(credentials.webhook_secrets) > MAX_SECRET_SOURCES:
        raise _invalid("webhook secrets", f"have more than {MAX_SECRET_SOURCES} sources")
    if credentials.access_token is not None:
        _check_source(credentials.access_token, "source of the access token")
    for source in credentials.webhook_secrets:
        _check_source(source, "source of the webhook secret")
    return credentials


def _check_source(source: Any, what: str) -> None:
    if isinstance(source, EnvironmentVariable):
        _check(source.name, what, Form.ENV_VAR)
        return
    _line(source.path, what, _MAX_PATH_CHARACTERS)
    _check(source.path, what, Form.ABSOLUTE_PATH)


def _optional(text: str | None, what: str, form: Form, longest: int) -> str | None:
    return None if text is None else _check(_line(text, what, longest), what, form)


def _check(text: str, what: str, form: Form) -> str:
    wrong = check_form(form, text, development=False)
    if wrong is not None:
        raise _invalid(what, wrong)
    return text


def _line(text: str, what: str, longest: int) -> str:
    if not text.strip():
        raise _invalid(what, "is empty: set it, or omit it")
    if len(text) > longest:
        raise _invalid(what, f"has {len(text)} characters, and {longest} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _invalid(what, "is not valid Unicode text") from None
    _check(text, what, Form.HEADER_TEXT)
    return text


def _invalid(what: str, wrong: str) -> InvalidTenantError:
    # The value is not quoted, because it may be a credential entered instead of its name.
    return InvalidTenantError(f"the {what} {wrong}")
