"""Methods of a store made of functions of a transaction.

``get = on_reader(reads.get)`` in the body of a :class:`SqlPart` is the method ``get`` with the
arguments of ``reads.get`` after the transaction. ``storage.ports`` has the contract; cancellation
is as in the inbox. Arguments are read in another thread, so a method whose caller may change a list
meanwhile is written out, and copies it.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...base.text import storable
from ..admission import LeaseTerms
from .dialect import Reads, SqlTransaction, Writes

P = ParamSpec("P")
T = TypeVar("T")


class SqlPart:
    """A part of a SQL store.

    Args:
        terms: the owner and the periods.
        commits: commits the changes.
        readers: run the queries.
    """

    def __init__(self, terms: LeaseTerms, commits: Writes, readers: Reads) -> None:
        self._terms = terms
        self._commits = commits
        self._readers = readers

    async def _read(self, query: Callable[[SqlTransaction], T]) -> T:
        return await self._readers.run(query)


def on_reader(
    query: Callable[Concatenate[SqlTransaction, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method that runs ``query`` on a connection that reads."""

    @wraps(query)
    async def method(self: SqlPart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given: Any = storable([args, kwargs])
        return await self._read(lambda tx: query(tx, *given[0], **given[1]))

    return method


def committed(
    work: Callable[Concatenate[SqlTransaction, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method that runs ``work`` and returns its result when that is committed."""

    @wraps(work)
    async def method(self: SqlPart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._commits.submit(lambda tx: work(tx, *args, **kwargs))

    return method


def committed_by_owner(
    work: Callable[Concatenate[SqlTransaction, LeaseTerms, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method as :func:`committed` does; ``work`` gets the terms of the store, too."""

    @wraps(work)
    async def method(self: SqlPart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        terms = self._terms
        return await self._commits.submit(lambda tx: work(tx, terms, *args, **kwargs))

    return method
