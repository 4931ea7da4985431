"""Finds the ``HandlerRegistry`` that ``--app`` names, as uvicorn finds an application."""

import importlib
import os
import sys
from types import ModuleType

from ..errors import EXIT_CONFIGURATION, SdkError
from ..webhooks import HandlerRegistry
from .usage import UsageError


class AppNotFoundError(SdkError):
    """``--app`` names no module, no attribute of it, or no registry."""

    exit_code = EXIT_CONFIGURATION


class AppBrokenError(SdkError):
    """The module of ``--app`` raised an exception while it was imported."""


def import_registry(reference: str) -> HandlerRegistry:
    """Return the registry that ``MODULE:ATTR`` names; the current directory is searched first.

    Raises:
        UsageError: the text is not of that form.
        AppNotFoundError: no such module or attribute, or it is no HandlerRegistry.
        AppBrokenError: the import raised; the exception is the cause.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (colon and module_name.strip() and attribute.strip()):
        raise UsageError(
            f"--app takes MODULE:ATTR, such as app:handlers for 'handlers' in app.py; not "
            f"{reference!r}"
        )
    found: object = _import(module_name)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise AppNotFoundError(
                f"--app {reference}: {module_name} has no attribute {attribute!r}"
                f"{_registries_in(sys.modules[module_name])}"
            ) from None
    if not isinstance(found, HandlerRegistry):
        raise AppNotFoundError(
            f"--app {reference}: {attribute} is a {type(found).__name__}, not a HandlerRegistry"
            f"{_registries_in(sys.modules[module_name])}"
        )
    return found


def _import(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Of a missing dependency the name differs: that is the module's own fault.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise AppNotFoundError(
                f"--app: there is no module {name!r} in {directory} or where Python looks for "
                "packages"
            ) from None
        raise _broken(name, error) from error
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> SdkError:
    where = _place_of(error)
    return AppBrokenError(
        f"--app: importing {name!r} failed{where}: {type(error).__name__}: {error}"
    )


def _place_of(error: BaseException) -> str:
    """Return where the innermost frame of the exception is, as `` at FILE:LINE``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _registries_in(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, HandlerRegistry)]
    return f"; it has {', '.join(names)}" if names else ""
