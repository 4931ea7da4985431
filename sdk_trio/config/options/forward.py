"""The settings of forwarding: applications of any language that events are posted to. Pure."""

from typing import Annotated

from msgspec import structs

from ..fields import Form, Section, about
from ..secret import Secret

#: The name of the route that ``Forward:Url`` stands for.
URL_ROUTE = "forward-to"


class RouteOptions(Section, frozen=True, kw_only=True):
    """One route: which events it takes, where they go, and how."""

    name: Annotated[
        str,
        about(
            "Name in commands, logs and metrics; when empty, route-N with the number of its place "
            "in the list, from 1.",
            form=Form.SLUG,
        ),
    ] = ""
    types: Annotated[
        tuple[str, ...],
        about(
            "Event types that it takes, as globs: order.*, subscription.c*; unknown types as well.",
            form=Form.HEADER_TEXT,
            required=True,
        ),
    ] = ("*",)
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
    # Without it, a route that somebody else may write would make this process a proxy to anywhere;
    # an application behind a gateway stands on this machine or in its network.
    allow_public_addresses: Annotated[
        bool,
        about(
            "Whether it may post to addresses of the public internet; without it, to this machine "
            "and private networks alone."
        ),
    ] = False
    secret_env_var: Annotated[
        str | None,
        about(
            "Variable with the local whsec_ secret that signs the posts; two with a space "
            "between them while it is rotated.",
            form=Form.ENV_VAR,
            default_note="that of Forward:SecretEnvVar",
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
        bool, about("Events of one data.id are posted one at a time, in order of arrival.")
    ] = False
    concurrency: Annotated[
        int | None,
        about(
            "Events that are posted at once; others wait in the store.",
            between=(1, 1024),
            default_note="Webhooks:Queue:Workers",
        ),
    ] = None


class ForwardOptions(Section, frozen=True, kw_only=True):
    """Events that are posted to applications instead of run by handlers."""

    url: Annotated[
        str,
        about(
            "Address of one application for all events that no handler and no route takes; "
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
        tuple[RouteOptions, ...], about("Routes, the first that matches an event takes it.")
    ] = ()

    @property
    def all_routes(self) -> tuple[RouteOptions, ...]:
        """Return the routes in their order, each with its name and variable; last that of Url."""
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
