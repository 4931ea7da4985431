"""Settings that open something to strangers: addresses, tokens, trusted proxies. Pure.

Nothing here is invalid in itself, and each of it has let somebody in: so it is told at every start.
An admin token that can be guessed from elsewhere is refused.
"""

from collections.abc import Iterator
from ipaddress import ip_network

from ..base.public_addresses import is_local_bind
from ..errors import Problem
from .options import Settings
from .secret import QUOTED, is_quoted
from .table import full_key
from .text_formats import split_unix

ADMIN_BIND = full_key(("Admin", "Bind"))
ADMIN_TOKEN = full_key(("Admin", "TokenEnvVar"))
BIND = full_key(("Server", "Bind"))
ENVIRONMENT = full_key(("Environment",))
REQUIRE_HTTPS = full_key(("Webhooks", "RequireHttps"))
TRUSTED_PROXIES = full_key(("Server", "TrustedProxies"))

#: 32 characters of hexadecimal digits are 128 bits; the token that is generated has 43.
LEAST_TOKEN_CHARACTERS = 32

#: Blocks larger than this hold strangers: /8 of IPv4, /32 of IPv6.
_WIDEST = {4: 8, 6: 32}

#: The bits of a socket's mode that let every user of the machine connect.
_EVERYBODY = 0o006


def exposure_warnings(settings: Settings) -> Iterator[Problem]:
    """Say what these settings open to more people than is usual."""
    server, admin = settings.server, settings.admin
    public = [address for address in server.bind if not is_local_bind(address)]
    if public and not settings.webhooks.require_https:
        yield Problem(
            REQUIRE_HTTPS,
            f"is false, and {', '.join(public)} can be reached from elsewhere: bodies can be read "
            "on the way; set it to true, or bind to a loopback address",
        )
    if admin.enabled and not is_local_bind(admin.bind):
        yield Problem(
            ADMIN_BIND,
            "can be reached from elsewhere, and speaks plain HTTP: the token can be read on the "
            "way; bind it to a loopback address or a unix socket, or keep it in a network of its "
            "own",
        )
    if settings.is_development:
        yield from _development(settings, public)
    for index, entry in enumerate(server.trusted_proxies):
        if is_wide(entry):
            yield Problem(
                f"{TRUSTED_PROXIES}:{index}",
                f"holds strangers ({entry}), whose forwarding headers are believed: they choose "
                "the address and the scheme that they are taken for; name the proxies' own "
                "addresses",
            )
    for key, address in [
        *((f"{BIND}:{index}", address) for index, address in enumerate(server.bind)),
        (ADMIN_BIND, admin.bind),
    ]:
        if address.startswith("unix:") and _is_for_everybody(address):
            yield Problem(
                key,
                "lets every user of this machine connect, and a peer of a unix socket has no "
                "address to be told apart by; use mode=0660 and a group of its own",
            )


def _is_for_everybody(address: str) -> bool:
    _, mode = split_unix(address)
    return mode.isdigit() and bool(int(mode, 8) & _EVERYBODY)


def _development(settings: Settings, public: list[str]) -> Iterator[Problem]:
    if public:
        yield Problem(
            ENVIRONMENT,
            f"is Development, and {', '.join(public)} can be reached from elsewhere; bind to a "
            "loopback address, or set it to Production",
        )
    # A real secret has no business where exceptions are shown whole and the simulator is mapped.
    if any(not secret.made_for_tests for secret in settings.webhooks.all_secrets):
        yield Problem(
            ENVIRONMENT,
            "is Development, and a webhook secret is configured that another installation may "
            "verify with; set it to Production, or leave the secret out and run 'dev', which "
            "makes one (Sdk:Simulator:SecretEnvVar names another)",
        )


def is_wide(entry: str) -> bool:
    """Say whether a block of TrustedProxies is so large that strangers are in it."""
    try:
        network = ip_network(entry, strict=False)
    except ValueError:
        return False  # unix, or what the rules of forms refuse
    return network.prefixlen < _WIDEST[network.version]


def token_fault(token: str) -> str | None:
    """Say what is wrong with an admin token that was given, as the end of a sentence, or None."""
    if is_quoted(token):
        return QUOTED
    if len(token) < LEAST_TOKEN_CHARACTERS:
        return (
            f"has {len(token)} characters, and can be guessed: at least {LEAST_TOKEN_CHARACTERS} "
            "are needed ('openssl rand -hex 32' prints 64); or unset the variable, and a token is "
            "generated"
        )
    return None


def admin_token_findings(settings: Settings, token: str) -> tuple[Problem | None, Problem | None]:
    """Judge the admin token of the environment: a problem, else a warning, else neither.

    Args:
        settings: where it is used.
        token: the value of the variable; empty where one is generated.
    """
    fault = token_fault(token) if settings.admin.enabled and token else None
    if fault is None:
        return None, None
    found = Problem(
        ADMIN_TOKEN, f"names the variable {settings.admin.token_env_var}, whose value {fault}"
    )
    # On loopback and unix sockets only this machine can guess; elsewhere nothing makes a token that
    # can be guessed right.
    return (None, found) if is_local_bind(settings.admin.bind) else (found, None)
