"""``init``: the files of a new application."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..errors import SdkError
from .parse import describing

if not describing():
    from .terminal import print_text, program_name, say

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


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    """Runs at least once for each paid order: make it idempotent by event.webhook_id."""
    print(f"order {event.data.id} is paid")
'''

#: Lines that ``.gitignore`` must hold: both name secrets and data of customers.
GITIGNORE_LINES = (".env", "sdk-data/")

#: Each new file and its content; ``.gitignore`` is completed instead.
FILES = {"appsettings.json": APPSETTINGS, ".env.example": ENV_EXAMPLE, "app.py": APP}


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
    """Write the files and print their names; nothing at all if one exists, without ``--force``.

    Raises:
        FilesExistError: it names every one that exists.
        UnwritableFileError: the directory or a file cannot be written.
    """
    directory = Path(arguments.directory)
    existing = [name for name in FILES if (directory / name).exists()]
    if existing and not arguments.force:
        raise FilesExistError(
            f"{', '.join(existing)} exists in {directory.absolute()}: nothing was written. "
            "--force overwrites, --directory writes elsewhere"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in FILES.items():
            (directory / name).write_text(content, encoding="utf-8")
            # Settings files of the working directory are not read if other users can write them.
            (directory / name).chmod((directory / name).stat().st_mode & ~0o022)
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
    say("for deliveries of the upstream: copy .env.example to .env, and set its secret there")
    return 0


def _complete_gitignore(file: Path) -> bool:
    """Add the lines that are missing; return whether there were any."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    missing = [line for line in GITIGNORE_LINES if line not in text.splitlines()]
    if not missing:
        return False
    separator = "" if not text or text.endswith("\n") else "\n"
    file.write_text(text + separator + "\n".join(missing) + "\n", encoding="utf-8")
    return True
