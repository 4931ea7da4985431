"""The settings as the program sees them: frozen records, section by section. Pure.

A field's key is its name in PascalCase, under the key of its class: ``webhooks.path`` is
``Sdk:Webhooks:Path``. All other facts about a setting are its metadata (``fields.py``);
``table.py`` lists them all. A record created by hand is not validated: ``Settings.from_mapping``
and ``load_settings`` do that.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from ..fields import ApiVersionStrictness, Form, Mode, Section, about
from ..secret import Secret
from .alerts import AlertsOptions
from .client import ConnectionOptions, ResilienceOptions, UpstreamOptions
from .forward import ForwardOptions
from .server import AdminOptions, LoggingOptions, RelayOptions, ServerOptions, StorageOptions
from .sources import SourceOptions
from .tenants import MultiTenantOptions
from .webhooks import SimulatorOptions, WebhooksOptions

#: The upstream API's schema version that this release was written against.
BUNDLED_API_VERSION = "2026-04-01"

#: Header names, in lower case, of upstreams that version by year and month only. Any other value is
#: answered 404 there, on every route.
_VERSIONS_BY_MONTH = frozenset({"polar-version"})

DEVELOPMENT = "Development"
PRODUCTION = "Production"

_ENVIRONMENTS = {
    "dev": DEVELOPMENT,
    "development": DEVELOPMENT,
    "prod": PRODUCTION,
    "production": PRODUCTION,
}


def environment_meant(name: str) -> str | None:
    """Return ``Development`` or ``Production`` for their usual spellings, otherwise None."""
    return _ENVIRONMENTS.get(name.casefold())


def bundled_api_version(version_header: str) -> str:
    """Return the bundled version in the form that this header requires."""
    by_month = version_header.lower() in _VERSIONS_BY_MONTH
    return BUNDLED_API_VERSION[: len("2026-04")] if by_month else BUNDLED_API_VERSION


class Settings(Section, frozen=True, kw_only=True):
    """All settings, section by section; the root key is ``Sdk``."""

    # The sandbox by default: a program started by mistake moves no money.
    mode: Annotated[
        Mode, about("Test is the sandbox, Live is production, Custom uses CustomBaseUrl.")
    ] = Mode.TEST
    access_token: Annotated[
        Secret | None,
        about(
            "Organization access token; keep it in a secret store.",
            default_note="none, required",
            live=True,
        ),
    ] = None
    custom_base_url: Annotated[
        str | None, about("Base address of Mode Custom, which requires it.", form=Form.HTTPS_URL)
    ] = None
    base_path: Annotated[
        str, about("Path prefix of all requests.", form=Form.ROUTE, required=True)
    ] = "/v1"
    api_version: Annotated[
        str | None,
        about(
            "Version of the upstream's schema, sent in the version header.",
            form=Form.API_VERSION,
            default_note=f"the bundled version, {BUNDLED_API_VERSION}; for Polar-Version its month",
        ),
    ] = None
    api_version_strictness: Annotated[
        ApiVersionStrictness,
        about("How an ApiVersion other than the bundled one is treated; Strict fails startup."),
    ] = ApiVersionStrictness.WARN
    timeout_ms: Annotated[
        int,
        about(
            "Timeout of one HTTP attempt.", between=(1000, 300_000), unit="milliseconds", live=True
        ),
    ] = 30_000
    max_retries: Annotated[
        int, about("Retries of one upstream call.", between=(0, 10), live=True)
    ] = 3
    # Null, so that it follows from the other settings: a fixed deadline would cut the first attempt
    # if TimeoutMs is at its maximum (ADR 29).
    total_timeout_ms: Annotated[
        int | None,
        about(
            "Deadline over all attempts and waits of one call.",
            minimum=1,
            unit="milliseconds",
            default_note="two minutes, or the time that attempts and retries need if longer",
            live=True,
        ),
    ] = None
    # Every other name is Production: a typing error must not show errors in full.
    environment: Annotated[
        str,
        about(
            "Development (or dev) shows full exception detail at start-up and maps the simulator; "
            "every other name counts as Production. Also from SDK_ENVIRONMENT.",
            form=Form.ENVIRONMENT_NAME,
            required=True,
        ),
    ] = PRODUCTION
    upstream: UpstreamOptions = UpstreamOptions()
    resilience: ResilienceOptions = ResilienceOptions()
    connection: ConnectionOptions = ConnectionOptions()
    webhooks: WebhooksOptions = WebhooksOptions()
    sources: Annotated[
        tuple[SourceOptions, ...],
        about("Senders other than the upstream, each at its own route.", live=True),
    ] = ()
    forward: ForwardOptions = ForwardOptions()
    simulator: SimulatorOptions = SimulatorOptions()
    server: ServerOptions = ServerOptions()
    admin: AdminOptions = AdminOptions()
    relay: RelayOptions = RelayOptions()
    storage: StorageOptions = StorageOptions()
    alerts: AlertsOptions = AlertsOptions()
    logging: LoggingOptions = LoggingOptions()
    multi_tenant: MultiTenantOptions = MultiTenantOptions()

    @property
    def is_development(self) -> bool:
        """Return whether Environment is ``Development`` or ``dev``, in any case."""
        return environment_meant(self.environment) == DEVELOPMENT

    @property
    def has_access_token(self) -> bool:
        """Return whether an access token is set; a blank one does not count."""
        # Orchestrators set an empty variable for a missing secret.
        return self.access_token is not None and bool(self.access_token.reveal().strip())

    @property
    def base_url(self) -> str:
        """Return the upstream's base address for Mode, without BasePath; empty when unset."""
        addresses = {
            Mode.LIVE: self.upstream.production_url,
            Mode.TEST: self.upstream.sandbox_url,
            Mode.CUSTOM: self.custom_base_url or "",
        }
        return addresses[self.mode]

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], *, standalone: bool = False, receiver: bool = True
    ) -> "Settings":
        """Validate a plain nested mapping, with or without the root key ``Sdk``.

        Reads only the mapping: no file, no environment variable.

        Args:
            mapping: keys as in a file, in any case; ``Webhooks:Path`` may be one key.
            standalone: no AccessToken is needed.
            receiver: the receiver runs, so at least one webhook secret is needed.

        Raises:
            OptionsValidationError: lists every problem.
        """
        return _from_mapping(mapping, standalone=standalone, receiver=receiver)


# Set by ``load.py``, which imports this module: importing it here would be circular. The package
# imports both, so it is always set.
_from_mapping: Callable[..., Settings]


def validate_mappings_with(function: Callable[..., Settings]) -> None:
    """Let :meth:`Settings.from_mapping` call ``function``."""
    global _from_mapping
    _from_mapping = function
