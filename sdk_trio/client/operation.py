"""Operations: a row of the table, and how its arguments become a call. Pure.

:func:`prepare` sorts the arguments into path, query and body, and encodes them. It refuses values
that the upstream would silently misread: an empty path parameter (``GET /orders/{id}`` would become
the list), a time without a zone, NaN, a name that is not in the upstream's table.
:func:`signature_of` and :func:`description_of` are for ``help()``.
"""

import difflib
import enum
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import quote
from uuid import UUID

import attrs

from .call import NO_OPTIONS, UNSET, Call, CallOptions, Unset, is_idempotent
from .records import Record
from .stubs import KnownOperation, known_operation

#: Lists in arguments; a text is one value, not a list of characters.
_LISTS = (list, tuple, set, frozenset)


def path_segment(value: object, where: str) -> str:
    """Return ``value`` as one percent-encoded segment of a path; ``where`` is for messages.

    Raises:
        TypeError: not text, an integer, a UUID or an enumeration of these.
        ValueError: empty, or a segment of dots, which servers and proxies remove, so that the
            request would reach another route.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    # To Python a Boolean is an integer; in a path it is never an id, and always a mistake.
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(
            f"{where} must be text, an integer or a UUID, not {_kind(value)}: "
            "it becomes part of the path"
        )
    text = str(value)
    if text in ("", ".", ".."):
        raise ValueError(f"{where} is {text!r}: the path would be that of another operation")
    # Slashes are also encoded: an id with a slash would name another resource (RFC 3986, 3.3).
    return quote(text, safe="")


def query_pairs(
    fields: Mapping[str, object] | Iterable[tuple[str, object]],
) -> Iterator[tuple[str, str]]:
    """Yield the query's pairs of text in order.

    None is omitted, also in lists. A list repeats its key, a mapping becomes ``key[inner]`` for
    each of its members (the upstream's ``metadata``), a Boolean is ``true`` or ``false``, a date or
    time is ISO 8601.

    Raises:
        TypeError, ValueError: a value has no form in a query.
    """
    for key, value in fields.items() if isinstance(fields, Mapping) else fields:
        if isinstance(value, Mapping):
            yield from query_pairs({f"{key}[{inner}]": item for inner, item in value.items()})
        elif isinstance(value, _LISTS):
            yield from ((key, _query_text(item, key)) for item in value if item is not None)
        elif value is not None:
            yield key, _query_text(value, key)


def json_value(value: object, where: str = "body") -> object:
    """Return ``value`` as plain JSON values; ``where`` names the value in messages.

    None stays (it clears a field of the upstream's record). Records, mappings, lists, sets,
    enumerations, UUIDs, decimals (exactly, as text), dates and times are converted.

    Raises:
        TypeError, ValueError: a value has no form in JSON.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Record):
        # It came from the upstream as JSON, so it needs no conversion.
        return value.raw
    if isinstance(value, Mapping):
        return {_key(key, where): json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, _LISTS):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            # Python's encoder would write NaN, which JSON does not have (RFC 8259, 6).
            raise ValueError(f"{where} is {value}: JSON has no such number")
        return value
    return _scalar_text(value, where, "JSON")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty text."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _query_text(value: object, where: str) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        # As in JSON. Python's spelling, True, would be a text to the upstream.
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: it must be a finite number")
    if isinstance(value, str | int | float):
        return str(value)
    return _scalar_text(value, where, "a query")


def _scalar_text(value: object, where: str, place: str) -> str:
    if isinstance(value, datetime):
        # The upstream would assume its own zone, hours off, and the answer would look right.
        if value.tzinfo is None:
            raise ValueError(
                f"{where} is {value.isoformat()}, a time without a zone: "
                "add one, as in datetime.now(UTC)"
            )
        return value.isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    # A decimal is sent as text: the upstream would round a number to a float.
    if isinstance(value, UUID | Decimal):
        return str(value)
    raise TypeError(f"{where} is {_kind(value)}, which has no form in {place}: convert it first")


def _key(key: object, where: str) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}: JSON keys must be text")
    return key


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"a {name}" if name[:1].lower() not in "aeiou" else f"an {name}"


_SPECIFICATION = re.compile(r"(GET|POST|PATCH|PUT|DELETE) (/\S*)")
_PARAMETER = re.compile(r"{(\w+)}")

#: Methods whose arguments are a JSON body by default.
BODY_METHODS = frozenset({"POST", "PATCH", "PUT"})


class OperationAnswer(enum.StrEnum):
    """The content of an operation's successful answer."""

    RECORD = "record"
    """One JSON object."""
    RECORDS = "records"
    """A JSON array of objects."""
    PAGE = "page"
    """One page of a list: ``{items, pagination: {total_count, max_page}}``."""
    CURSOR_PAGE = "cursor page"
    """As PAGE, or ``{items, pagination: {has_next_page}}`` if the query requests that."""
    JSON = "json"
    """Any JSON, or nothing."""
    NOTHING = "nothing"
    """No body, or one without information."""
    CSV = "csv"
    """A CSV file of any length, read as a stream."""


class Body(enum.StrEnum):
    """The form in which arguments other than path parameters are sent."""

    JSON = "json"
    """A JSON object."""
    FORM = "form"
    """An HTML form (``application/x-www-form-urlencoded``), as in OAuth 2."""
    NONE = "none"
    """In the query, for GET and DELETE; other methods take no arguments."""


class Pagination(enum.StrEnum):
    """The method of requesting further pages of a list."""

    NONE = "none"
    """Not paginated: the answer is complete."""
    NUMBERED = "page/limit"
    """``page`` from 1 up to the answer's ``max_page``."""
    CURSOR = "cursor"
    """``page`` from 1 while the answer's ``has_next_page`` is true, or NUMBERED."""


_PAGINATION = {
    OperationAnswer.PAGE: Pagination.NUMBERED,
    OperationAnswer.CURSOR_PAGE: Pagination.CURSOR,
}


@attrs.frozen
class Operation:
    """One row of the table.

    ``resource`` is the resource's path in the client (``customer_portal.orders``), ``name`` the
    operation's name there. ``path`` is exact, below ``Sdk:BasePath``: the upstream redirects a path
    that lacks its trailing slash, and redirects are not followed. ``body`` is the form of the
    arguments other than path parameters. ``idempotent``: it may be executed twice without harm, by
    its method or because this operation is known to be harmless.
    """

    resource: str
    name: str
    method: str
    path: str
    answer: OperationAnswer
    body: Body
    idempotent: bool

    @property
    def full_name(self) -> str:
        """Return the dotted name, such as ``orders.list``."""
        return f"{self.resource}.{self.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the path's parameters, in order."""
        return tuple(_PARAMETER.findall(self.path))

    @property
    def known(self) -> KnownOperation | None:
        """Return the stub's entry; None for a row that the upstream's client lacks."""
        return known_operation(self.full_name)

    @property
    def pagination(self) -> Pagination:
        """Return how further pages of a list are requested."""
        return _PAGINATION.get(self.answer, Pagination.NONE)

    def filled_path(self, values: Mapping[str, object]) -> str:
        """Return the path with ``values`` in place of its parameters, each percent-encoded.

        Raises:
            TypeError, ValueError: a value is None, empty or otherwise invalid in a path.
        """
        return _PARAMETER.sub(
            lambda match: path_segment(values[match[1]], f"{self.full_name}({match[1]}=)"),
            self.path,
        )


class UnknownArgumentError(TypeError):
    """An operation got an unknown argument; nothing was sent.

    ``reason`` names the argument; the message adds how to pass it anyway in Python.
    """

    def __init__(self, reason: str, way: str) -> None:
        super().__init__(f"{reason} ({way})")
        self.reason = reason


def operation(
    specification: str,
    answer: OperationAnswer,
    *,
    resource: str = "",
    name: str = "",
    body: Body | None = None,
    idempotent: bool | None = None,
) -> Operation:
    """Create a row from ``"METHOD /path/{parameter}"``.

    ``body`` and ``idempotent`` follow from the method unless given (POST, PATCH and PUT take JSON;
    GET, PUT and DELETE are idempotent).

    Raises:
        ValueError: the text does not have this form.
    """
    match = _SPECIFICATION.fullmatch(specification)
    if match is None:
        raise ValueError(f"{specification!r} is not 'METHOD /path/{{parameter}}'")
    method, path = match.groups()
    return Operation(
        resource=resource,
        name=name,
        method=method,
        path=path,
        answer=answer,
        body=(Body.JSON if method in BODY_METHODS else Body.NONE) if body is None else body,
        idempotent=is_idempotent(method, declared=idempotent),
    )


def prepare(
    operation: Operation,
    positional: Sequence[object] = (),
    fields: Mapping[str, object] | None = None,
    *,
    body: object = UNSET,
    query: object = None,
    options: CallOptions = NO_OPTIONS,
    is_checked: bool = True,
) -> Call:
    """Create a call of an operation: sort its arguments into path, query and body.

    Args:
        operation: the row.
        positional: values of the path's parameters, in order.
        fields: path parameters by name; all others go into the body if the operation takes one,
            otherwise into the query.
        body: the body, to which fields are added if it is a mapping. Its names are not checked.
        query: a mapping: added to the query from the fields; its names are not checked. Anything
            else: the value of the upstream's own field of this name, which its lists use for
            searches.
        options: the options of the call.
        is_checked: whether ``fields`` must be in the table.

    Raises:
        TypeError: a path parameter is missing, given twice, or one too many, or a field is unknown
            (:class:`UnknownArgumentError`).
        ValueError: a value cannot be sent.
    """
    rest = dict(fields or {})
    path = operation.filled_path(_path_values(operation, positional, rest))
    # Lists of the upstream have a search parameter named "query", so the type of the value decides.
    in_query = dict(query) if isinstance(query, Mapping) else {}
    if query is not None and not isinstance(query, Mapping):
        rest["query"] = query
    # Only names are checked. The upstream adds values faster than this client, and refuses wrong
    # ones itself (docs/adr/0030-generated-types.md).
    if is_checked and operation.known is not None:
        _check_known(operation, operation.known, rest)
    if operation.body is not Body.NONE and isinstance(body, Unset):
        body, rest = rest, {}
    elif operation.body is not Body.NONE and isinstance(body, Mapping):
        _check_given_once(operation, body, rest)
        body, rest = {**body, **rest}, {}
    if rest and operation.method in BODY_METHODS:
        _raise_unexpected_fields(operation, rest)
    json, form = _body_parts(operation, body)
    # The row is more precise than the method: a POST that only requests a redelivery may be
    # repeated. Passed as an option, so the caller's own takes precedence.
    if operation.idempotent != is_idempotent(operation.method, declared=None):
        options = CallOptions(idempotent=operation.idempotent).merged_with(options)
    return Call(
        method=operation.method,
        path=path,
        name=operation.full_name,
        query=tuple(query_pairs(in_query | rest)),
        json=json,
        form=form,
        options=options,
    )


def _body_parts(
    operation: Operation, body: object
) -> tuple[object, tuple[tuple[str, str], ...] | None]:
    """Return the body as JSON and as form fields; at most one of them is set."""
    if isinstance(body, Unset):
        return UNSET, None
    if operation.body is not Body.FORM:
        return json_value(body), None
    if not isinstance(body, Mapping):
        raise TypeError(f"{operation.full_name}() sends a form: body= must be a mapping")
    # A form is encoded like a query (application/x-www-form-urlencoded has the same syntax).
    return UNSET, tuple(query_pairs(body)) or None


def _path_values(
    operation: Operation, positional: Sequence[object], fields: dict[str, object]
) -> dict[str, object]:
    """Take the path parameters from ``positional`` and ``fields``, leaving the rest in it."""
    names = operation.parameters
    if len(positional) > len(names):
        takes = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise TypeError(
            f"{operation.full_name}() got {len(positional)} positional arguments, "
            f"but its path takes {takes}; pass other fields by name"
        )
    values = dict(zip(names, positional, strict=False))
    twice = [name for name in values if name in fields]
    if twice:
        raise TypeError(f"{operation.full_name}() got the path parameter {twice[0]!r} twice")
    for name in names[len(positional) :]:
        if name not in fields:
            _raise_missing(operation, name, fields)
        values[name] = fields.pop(name)
    return values


def _raise_missing(operation: Operation, name: str, fields: Mapping[str, object]) -> NoReturn:
    others = [field for field in fields if field not in operation.parameters]
    # Usually the name is from another operation: customer_id= where the path has {id}.
    meant = next((f for f in others if f.endswith(f"_{name}") or did_you_mean(f, [name])), None)
    hint = f"; did you mean {name}= by {meant}=?" if meant else ""
    raise TypeError(
        f"{operation.full_name}() needs the path parameter {name!r} of {operation.path}{hint}"
    )


def _check_known(operation: Operation, known: KnownOperation, given: Mapping[str, object]) -> None:
    """Refuse names that the upstream would ignore: a misspelt filter would return everything."""
    if known.is_open or given.keys() <= known.fields.keys():
        return
    for name in given:
        # ``metadata[plan]`` is a member of the parameter ``metadata``.
        if name.partition("[")[0] not in known.fields:
            where = "query" if operation.body is Body.NONE else "body"
            raise UnknownArgumentError(
                f"{operation.full_name}() has no argument {name!r}"
                f"{did_you_mean(name, [*known.fields, *_OWN_ARGUMENTS])}",
                f"{where}={{{name!r}: ...}} sends fields that are newer than this client",
            )


def _check_given_once(
    operation: Operation, body: Mapping[str, object], fields: Mapping[str, object]
) -> None:
    for name in fields:
        if name in body:
            raise TypeError(f"{operation.full_name}() got {name!r} twice: by name and in body=")


def _raise_unexpected_fields(operation: Operation, rest: Mapping[str, object]) -> NoReturn:
    names = ", ".join(rest)
    if operation.body is Body.NONE:
        raise TypeError(
            f"{operation.full_name}() takes no fields, but got {names}; "
            "body={...} or query={...} sends fields that are newer than this client"
        )
    raise TypeError(
        f"{operation.full_name}() got fields ({names}) and a body= that is not a mapping: "
        "pass only one of them"
    )


# --- help() and signatures ----------------------------------------------------------------------

#: The arguments of every operation besides the upstream's own parameters.
_OWN_ARGUMENTS = ("query", "body", "options")


def signature_of(operation: Operation) -> inspect.Signature:
    """Return the operation's real parameters: for ``help()``, IPython and tests."""
    known = operation.known
    if known is None:
        names = dict.fromkeys(operation.parameters, ("Any", True))
        return inspect.Signature([*_parameters(operation, names), _ANY_FIELD])
    parameters = list(_parameters(operation, known.fields))
    if known.is_open:
        parameters.append(_ANY_FIELD)
    return inspect.Signature(parameters, return_annotation=_Text(known.returns))


class _Text(str):
    """A type as text, shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_ANY_FIELD = inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD, annotation=Any)


def _parameters(
    operation: Operation, fields: Mapping[str, tuple[str, bool]]
) -> Iterator[inspect.Parameter]:
    # In a query None means "omitted", in a body it clears the field, so only there "not given"
    # needs another value.
    unset = UNSET if operation.body is not Body.NONE else None
    for name, (kind, is_required) in fields.items():
        is_path = name in operation.parameters
        yield inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if is_path else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required else unset,
            annotation=_Text(kind),
        )
    own: tuple[tuple[str, str, object], ...] = (
        ("query", "Mapping[str, Any] | None", None),
        ("body", "Mapping[str, Any]", UNSET),
        ("options", "CallOptions", NO_OPTIONS),
    )
    for name, kind, default in own:
        if name not in fields and (name != "body" or operation.method in BODY_METHODS):
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_Text(kind)
            )


def description_of(operation: Operation) -> str:
    """Describe in plain text what the operation does and its arguments."""
    known = operation.known
    lines = [] if known is None else [known.summary, ""]
    lines.append(f"{operation.method} {operation.path}")
    if known is not None and known.scopes:
        lines.append(f"Scopes: {', '.join(known.scopes)}")
    if operation.pagination is not Pagination.NONE:
        lines.append(
            f"A list in pages ({operation.pagination}): iterate over the call for every record, "
            "over its pages() for batches"
        )
    lines.append(f"Signature: {signature_of(operation)}")
    return "\n".join(lines)
