"""A group with one exception represents that exception."""

import pytest

from sdk_trio.errors import only_member

ONE = ValueError("one")
TWO = ExceptionGroup("two", [ONE, KeyError("other")])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ONE, ONE),
        (ExceptionGroup("of one", [ONE]), ONE),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [ONE])]), ONE),
        (TWO, TWO),
        (ExceptionGroup("outer", [TWO]), TWO),
        (BaseExceptionGroup("stop", [stop := KeyboardInterrupt()]), stop),
    ],
)
def test_the_only_member_of_nested_groups_of_one(error, expected):
    assert only_member(error) is expected
