"""The settings of forwarding: posting events to applications in any language. Pure."""

from typing import Annotated

from msgspec import structs

from ..fields import Form, Section, about
from ..secret import Secret

#: The name of the route that ``Forward:Url`` stands for.
URL_ROUTE = "forward-to"


class RouteOptions(Section, frozen=True, kw_only=True):
    """One route: the events it takes, where it posts them, and how."""

    name: Annotated[
        str,
        about(
            "Name in commands, logs and metrics; when empty, route-N with its number "
            "in the list, from 1.",
            form=Form.SLUG,
        ),
    ] = ""
    types: Annotated[
        tuple[str, ...],
        about(
            "Event types to forward, as globs: order.*, subscription.c*; unknown types as well.",
            form=Form.HEADER_TEXT,
            required=True,
        ),
    ] = ("*",)
    sources: Annotated[
        tuple[str, ...],
        about(
            "Names of the sources whose events it takes; when empty, those of the upstream.",
            form=Form.SLUG,
        ),
    ] = ()
    where: Annotated[
        tuple[str, ...],
        about(
            "Conditions, all of which must hold: a JSON pointer into the body, =, and a JSON "
            "value or plain text, as in /data/status=paid.",
            form=Form.CONDITION,
        ),
    ] = ()
    url: Annotated[
        str,
        about(
            "Address of the application: http://, https://, or unix:SOCKET:PATH.",
            form=Form.FORWARD_URL,
            required=True,
        ),
    ] = ""
    # Otherwise a route written by someone else would make this process a proxy to any address. An
    # application behind a gateway runs on this machine or in its network.
    allow_public_addresses: Annotated[
        bool,
        about(
            "Allow posting to public addresses; otherwise only to this machine "
            "and private networks."
        ),
    ] = False
    secret_env_var: Annotated[
        str | None,
        about(
            "Variable with the local whsec_ secret that signs the posts; two with a space "
            "between them while it is rotated.",
            form=Form.ENV_VAR,
            default_note="the value of Forward:SecretEnvVar",
        ),
    ] = None
    headers: Annotated[tuple[Secret, ...], about("Headers to add, each as Name: value.")] = ()
    timeout_seconds: Annotated[
        float,
        about(
            "Time from the connection to the end of the answer.",
            between=(0.1, 3600),
            unit="seconds",
        ),
    ] = 15.0
    ordered: Annotated[
        bool, about("Post events of one data.id one at a time, in order of arrival.")
    ] = False
    concurrency: Annotated[
        int | None,
        about(
            "Concurrent posts over all processes and hosts of the store; other events wait there.",
            between=(1, 1024),
            default_note="Webhooks:Queue:Workers in each process",
        ),
    ] = None
    rate_per_minute: Annotated[
        float | None,
        about(
            "Posts a minute over all processes and hosts of the store.",
            between=(0.01, 1_000_000),
            unit="per minute",
            default_note="no limit",
        ),
    ] = None
    max_attempts: Annotated[
        int | None,
        about(
            "Attempts before an event is a dead letter.",
            between=(1, 1000),
            default_note="Webhooks:Queue:MaxAttempts",
        ),
    ] = None
    retry_base_seconds: Annotated[
        float | None,
        about(
            "First retry delay, doubled each time and fully jittered.",
            between=(0, 86_400),
            unit="seconds",
            default_note="Webhooks:Queue:RetryBaseSeconds",
        ),
    ] = None
    retry_cap_seconds: Annotated[
        float | None,
        about(
            "Longest retry delay.",
            between=(0, 604_800),
            unit="seconds",
            default_note="Webhooks:Queue:RetryCapSeconds",
        ),
    ] = None
    coalesce: Annotated[
        bool,
        about("Post only the newest waiting event of one data.id and type; implies Ordered."),
    ] = False


class ForwardOptions(Section, frozen=True, kw_only=True):
    """Events posted to applications instead of run by handlers."""

    url: Annotated[
        str,
        about(
            "Address of one application for all events without a handler or route; "
            "the same as --forward-to.",
            form=Form.FORWARD_URL,
        ),
    ] = ""
    secret_env_var: Annotated[
        str,
        about(
            "Variable with the local whsec_ secret that signs the posts.",
            form=Form.ENV_VAR,
            required=True,
        ),
    ] = "SDK_FORWARD_SECRET"
    routes: Annotated[
        tuple[RouteOptions, ...], about("Routes; the first that matches an event forwards it.")
    ] = ()

    @property
    def all_routes(self) -> tuple[RouteOptions, ...]:
        """Return the routes in order, each with its name and variable; the route of Url last."""
        routes = [
            structs.replace(
                route,
                name=route.name or f"route-{number}",
                secret_env_var=route.secret_env_var or self.secret_env_var,
            )
            for number, route in enumerate(self.routes, 1)
        ]
        if self.url:
            last = RouteOptions(name=URL_ROUTE, url=self.url, secret_env_var=self.secret_env_var)
            routes.append(last)
        return tuple(routes)
