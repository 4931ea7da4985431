"""Exceptions that resist being described, divided or compared; each maker returns a new one."""

import asyncio
from collections.abc import Callable

import trio

from sdk_trio.errors import RetryLater


def raising(error: type[BaseException] = ValueError) -> Callable[..., object]:
    """Return a method that always raises."""

    def method(*arguments: object, **options: object) -> object:
        raise error("from a method of the exception")

    return method


def made(name: str, base: type = Exception, meta: type = type, **members: object) -> type:
    return meta(name, (base,), members)


class _NameRaises(type):
    __name__ = property(raising())  # type: ignore[assignment]


class _NameIsNumber(type):
    __name__ = 5  # type: ignore[assignment]


class _Compares(type):
    __eq__ = raising()  # type: ignore[assignment]
    __hash__ = raising()  # type: ignore[assignment]
    __instancecheck__ = raising()  # type: ignore[assignment]
    __subclasscheck__ = raising()  # type: ignore[assignment]
    __getattribute__ = raising()  # type: ignore[assignment]


class SlottedError(Exception):
    __slots__ = ("detail",)


class OddText(str):
    encode = __str__ = __format__ = __len__ = replace = raising()  # type: ignore[assignment]


def claims(kind: type) -> BaseException:
    return made("Claims", __class__=property(lambda self: kind))()


def group(**members: object) -> BaseException:
    kind = made("Group", BaseExceptionGroup, **members)
    return kind("several", [ValueError("one"), SystemExit(3)])  # type: ignore[no-any-return]


def nested(depth: int) -> BaseException:
    error: Exception = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("around", [error])
    return error


def circle(attribute: str) -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    setattr(first, attribute, second)
    setattr(second, attribute, first)
    return first


def changed(**members: object) -> BaseException:
    error = RetryLater(1)
    vars(error).update(members)
    return error


def leaked() -> BaseException:
    """Return the Cancelled of a scope that has ended."""
    kept = []

    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                kept.append(error)

    trio.run(main)
    return kept[0]


_LEAKED = leaked()

#: Exceptions of a handler, by a name that is also a webhook id.
ODD_ERRORS: dict[str, Callable[[], BaseException]] = {
    "traceback-raises": lambda: made("T", __traceback__=property(raising()))(),
    "traceback-exits": lambda: made("T", __traceback__=property(raising(SystemExit)))(),
    "traceback-is-number": lambda: made("T", __traceback__=5)(),
    "with-traceback-raises": lambda: made("T", with_traceback=raising())(),
    "name-raises": lambda: made("N", meta=_NameRaises)(),
    "name-is-number": lambda: made("N", meta=_NameIsNumber)(),
    "metaclass-raises": lambda: made("M", meta=_Compares)(),
    "class-raises": lambda: made("C", __class__=property(raising()))(),
    "class-interrupts": lambda: made("C", __class__=property(raising(KeyboardInterrupt)))(),
    "claims-group": lambda: claims(BaseExceptionGroup),
    "claims-retry-later": lambda: claims(RetryLater),
    "claims-cancelled": lambda: claims(trio.Cancelled),
    "getattribute-raises": lambda: made("G", __getattribute__=raising())(),
    "getattribute-exits": lambda: made("G", __getattribute__=raising(SystemExit))(),
    "derive-raises": lambda: group(derive=raising()),
    "derive-exits": lambda: group(derive=raising(SystemExit)),
    "derive-interrupts": lambda: group(derive=raising(KeyboardInterrupt)),
    "split-exits": lambda: group(split=raising(SystemExit)),
    "members-raise": lambda: group(exceptions=property(raising())),
    "seconds-is-text": lambda: changed(seconds="soon"),
    "seconds-missing": lambda: made("R", RetryLater, __init__=lambda self: None)(),
    "seconds-raises": lambda: made(
        "R", RetryLater, seconds=property(raising(SystemExit)), __init__=lambda self: None
    )(),
    "seconds-not-a-number": lambda: changed(seconds=float("nan")),
    "str-raises": lambda: made("S", __str__=raising())(),
    "str-exits": lambda: made("S", __str__=raising(SystemExit))(),
    "str-returns-number": lambda: made("S", __str__=lambda self: 5)(),
    "str-is-odd": lambda: made("S", __str__=lambda self: OddText("x"))(),
    "str-is-no-utf8": lambda: ValueError("caf\udce9"),
    "repr-raises": lambda: made("S", __repr__=raising())(),
    "name-is-odd": lambda: type(OddText("odd"), (Exception,), {})(),
    "notes-raise": lambda: made("O", __notes__=property(raising()))(),
    "cause-raises": lambda: made("O", __cause__=property(raising()))(),
    "context-raises": lambda: made("O", __context__=property(raising(SystemExit)))(),
    "cause-is-circle": lambda: circle("__cause__"),
    "context-is-circle": lambda: circle("__context__"),
    "eq-and-hash-raise": lambda: made("E", __eq__=raising(), __hash__=raising())(),
    "bool-and-len-raise": lambda: made("B", __bool__=raising(), __len__=raising())(),
    "is-false": lambda: made("B", __bool__=lambda self: False)(),
    "setattr-raises": lambda: made("A", __setattr__=raising())(),
    "base-exception": lambda: made("Own", BaseException)("mine"),
    "system-exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator-exit": GeneratorExit,
    "asyncio-cancelled": asyncio.CancelledError,
    "stop-iteration": StopIteration,
    "stop-async-iteration": StopAsyncIteration,
    "leaked-cancelled": lambda: _LEAKED,
    "group-of-cancelled": lambda: BaseExceptionGroup("g", [_LEAKED, ValueError("own")]),
    "slots": SlottedError,
    "nested-5000": lambda: nested(5000),
    "long": lambda: ValueError("x" * 50_000),
}
