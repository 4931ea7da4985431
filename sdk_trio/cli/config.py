"""``config check``, ``config show``, ``config schema`` and ``openapi``."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from importlib import resources
from typing import Any

import attrs

from .._version import __version__
from ..errors import EXIT_CONFIGURATION
from .parse import add_format, describing

if not describing():
    from ..config import describe, json_schema, missing_parts, unmet_needs
    from ..config.show import DEFAULT_ORIGIN
    from .settings import load, read
    from .terminal import print_json, print_rows, print_text, say


def check_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``config check``."""
    parser.add_argument(
        "--standalone", action="store_true", help="check for the receiver alone: no AccessToken"
    )
    add_format(parser)


def check(arguments: Namespace) -> int:
    """Print every problem and warning at once; 78 if there is a problem."""
    loaded = read(arguments, standalone=arguments.standalone, receiver=True)
    problems = list(loaded.problems)
    if loaded.settings is not None:
        problems += [*missing_parts(loaded.settings), *unmet_needs(loaded.settings)]
    rows: list[dict[str, Any]] = [
        {"level": level, **attrs.asdict(problem)}
        for level, found in (("error", problems), ("warning", loaded.warnings))
        for problem in found
    ]
    if arguments.format == "json":
        print_rows(rows, (), as_json=True)
    else:
        for level, found in (("error", problems), ("warning", loaded.warnings)):
            for problem in found:
                print_text(f"{level}: {problem}")
        say(f"errors: {len(problems)}, warnings: {len(loaded.warnings)}")
    return EXIT_CONFIGURATION if problems else 0


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``config show``."""
    parser.add_argument("--all", action="store_true", help="include what is at its default")
    add_format(parser)


def show(arguments: Namespace) -> int:
    """Print each setting that is not at its default, or all of them, with its origin.

    Raises:
        OptionsValidationError: the settings cannot be read.
    """
    loaded = read(arguments)
    settings = loaded.require()
    rows = describe(settings, loaded.origins)
    chosen = [row for row in rows if arguments.all or row.origin != DEFAULT_ORIGIN]
    print_rows(
        [attrs.asdict(row) for row in chosen],
        ("key", "value", "origin"),
        as_json=arguments.format == "json",
    )
    if not chosen:
        say("every setting is at its default; --all shows them")
    return 0


def schema(_: Namespace) -> int:
    """Print the JSON Schema of the settings file, for editors."""
    print_json(json_schema())
    return 0


def openapi_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``openapi``."""
    parser.add_argument(
        "--admin", action="store_true", help="of the admin address instead of the receiver"
    )


def openapi(arguments: Namespace) -> int:
    """Print the OpenAPI 3.1 document; the receiver's has the path of the settings."""
    if arguments.admin:
        print_json(_document("sdk_trio.admin"))
        return 0
    settings = load(arguments)
    document = _document("sdk_trio.webhooks")
    route, of_tenant = document["paths"].values()
    path = settings.webhooks.path
    document["paths"] = {path: route}
    if settings.multi_tenant.enabled:
        document["paths"][f"{path.rstrip('/')}/{{identifier}}"] = of_tenant
    print_json(document)
    return 0


def _document(package: str) -> dict[str, Any]:
    """Return the document that lies beside the code it describes, with this version's number."""
    text = resources.files(package).joinpath("openapi.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    document["info"]["version"] = __version__
    return document
