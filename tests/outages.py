"""Disable every endpoint for a while, kill the receiver while it catches up, and count.

    python tests/outages.py [--hours 72] [--tenants 20] [--objects 10000] [--kills 5] [--seed 1]

The receiver is ``python -m sdk_trio run`` with a store in SQLite and a handler for each type, whose
effects are rows of that store. The upstream is ``sdk_trio.testing.SendingUpstream``: each tenant is
an organization with its own token. The outage is as long as the times of the records and the last
contact say; nothing waits for it. While the receiver catches up it is killed (SIGKILL) again and
again, and records change whose events are delivered.

The exit status is 1 if the newest state of a record was not handled exactly once, if a lifecycle
event was handled twice or not at all, or if a second catch-up changes anything.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import apsw
import attrs
import trio
from support.daemon import clean_environment
from support.deliveries import SECRET
from support.outage import order, subscription
from support.scripted_upstream import answer_requests
from support.upstreams import Upstream, serving
from support.wire import Wire

from sdk_trio.config import Settings
from sdk_trio.reconcile.gap import AccountState, state_name
from sdk_trio.records.tenants import EnvironmentVariable, TenantCredentials
from sdk_trio.storage.open import open_store
from sdk_trio.tenants.service import TenantService
from sdk_trio.testing import SendingUpstream, sign_delivery

APPLICATION = """
import sdk_trio
from sdk_trio.events import DEFAULT_CATALOG

handlers = sdk_trio.HandlerRegistry()


def note(event, tx):
    tx.connection.execute(
        "CREATE TABLE IF NOT EXISTS effect (type, subject, changed, synthetic, key, tenant)"
    )
    data = event.json["data"]
    changed = data.get("modified_at") or data["created_at"]
    row = (event.type, event.data.id, changed, event.synthetic, event.key)
    tenant = event.tenant and event.tenant.identifier
    tx.connection.execute("INSERT INTO effect VALUES (?, ?, ?, ?, ?, ?)", (*row, tenant))


for row in DEFAULT_CATALOG:
    handlers.register(row.event_class, note, enqueue=True, transaction=True)
"""

HOUR = 3600.0

#: Lists and lifecycle types of the records that are made, and how many of ten are of each.
SHARES = {"orders": 5, "subscriptions": 2, "customers": 1, "checkouts": 1, "refunds": 1}


@attrs.define
class Result:
    """The counts of an experiment, and what was wrong."""

    counts: dict[str, Any] = attrs.Factory(dict)
    problems: list[str] = attrs.Factory(list)

    def expect(self, name: str, found: Any, expected: Any) -> None:
        self.counts[name] = found
        if found != expected:
            self.problems.append(f"{name}: {found!r} instead of {expected!r}")


async def deliver(account: Any, event: Any) -> bool:
    """Post an event to a receiver that may be killed meanwhile."""
    await trio.lowlevel.checkpoint()
    if account.target is None:
        return False
    signed = sign_delivery(event.body, secret=SECRET, webhook_id=event.id)
    try:
        with trio.fail_after(10), await Wire.connect(account.target) as wire:
            return bool((await wire.post(signed)).status == 200)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return False


class Experiment:
    """One outage; see the module."""

    def __init__(
        self, directory: Path, arguments: argparse.Namespace, shares: Mapping[str, int]
    ) -> None:
        self.directory = directory
        self.shares = shares
        self.hours: float = arguments.hours
        self.objects: int = arguments.objects
        self.kills: int = arguments.kills
        self.dice = random.Random(arguments.seed)
        names = [f"t{number:02}" for number in range(arguments.tenants)]
        tokens = {"token-of-host": "org_host"} | {f"token-of-{n}": f"org_{n}" for n in names}
        self.upstream = SendingUpstream(
            secret=SECRET, organizations=tokens, pace=0.0001, deliver=deliver
        )
        for account in self.upstream.organizations.values():
            account.subscribed = tuple(each for kind in shares for each in self.types(kind))
        self.names = names
        self.port = 0
        self.process: Popen[bytes] | None = None
        self.result = Result()
        self.killed = 0

    # -- the receiver ------------------------------------------------------------------------

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "Mode": "Custom",
            "Environment": "Development",
            "CustomBaseUrl": f"http://127.0.0.1:{self.port}",
            "AccessToken": "token-of-host",
            "MaxRetries": 0,
            "Server:Bind": ["127.0.0.1:0"],
            "Admin:Bind": "127.0.0.1:0",
            "Storage:Path": str(self.directory / "data"),
            "Webhooks:RequireHttps": False,
            "Webhooks:Secret": SECRET,
            "Webhooks:Reconciliation:Enabled": True,
            "MultiTenant:Enabled": True,
            "MultiTenant:FileDb:Directory": str(self.directory / "tenants"),
        }

    def start(self) -> None:
        """Start the receiver; deliveries find it by its log."""
        nested: dict[str, Any] = {}
        for key, value in self.keys.items():
            *path, name = key.split(":")
            section = nested
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value
        (self.directory / "app.py").write_text(APPLICATION)
        (self.directory / "settings.json").write_text(json.dumps({"Sdk": nested}))
        variables = {f"TOKEN_{name.upper()}": f"token-of-{name}" for name in self.names}
        command = [sys.executable, "-m", "sdk_trio", "run", "--config", "settings.json"]
        with (self.directory / "log").open("ab") as log:
            self.process = Popen(
                [*command, "--app", "app:handlers"],
                cwd=self.directory,
                env={**clean_environment(), **variables},
                stdout=log,
                stderr=log,
            )

    async def serve_again(self) -> None:
        """Start the receiver, and let the upstream deliver to it."""
        begun = self.log_size()
        self.start()
        while True:
            found = [line for line in self.log_lines(begun) if "runtime.started" in line]
            if found:
                # The receiver's comes before that of the admin address.
                (address, *_) = re.findall(r"http://[0-9.:]+[0-9]", found[0])
                break
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError("the receiver has ended: " + "".join(self.log_lines(begun)[-5:]))
            await trio.sleep(0.05)
        for account in self.upstream.organizations.values():
            account.target = f"{address}/hooks/sdk"

    def log_size(self) -> int:
        path = self.directory / "log"
        return path.stat().st_size if path.exists() else 0

    def log_lines(self, after: int = 0) -> list[str]:
        with (self.directory / "log").open("rb") as log:
            log.seek(after)
            return log.read().decode(errors="replace").splitlines(keepends=True)

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None
        for account in self.upstream.organizations.values():
            account.target = None

    @contextlib.contextmanager
    def database(self) -> Iterator[apsw.Connection]:
        (path,) = (self.directory / "data").glob("*.db")
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(10_000)
        try:
            yield connection
        finally:
            connection.close()

    def effects(self) -> list[Any]:
        with self.database() as connection:
            made = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'effect'"
            ).fetchall()
            return connection.execute("SELECT * FROM effect").fetchall() if made else []

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Any]:
        settings = Settings.from_mapping(self.keys)
        async with open_store(settings, owner=f"outages-{os.getpid()}") as store:
            yield settings, store

    async def add_tenants(self) -> None:
        async with self.store() as (settings, store):
            service = TenantService(settings, store.tenants)
            for name in self.names:
                await service.add(
                    name,
                    name=name,
                    organization_id=f"org_{name}",
                    credentials=TenantCredentials(
                        access_token=EnvironmentVariable(f"TOKEN_{name.upper()}")
                    ),
                )

    def states(self) -> list[AccountState]:
        """Return the stored state of every account that has one."""
        with self.database() as connection:
            rows = connection.execute("SELECT value FROM checkpoint WHERE name GLOB 'catch_up*'")
            return [AccountState.from_text(text) for (text,) in rows]

    async def set_back(self, hours: float) -> None:
        """Let the last contact of every account be so long ago."""
        async with self.store() as (settings, store):
            tenants = await TenantService(settings, store.tenants).all()
            for key in [None, *(each.id for each in tenants)]:
                text = await store.read_checkpoint(state_name(key))
                state = attrs.evolve(
                    AccountState.from_text(text), contact=time.time() - hours * HOUR
                )
                await store.write_checkpoint(state_name(key), state.as_text())

    # -- the upstream ------------------------------------------------------------------------

    def record(self, kind: str, name: str, created: float, modified: float, org: str) -> Any:
        if kind == "orders":
            return order(name, created=created, modified=modified, organization=org)
        made = subscription(name, created=created, modified=modified)
        made["customer"] = {"organization_id": org}
        if kind != "subscriptions":
            made = {key: made[key] for key in ("id", "created_at", "modified_at")}
            made["organization_id"] = org
        return made

    def types(self, kind: str, *, is_new: bool = True) -> list[str]:
        family = kind.removesuffix("s")
        new = [f"{family}.created"] if is_new else []
        new += {"orders": ["order.paid"], "subscriptions": ["subscription.active"]}.get(kind, [])
        return [*(new if is_new else []), f"{family}.updated"]

    def lots(self, per_account: int) -> Iterator[tuple[Any, str, str]]:
        """Yield account, list and name of so many records of each tenant."""
        kinds = [kind for kind, share in self.shares.items() for _ in range(share)]
        for account in list(self.upstream.organizations.values())[1:]:
            for number in range(per_account):
                yield account, kinds[number % len(kinds)], f"{account.id}_{number:05}"

    async def all_delivered(self) -> None:
        events = [e for a in self.upstream.organizations.values() for e in a.events.values()]
        while any(event.pending for event in events):
            await trio.sleep(0.05)

    # -- the story ---------------------------------------------------------------------------

    async def run(self) -> Result:
        per_account = self.objects // len(self.names)
        await self.add_tenants()
        await self.serve_again()
        # A fifth of the records existed before, and their events were delivered.
        before = time.time() - (self.hours + 5) * HOUR
        for account, kind, name in self.lots(per_account // 5):
            record = self.record(kind, name, before, before, account.id)
            types = self.types(kind)
            self.upstream.change(kind, record, *types, organization=account)
        await self.all_delivered()
        while len(self.states()) <= len(self.names):
            await trio.sleep(0.2)
        await self.idle()
        self.stop()
        delivered = self.effects()
        await self.break_down(per_account)
        await self.set_back(self.hours)
        for account in self.upstream.organizations.values():
            self.upstream.enable(account)
        # Live events are retried across the kills.
        self.upstream.set_pace(0.05)
        live: list[tuple[str, str]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.go_on_changing, live)
            await self.catch_up_under_kills()
            nursery.cancel_scope.cancel()
        await self.all_delivered()
        await self.idle()
        self.judge(delivered, live)
        await self.again()
        return self.result

    async def break_down(self, per_account: int) -> None:
        """Change every record while no receiver answers, until all endpoints are disabled."""
        accounts = list(self.upstream.organizations.values())[1:]
        begin = time.time() - (self.hours - 0.5) * HOUR
        for step in (0, 1, 2):
            for account, kind, name in self.lots(per_account):
                is_old = name in account.records[kind]
                created = begin + 10 if not is_old else begin - 5 * HOUR
                # The last change of each is somewhere in the outage.
                at = (
                    begin + 60 + step * 60 + self.dice.random() * (self.hours - 1) * HOUR * step / 2
                )
                record = self.record(kind, name, created, at, account.id)
                if is_old:
                    record["created_at"] = account.records[kind][name]["created_at"]
                    if "started_at" in record:
                        record["started_at"] = record["created_at"]
                types = self.types(kind, is_new=not is_old)
                self.upstream.change(kind, record, *types, organization=account)
            while step == 0 and any(account.enabled for account in accounts):
                await trio.sleep(0.05)
        self.result.counts["endpoints disabled"] = sum(not a.enabled for a in accounts)
        self.result.counts["events without any record"] = sum(
            a.skipped_unrecorded for a in accounts
        )

    async def go_on_changing(self, live: list[tuple[str, str]]) -> None:
        """Deliver ordinary events while the receiver catches up."""
        accounts = list(self.upstream.organizations.values())[1:]
        while True:
            account, now = self.dice.choice(accounts), time.time()
            name = f"live_{len(live):05}"
            record = self.record("orders", name, now, now, account.id)
            types = self.types("orders")
            self.upstream.change("orders", record, *types, organization=account)
            live.append((name, account.id))
            await trio.sleep(0.5)

    async def catch_up_under_kills(self) -> None:
        await self.serve_again()
        begun = len(self.effects())
        expected = self.objects * 1.8
        for number in range(self.kills):
            goal = begun + expected * (number + 0.5) / (self.kills + 1)
            while len(self.effects()) < goal:
                if self.is_caught_up():
                    return
                await trio.sleep(0.05)
            self.stop()
            self.killed += 1
            await self.serve_again()
        while not self.is_caught_up():
            await trio.sleep(0.5)

    def is_caught_up(self) -> bool:
        states = self.states()
        fresh = all((state.contact or 0.0) > time.time() - 300 for state in states)
        return fresh and all(state.run is None for state in states)

    async def idle(self) -> None:
        """Wait until no event waits or runs."""
        query = "SELECT count(*) FROM work WHERE state IN ('received', 'running', 'retrying')"
        while True:
            with self.database() as connection:
                ((unfinished,),) = connection.execute(query)
            if not unfinished:
                return
            await trio.sleep(0.1)

    def judge(self, delivered: list[Any], live: list[tuple[str, str]]) -> None:
        rows = self.effects()[len(delivered) :]
        expect, result = self.result.expect, self.result
        lives = {name for name, _ in live}
        newest = {}
        fresh = Counter[str]()
        for account in list(self.upstream.organizations.values())[1:]:
            for kind, records in account.records.items():
                for name, record in records.items():
                    if name not in lives:
                        family = kind.removesuffix("s")
                        newest[f"{family}.updated", name, record["modified_at"]] = account.id
        old = {subject for _, subject, *_ in delivered}
        handled = Counter((row[0], row[1], row[2]) for row in rows if row[1] not in lives)
        states = Counter({key: n for key, n in handled.items() if key[0].endswith(".updated")})
        expect("records that changed", len(newest), self.objects)
        expect("newest states handled once", sum(states[key] == 1 for key in newest), len(newest))
        expect("newest states handled twice", sum(states[key] > 1 for key in newest), 0)
        expect("older states handled", sum(key not in newest for key in states), 0)
        for kind in self.shares:
            names = {
                name for _, each, name in self.lots(self.objects // len(self.names)) if each == kind
            }
            for name in self.types(kind)[:-1]:
                found = Counter(row[1] for row in rows if row[0] == name and row[1] not in lives)
                expect(
                    f"{name} handled once", sum(n == 1 for n in found.values()), len(names - old)
                )
                fresh[name] = len(found)
                expect(f"{name} of records that had one", len(old & set(found)), 0)
        tenants = {row[1]: row[5] for row in rows}
        wrong = [s for s, t in tenants.items() if t and f"org_{t}" not in s and s not in lives]
        expect("events of another tenant", len(wrong), 0)
        real = Counter((row[0], row[1]) for row in rows if row[1] in lives and not row[3])
        expect("live events handled once", sum(n == 1 for n in real.values()), 3 * len(lives))
        result.counts["live events also made from state"] = sum(
            bool(row[3]) for row in rows if row[1] in lives
        )
        result.counts["kills"] = self.killed
        expect(
            "endpoints enabled",
            sum(a.enabled for a in self.upstream.organizations.values()),
            len(self.names) + 1,
        )

    async def again(self) -> None:
        """Let every account catch up once more; nothing may change."""
        self.stop(signal.SIGTERM)
        before = len(self.effects())
        await self.set_back(self.hours)
        await self.serve_again()
        while not self.is_caught_up():
            await trio.sleep(0.5)
        await self.idle()
        self.stop(signal.SIGTERM)
        self.result.expect("effects of a second catch-up", len(self.effects()) - before, 0)


async def experiment(
    arguments: argparse.Namespace, directory: Path, shares: Mapping[str, int] = SHARES
) -> Result:
    """Run an experiment in a directory and return its result."""
    made = Experiment(directory, arguments, shares)
    server = Upstream()

    def answer(method: str, target: str, headers: dict[str, str], body: bytes) -> Any:
        token = headers.get("authorization", "").removeprefix("Bearer ")
        return made.upstream.answer(method, target, token, body)

    async with trio.open_nursery() as nursery:
        await nursery.start(made.upstream.run)
        async with serving(server, lambda stream: answer_requests(stream, answer)):
            made.port = server.port
            try:
                await made.run()
            finally:
                made.stop()
        nursery.cancel_scope.cancel()
    return made.result


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=72.0)
    parser.add_argument("--tenants", type=int, default=20)
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def main() -> int:
    """Run an experiment and print its counts."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as directory:
        begun = time.monotonic()
        result = trio.run(experiment, arguments, Path(directory))
        for name, count in result.counts.items():
            print(f"{count!s:>8}  {name}")
        print(f"{time.monotonic() - begun:8.0f}  seconds")
        for problem in result.problems:
            print(f"WRONG: {problem}")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
