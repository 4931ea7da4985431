"""The user's application: the import of its parts, and ``init``, which writes a new one.

An option names a part as ``MODULE:ATTR``.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from ..errors import EXIT_CONFIGURATION, SdkError
from .parse import UsageError, describing

if not describing():
    from .. import webhooks
    from ..base.ownership import is_foreign_link
    from ..base.private_files import write_private
    from ..webhooks.outcomes import place_of
    from .terminal import print_text, program_name, say

T = TypeVar("T")


class AppNotFoundError(SdkError):
    """The option names no module, no attribute of it, or something of another class."""

    exit_code = EXIT_CONFIGURATION


class AppBrokenError(SdkError):
    """The module that the option names raised an exception while it was imported."""


class AppWrongError(AppBrokenError):
    """The module is wrong as written: every start would fail in the same way."""

    exit_code = EXIT_CONFIGURATION


#: Exceptions that mean a module is wrong as written. Any other, such as an unavailable database,
#: may be temporary, so a service manager should restart it.
_WRONG = (SyntaxError, ImportError, NameError, AttributeError, TypeError)


def import_registry(reference: str) -> webhooks.HandlerRegistry:
    """Return the registry that ``--app`` names; see :func:`import_part`."""
    # By its package, which loads the class at this use: ``init`` needs none.
    return import_part("--app", reference, webhooks.HandlerRegistry, example="app:handlers")


def import_part(option: str, reference: str, kind: type[T], *, example: str) -> T:
    """Return the object that ``MODULE:ATTR`` names; the current directory is searched first.

    Args:
        option: the option that took ``reference``, for messages.
        reference: a module's name, a colon, and an attribute or a path of attributes.
        kind: the required class of the object.
        example: a reference for messages, such as ``app:handlers``.

    Raises:
        UsageError: the text is not of that form.
        AppNotFoundError: there is no such module or attribute, or it has another class.
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
    # A path of attributes, so that a registry can be part of an object, as uvicorn allows.
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
        # `python -m sdk_trio` already has the directory there, but the installed script does not:
        # both must find app.py.
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the missing module is not the named one, it is a dependency: the application's own
        # fault.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise AppNotFoundError(
                f"{asked}: there is no module {name!r} in {directory} or where Python looks for "
                f"packages{_without_suffix(name)}"
            ) from None
        raise _broken(asked, name, error) from error
    except (Exception, SystemExit) as error:  # a script ends itself, instead of being imported
        raise _broken(asked, name, error) from error


def _without_suffix(name: str) -> str:
    module = name.removesuffix(".py").replace("/", ".")
    return "" if module == name else f": a module is named without .py, {module}"


def _broken(asked: str, name: str, error: BaseException) -> SdkError:
    # The application's line is enough for its author; Development shows the traceback.
    if isinstance(error, SyntaxError) and error.filename:
        place: str | None = f"{error.filename}:{error.lineno}"
    else:
        place = place_of(error)
    where = "" if place is None else f" at {place.removesuffix(' in <module>')}"
    # Errors of this package are sentences; their class adds nothing.
    kind = "" if isinstance(error, SdkError) else f"{type(error).__name__}: "
    wrong = isinstance(error, _WRONG) or getattr(error, "exit_code", 0) == EXIT_CONFIGURATION
    return (AppWrongError if wrong else AppBrokenError)(
        f"{asked}: importing {name!r} failed{where}: {kind}{error}"
    )


def _parts_in(module: ModuleType, kind: type[object]) -> str:
    # Usually the object exists under another name, so the message lists the existing ones.
    names = [name for name, value in vars(module).items() if isinstance(value, kind)]
    if names:
        return f"; it has {', '.join(names)}"
    return f"; it has no {kind.__name__}: add one"


# -- init --------------------------------------------------------------------------------------

APPSETTINGS = """\
{
  "Sdk": {
    "Mode": "Test",
    "Server": {
      "Bind": ["127.0.0.1:8080"],
      "TrustedProxies": ["127.0.0.1"]
    },
    "Webhooks": {
      "Path": "/hooks/sdk",
      "RequireHttps": true,
      "ToleranceSeconds": 300,
      "FailOnMissingHandlers": false,
      "Queue": {
        "Capacity": 1000,
        "Workers": 8,
        "MaxAttempts": 8
      }
    },
    "Storage": {
      "Backend": "Sqlite"
    },
    "Logging": {
      "Level": "Info"
    }
  }
}
"""

ENV_EXAMPLE = """\
# Secrets never go into appsettings.json. Copy this file to .env, which is read in the Development
# environment only and is not committed; elsewhere set the same variables, or put each value into
# a file of that name in a directory of secrets.
#
# The secrets that the upstream issued for this endpoint; two while one is being replaced.
SDK__WEBHOOKS__SECRETS__0=
# The organization access token, for calls of the upstream; not needed with --standalone.
#SDK__ACCESSTOKEN=
"""

APP = '''\
"""The handlers of this application: `sdk-trio run --app app:handlers`."""

from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

handlers = HandlerRegistry()
handlers.ignore()  # the other event types are left out on purpose: no warnings at the start


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    """Runs at least once for each paid order: make it idempotent by event.webhook_id."""
    print(f"order {event.data.id} is paid")
'''

TEST_APP = '''\
"""Tests of the handlers: `pip install "sdk-trio[testing]"`, then `python -m pytest`."""

import app
import pytest


@pytest.fixture
def sdk_handlers():
    return app.handlers


async def test_a_paid_order_is_handled(deliver):
    delivered = await deliver("order.paid", {"amount": 100}, expect="done")
    assert delivered.status == 200
'''

#: Required lines of ``.gitignore``: both name secrets and data of customers.
GITIGNORE_LINES = (".env", "sdk-data/")

#: Each new file and its content; ``.gitignore`` is completed instead.
FILES = {
    "appsettings.json": APPSETTINGS,
    ".env.example": ENV_EXAMPLE,
    "app.py": APP,
    "test_app.py": TEST_APP,
}


class FilesExistError(SdkError):
    """A file that would be written exists."""


class UnwritableFileError(SdkError):
    """A file cannot be written."""


def init_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``init``."""
    parser.add_argument(
        "--directory", metavar="D", default=".", help="where to write (default: here)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def init(arguments: Namespace) -> int:
    """Write the files and print their names; write nothing if one exists, unless ``--force`` is
    given.

    Raises:
        FilesExistError: it names every one that exists.
        UnwritableFileError: the directory or a file cannot be written.
    """
    directory = Path(arguments.directory)
    # All files are checked before the first is written: half of an application is worse than none.
    # A dangling link also counts: writing through it would create a file elsewhere.
    existing = [name for name in FILES if os.path.lexists(directory / name)]
    if existing and not arguments.force:
        raise FilesExistError(
            f"{', '.join(existing)} exist{'s' if len(existing) == 1 else ''} in "
            f"{directory.absolute()}: nothing was written. "
            "--force overwrites, --directory writes elsewhere"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in FILES.items():
            # Settings files of the working directory are not read if other users can write them.
            write_private(directory / name, content, mode=0o644)
            print_text(str(directory / name))
        if _complete_gitignore(directory / ".gitignore"):
            print_text(str(directory / ".gitignore"))
    except OSError as error:
        raise UnwritableFileError(
            f"{error.filename or directory} cannot be written: {error.strerror}"
        ) from error
    here = directory.resolve() == Path.cwd()
    enter = "" if here else f"cd {shlex.quote(str(directory))} && "
    say(f"next: {enter}{program_name(elsewhere=not here)} dev --app app:handlers")
    # The user creates .env: a file with an empty secret would be refused as a webhook secret.
    say("for deliveries of the upstream: copy .env.example to .env, and set its secret there;")
    say("'run' is Production and reads no .env: set the same variables there")
    return 0


def _complete_gitignore(file: Path) -> bool:
    """Add the lines that are missing; return whether there were any."""
    # Other users could have created a link that redirects the write.
    is_read = file.exists() and not is_foreign_link(file)
    text = file.read_text(encoding="utf-8") if is_read else ""
    missing = [line for line in GITIGNORE_LINES if line not in text.splitlines()]
    if not missing:
        return False
    # A last line without a line break must not be joined with the first new line.
    separator = "" if not text or text.endswith("\n") else "\n"
    write_private(file, text + separator + "\n".join(missing) + "\n", mode=0o644)
    return True
