"""``events catch-up``: events for what changed while the upstream skipped deliveries."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ..errors import EXIT_FAILURE
from .parse import UsageError, add_format, add_moment, describing, moment_text

if not describing():
    import msgspec
    import trio

    from ..client.client import Client, UpstreamDeliveries
    from ..client.errors import CallError
    from ..config import Settings
    from ..errors import TenantCredentialsError
    from ..reconcile.catch_up import CatchUp, IncompleteCatchUpError, SyntheticEvent, types_of
    from ..reconcile.gap import COMMAND_NAME, AccountState, CatchUpRun, state_name, until_now
    from ..reconcile.gap_watch import endpoints_of, list_accounts
    from ..reconcile.plan import UnknownEndpointError, subscribed_types
    from ..reconcile.reconciler import Reconciler
    from ..records.tenants import Tenant
    from ..storage.ports import Inbox
    from ..tenants.credentials import CredentialReader
    from ..tenants.service import TenantService
    from .settings import read
    from .store import open_inbox, open_tenants
    from .terminal import ByteProgress, print_list, say

COLUMNS = ("type", "subject", "tenant", "changed", "action")

#: Time that the command waits for a receiver to run waiting events, in seconds.
PATIENCE_SECONDS = 30.0


def catch_up_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events catch-up``."""
    add_moment(parser, "--since", "records changed since", required=True)
    add_moment(parser, "--until", "records changed until (default: now)")
    parser.add_argument("--types", metavar="GLOB", help="only these types, such as 'order.*'")
    parser.add_argument("--dry-run", action="store_true", help="show the events, add none")
    add_format(parser)


def catch_up(arguments: Namespace) -> int:
    """List the records that changed in a time, add the events that the inbox lacks, and print them.

    A running receiver runs them; otherwise its next start does. Returns 1 if an account could not
    be read to its end; the same command continues there.

    Raises:
        UsageError: the times or types are wrong.
        StoreUnavailableError: the inbox does not exist.
    """
    now = time.time()
    since: float = arguments.since
    until: float = until_now(now) if arguments.until is None else arguments.until
    if since >= until or since > now:
        raise UsageError("--since must be before --until, and not in the future")
    if not types_of(arguments.types):
        raise UsageError(
            f"--types {arguments.types!r} matches no type that can be made from the upstream's "
            "state; docs/reference/catch-up.md lists them"
        )
    settings = read(arguments, standalone=False).require()
    command = _Command(settings, CatchUpRun(since, until, arguments.types), arguments)
    trio.run(command.run)
    print_list(arguments, command.rows, COLUMNS)
    verb = "would be added" if arguments.dry_run else "added; a running receiver runs them"
    say(f"{command.changed} of {command.listed} records changed; {len(command.rows)} events {verb}")
    if command.uncertain:
        say(
            f"{command.uncertain} lifecycle events were left out: their records are older than the "
            "retention of ids, so they may have been handled. Their *.updated events are included"
        )
    return EXIT_FAILURE if command.failed else 0


class _Command:
    """The catch-up of all accounts, one after the other."""

    def __init__(self, settings: Settings, wanted: CatchUpRun, arguments: Namespace) -> None:
        self._settings = settings
        self._wanted = wanted
        self._until_now = arguments.until is None
        self._dry_run: bool = arguments.dry_run
        self._credentials = CredentialReader()
        self._line = ByteProgress()
        self.rows: list[dict[str, Any]] = []
        self.listed = self.changed = self.uncertain = 0
        self.failed = False

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            inbox = await stack.enter_async_context(open_inbox(self._settings))
            tenants: TenantService | None = None
            if self._settings.multi_tenant.enabled:
                tenants = await stack.enter_async_context(open_tenants(self._settings))
            for tenant in await list_accounts(tenants):
                name = "" if tenant is None else f" of the tenant {tenant.identifier}"
                try:
                    await self._catch_up(tenant, inbox, tenants)
                except (
                    CallError,
                    IncompleteCatchUpError,
                    TenantCredentialsError,
                    UnknownEndpointError,
                ) as error:
                    self.failed = True
                    say(f"the records{name} could not be read: {error}")
                finally:
                    self._line.end()

    async def _catch_up(
        self, tenant: Tenant | None, inbox: Inbox, tenants: TenantService | None
    ) -> None:
        name = state_name(None if tenant is None else tenant.id, COMMAND_NAME)
        run = await self._begin(inbox, name)
        async with self._upstream(tenant) as upstream:
            chosen = endpoints_of(self._settings, tenant, await upstream.endpoints())
            for endpoint in chosen:
                if not endpoint.enabled:
                    say(
                        f"the webhook endpoint {endpoint.id} is disabled: enable it at the "
                        "upstream, and run this again for what changes until then"
                    )
            if tenant is None:
                await self._warn_of_deliveries(inbox, upstream)
            work = CatchUp(
                inbox,
                self._settings,
                tenant=tenant,
                tenants=tenants,
                types=subscribed_types(chosen),
                note=lambda event: self._note(event, tenant),
                dry_run=self._dry_run,
                patience=PATIENCE_SECONDS,
            )

            last = run

            async def save(progress: CatchUpRun) -> None:
                nonlocal last
                last = progress
                self._line.show(
                    f"{_place(progress)}: {progress.listed} records, {progress.added} events", 0
                )
                await self._save(inbox, name, progress)

            try:
                await work.run(upstream, run, save)
            finally:
                self.listed += last.listed
                self.changed += last.changed
                self.uncertain += last.uncertain
        await self._save(inbox, name, None)

    async def _warn_of_deliveries(self, inbox: Inbox, upstream: UpstreamDeliveries) -> None:
        """Warn of deliveries that the upstream lists and the inbox lacks."""
        options = self._settings.webhooks
        hours = min(options.dedup_retention_hours, options.payload_retention_days * 24)
        since = max(self._wanted.since, time.time() - hours * 3600.0)
        survey = await Reconciler(upstream, inbox, self._settings).survey(since)
        listed = sum(not each.archived for each in survey.missing)
        if listed:
            say(
                f"the upstream still lists {listed} deliveries that are missing here: run 'events "
                "reconcile' first, or the same fact may be handled twice"
            )

    @asynccontextmanager
    async def _upstream(self, tenant: Tenant | None) -> AsyncIterator[UpstreamDeliveries]:
        settings = self._settings
        if tenant is not None:
            token = await self._credentials.access_token(tenant)
            settings = msgspec.structs.replace(settings, access_token=token)
        async with Client(settings) as client:
            yield UpstreamDeliveries(client)

    async def _begin(self, inbox: Inbox, name: str) -> CatchUpRun:
        """Return the interrupted run of the same arguments, or a new one."""
        await trio.lowlevel.checkpoint()
        wanted = self._wanted
        text = None if self._dry_run else await inbox.read_checkpoint(name)
        try:
            stored = None if text is None else AccountState.from_text(text).run
        except ValueError:
            return wanted
        if stored is None or (stored.since, stored.types) != (wanted.since, wanted.types):
            return wanted
        if not self._until_now and stored.until != wanted.until:
            return wanted
        say(f"continuing with {_place(stored)}, up to {moment_text(stored.until)}")
        return stored

    async def _save(self, inbox: Inbox, name: str, run: CatchUpRun | None) -> None:
        await trio.lowlevel.checkpoint()
        if not self._dry_run:
            text = None if run is None else AccountState(run=run).as_text()
            await inbox.write_checkpoint(name, text)

    def _note(self, event: SyntheticEvent, tenant: Tenant | None) -> None:
        self.rows.append(
            {
                "type": event.delivery.type,
                "subject": event.delivery.subject,
                "tenant": event.delivery.tenant_id,
                "changed": moment_text(event.changed_at),
                "action": "would add" if self._dry_run else "added",
                "webhook_id": event.delivery.webhook_id,
            }
        )


def _place(run: CatchUpRun) -> str:
    """Return the list and the page that a run reads next."""
    if run.current is None:
        return "all lists" if run.lists is None else "the end"
    return f"{run.current.name}, page {run.current.page}"
