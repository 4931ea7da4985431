"""Exceptions of user code, read without running any of that code.

An attribute access, ``isinstance`` or comparison can call code of a class or metaclass:
``__class__``, ``__getattribute__``, ``__traceback__``, ``__name__``. Any of these may raise, or
return anything. The functions here use the interpreter's own descriptors instead. Only
:func:`attempt` calls user code, and catches everything it raises.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

# The descriptors of the built-in classes read an exception's slots; a subclass cannot replace them.
_mro_of: Any = type.__dict__["__mro__"].__get__
_class_name_of: Any = type.__dict__["__name__"].__get__
_traceback_of: Any = BaseException.__dict__["__traceback__"].__get__
_context_of: Any = BaseException.__dict__["__context__"].__get__
_cause_of: Any = BaseException.__dict__["__cause__"].__get__
_members_of: Any = BaseExceptionGroup.__dict__["exceptions"].__get__


def is_a(error: BaseException, kind: type[Any]) -> bool:
    """Return whether the real class of an exception derives from ``kind``; see ``isinstance``."""
    # By identity: a metaclass may define __eq__, and ABCMeta calls even more code.
    return id(kind) in map(id, _mro_of(type(error)))


def type_name(error: BaseException) -> str:
    """Return the name of an exception's real class, as text that can be stored."""
    return _storable(_class_name_of(type(error)))


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Return the frames in an exception's traceback with their lines, the outermost first."""
    trace: TracebackType | None = _traceback_of(error)
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group; empty for other exceptions."""
    members: tuple[BaseException, ...] = ()
    if is_a(error, BaseExceptionGroup):
        members = _members_of(error)
    return members


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Return the leaf exceptions of a group in order; any other exception is its only leaf."""
    # Not recursive: nurseries of a recursive task nest groups as deep as the recursion.
    waiting = [error]
    while waiting:
        found = waiting.pop()
        # No group is empty.
        if members := members_of(found):
            waiting += reversed(members)
        else:
            yield found


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Return an exception and its ``__cause__`` chain; each exception once."""
    # User code can create a cycle by assignment.
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = _cause_of(found)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Return an exception with all members, causes and contexts, recursively; each once."""
    # __context__ and __cause__ can form a cycle, by assignment in user code.
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        further = (*members_of(found), _context_of(found), _cause_of(found))
        waiting += [one for one in further if one is not None]


def message_of(error: BaseException) -> str:
    """Return ``str(error)`` as text that can be stored, or a placeholder with the reason.

    Raises:
        KeyboardInterrupt: an operator pressed Ctrl-C during the call.
    """
    text, failure = attempt(lambda: _storable(str(error)))
    if text is None:
        reason = "" if failure is None else f": its __str__ raised {type_name(failure)}"
        return f"(no text{reason})"
    return text


def attribute_of(error: BaseException, name: str) -> object:
    """Return an attribute of an exception; None if it is missing, or reading it raises.

    Raises:
        KeyboardInterrupt: an operator pressed Ctrl-C during the call.
    """
    return attempt(lambda: getattr(error, name, None))[0]


def attempt(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call user code; return its result and None, or None and the exception.

    Raises:
        KeyboardInterrupt: an operator pressed Ctrl-C during the call.
    """
    try:
        return call(), None
    except BaseException as failure:  # noqa: ASYNC103 - returned, for the caller to judge
        if is_interrupt(failure):
            raise
        return None, failure  # noqa: ASYNC104 - see above


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is an operator's Ctrl-C, not a handler's KeyboardInterrupt.

    Trio raises a real one in its signal handler, so the innermost frame identifies it.
    """
    if not is_a(error, KeyboardInterrupt):
        return False
    innermost: FrameType | None = None
    for frame, _ in frames_of(error):
        innermost = frame
    raising = sys.modules.get("trio._core._ki")
    return innermost is not None and innermost.f_globals is getattr(raising, "__dict__", None)


def _storable(text: str) -> str:
    # Call str's own method: __str__ may return an object of a subclass. The text may hold
    # characters that UTF-8 cannot encode, such as undecodable bytes of a file name.
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")
