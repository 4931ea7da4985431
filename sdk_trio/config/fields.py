"""Fields of the option classes: metadata, enumerations, and the forms of texts. Pure.

Each setting is described once, at its field: range, form, unit, and whether a reload applies it.
Binding, checks, JSON Schema and the reference page use that.

Each form check returns the fault, as the end of a sentence that starts with the setting's key, or
None. Values are not quoted: a credential may have been entered instead of its name.
"""

import enum
import ipaddress
import re
import unicodedata
from collections.abc import Callable, Iterator
from datetime import date
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from ..base.http import TOKEN


class Form(enum.Enum):
    """The form of a text; ``check.py`` checks it, the schema and the reference page document it."""

    HTTPS_URL = "absolute HTTPS URL (HTTP to this machine is allowed in Development)"
    HOOK_URL = "absolute HTTPS URL, also with a query (HTTP to this machine in Development)"
    URL = "absolute HTTP or HTTPS URL"
    API_VERSION = "ISO date, YYYY-MM-DD or YYYY-MM"
    ROUTE = "path that starts with /"
    RECEIVER_ROUTE = "path that starts with /, without %"
    HEADER = "name of an HTTP header"
    ENVIRONMENT_NAME = "letters, digits, _ and -"
    ENV_VAR = "name of an environment variable, never its value"
    SLUG = "1-64 lowercase letters, digits and hyphens, no hyphen at either end"
    PHONE = "phone number in E.164 format, such as +15551234567"
    EMAIL = "email address"
    HEADER_TEXT = "one line without control characters"
    HOST = "host name without a port"
    BIND = "HOST:PORT, [IPv6]:PORT, unix:PATH, unix:PATH?mode=0660, fd:N or fd:NAME"
    CIDR = "CIDR block or address"
    PROXY = "CIDR block, address, or unix"
    ABSOLUTE_PATH = "absolute path"
    FORWARD_URL = "absolute HTTP or HTTPS URL, or unix:SOCKET:PATH"
    CONDITION = "JSON pointer, = and a value"
    SCHEMA = "1-63 lowercase letters, digits and _, no digit first"
    PLACE = "HEADER, HEADER:PART, or a JSON pointer"
    POINTER = "JSON pointer, such as /data/object"
    SIGNING = "whsec_..., whpk_..., or the text that the upstream signs with"


class SettingMetadata(msgspec.Struct, frozen=True):
    """Metadata of one setting.

    ``doc`` is one plain sentence. ``minimum`` and ``maximum`` are inclusive, in ``unit``.
    ``required``: it must not be blank while its section is in use. ``default_note`` explains a null
    default. ``at_least`` is the attribute of the same section that it must not be less than.
    ``live``: a reload applies changes; others need a restart. ``masked``: a URL with a secret path;
    only its host is shown.
    """

    doc: str
    minimum: float | None = None
    maximum: float | None = None
    unit: str | None = None
    form: Form | None = None
    required: bool = False
    default_note: str | None = None
    at_least: str | None = None
    live: bool = False
    masked: bool = False


def about(
    doc: str, *, between: tuple[float | None, float | None] = (None, None), **details: Any
) -> SettingMetadata:
    """Return the metadata of a setting, for the annotation of its field.

    Args:
        doc: the meaning of the setting, one sentence.
        between: the inclusive range of a number.
        details: further fields of the record.
    """
    minimum, maximum = between
    return SettingMetadata(doc, **{"minimum": minimum, "maximum": maximum} | details)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one section; each section class derives from this one.

    Change a value with ``msgspec.structs.replace``. Structs, because attrs would generate and
    compile each class at every start (docs/adr/0066-lean-start.md).
    """


def fields_of(kind: type[Section]) -> Iterator[tuple[str, Any, SettingMetadata | None]]:
    """Return name, type and metadata of each field; metadata is None for nested sections."""
    for name in kind.__struct_fields__:
        annotation = kind.__annotations__[name]
        (known,) = getattr(annotation, "__metadata__", (None,))
        yield name, annotation if known is None else annotation.__origin__, known


def pascal_case(name: str) -> str:
    """Return the key of an attribute: ``retry_base_seconds`` becomes ``RetryBaseSeconds``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


# -- enumerations: spelled as in a file, bound without regard to case ----------------------------


class Choice(enum.StrEnum):
    """A set of words, one of which is the setting's value; matched case-insensitively."""

    @classmethod
    def _missing_(cls, value: object) -> "Choice | None":
        word = value.casefold() if isinstance(value, str) else None
        return next((member for member in cls if member.casefold() == word), None)


class Mode(Choice):
    """The upstream that the client calls."""

    TEST = "Test"
    LIVE = "Live"
    CUSTOM = "Custom"


class ApiVersionStrictness(Choice):
    """The reaction to an ApiVersion other than the bundled one."""

    WARN = "Warn"
    STRICT = "Strict"
    OFF = "Off"


class KeyDerivation(Choice):
    """The derivation of an HMAC key from a webhook secret."""

    AUTO = "Auto"
    """Either of those below; a signature with either key is accepted."""
    STANDARD = "Standard"
    """The decoded base64 after ``whsec_``."""
    UTF8 = "Utf8"
    """The UTF-8 bytes of the whole text, including its prefix."""


class SourceScheme(Choice):
    """The scheme by which the sender of a source signs its deliveries."""

    STANDARD_WEBHOOKS = "StandardWebhooks"
    SVIX = "Svix"
    """Standard Webhooks with headers named ``svix-``."""
    STRIPE = "Stripe"
    GITHUB = "GitHub"
    SHOPIFY = "Shopify"
    HMAC = "Hmac"
    """An HMAC whose header, form and content the settings name."""


class HmacAlgorithm(Choice):
    """The hash function of Scheme Hmac."""

    SHA256 = "Sha256"
    SHA512 = "Sha512"
    SHA1 = "Sha1"


class HmacEncoding(Choice):
    """The form of a signature of Scheme Hmac."""

    HEX = "Hex"
    BASE64 = "Base64"


class ForwardedHeaders(Choice):
    """The family of forwarding headers that a trusted proxy sets."""

    AUTO = "Auto"
    """Either of those below; if both are present, they must agree."""
    FORWARDED = "Forwarded"
    """Only ``Forwarded`` (RFC 7239)."""
    X_FORWARDED = "XForwarded"
    """Only ``X-Forwarded-For`` and ``X-Forwarded-Proto``."""


class StorageBackend(Choice):
    """The storage backend of the inbox."""

    SQLITE = "Sqlite"
    POSTGRES = "Postgres"
    MEMORY = "Memory"


class LogLevel(Choice):
    """The lowest severity that is logged."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class LogFormat(Choice):
    """The form of log lines; ``Auto`` is readable text on a terminal and JSON elsewhere."""

    AUTO = "Auto"
    JSON = "Json"
    CONSOLE = "Console"


class DefaultTenantStrategy(Choice):
    """The single-tenant upgrade's method of finding the default tenant."""

    LITERAL_DEFAULT = "LiteralDefault"
    FIRST_USER_ORGANIZATION = "FirstUserOrganization"
    HOST_SUPPLIED = "HostSupplied"


class ReplicaTargetType(Choice):
    """The target type that tenant databases are replicated to."""

    OBJECT_STORE = "ObjectStore"
    BLOB_STORE = "BlobStore"
    CLOUD_STORAGE = "CloudStorage"
    SFTP = "Sftp"
    LOCAL_DISK = "LocalDisk"


class EmailProvider(Choice):
    """The email provider; one in v1.0."""

    EMAIL_PROVIDER_A = "EmailProviderA"


class SmsProvider(Choice):
    """The SMS provider; one in v1.0."""

    SMS_PROVIDER_A = "SmsProviderA"


class AlertChannel(Choice):
    """A way to send alerts."""

    EMAIL = "Email"
    WEBHOOK = "Webhook"
    CHAT = "Chat"


#: The kernel's limit of a Unix socket path, without the closing NUL.
UNIX_PATH_BYTES = 107

_SOCKET_MODE = "?mode="
#: The modes of a socket: this user may connect, also its group, or every user of the machine.
SOCKET_MODES = ("0600", "0660", "0666")

#: The longest name that can be resolved, including its last dot (RFC 1035).
HOST_BYTES = 254

_EMAIL = re.compile(r"[^\s@<>,;\"]+@[^\s@<>,;\"]+")
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?"

#: Forms checked by one regular expression, in the syntax that JSON Schema and Python share, and the
#: fault of a text that does not match.
PATTERNS: dict[Form, tuple[str, str]] = {
    Form.ROUTE: (
        r'/[!"$->@-~]*',
        "must be a path that starts with /, without white space, ?, # or characters outside ASCII",
    ),
    # Paths of requests are decoded before they are compared.
    Form.RECEIVER_ROUTE: (
        r'/[!"$&->@-~]*',
        "must be a path that starts with /, without white space, ?, #, % or characters outside "
        "ASCII",
    ),
    # Without its last +, because JSON Schema has no possessive quantifiers.
    Form.HEADER: (TOKEN.removesuffix("+"), "must be the name of an HTTP header"),
    Form.ENVIRONMENT_NAME: (
        r"[A-Za-z0-9_-]{1,64}",
        "must be 1 to 64 letters, digits, _ or -, such as Production or Development",
    ),
    Form.ENV_VAR: (
        r"[A-Za-z_][A-Za-z0-9_]*",
        "must be the name of an environment variable, never its value",
    ),
    Form.CONDITION: (
        r"/[^=]*=[\s\S]*",
        "must be a JSON pointer, = and a value, such as /data/status=paid",
    ),
    Form.PLACE: (
        r"/[\s\S]*|[!#$%&'*+.^_`|~0-9A-Za-z-]+(:[A-Za-z0-9_-]{1,32})?",
        "must be the name of a header, HEADER:PART, or a JSON pointer that starts with /",
    ),
    Form.POINTER: (r"/[\s\S]*", "must be a JSON pointer that starts with /"),
    Form.SLUG: (
        r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?",
        "must be 1 to 64 lowercase letters, digits and hyphens, with no hyphen at either end",
    ),
    Form.SCHEMA: (
        r"(?!pg_)[a-z_][a-z0-9_]{0,62}",
        "must be 1 to 63 lowercase letters, digits and _, not begin with a digit or with pg_",
    ),
    Form.PHONE: (
        r"\+[1-9][0-9]{1,14}",
        "must be a phone number in E.164 format, such as +15551234567",
    ),
    # Settings may also be checked on another machine, by their author.
    Form.ABSOLUTE_PATH: (r"(/|[A-Za-z]:[\\/])[\s\S]*", "must be an absolute path"),
    Form.HOST: (_HOST, "must be a host name, without a port"),
}

_API_VERSION = re.compile(r"([0-9]{4})-([0-9]{2})(?:-([0-9]{2}))?")
# Underscores are common in ASCII names. Labels of non-ASCII names start and end with a letter or
# digit and have no hyphens in the third and fourth position (RFC 5891, 4.2.3): the client refuses
# others.
_LABEL = r"(?!..--)[^\W_](?:(?:[^\W_]|-)*[^\W_])?"
_URL_HOST = re.compile(rf"[A-Za-z0-9_.-]+|{_LABEL}(?:\.{_LABEL})*\.?")
_DOTTED = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_LOOPBACK = re.compile(r"localhost|127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|::1")
_DESCRIPTOR = re.compile(r"[0-9]{1,6}|[A-Za-z_][A-Za-z0-9_.@-]{0,254}")

#: Control characters, lone surrogates, and the separators of lines and paragraphs.
_NOT_IN_A_LINE = ("Cc", "Cs", "Zl", "Zp")
#: Characters that change the direction of the surrounding text.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
#: Joiners and non-joiners: Persian and Indic words and emoji are spelled with them.
_JOINERS = "\u200c\u200d"
#: Letters and symbols drawn as nothing: fillers of Hangul, a Braille cell without dots.
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")


def check_form(form: Form, text: str, *, development: bool) -> str | None:
    """Return the fault of ``text``, or None.

    Args:
        form: the required form.
        text: a value; not empty.
        development: plain HTTP to this machine is allowed.
    """
    # These two depend on whether plain HTTP is allowed; every other form depends on the text only.
    if form in (Form.HTTPS_URL, Form.HOOK_URL):
        return _https_url(text, development=development, query=form is Form.HOOK_URL)
    if form in PATTERNS:
        pattern, wrong = PATTERNS[form]
        return None if re.fullmatch(pattern, text) else wrong
    check = _CHECKS.get(form)
    return None if check is None else check(text)


def _https_url(text: str, *, development: bool, query: bool) -> str | None:
    url = _split_url(text, query=query)
    if isinstance(url, str):
        return url
    if url.scheme == "https":
        return None
    if not _is_plain_loopback(url):
        return "must be an absolute HTTPS URL, such as https://api.example.com"
    if development:
        return None
    return "must be an HTTPS URL; plain HTTP to this machine is allowed in Development only"


def is_plain_loopback(text: str) -> bool:
    """Return whether this is a plain HTTP URL to this machine, which Development allows."""
    url = _split_url(text, query=True)
    return not isinstance(url, str) and _is_plain_loopback(url)


def _is_plain_loopback(url: SplitResult) -> bool:
    return url.scheme == "http" and bool(_LOOPBACK.fullmatch(url.hostname or ""))


def _url(text: str) -> str | None:
    url = _split_url(text)
    return url if isinstance(url, str) else None


def _split_url(text: str, *, query: bool = False) -> SplitResult | str:
    """Return the parts of an absolute URL, or its fault; ``query``: a query is allowed."""
    # Before splitting: urlsplit silently removes line breaks and tabs, so the checked text would
    # differ from the written one.
    if any(c.isspace() or unicodedata.category(c) in _NOT_IN_A_LINE for c in text):
        return "holds white space or a control character: remove it"
    for character in text:
        if unicodedata.category(character) == "Cf":
            return _why_format(character)
    try:
        url = urlsplit(text)
        # Port 0 cannot be connected to; reading an invalid port raises, as may the host.
        complete = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        complete = False
    if not complete or not _is_host(url.hostname or ""):
        return "must be an absolute URL with a host, such as https://api.example.com"
    # A password in a URL ends up in logs and error messages, which mask only secret settings.
    if "@" in url.netloc:
        return "holds a user or password: remove it, and use the settings for credentials"
    if query and "#" in text:
        return "holds a fragment, which is never sent: remove it"
    if not query and ("?" in text or "#" in text):
        return "holds a query or fragment: remove it"
    return url


def _is_host(text: str) -> bool:
    """Return whether this is an IPv6 address, or can be resolved as a name."""
    if ":" in text:  # urlsplit has read it between brackets
        return True
    try:
        if _DOTTED.fullmatch(text):
            ipaddress.IPv4Address(text)
            return True
        return bool(_URL_HOST.fullmatch(text)) and len(text.encode("idna")) <= HOST_BYTES
    except ValueError:  # an empty or too long label, or a part of an address above 255
        return False


def _api_version(text: str) -> str | None:
    match = _API_VERSION.fullmatch(text)
    try:
        if match is not None:
            date(int(match[1]), int(match[2]), int(match[3] or 1))
            return None
    except ValueError:
        pass  # such as month 13: same advice
    return "must be an ISO date, such as 2026-04-01 or 2026-04"


def _forward_url(text: str) -> str | None:
    if not text.startswith("unix:"):
        url = _split_url(text, query=True)
        return url if isinstance(url, str) else None
    socket, _, path = text.removeprefix("unix:").partition(":")
    wrong = _unix_path(socket, "0600") if socket else "must name a socket after unix:"
    return wrong or (check_form(Form.ROUTE, path, development=False) if path else None)


def _email(text: str) -> str | None:
    for character in text:
        if unicodedata.category(character) in (*_NOT_IN_A_LINE, "Cf"):
            return _why_format(character)
    return None if _EMAIL.fullmatch(text) else "must be an email address, without a display name"


def _header_text(text: str) -> str | None:
    # Most texts pass this check: the loop below inspects each character.
    if text.isascii() and text.isprintable():
        return None
    # The leading blank precedes the first character, and a joiner must not follow it.
    for before, character in pairwise(f" {text}"):
        category = unicodedata.category(character)
        if category in _NOT_IN_A_LINE:
            return f"must be one line without control characters; it holds {_code_point(character)}"
        if category == "Cf" and not (character in _JOINERS and _can_be_joined(before)):
            return _why_format(character)
    if text.strip() and not any(map(_can_be_seen, text)):
        return f"has no visible character, only {_code_point(text.strip()[0])} and similar ones"
    return None


def _why_format(character: str) -> str:
    what = "changes the direction of writing" if character in _BIDI else "cannot be seen"
    return f"holds {_code_point(character)}, which {what}: remove it"


def _can_be_joined(character: str) -> bool:
    """Return whether a joiner may follow: emoji, and scripts whose letters join."""
    return not character.isascii() and unicodedata.category(character)[0] in "LMS"


def _can_be_seen(character: str) -> bool:
    return unicodedata.category(character)[0] in "LNPS" and character not in _BLANK


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}"


def _bind(text: str) -> str | None:
    if text.startswith("unix:"):
        return _unix_path(*split_unix(text))
    if text.startswith("fd:"):
        valid = _DESCRIPTOR.fullmatch(text.removeprefix("fd:"))
        return None if valid else "must be fd: and the number or the name of an inherited socket"
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5:
        return "must be HOST:PORT, [IPv6]:PORT, unix:PATH, fd:N or fd:NAME"
    if int(port) > 65_535:
        return "has a port above 65535"
    # An IPv6 address contains colons, so only brackets show where the port starts.
    if host.startswith("[") and host.endswith("]"):
        return _ipv6(host[1:-1])
    if not re.fullmatch(_HOST, host):
        return "must name a host before the port; an IPv6 address goes in brackets"
    return None


def split_unix(address: str) -> tuple[str, str]:
    """Return the path of ``unix:PATH?mode=0660``, and the mode as written: usually 0600."""
    path, asked, mode = address.removeprefix("unix:").partition(_SOCKET_MODE)
    return path, mode if asked else "0600"


def _unix_path(path: str, mode: str) -> str | None:
    if mode not in SOCKET_MODES:
        return f"has an unknown mode: use one of {', '.join(SOCKET_MODES)}"
    if not path or "\0" in path:
        return "must have a path after unix:"
    # File names are bytes; Python represents undecodable ones as surrogates.
    if len(path.encode(errors="surrogateescape")) > UNIX_PATH_BYTES:
        return f"has a path of more than {UNIX_PATH_BYTES} bytes, the limit of sockets: shorten it"
    return None


def _ipv6(text: str) -> str | None:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return "must have an IPv6 address in its brackets"
    return None


def _cidr(text: str) -> str | None:
    try:
        loose = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return "must be a CIDR block, such as 10.0.0.0/8, or an address"
    try:
        ipaddress.ip_network(text)
    except ValueError:
        # Refused, not masked: 10.0.0.1/8 may mean one address or the block.
        return f"has bits set beyond its prefix: write {loose}"
    return None


def _proxy(text: str) -> str | None:
    wrong = None if text == "unix" else _cidr(text)
    return f"{wrong}, or unix" if wrong and wrong.endswith("an address") else wrong


# Form.SIGNING is not here: it depends on KeyDerivation, and check.py reads the secrets together.
_CHECKS: dict[Form, Callable[[str], str | None]] = {
    Form.URL: _url,
    Form.API_VERSION: _api_version,
    Form.FORWARD_URL: _forward_url,
    Form.EMAIL: _email,
    Form.HEADER_TEXT: _header_text,
    Form.BIND: _bind,
    Form.CIDR: _cidr,
    Form.PROXY: _proxy,
}
