"""The table of the upstream API's operations, one row each.

The rows are attributes of the resource classes in this folder. A row names the form of the answer,
then method and exact path below ``Sdk:BasePath``::

    class Orders(Resource[Mode], path="orders"):
        list = pages("GET /orders/")
        get = record("GET /orders/{id}")

so that a type checker knows the result of ``await client.orders.get(id)``. Names, including path
parameters, are those of the upstream's own Python client: ``{id_path}`` is used if a body has its
own field ``id``. To add an operation, add its row; a test compares each with the requests of the
upstream's client.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import EXIT_USAGE, SdkError
from ..operation import Body, Operation, OperationAnswer, Pagination
from ..resources import BoundEndpoint, BoundOperation, Nested, Resource
from .table import Resources

__all__ = [
    "OperationAnswer",
    "Body",
    "OPERATIONS",
    "Operation",
    "Pagination",
    "Resources",
    "UnknownOperationError",
    "bound",
    "endpoints",
    "find_operation",
]


def endpoints(resource: type[Resource[Any]] = Resources) -> Iterator[BoundEndpoint]:
    """Yield every row below ``resource``: its own first, then those of nested resources."""
    for value in vars(resource).values():
        if isinstance(value, BoundEndpoint):
            yield value
    for value in vars(resource).values():
        if isinstance(value, Nested):
            yield from endpoints(value.resource)


#: Every operation by its full name (``orders.list``).
OPERATIONS: dict[str, Operation] = {
    endpoint.operation.full_name: endpoint.operation for endpoint in endpoints()
}


class UnknownOperationError(SdkError, LookupError):
    """No operation has this name; ``near`` lists similar ones."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, near: Sequence[str]) -> None:
        self.near: tuple[str, ...] = tuple(near)
        super().__init__(message)


def find_operation(words: str | Sequence[str]) -> Operation:
    """Return the operation with a name like ``"orders list"`` or ``"customer-portal.orders.get"``.

    Only letters and digits count, so spaces, dots, hyphens and underscores are equivalent.

    Raises:
        UnknownOperationError: there is none; the message names similar ones.
    """
    text = (words if isinstance(words, str) else " ".join(words)).strip()
    found = _BY_LETTERS.get(_letters(text))
    if found is None:
        raise _unknown(text)
    return found


def bound(resources: Resource[Any], operation: Operation) -> BoundOperation[..., Any]:
    """Return the method of ``resources`` (a client) that calls ``operation``."""
    # Through the attributes, so that the command line calls the same method as a program.
    method = functools.reduce(getattr, operation.full_name.split("."), resources)
    assert isinstance(method, BoundOperation)
    return method


#: The most operations in a message that suggests none in particular.
_SHOWN = 12


def _letters(name: str) -> str:
    """Return the letters and digits of a name; people confuse dots, hyphens and underscores."""
    return re.sub(r"[\s./_-]+", "", name.lower())


_BY_LETTERS = {_letters(name): row for name, row in OPERATIONS.items()}


def _unknown(text: str) -> UnknownOperationError:
    by_resource: dict[str, list[str]] = {}
    for row in OPERATIONS.values():
        by_resource.setdefault(row.resource, []).append(row.full_name)
    if not text:
        return UnknownOperationError(
            f"name an operation; the resources are: {_listed(by_resource)}", tuple(by_resource)
        )
    letters = _letters(text)
    below = [name for name in OPERATIONS if _letters(name).startswith(letters)]
    # The portal has resources and no operations, so no row names it.
    if any(_letters(resource) == letters for resource in {*by_resource, "customer_portal"}):
        return UnknownOperationError(f"{text} is a resource; it has: {_listed(below)}", below)
    # For the beginning of a name, list its completions; only otherwise guess.
    near = below or _near(letters, by_resource)
    shown = _listed(near[:_SHOWN]) + (", ..." if len(near) > _SHOWN else "")
    hint = f"; did you mean {shown}?" if near else ""
    return UnknownOperationError(f"no operation is named {text!r}{hint}", near)


def _near(letters: str, by_resource: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names nearest to ``letters``: in the resource it starts with, or anywhere."""
    starts = [resource for resource in by_resource if letters.startswith(_letters(resource))]
    if not starts:
        names = {_letters(name): name for name in OPERATIONS}
        return [names[match] for match in difflib.get_close_matches(letters, names, n=3)]
    longest = max(starts, key=len)
    resource = _letters(longest)
    word = letters.removeprefix(resource)
    siblings = {_letters(name).removeprefix(resource): name for name in by_resource[longest]}
    # A word within a longer name is the most likely match: "list" in "list_webhook_endpoints".
    holding = [name for rest, name in siblings.items() if word in rest]
    close = [siblings[match] for match in difflib.get_close_matches(word, siblings, n=3)]
    return holding or close or list(siblings.values())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.replace(".", " ") for name in names)
