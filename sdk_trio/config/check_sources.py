"""Checks of the sources: their names, addresses, secrets and schemes. Pure."""

import re
from collections.abc import Iterator

from ..errors import Problem
from .fields import KeyDerivation, SourceScheme, pascal_case
from .options import Settings
from .options.sources import OF_HMAC, SourceOptions
from .secret import Secret, parse_secret

SOURCES = "Sdk:Sources"

#: The derivation of keys by scheme. Svix and Standard Webhooks sign with the decoded key; Auto also
#: accepts senders of the latter that sign with the text. The other schemes sign with the text.
DERIVATIONS = {
    SourceScheme.STANDARD_WEBHOOKS: KeyDerivation.AUTO,
    SourceScheme.SVIX: KeyDerivation.STANDARD,
}

#: The path of the simulator, which exists in Development.
_SIMULATOR = "/test/webhook/simulate/"

#: Finds a separator of the entries of a header.
_separates = re.compile(r"[,; \t]").search
_placeholders = re.compile(r"\{([a-z]*)\}").findall


def source_problems(settings: Settings, *, receiver: bool) -> Iterator[Problem]:
    """Yield the faults of the sources; without ``receiver``, secrets may be missing."""
    taken = {settings.webhooks.path: "Sdk:Webhooks:Path"}
    names: set[str] = set()
    for index, source in enumerate(settings.sources):
        key = f"{SOURCES}:{index}"
        if source.name in names:
            yield Problem(f"{key}:Name", "is another source's, too: choose another name")
        names.add(source.name)
        yield from _path_problems(key, source, settings, taken)
        if receiver and not source.secrets:
            yield Problem(f"{key}:Secrets", _no_secret(source))
        for number, secret in enumerate(source.secrets):
            wrong, guessable = _secret_faults(source, secret)
            # An example secret is fine for trying things out.
            if wrong or (guessable and not settings.is_development):
                yield Problem(f"{key}:Secrets:{number}", wrong or guessable or "")
        yield from _scheme_problems(key, source)
    for index, route in enumerate(settings.forward.routes):
        for number, name in enumerate(route.sources):
            if name not in names:
                place = f"Sdk:Forward:Routes:{index}:Sources:{number}"
                yield Problem(place, f"names no source of {SOURCES}")


def source_warnings(settings: Settings) -> Iterator[Problem]:
    """Yield what is suspicious about the secrets of the sources."""
    seen = dict.fromkeys(settings.webhooks.all_secrets, "Sdk:Webhooks:Secrets")
    for index, source in enumerate(settings.sources):
        for number, secret in enumerate(source.secrets):
            key = f"{SOURCES}:{index}:Secrets:{number}"
            if (first := seen.setdefault(secret, key)) != key:
                yield Problem(
                    key,
                    f"is the same secret as {first}: a delivery to one address would be accepted "
                    "at the other; have the sender issue a secret for each address",
                )
            wrong, guessable = _secret_faults(source, secret)
            if guessable and not wrong and settings.is_development:
                yield Problem(key, guessable)


def _no_secret(source: SourceOptions) -> str:
    if source.secret_env_var is None:
        return "is required: set a secret here, or name its variable in SecretEnvVar"
    return (
        f"is empty, and the variable {source.secret_env_var} of SecretEnvVar is not set: set it "
        "to the secret that the sender shows"
    )


def _path_problems(
    key: str, source: SourceOptions, settings: Settings, taken: dict[str, str]
) -> Iterator[Problem]:
    path = source.route
    first = taken.setdefault(path, f"{key}:Path")
    below = f"{settings.webhooks.path.rstrip('/')}/"
    if first != f"{key}:Path":
        yield Problem(f"{key}:Path", f"is {path}, the route of {first}: choose another one")
    elif settings.multi_tenant.enabled and path.startswith(below):
        yield Problem(
            f"{key}:Path", f"is {path}, which is the address of a tenant: choose another route"
        )
    elif settings.is_development and path.startswith(_SIMULATOR):
        yield Problem(f"{key}:Path", "is a route of the simulator: choose another one")


def _secret_faults(source: SourceOptions, secret: Secret) -> tuple[str | None, str | None]:
    """Return why a secret cannot be used, and why strangers may know it."""
    derivation = DERIVATIONS.get(source.scheme, KeyDerivation.UTF8)
    try:
        parsed = parse_secret(secret.reveal(), derivation)
    except ValueError as error:
        # The advice about KeyDerivation is for the upstream's secrets.
        return str(error).partition(", or set Sdk:")[0], None
    if parsed.ed25519_public_key is not None and source.scheme not in DERIVATIONS:
        return f"is a public key, and Scheme {source.scheme} has none", None
    return None, parsed.guessable


def _scheme_problems(key: str, source: SourceOptions) -> Iterator[Problem]:
    if source.scheme is not SourceScheme.HMAC:
        for name in OF_HMAC:
            if getattr(source, name) is not None:
                yield Problem(
                    f"{key}:{pascal_case(name)}",
                    f"is for Scheme Hmac only: remove it, as {source.scheme} has its own",
                )
        return
    if source.header is None:
        yield Problem(f"{key}:Header", "is required by Scheme Hmac: name the signature's header")
    if _separates(source.prefix or ""):
        yield Problem(
            f"{key}:Prefix",
            "has a comma, a semicolon or a blank, which separate the entries of the header, so no "
            "entry begins with it: keep only the text behind the last of them, or none",
        )
    content = source.signed_content or "{body}"
    names = _placeholders(content)
    if names.count("body") != 1:
        yield Problem(f"{key}:SignedContent", "must have {body} once: it would not be signed")
    for name in dict.fromkeys(names):
        if name not in ("body", "id", "timestamp"):
            yield Problem(
                f"{key}:SignedContent", "knows only {body}, {timestamp} and {id} in braces"
            )
        # The body is read only when its signature is verified.
        elif name != "body" and (getattr(source, name) or "/").startswith("/"):
            yield Problem(
                f"{key}:{pascal_case(name)}",
                f"must be a header, because SignedContent has {{{name}}}",
            )
