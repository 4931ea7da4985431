"""The decorator of the generated stubs: an operation's signature, with ``raw`` and its kin."""

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from ..blocking import BlockingOperation, SyncExport, SyncListing
from ..export import CsvExport
from ..pages import Item, Listing
from ..resources import Awaiting, Blocking, BoundOperation, Later, Resource

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result", covariant=True)

class operation(Generic[P, Result]):
    """A method that is awaited or iterated asynchronously; of the synchronous client, it blocks."""

    def __init__(self, function: Callable[Concatenate[Any, P], Result]) -> None: ...
    @overload
    def __get__(self, instance: Resource[Awaiting], owner: type) -> BoundOperation[P, Result]: ...
    @overload
    def __get__(
        self: operation[P, Listing[Item]], instance: Resource[Blocking], owner: type
    ) -> BlockingOperation[P, SyncListing[Item]]: ...
    @overload
    def __get__(
        self: operation[P, CsvExport], instance: Resource[Blocking], owner: type
    ) -> BlockingOperation[P, SyncExport]: ...
    @overload
    def __get__(
        self: operation[P, Later[T]], instance: Resource[Blocking], owner: type
    ) -> BlockingOperation[P, T]: ...
