"""The move of a whole store from one engine to the other: ``storage migrate``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ..errors import StorageError

if TYPE_CHECKING:
    from .engines.postgres_address import PostgresAddress


class TransferError(StorageError):
    """The move cannot begin, or its rows differ."""


@attrs.frozen(kw_only=True)
class TransferPlan:
    """The findings before a move."""

    source: str
    target: str
    size: int
    rows: Mapping[str, int]
    left_behind: Sequence[str]
    copied: str | None = None
    refusal: str | None = None


@attrs.frozen(kw_only=True)
class Transferred:
    """The rows that were moved and compared, by table, and the tables that were left."""

    rows: Mapping[str, int]
    left_behind: Sequence[str]


def plan_transfer(file: Path, address: "PostgresAddress") -> TransferPlan:
    """Look at both stores and change nothing; blocks."""
    raise TransferError(f"{file} cannot be moved to {address.place} yet")


def transfer(
    file: Path,
    address: "PostgresAddress",
    *,
    anew: bool,
    report: Callable[[str, str, int, int], None],
) -> Transferred:
    """Copy the store in ``file`` to ``address``; blocks."""
    raise TransferError(f"{file} cannot be moved to {address.place} yet")
