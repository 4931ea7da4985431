"""A text that must not be shown by accident. Pure."""

from typing import Final, final

MASK: Final = "********"


@final
class Secret:
    """A secret text: ``repr``, ``str`` and ``format`` show a mask, ``reveal()`` the text.

    Two secrets are equal when their texts are. Not for comparing what a sender claims: that takes
    a constant-time comparison of signatures.

    ``made_for_tests`` marks a webhook secret with which no other installation verifies: the
    simulator signs with no other.
    """

    __slots__ = ("_text", "made_for_tests")

    def __init__(self, text: str, *, made_for_tests: bool = False) -> None:
        self._text = text
        self.made_for_tests: bool = made_for_tests

    def reveal(self) -> str:
        """Return the text; every call of this is a place where it could leak."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret('{MASK}')"

    def __str__(self) -> str:
        return MASK

    def __format__(self, specification: str) -> str:
        return format(MASK, specification)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))
