"""The settings of sources: senders other than the upstream, with the same inbox. Pure."""

from typing import Annotated

from ..fields import Form, HmacAlgorithm, HmacEncoding, Section, SourceScheme, about
from ..secret import Secret

_OF_SCHEME = "that of Scheme"


class SourceOptions(Section, frozen=True, kw_only=True):
    """One source: its address, how it signs, and where its deliveries name their event."""

    name: Annotated[
        str,
        about("Name in handlers, commands, logs and metrics.", form=Form.SLUG, required=True),
    ] = ""
    path: Annotated[
        str | None,
        about(
            "Route that receives its deliveries.",
            form=Form.RECEIVER_ROUTE,
            default_note="/hooks/ and Name",
        ),
    ] = None
    scheme: Annotated[
        SourceScheme,
        about("How it signs; Hmac takes the settings from Header to Timestamp."),
    ] = SourceScheme.STANDARD_WEBHOOKS
    secrets: Annotated[
        tuple[Secret, ...],
        about("Active secrets; verification passes if any one matches (rotation)."),
    ] = ()
    secret_env_var: Annotated[
        str | None,
        about(
            "Variable with its secret, in addition to Secrets; two with a space between them while "
            "it is rotated.",
            form=Form.ENV_VAR,
        ),
    ] = None
    tolerance_seconds: Annotated[
        int,
        about(
            "Maximum age of the signed timestamp, in either direction; senders that sign none "
            "ignore it.",
            minimum=1,
            unit="seconds",
        ),
    ] = 300
    # The places in a delivery that name its event. Those of a scheme are constants of this package;
    # a sender with another envelope needs other ones.
    type: Annotated[
        str | None,
        about(
            "Place of the event type: a header, HEADER:PART, or a JSON pointer into the body.",
            form=Form.PLACE,
            default_note=_OF_SCHEME,
        ),
    ] = None
    subject: Annotated[
        str | None,
        about(
            "Place of the id of the object that an event is about, for order and coalescing.",
            form=Form.PLACE,
            default_note=_OF_SCHEME,
        ),
    ] = None
    data: Annotated[
        str | None,
        about(
            "JSON pointer to the part of the body that is decoded into a handler's class.",
            form=Form.POINTER,
            default_note=_OF_SCHEME,
        ),
    ] = None
    # Only for Hmac.
    header: Annotated[
        str | None,
        about("Scheme Hmac: the header with the signature.", form=Form.HEADER),
    ] = None
    algorithm: Annotated[
        HmacAlgorithm | None,
        about("Scheme Hmac: the hash function.", default_note="Sha256"),
    ] = None
    encoding: Annotated[
        HmacEncoding | None,
        about("Scheme Hmac: how the signature is written.", default_note="Hex"),
    ] = None
    prefix: Annotated[
        str | None,
        about(
            "Scheme Hmac: the text before each signature, such as sha256= or v1=; other entries of "
            "the header are ignored.",
            form=Form.HEADER_TEXT,
        ),
    ] = None
    signed_content: Annotated[
        str | None,
        about(
            "Scheme Hmac: the signed text, with {body}, {timestamp} and {id}, as in "
            "v0:{timestamp}:{body}.",
            default_note="{body}",
        ),
    ] = None
    id: Annotated[
        str | None,
        about(
            "Scheme Hmac: place of the event's id.",
            form=Form.PLACE,
            default_note="a digest of the body",
        ),
    ] = None
    timestamp: Annotated[
        str | None,
        about(
            "Scheme Hmac: place of the time of the attempt: Unix seconds, milliseconds, or RFC "
            "3339.",
            form=Form.PLACE,
            default_note="none: it is not checked",
        ),
    ] = None

    @property
    def route(self) -> str:
        """Return the route that receives its deliveries."""
        return self.path or f"/hooks/{self.name}"


#: The settings that only Scheme Hmac has.
OF_HMAC = ("header", "algorithm", "encoding", "prefix", "signed_content", "id", "timestamp")
