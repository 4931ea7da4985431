"""Run one command, and map its result or error to an exit status.

docs/reference/command-line.md lists the statuses.
"""

import gc
import importlib
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from ..errors import EXIT_FAILURE, SdkError, only_member
from .parse import PROGRAM, parse

#: 128 + SIGINT and 128 + SIGPIPE, as a shell reports commands that these signals ended.
INTERRUPTED = 130
PIPE_CLOSED = 141

#: Commands for which HUP means reload; it never ends them, even during startup.
OBEYING = ("run", "replication run")

#: Commands that restore INT and garbage collection themselves when their event loop starts: until
#: then INT also interrupts imports of the application's modules.
SERVING = ("run", "dev")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: the arguments after the program's name; None takes ``sys.argv``.

    Errors are not raised: each becomes one line on standard error, ``sdk-trio: error: ...``. In the
    Development environment, a traceback precedes it.
    """
    parsed = Namespace()
    try:
        try:
            parsed = parse(sys.argv[1:] if arguments is None else arguments)
            status = _command(parsed)
        except SystemExit as ended:  # --help, --version
            # argparse exits with numbers; anything else counts as a failure.
            status = ended.code if isinstance(ended.code, int) else EXIT_FAILURE
        # Flushed here, so that a closed pipe or a full disk is an error of this command with a
        # status of its own. The interpreter's own flush at exit would print a traceback.
        sys.stdout.flush()
    # Trio raises groups, and a Ctrl-C in one is a BaseExceptionGroup.
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        # A group of one is reported as its member: the nursery around it does not matter to the
        # reader.
        return _status_of(only_member(error), parsed)
    return status


def _command(parsed: Namespace) -> int:
    """Import the chosen command and run it."""
    # __main__ defers HUP from the first moment, because the command is only known after this
    # package is imported.
    if parsed.words not in OBEYING:
        _release_hangup()
    module, _, name = parsed.target.partition(":")
    function: Callable[[Namespace], int]
    function = getattr(importlib.import_module(f".{module}", __package__), name)
    if parsed.words not in SERVING:
        release_interrupt()
        gc.enable()
        return function(parsed)
    with _collector_deferred():
        return function(parsed)


#: A collection threshold, in new objects, that startup does not reach.
_HELD = 10_000_000

_usual = gc.get_threshold()[0]


@contextmanager
def _collector_deferred() -> Iterator[None]:
    """Raise the collector's threshold until :func:`release_collector`, so that it does not run.

    The collector stays enabled, so that a ``gc.disable()`` by the application remains in effect.
    """
    global _usual
    _usual = gc.get_threshold()[0]
    gc.set_threshold(_HELD)
    gc.enable()
    try:
        yield
    finally:
        release_collector()


def release_collector() -> None:
    """Restore the collector's settings, unless the application has changed them.

    If the application multiplied the raised threshold (``gc.set_threshold(2 * old)``), apply the
    same factor to the normal one.
    """
    first, *others = gc.get_threshold()
    if first >= _HELD:
        gc.set_threshold(_usual * first // _HELD, *others)


def release_interrupt() -> None:
    """Let INT raise KeyboardInterrupt again if ``__main__`` has made it end the process."""
    if getattr(signal.getsignal(signal.SIGINT), "for_the_start", False):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _release_hangup() -> None:
    """Let HUP end a command as usual, including a HUP that was deferred until now."""
    hangup = getattr(signal, "SIGHUP", None)
    called = None if hangup is None else getattr(signal.getsignal(hangup), "called", None)
    if hangup is not None and called is not None:
        signal.signal(hangup, signal.SIG_DFL)
        if called:
            os.kill(os.getpid(), hangup)


def _status_of(error: BaseException, parsed: Namespace) -> int:
    """Print the error and return its exit status."""
    if isinstance(error, KeyboardInterrupt):
        # No text: the user who pressed Ctrl-C knows.
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _forget_output()
        # No text either: `| head` closes the pipe on purpose.
        return PIPE_CLOSED
    if isinstance(error, SdkError):
        _show_detail(error, parsed)
        _complain(str(error))
        for warning in getattr(error, "warnings", ()):
            sys.stderr.write(f"{PROGRAM}: warning: {warning}\n")
        return error.exit_code
    hint = (
        "" if _show_detail(error, parsed) else "; run with Sdk:Environment=Development for details"
    )
    cause = _cause_of(error)
    place = "" if cause is error else _place_of(cause)
    _complain(f"unexpected {type(cause).__name__}: {cause}{place}{hint}")
    return EXIT_FAILURE


def _cause_of(error: BaseException) -> BaseException:
    """Unwrap an application's exception that Trio reports as an internal error."""
    trio = sys.modules.get("trio")
    while trio is not None and isinstance(error, trio.TrioInternalError) and error.__cause__:
        error = only_member(error.__cause__)
    return error


def _place_of(error: BaseException) -> str:
    from ..webhooks.outcomes import place_of  # imported only to report an error

    place = place_of(error)
    return "" if place is None else f" ({place})"


def _show_detail(error: BaseException, parsed: Namespace) -> bool:
    """Print the traceback of a failed start or of a fault; return whether it was printed."""
    from .settings import is_development

    # The application is as often the reason for a failed start as the settings, so a traceback
    # helps even with our own errors. For our other errors without a cause, the message suffices.
    starting = getattr(parsed, "words", "") == "run"
    if isinstance(error, SdkError) and not starting and error.__cause__ is None:
        return False
    if not is_development(parsed):
        return False
    cause = error.__cause__
    # If our error was caused by another one of ours, or by a system error such as a port in use,
    # all frames are in this package.
    is_explained = cause is not None and (isinstance(cause, SdkError) or not _place_of(cause))
    if isinstance(error, SdkError) and is_explained:
        return False
    import traceback

    if cause is not None and isinstance(error, SdkError):
        # Our own message follows below, and the frames between here and the application do not
        # matter.
        traceback.print_exception(cause.with_traceback(_from_application(cause.__traceback__)))
    else:
        traceback.print_exception(error)
    return True


def _from_application(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames without the leading ones of this package and the import system."""
    own = os.path.dirname(os.path.dirname(__file__))
    passed_over = (own, os.path.dirname(importlib.__file__), "<frozen importlib")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(passed_over):
        frames = frames.tb_next
    return frames


def _complain(message: str) -> None:
    from .terminal import printable_lines  # an error may quote a file or a remote program

    sys.stderr.write(f"{PROGRAM}: error: {printable_lines(message)}\n")


def _forget_output() -> None:
    """Redirect standard output to /dev/null; otherwise the interpreter's last flush fails."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
