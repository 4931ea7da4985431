"""The import of an object of the application that an option names as ``MODULE:ATTR``."""

import importlib
import os
import sys
from types import ModuleType
from typing import TypeVar

from ..errors import EXIT_CONFIGURATION, SdkError
from ..webhooks import HandlerRegistry
from .parse import UsageError

T = TypeVar("T")


class AppNotFoundError(SdkError):
    """The option names no module, no attribute of it, or something of another class."""

    exit_code = EXIT_CONFIGURATION


class AppBrokenError(SdkError):
    """The module that the option names raised an exception while it was imported."""


class AppRefusedError(AppBrokenError):
    """The module raised an error of this package: a wrong registration or an invalid setting."""

    exit_code = EXIT_CONFIGURATION


def import_registry(reference: str) -> HandlerRegistry:
    """Return the registry that ``--app`` names; see :func:`import_part`."""
    return import_part("--app", reference, HandlerRegistry, example="app:handlers")


def import_part(option: str, reference: str, kind: type[T], *, example: str) -> T:
    """Return the object that ``MODULE:ATTR`` names; the current directory is searched first.

    Args:
        option: the option that took ``reference``, for messages.
        reference: a module's name, a colon, and an attribute or a path of attributes.
        kind: the class that the object has to be of.
        example: a reference for messages, such as ``app:handlers``.

    Raises:
        UsageError: the text is not of that form.
        AppNotFoundError: no such module or attribute, or it is of another class.
        AppBrokenError: the import raised; the exception is the cause.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (colon and module_name.strip() and attribute.strip()):
        module, _, name = example.partition(":")
        raise UsageError(
            f"{option} takes MODULE:ATTR, such as {example} for '{name}' in {module}.py; not "
            f"{reference!r}"
        )
    found: object = _import(f"{option} {reference}", module_name)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise AppNotFoundError(
                f"{option} {reference}: {module_name} has no attribute {attribute!r}"
                f"{_parts_in(sys.modules[module_name], kind)}"
            ) from None
    if not isinstance(found, kind):
        raise AppNotFoundError(
            f"{option} {reference}: {attribute} is of type {type(found).__name__}, not "
            f"{kind.__name__}{_parts_in(sys.modules[module_name], kind)}"
        )
    return found


def _import(asked: str, name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the missing module is not the named one, it is a dependency: the application's own
        # fault.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise AppNotFoundError(
                f"{asked}: there is no module {name!r} in {directory} or where Python looks for "
                "packages"
            ) from None
        raise _broken(asked, name, error) from error
    except (Exception, SystemExit) as error:  # a script ends itself, instead of being imported
        raise _broken(asked, name, error) from error


def _broken(asked: str, name: str, error: BaseException) -> SdkError:
    where = _place_of(error)
    ours = isinstance(error, SdkError) and error.exit_code == EXIT_CONFIGURATION
    return (AppRefusedError if ours else AppBrokenError)(
        f"{asked}: importing {name!r} failed{where}: {type(error).__name__}: {error}"
    )


def _place_of(error: BaseException) -> str:
    """Return the place of the exception's innermost frame, as `` at FILE:LINE``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _parts_in(module: ModuleType, kind: type[object]) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, kind)]
    if names:
        return f"; it has {', '.join(names)}"
    return f"; it has no {kind.__name__}: put one into it"
