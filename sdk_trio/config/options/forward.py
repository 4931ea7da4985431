"""The settings of forwarding: applications of any language that events are posted to. Pure."""

import attrs

from ..fields import Form, about
from ..secret import Secret

#: The name of the route that ``Forward:Url`` stands for.
URL_ROUTE = "forward-to"


@attrs.frozen(kw_only=True)
class RouteOptions:
    """One route: which events it takes, where they go, and how."""

    name: str = attrs.field(
        default="",
        metadata=about(
            "Name in commands, logs and metrics; when empty, route-N with the number of its place "
            "in the list, from 1.",
            form=Form.SLUG,
        ),
    )
    types: tuple[str, ...] = attrs.field(
        default=("*",),
        metadata=about(
            "Event types that it takes, as globs: order.*, subscription.c*; unknown types as well.",
            form=Form.HEADER_TEXT,
            required=True,
        ),
    )
    where: tuple[str, ...] = attrs.field(
        default=(),
        metadata=about(
            "Conditions, all of which must hold: a JSON pointer into the body, =, and a JSON "
            "value or plain text, as in /data/status=paid.",
            form=Form.CONDITION,
        ),
    )
    url: str = attrs.field(
        default="",
        metadata=about(
            "Address of the application: http://, https://, or unix:SOCKET:PATH.",
            form=Form.FORWARD_URL,
            required=True,
        ),
    )
    # Without it, a route that somebody else may write would make this process a proxy to anywhere;
    # an application behind a gateway stands on this machine or in its network.
    allow_public_addresses: bool = attrs.field(
        default=False,
        metadata=about(
            "Whether it may post to addresses of the public internet; without it, to this machine "
            "and private networks alone."
        ),
    )
    secret_env_var: str | None = attrs.field(
        default=None,
        metadata=about(
            "Variable with the whsec_ secret that events are signed with anew; two with a space "
            "between them while it is rotated.",
            form=Form.ENV_VAR,
            default_note="that of Forward:SecretEnvVar",
        ),
    )
    headers: tuple[Secret, ...] = attrs.field(
        default=(),
        metadata=about("Headers to add, each as Name: value."),
    )
    timeout_seconds: float = attrs.field(
        default=15.0,
        metadata=about(
            "Time from the connection to the end of the answer.",
            minimum=0.1,
            maximum=3600,
            unit="seconds",
        ),
    )
    ordered: bool = attrs.field(
        default=False,
        metadata=about("Events of one data.id are posted one at a time, in order of arrival."),
    )
    concurrency: int | None = attrs.field(
        default=None,
        metadata=about(
            "Events that are posted at once; others wait in the store.",
            minimum=1,
            maximum=1024,
            default_note="Webhooks:Queue:Workers",
        ),
    )


@attrs.frozen(kw_only=True)
class ForwardOptions:
    """Events that are posted to applications instead of run by handlers."""

    url: str = attrs.field(
        default="",
        metadata=about(
            "Address of one application for all events that no handler and no route takes; "
            "the same as --forward-to.",
            form=Form.FORWARD_URL,
        ),
    )
    secret_env_var: str = attrs.field(
        default="SDK_FORWARD_SECRET",
        metadata=about(
            "Variable with the whsec_ secret that events are signed with anew.",
            form=Form.ENV_VAR,
            required=True,
        ),
    )
    routes: tuple[RouteOptions, ...] = attrs.field(
        default=(),
        metadata=about("Routes, the first that matches an event takes it."),
    )

    @property
    def all_routes(self) -> tuple[RouteOptions, ...]:
        """Return the routes in their order, each with its name and variable; last that of Url."""
        routes = [
            attrs.evolve(
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
