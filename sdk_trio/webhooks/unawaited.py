"""Detect coroutines that a handler creates and never awaits.

``services.client.refunds.create(...)`` without ``await`` sends nothing, and Python only warns. A
run that leaves such a coroutine behind has failed: otherwise the event would count as done, and its
effect would be lost.

CPython calls ``warnings._warn_unawaited_coroutine`` when it frees a coroutine that never started.
Reference counting frees it within the run that made it, so a context variable identifies that run,
in child tasks and threads as well. A run costs one list and one write of the variable; an awaited
coroutine costs nothing.

Two kinds cause only Python's warning, because the current run may not be their origin, and failing
it would repeat it. A coroutine in a reference cycle is freed by the garbage collector during any
run. And a library may drop a coroutine of its own.
"""

import gc
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, CoroutineType, FrameType
from typing import Any, TypeAlias

from ..errors import NotAwaitedError
from .outcomes import library_of, place_in

_HOOK = "_warn_unawaited_coroutine"

#: A coroutine that never ran: its name, the user's line that dropped it, if known, and the
#: installed library that has both created and dropped it.
Forgotten: TypeAlias = tuple[str, str | None, str | None]

#: The coroutines that the last run of this context never awaited. A run sets a new list, and reads
#: it at its end. The variable is not reset, which would cost as much again.
LEFT: ContextVar[list[Forgotten] | None] = ContextVar("left", default=None)

#: The maximum number that is recorded per context.
_MOST = 10

#: The code that starts runs; frames outside it are not the handler's.
_boundaries: set[CodeType] = set()

#: The threads in which the garbage collector is running.
_collecting: set[int] = set()


def install(boundary: CodeType) -> None:
    """Watch for coroutines that are never awaited, in the whole process; a second call is a no-op.

    ``boundary`` is the code of the function that calls handlers. Python's own warning stays.
    """
    _boundaries.add(boundary)
    if _note_collection not in gc.callbacks:
        gc.callbacks.append(_note_collection)
    warn: Callable[[Any], None] | None = getattr(warnings, _HOOK, None)
    if warn is None or getattr(warn, "__module__", None) == __name__:
        return

    def note(coroutine: "CoroutineType[Any, Any, Any]") -> None:
        left = LEFT.get()
        if left is not None and len(left) < _MOST and threading.get_ident() not in _collecting:
            frames = _frames_of_run(sys._getframe(1))
            library = _library_between(coroutine, frames)
            left.append((coroutine.__qualname__, place_in(frames), library))
        warn(coroutine)

    setattr(warnings, _HOOK, note)


def require_awaited(handler: str, place: str | None) -> None:
    """Fail the run of this context if it has left a coroutine that never ran.

    Args:
        handler: the handler's name, for the message.
        place: the line that defines it, for a coroutine whose own line is not known.

    Raises:
        NotAwaitedError: names the first such coroutine.
    """
    for called, line, library in LEFT.get() or ():
        if library is None or library == library_of((place or "").rpartition(":")[0]):
            raise NotAwaitedError(
                f"{handler} called {called} without await, so it never ran", line or place
            )


def _note_collection(phase: str, _: object) -> None:
    if phase == "start":
        _collecting.add(threading.get_ident())
    else:
        _collecting.discard(threading.get_ident())


def _library_between(
    coroutine: "CoroutineType[Any, Any, Any]", frames: list[tuple[FrameType, int]]
) -> str | None:
    """Return the library that has both created and dropped a coroutine; None if it was user
    code."""
    made = library_of(coroutine.cr_code.co_filename)
    dropped = library_of(frames[-1][0].f_code.co_filename) if frames else None
    return made if made == dropped else None


def _frames_of_run(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return the frames from the call of the handler to ``frame``, the outermost first."""
    frames: list[tuple[FrameType, int]] = []
    while frame is not None and frame.f_code not in _boundaries:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]
