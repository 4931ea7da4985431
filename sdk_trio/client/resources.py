"""Resources: the rows of the table as methods, ``await client.orders.get(id)``.

A resource class consists of rows, each a :class:`BoundEndpoint`. That is a descriptor: read from an
instance it gives a :class:`BoundOperation`, which can be called. Its result depends on the row's
answer, and type checkers know it. ``record`` rows are awaited for a
:class:`~sdk_trio.client.records.Record`, ``pages`` rows return a :class:`Listing`, ``csv`` rows a
:class:`CsvExport`.
"""

import copy
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import attrs
import httpx

from .answers import decode_json, unexpected
from .call import NO_OPTIONS, UNSET, Call, CallOptions, OperationSender, OptionFields
from .errors import without_frames
from .export import CsvExport
from .operation import (
    Body,
    Operation,
    OperationAnswer,
    description_of,
    operation,
    prepare,
    signature_of,
)
from .pages import Item, Listing, Page
from .records import Record, wrap

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result", covariant=True)
Mode = TypeVar("Mode")
Later = Coroutine[Any, Any, Result]


@attrs.frozen
class WithResponse(Generic[T]):
    """An operation's result and its HTTP response, with status and headers."""

    result: T
    response: httpx.Response


# A record is only its JSON, and a list or an export makes its calls later. So the response is
# recorded in passing, and no result has to carry it.
class _Recording:
    """A sender that remembers the last response of another one."""

    def __init__(self, sender: OperationSender) -> None:
        self._sender = sender
        self.response: httpx.Response | None = None
        self.stream = sender.stream

    async def send(self, call: Call) -> httpx.Response:
        self.response = await self._sender.send(call)
        return self.response


class Awaiting:
    """Marker for type checkers: the operations are awaited."""


class Blocking:
    """Marker for type checkers: the operations block."""


class Resource(Generic[Mode]):
    """Base of the resources: related operations, and the sender of their calls.

    Subclasses declare their path in the client: ``class Orders(Resource[Mode], path="orders")``.
    """

    path: ClassVar[str] = ""

    def __init__(
        self,
        sender: OperationSender,
        options: CallOptions = NO_OPTIONS,
        method: "Callable[..., OperationMethod[..., Any]] | None" = None,
    ) -> None:
        self._sender = sender
        self._options = options
        # The class of the methods: awaited (BoundOperation), or blocking.
        self._method = BoundOperation if method is None else method

    def __init_subclass__(cls, *, path: str) -> None:
        super().__init_subclass__()
        cls.path = path
        for name, value in vars(cls).items():
            if isinstance(value, BoundEndpoint):
                # A row takes its name from the attribute and its path from the class.
                value.operation = attrs.evolve(value.operation, resource=path, name=name)

    def with_options(
        self, options: CallOptions = NO_OPTIONS, **fields: Unpack[OptionFields]
    ) -> Self:
        """Return a view of this resource or client with other options for its calls.

        ``client.with_options(max_retries=0, total_timeout=2).orders.list()``. A view shares
        everything with its client: connections, budget, breakers, limits, counters. ``fields`` are
        those of :class:`CallOptions`; options of a single call take precedence.
        """
        view = copy.copy(self)
        view._options = self._options.merged_with(options).merged_with(CallOptions(**fields))
        return view

    def __repr__(self) -> str:
        return f"<resource {self.path or 'client'}>"


# Type checkers read the table's stub, which types each attribute, so the two descriptors below need
# no types.


class Nested:
    """A resource as the attribute of another: ``client.customers.members``."""

    def __init__(self, resource: type[Resource[Any]]) -> None:
        self.resource = resource

    def __get__(self, instance: Resource[Any] | None, owner: type) -> Any:
        if instance is None:
            return self
        # Created at each access: it holds three references, and a view with other options must not
        # get a cached resource with the old ones.
        return self.resource(instance._sender, instance._options, instance._method)


class BoundEndpoint:
    """One row of the table, as the attribute of a resource class."""

    def __init__(
        self, operation: Operation, receive: Callable[[OperationSender, Call], Any]
    ) -> None:
        self.operation = operation
        self.receive = receive

    def __get__(self, instance: Resource[Any] | None, owner: type) -> Any:
        if instance is None:
            return self
        return instance._method(self, instance._sender, instance._options)


# ``help(client.orders.get)`` shows the upstream's parameters, ``help(BoundOperation)`` the class's
# text. Both read ``__doc__`` and ``__signature__``.
class OfInstance:
    """A descriptor that only instances see; the class keeps its own attribute."""

    def __init__(self, of_class: str | None, of_operation: Callable[[Operation], object]) -> None:
        self._of_class = of_class
        self._of_operation = of_operation

    def __get__(self, instance: "OperationMethod[..., Any] | None", owner: type) -> object:
        if instance is not None:
            return self._of_operation(instance.operation)
        if self._of_class is None:
            raise AttributeError
        return self._of_class


class OperationMethod(Generic[P, Result]):
    """An operation and its sender: the common part of blocking and asynchronous methods.

    ``help()`` and ``inspect.signature`` show the upstream's parameters.
    """

    __signature__: Any = OfInstance(None, signature_of)

    def __init__(
        self,
        endpoint: BoundEndpoint,
        sender: OperationSender,
        options: CallOptions = NO_OPTIONS,
    ) -> None:
        self.operation: Operation = endpoint.operation
        self._receive = endpoint.receive
        self._sender = sender
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call the operation and return its result.

        Raises:
            TypeError: a path parameter is missing, or an argument is unknown.
            ValueError: a value cannot be sent.
            CallError: the call failed; if the result is awaited or iterated, raised only then.
        """
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # error reports include variables: none may hold a body
        result: Result = self._finish(self._receive(self._sender, call))
        return result

    def unchecked(self, *args: object, **kwargs: object) -> Result:
        """Call the operation with any arguments, even without required ones.

        Names are sent unchanged: neither the table nor a type checker checks them.
        """
        try:
            call = self._prepare(args, kwargs, is_checked=False)
        finally:
            del args, kwargs  # error reports include variables
        result: Result = self._finish(self._receive(self._sender, call))
        return result

    def _finish(self, result: Any) -> Any:
        """Convert a coroutine, a listing or an export to what the caller gets."""
        return result

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Return the request for these arguments without sending it."""
        return self._prepare(args, kwargs)

    def _prepare(
        self, path: Sequence[object], named: dict[str, Any], *, is_checked: bool = True
    ) -> Call:
        try:
            return prepare(
                self.operation,
                path,
                named,
                body=named.pop("body", UNSET),
                query=named.pop("query", None),
                options=self._options.merged_with(named.pop("options", NO_OPTIONS)),
                is_checked=is_checked,
            )
        except (TypeError, ValueError) as error:
            # The frames of a failed conversion hold the body, and error reports with variables
            # would include it (docs/adr/0029-client-calls.md).
            raise without_frames(error)
        finally:
            del path, named  # error reports include variables

    async def _send_with_response(self, call: Call) -> WithResponse[Any]:
        recording = _Recording(self._sender)
        result: Any = self._receive(recording, call)
        # It has sent nothing yet, so there is no response.
        if isinstance(result, CsvExport):
            raise TypeError(f"{self.operation.full_name}() is an export: its rows have .response")
        result = await (result.first_page() if isinstance(result, Listing) else result)
        assert recording.response is not None
        return WithResponse(result, recording.response)

    def __repr__(self) -> str:
        row = self.operation
        return f"<operation {row.full_name}({', '.join(row.parameters)}): {row.method} {row.path}>"


class BoundOperation(OperationMethod[P, Result]):
    """A callable operation.

    Path parameters are positional or named. Other keyword arguments go into the query of a GET or
    DELETE (None is omitted, a list repeats its key) and into the JSON body of a write (None is
    null, which clears a field). An unknown name is a ``TypeError`` before anything is sent;
    ``query={...}`` and ``body={...}`` add fields that are newer than this client. ``options=``
    changes this call only.
    """

    __doc__: Any = OfInstance(__doc__, description_of)

    async def raw(self, *args: P.args, **kwargs: P.kwargs) -> httpx.Response:
        """Call the operation and return the response itself, with headers and exact bytes.

        For a list it is one page. Errors are as for the call. Cancellation ends the call; a write
        that was already sent may have been executed.
        """
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # error reports include variables
        return await self._sender.send(call)

    @overload
    async def with_response(
        self: "BoundOperation[P, Later[T]]", *args: P.args, **kwargs: P.kwargs
    ) -> WithResponse[T]: ...
    @overload
    async def with_response(
        self: "BoundOperation[P, Listing[Item]]", *args: P.args, **kwargs: P.kwargs
    ) -> WithResponse[Page[Item]]: ...
    async def with_response(self, *args: Any, **kwargs: Any) -> WithResponse[Any]:
        """Call the operation and return its result together with the response.

        For a list the result is one page. An export's rows already have ``response``. Arguments,
        errors and cancellation are as for the call.
        """
        try:
            call = self._prepare(args, kwargs)
        finally:
            del args, kwargs  # error reports include variables
        return await self._send_with_response(call)


async def receive_record(sender: OperationSender, call: Call) -> Record:
    """Send ``call`` and return its answer's JSON object."""
    response = await sender.send(call)
    document = await decode_json(response, call)
    # Report an unexpected form at once and by name; otherwise an AttributeError would follow
    # somewhere in the program.
    if not isinstance(document, dict):
        del document  # error reports include variables
        raise unexpected(call, "the answer is not a JSON object", response)
    return Record(document, call.name)


async def receive_records(sender: OperationSender, call: Call) -> list[Record]:
    """Send ``call`` and return its answer's JSON array of objects."""
    response = await sender.send(call)
    document = await decode_json(response, call)
    if not isinstance(document, list) or not all(isinstance(item, dict) for item in document):
        del document  # error reports include variables
        raise unexpected(call, "the answer is not a JSON array of objects", response)
    # The call's name identifies the model, which is looked up only if a field is absent.
    return [Record(item, call.name) for item in document]


async def receive_anything(sender: OperationSender, call: Call) -> Any:
    """Send ``call`` and return its answer's JSON with objects as records; None without a body."""
    response = await sender.send(call)
    return wrap(await decode_json(response, call)) if response.content else None


async def receive_nothing(sender: OperationSender, call: Call) -> None:
    """Send ``call``; its answer has no content."""
    await sender.send(call)


_RECEIVERS: dict[OperationAnswer, Callable[[OperationSender, Call], Any]] = {
    OperationAnswer.RECORD: receive_record,
    OperationAnswer.RECORDS: receive_records,
    OperationAnswer.JSON: receive_anything,
    OperationAnswer.NOTHING: receive_nothing,
    OperationAnswer.PAGE: Listing,
    OperationAnswer.CURSOR_PAGE: Listing,
    OperationAnswer.CSV: CsvExport,
}


def row(
    answer: OperationAnswer,
    specification: str,
    *,
    body: Body | None = None,
    idempotent: bool | None = None,
) -> BoundEndpoint:
    """Return a row of the table; the arguments are those of :func:`operation`."""
    made = operation(specification, answer, body=body, idempotent=idempotent)
    return BoundEndpoint(made, _RECEIVERS[answer])


_Row = Callable[..., BoundEndpoint]

#: Rows by the form of the answer: one object, an array of objects, any JSON or none, no content, a
#: list in numbered pages, a list whose pages only show whether there is a next one, a file.
record: _Row = functools.partial(row, OperationAnswer.RECORD)
records: _Row = functools.partial(row, OperationAnswer.RECORDS)
json_endpoint: _Row = functools.partial(row, OperationAnswer.JSON)
empty_endpoint: _Row = functools.partial(row, OperationAnswer.NOTHING)
pages: _Row = functools.partial(row, OperationAnswer.PAGE)
cursor_pages: _Row = functools.partial(row, OperationAnswer.CURSOR_PAGE)
csv: _Row = functools.partial(row, OperationAnswer.CSV)
