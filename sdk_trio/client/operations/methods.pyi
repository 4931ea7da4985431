"""What the operations of the generated stubs are: their signature, with ``raw`` and its kin."""

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ..blocking import BlockingOperation
from ..resources import BoundOperation

P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)

class asynchronous(Generic[P, Result]):
    """A method that is awaited, or gives what is iterated asynchronously."""

    def __init__(self, function: Callable[Concatenate[Any, P], Result]) -> None: ...
    def __get__(self, instance: object, owner: type) -> BoundOperation[P, Result]: ...

class blocking(Generic[P, Result]):
    """A method of the synchronous client."""

    def __init__(self, function: Callable[Concatenate[Any, P], Result]) -> None: ...
    def __get__(self, instance: object, owner: type) -> BlockingOperation[P, Result]: ...
