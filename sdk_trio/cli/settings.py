"""The settings of a command, and the commands that check and show them.

A command reads its files, its ``--set`` arguments, and all other sources. ``config check``,
``config show``, ``config schema`` and ``openapi`` print the result.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import attrs

from .._version import __version__
from ..errors import EXIT_CONFIGURATION, OptionsValidationError, Problem
from .parse import REFERENCE, UsageError, add_dev, add_format, describing

if not describing():
    import msgspec

    from ..config import (
        Loaded,
        Secret,
        Settings,
        describe,
        json_schema,
        read_settings,
    )
    from ..config.bind import IGNORED, UNKNOWN_KEY
    from ..config.options import DEVELOPMENT, environment_meant
    from ..config.show import DEFAULT_ORIGIN
    from ..config.sources import below_root, split_mapping_key
    from ..config.table import Setting, by_folded_path, fold
    from .terminal import print_json, print_list, print_rows, print_text, say


def read(
    arguments: Namespace,
    *,
    standalone: bool = True,
    receiver: bool = False,
    defaults: Mapping[str, str] | None = None,
) -> Loaded:
    """Read the settings; problems and warnings are part of the result.

    Args:
        arguments: the parsed arguments; ``--config`` and ``--set`` are used.
        standalone: whether to allow a missing AccessToken.
        receiver: whether to require a webhook secret, because the command runs the receiver.
        defaults: keys that the command sets; they override files, and ``--set`` overrides them.

    Raises:
        UsageError: a ``--set`` has no ``=``, names no setting, or contains a secret.
    """
    given = assignments(arguments.set)
    paths = {_folded(key) for key in given}
    own = {k: value for k, value in (defaults or {}).items() if _folded(k) not in paths}
    loaded = read_settings(
        *arguments.config, overrides={**own, **given}, standalone=standalone, receiver=receiver
    )
    # Set this even if the settings are invalid: main needs it to word the error.
    arguments.development = loaded.is_development
    for warning in loaded.warnings:
        # An unknown key in a file may belong to a later version. In an argument it is a mistake.
        if warning.message.startswith(UNKNOWN_KEY) and str(warning.origin).startswith("argument "):
            message = warning.message.removesuffix(IGNORED)
            raise UsageError(f"--set {warning.key} {message}")
    return loaded


#: The settings of ``dev``, which the user's ``--set`` overrides. HTTPS is not required, because an
#: experiment on this machine has no certificate.
DEV_DEFAULTS = {"Sdk:Environment": "Development", "Sdk:Webhooks:RequireHttps": "false"}


def read_to_examine(arguments: Namespace) -> Loaded:
    """Read the settings that ``doctor`` or ``config check`` examines.

    With ``--dev`` they are those of ``dev``, which generates its secret.
    """
    if arguments.dev:
        return read(arguments, standalone=True, defaults=DEV_DEFAULTS)
    return read(arguments, standalone=arguments.standalone, receiver=True)


def load(arguments: Namespace) -> Settings:
    """Read the settings for a command that runs no receiver, or raise all their problems.

    Raises:
        UsageError: an argument is invalid; see :func:`read`.
        OptionsValidationError: the settings are invalid; it lists every problem.
    """
    return read(arguments).require()


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` arguments as a mapping; a later one replaces an earlier one.

    Raises:
        UsageError: one has no key or no ``=``, or sets a secret: other users of the machine see
            the arguments of every process. The message never quotes a value.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        setting = _setting(key)
        if setting is not None and setting.kind is Secret:
            # Spell out the variable to set instead, so that users need not look up the rule.
            name = "__".join(("SDK", *(part.upper() for part in setting.path)))
            name += "__0" if setting.many else ""
            raise UsageError(
                f"--set {setting.key}: secrets are not taken from the command line, which other "
                f"users can read. Set the variable {name}, or put it into a file with that name in "
                "a directory of secrets ($CREDENTIALS_DIRECTORY)"
            )
        if not equals or not key.strip():
            raise UsageError(
                "--set takes KEY=VALUE, such as --set Sdk:Webhooks:Path=/hooks; "
                f"one of these arguments has no {'value' if key.strip() else 'key'}"
            )
        # Compared like keys, ignoring case and separators: of two spellings of one key the later
        # one wins.
        for earlier in [k for k in found if _folded(k) == _folded(key)]:
            del found[earlier]
        found[key] = value
    return found


def is_development(arguments: Namespace) -> bool:
    """Return whether to show errors in full; without valid settings, a best guess."""
    known: bool | None = getattr(arguments, "development", None)
    if known is not None:
        return known
    # Files are not read again: they may be the cause of the error.
    chosen = os.environ.get("SDK__ENVIRONMENT") or os.environ.get("SDK_ENVIRONMENT", "")
    for text in getattr(arguments, "set", ()):
        key, _, value = text.partition("=")
        if _folded(key) == ("environment",):
            chosen = value
    return environment_meant(chosen) == DEVELOPMENT


def _folded(key: str) -> tuple[str, ...]:
    path = split_mapping_key(key.strip())
    below = below_root(path)
    return fold(path if below is None else below)


def _setting(key: str) -> Setting | None:
    """Return the setting of a key, or of the key of one item of its list."""
    path = _folded(key)
    known = by_folded_path()
    found = known.get(path) or known.get(path[:-1])
    if found is None and (above := known.get(path[:-2])) is not None and above.is_section_list:
        found = next((each for each in above.item(0) if each.folded[-1] == path[-1]), None)
    return found


# -- commands ----------------------------------------------------------------------------------


def check_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``config check``."""
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="check only the receiver, which needs no AccessToken",
    )
    parser.add_argument(
        "--upgrade-host",
        metavar=REFERENCE,
        help="the application's HostUpgrade, which resolves the default tenant, as for 'run'",
    )
    add_dev(parser)
    add_format(parser)


def check(arguments: Namespace) -> int:
    """Print all problems and warnings; return 78 if there is a problem."""
    loaded = read_to_examine(arguments)
    # `run` refuses unmet requirements only when it starts; a check must find them earlier.
    at_start = _unstartable(loaded, arguments)
    problems = [*loaded.problems, *loaded.unmet, *at_start]
    # Commands that start nothing only warn of an unset variable; here it is already a problem.
    warnings = [w for w in loaded.warnings if w.key not in {each.key for each in at_start}]
    warnings += (*_ending_certificate(loaded), *_missing_source(loaded))
    rows: list[dict[str, Any]] = [
        {"level": level, **attrs.asdict(problem)}
        for level, found in (("error", problems), ("warning", warnings))
        for problem in found
    ]
    if arguments.format == "json":
        print_rows(rows, (), as_json=True)
    else:
        for level, found in (("error", problems), ("warning", warnings)):
            for problem in found:
                print_text(f"{level}: {problem}")
        say(f"errors: {len(problems)}, warnings: {len(warnings)}")
        if any(problem.key == "Sdk:Webhooks:Secret" for problem in problems):
            say("to experiment without a secret, use 'config check --dev' and 'doctor --dev'")
    return EXIT_CONFIGURATION if problems else 0


def _unstartable(loaded: Loaded, arguments: Namespace) -> Sequence[Problem]:
    """Return why `run` would refuse to start with valid settings; make no connections."""
    if loaded.settings is None:
        return ()
    from ..runtime.preflight import start_problems  # loads the store

    host = None
    if arguments.upgrade_host:
        from ..tenants.upgrade import HostUpgrade  # loads all of the tenants' modules
        from .application import import_part

        host = import_part(
            "--upgrade-host", arguments.upgrade_host, HostUpgrade, example="app:upgrade"
        )
    return start_problems(loaded.settings, host)


def _ending_certificate(loaded: Loaded) -> Sequence[Problem]:
    """Return a warning if the receiver's certificate has expired or soon will.

    It is not an error, because ``run`` starts anyway: a check before a restart must not keep the
    receiver from processing accepted events.
    """
    server = None if loaded.settings is None else loaded.settings.server
    if server is None or server.cert_file is None:
        return ()
    from ..server.tls import load_certificate, validity, validity_fault

    try:
        dates = validity(load_certificate(server.cert_file, server.key_file), server.cert_file)
    except OptionsValidationError:
        return ()  # `run` refuses to start, which is reported as an error
    fault = validity_fault(dates, time.time())
    return () if fault is None else (Problem("Sdk:Server:CertFile", fault),)


def _missing_source(loaded: Loaded) -> Sequence[Problem]:
    """Return a warning if the single-tenant database is missing.

    It is not an error, because only the store knows whether the upgrade has copied it already.
    """
    tenants = None if loaded.settings is None else loaded.settings.multi_tenant
    if tenants is None or not tenants.enabled:
        return ()
    named = tenants.single_tenant_upgrade.source_database
    if named is None or os.path.exists(named):
        return ()
    key = "Sdk:MultiTenant:SingleTenantUpgrade:SourceDatabase"
    advice = "'run' does not start until the upgrade is done; correct the path or remove the key"
    return (Problem(key, f"there is no file {os.path.abspath(named)}: {advice}"),)


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``config show``."""
    parser.add_argument("--all", action="store_true", help="include defaults")
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
    print_list(
        arguments,
        [msgspec.structs.asdict(row) for row in chosen],
        ("key", "value", "origin"),
        nothing="every setting is at its default; --all shows them",
    )
    return 0


def schema(_: Namespace) -> int:
    """Print the JSON Schema of the settings file, for editors."""
    print_json(json_schema())
    return 0


def openapi_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``openapi``."""
    parser.add_argument(
        "--admin", action="store_true", help="print the document of the admin address instead"
    )


def openapi(arguments: Namespace) -> int:
    """Print the OpenAPI 3.1 document; the receiver's contains the configured path."""
    if arguments.admin:
        print_json(_document("sdk_trio.admin"))
        return 0
    settings = load(arguments)
    document = _document("sdk_trio.webhooks")
    # The document in the package has the default path; use the configured one.
    route, of_tenant = document["paths"].values()
    path = settings.webhooks.path
    document["paths"] = {path: route}
    if settings.multi_tenant.enabled:
        document["paths"][f"{path.rstrip('/')}/{{identifier}}"] = of_tenant
    print_json(document)
    return 0


def _document(package: str) -> dict[str, Any]:
    """Return the document next to the code it describes, with this version's number."""
    text = resources.files(package).joinpath("openapi.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    document["info"]["version"] = __version__
    return document
