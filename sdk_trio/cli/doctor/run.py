"""``doctor``: an examination of the whole installation, with one list of findings.

Each check has its own time limit, and a check that fails or hangs is itself a finding: a diagnosis
is needed exactly when parts of the installation do not respond.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import attrs

from ...errors import EXIT_CONFIGURATION, EXIT_FAILURE, SdkError
from ..parse import REFERENCE, add_dev, add_format, describing
from . import Finding, Level, Report, ranked

if not describing():
    import msgspec
    import trio

    from ...config import Loaded, Settings, StorageBackend
    from ...records.policies import UNLIMITED
    from ...storage.examine import Contents
    from ..application import import_registry
    from ..receiver import NoReceiverError
    from ..settings import read_to_examine
    from ..sign import read_dev_secret
    from ..terminal import is_terminal, print_json, print_text, say
    from .alerts import check_alerts
    from .machine import (
        check_clock,
        check_descriptors,
        check_disk,
        check_permissions,
        check_replication,
    )
    from .settings import (
        check_handlers,
        check_https,
        check_replays,
        check_secrets,
        check_settings,
        check_sources,
    )
    from .store import (
        check_database,
        check_file,
        check_notifications,
        check_pauses,
        check_tenants,
    )

#: Time limits of one check, and of all together, in seconds: a ``doctor`` that hangs finds nothing.
CHECK_SECONDS = 20.0
TOTAL_SECONDS = 40.0

Check: TypeAlias = Callable[[Report], Awaitable[None]]


def doctor_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument("--app", metavar=REFERENCE, help="also examine this app's handlers")
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="examine only the receiver, which needs no AccessToken",
    )
    add_dev(parser)
    parser.add_argument("--offline", action="store_true", help="do not call the upstream")
    add_format(parser)


def doctor(arguments: Namespace) -> int:
    """Examine the installation; return 0, 1 if it has problems, 78 if the settings are invalid.

    Raises:
        UsageError: an argument is wrong.
    """
    loaded = read_to_examine(arguments)
    first = Report("settings")
    check_settings(loaded, first)
    findings = first.findings
    settings = loaded.settings
    if settings is not None:
        if arguments.dev:
            arguments.standalone = not settings.has_access_token
            settings = _with_dev_secret(settings, first)
        handled = _Handled(arguments.app)
        findings += trio.run(partial(_examine, loaded, settings, handled, arguments))
    else:
        first.note(
            "doctor",
            "the other checks need valid settings and were skipped",
            "fix the settings and run doctor again; "
            "'doctor --dev' examines the setup of 'dev', which needs neither secret nor token",
        )
    _show(ranked(findings), as_json=arguments.format == "json")
    if settings is None:
        return EXIT_CONFIGURATION
    # Warnings do not change the exit code: doctor runs before deployments, and a future risk must
    # not stop those.
    return EXIT_FAILURE if any(f.level is Level.PROBLEM for f in findings) else 0


def _with_dev_secret(settings: Settings, report: Report) -> Settings:
    """Return the settings with the secret of ``dev``, if ``dev`` has been started here."""
    secret = read_dev_secret(settings.storage.path)
    if secret is None:
        report.note(settings.storage.path, "'dev' has not been started here yet", "sdk-trio dev")
        return settings
    webhooks = msgspec.structs.replace(
        settings.webhooks, secret=secret, secrets=settings.webhooks.all_secrets
    )
    return msgspec.structs.replace(settings, webhooks=webhooks)


@attrs.define
class _Handled:
    """The application of ``--app``, and the types that it handles once it is imported."""

    reference: str | None
    types: tuple[str, ...] | None = None

    def check(self, settings: Settings, report: Report) -> None:
        """Import the application and report the types without a handler."""
        if self.reference is None:
            report.note("--app", "not given, so handlers were not checked", "--app MODULE:ATTR")
            return
        registry = import_registry(self.reference)
        self.types = tuple(registry)
        check_handlers(
            tuple(each.type for each in registry.missing()),
            len(registry.catalog.known),
            len(registry),
            required=settings.webhooks.fail_on_missing_handlers,
            report=report,
        )
        for each in registry.registrations:
            if each.policy != UNLIMITED:
                report.ok(f"{each.name} ({each.group})", f"its policies: {each.policy}")


async def examine_running(loaded: Loaded, arguments: Namespace) -> list[dict[str, str]]:
    """Examine the installation of this running receiver; return the findings, the worst first.

    The receiver does not query itself or the upstream, and does not import its application again.
    """
    first = Report("settings")
    check_settings(loaded, first)
    options = Namespace(offline=True, standalone=True, config=arguments.config)
    handled = _Handled(None)
    found = await _examine(loaded, loaded.require(), handled, options, running=True)
    rows = ranked([*first.findings, *found])
    return [{**attrs.asdict(row), "level": str(row.level)} for row in rows]


async def _examine(
    loaded: Loaded,
    settings: Settings,
    handled: _Handled,
    arguments: Namespace,
    *,
    running: bool = False,
) -> list[Finding]:
    """Run every check; a check that fails or times out is reported, and the others continue.

    ``running``: this process is the receiver, so the checks of the network and the handlers are
    skipped.
    """
    # A list, because the checks run as tasks: the store check fills it for later checks.
    found: list[Contents] = []

    async def check_the_store(report: Report) -> None:
        if settings.storage.backend is StorageBackend.POSTGRES:
            contents = await check_database(settings, report)
        else:
            contents = await check_file(settings, report)
        if contents is not None:
            found.append(contents)
            await check_pauses(settings, report)

    def check_the_disk(report: Report) -> None:
        check_disk(settings, report, found[0].growth_per_day if found else None)

    async def check_the_tenants(report: Report) -> None:
        await check_tenants(settings, found[0] if found else None, report)

    async def check_the_notifications(report: Report) -> None:
        await check_notifications(settings, found[0] if found else None, os.environ, report)

    async def check_the_alerts(report: Report) -> None:
        await check_alerts(settings, found[0] if found else None, os.environ, report)

    # The findings are shown in the order of these checks.
    checks: dict[str, Check] = {
        "secrets": _plain(partial(check_secrets, settings)),
        "https": _plain(partial(check_https, settings)),
        "sources": _plain(partial(check_sources, settings)),
        "replays": _plain(partial(check_replays, settings)),
        "permissions": _threaded(partial(check_permissions, loaded, settings)),
        "disk": _threaded(check_the_disk),
        "descriptors": _threaded(partial(check_descriptors, settings)),
        "clock": _plain(check_clock),
        "store": check_the_store,
        "receiver": partial(_check_receiver, settings),
        "routes": partial(_check_routes, settings),
        "upstream": partial(_check_upstream, settings, handled, arguments),
        "handlers": _plain(partial(handled.check, settings)),
        "tenants": check_the_tenants,
        "notifications": check_the_notifications,
        "alerts": check_the_alerts,
        "replication": _threaded(
            partial(check_replication, settings, os.environ, may_run=bool(arguments.config))
        ),
    }
    reports = {name: Report(name) for name in checks}

    async def run(*names: str) -> None:
        await trio.lowlevel.checkpoint()
        for name in names:
            await _run(checks[name], reports[name])

    # The application is user code, so it is imported here, before other checks run concurrently.
    if not running:
        await run("handlers")
    over_network = ("receiver", "routes", "upstream")
    here = [name for name in checks if name not in ("handlers", "disk", *over_network)]
    # The disk check comes after the store check, which knows the growth of the store.
    here.insert(here.index("store") + 1, "disk")
    with trio.move_on_after(TOTAL_SECONDS) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, *here)
            # Two tasks: network checks wait for other hosts; all other checks read the same disk.
            nursery.start_soon(run, *(() if running else over_network))
    if scope.cancelled_caught:
        reports["doctor"] = Report("doctor")
        reports["doctor"].warning(
            "doctor", f"not everything was checked within {TOTAL_SECONDS:g} s", "try again"
        )
    return [finding for report in reports.values() for finding in report.findings]


async def _check_receiver(settings: Settings, report: Report) -> None:
    from .network import check_receiver  # imports httpx

    await trio.lowlevel.checkpoint()
    try:
        await check_receiver(settings, report)
    except NoReceiverError as error:
        report.note("receiver", f"nothing was delivered: {error}")


async def _check_routes(settings: Settings, report: Report) -> None:
    if not settings.forward.all_routes:
        await trio.lowlevel.checkpoint()
        return
    from .network import check_routes

    await check_routes(settings, report)


async def _check_upstream(
    settings: Settings, handled: _Handled, arguments: Namespace, report: Report
) -> None:
    from .network import check_upstream

    if arguments.offline or arguments.standalone or settings.access_token is None:
        report.note("upstream", "not reached: offline, standalone, or without an access token")
        await trio.lowlevel.checkpoint()
        return
    await check_upstream(settings, handled.types, report)


def _plain(check: Callable[[Report], None]) -> Check:
    async def run(report: Report) -> None:
        check(report)
        await trio.lowlevel.checkpoint()

    return run


def _threaded(check: Callable[[Report], None]) -> Check:
    """Run a check in a thread, because it reads the file system, which may hang."""

    async def run(report: Report) -> None:
        await trio.to_thread.run_sync(check, report, abandon_on_cancel=True)

    return run


async def _run(check: Check, report: Report) -> None:
    try:
        with trio.fail_after(CHECK_SECONDS):
            await check(report)
    except trio.TooSlowError:
        report.warning(
            report.check,
            f"this check did not finish within {CHECK_SECONDS:g} s",
            "look for a disk or a server that hangs, the usual cause",
        )
    except SdkError as error:
        report.problem(report.check, str(error), "see the message")
    except Exception as error:  # a fault in one check must not end the others
        report.warning(
            report.check,
            # Only the class: the message of an unexpected error may quote a secret.
            f"this check failed: {type(error).__name__}",
            "report it, with the output of --format json",
        )
    await trio.lowlevel.checkpoint()


# SGR codes.
_STYLES = {Level.PROBLEM: "31;1", Level.WARNING: "33", Level.NOTE: "36", Level.OK: "32"}


def _show(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print_json([attrs.asdict(finding) for finding in findings])
        return
    from ...config.sources import printable

    colored = is_terminal() and not os.environ.get("NO_COLOR")
    for finding in findings:
        level = f"{finding.level:<8}"
        if colored:
            level = f"\x1b[{_STYLES[finding.level]}m{level}\x1b[0m"
        print_text(f"{level} {finding.check}: {printable(finding.where)}")
        print_text(f"         {printable(finding.what)}")
        if finding.remedy:
            print_text(f"         -> {printable(finding.remedy)}")
    counts = Counter(finding.level for finding in findings)
    say(", ".join(f"{level}: {counts[level]}" for level in Level))
