"""The enumerations of the settings: each value is spelled as it is written in a file.

Values are matched without regard to case when settings are bound.
"""

import enum


class Mode(enum.StrEnum):
    """The upstream that the client calls."""

    TEST = "Test"
    LIVE = "Live"
    CUSTOM = "Custom"


class ApiVersionStrictness(enum.StrEnum):
    """The consequence of an ApiVersion other than the bundled one."""

    WARN = "Warn"
    STRICT = "Strict"
    OFF = "Off"


class KeyDerivation(enum.StrEnum):
    """The way from a webhook secret to an HMAC key."""

    AUTO = "Auto"
    """Either of the two below; a signature made with either key is accepted."""
    STANDARD = "Standard"
    """The bytes that the base64 after ``whsec_`` decodes to."""
    UTF8 = "Utf8"
    """The UTF-8 bytes of the whole text, its prefix included."""


class ForwardedHeaders(enum.StrEnum):
    """The family of forwarding headers that a trusted proxy sets."""

    AUTO = "Auto"
    """Either of the two below; where both came, they must agree."""
    FORWARDED = "Forwarded"
    """``Forwarded`` alone (RFC 7239)."""
    X_FORWARDED = "XForwarded"
    """``X-Forwarded-For`` and ``X-Forwarded-Proto`` alone."""


class StorageBackend(enum.StrEnum):
    """The kind of store that keeps the inbox."""

    SQLITE = "Sqlite"
    POSTGRES = "Postgres"
    MEMORY = "Memory"


class LogLevel(enum.StrEnum):
    """The least severe log events that are written."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class LogFormat(enum.StrEnum):
    """The form of log events; ``Auto`` is readable on a terminal and JSON elsewhere."""

    AUTO = "Auto"
    JSON = "Json"
    CONSOLE = "Console"


class DefaultTenantStrategy(enum.StrEnum):
    """The way in which the single-tenant upgrade finds the default tenant."""

    LITERAL_DEFAULT = "LiteralDefault"
    FIRST_USER_ORGANIZATION = "FirstUserOrganization"
    HOST_SUPPLIED = "HostSupplied"


class ReplicaTargetType(enum.StrEnum):
    """The kind of place that tenant databases are replicated to."""

    OBJECT_STORE = "ObjectStore"
    BLOB_STORE = "BlobStore"
    CLOUD_STORAGE = "CloudStorage"
    SFTP = "Sftp"
    LOCAL_DISK = "LocalDisk"


class EmailProvider(enum.StrEnum):
    """The email provider; one in v1.0."""

    EMAIL_PROVIDER_A = "EmailProviderA"


class SmsProvider(enum.StrEnum):
    """The SMS provider; one in v1.0."""

    SMS_PROVIDER_A = "SmsProviderA"
