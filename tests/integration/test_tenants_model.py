"""Tenants on every store against an independent model: any order of calls by two processes."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.deliveries import settings as settings_of
from support.loop import Loop
from support.postgres import open_inbox
from support.stores import open_file

from sdk_trio.errors import (
    IllegalTransitionError,
    InvalidTenantError,
    SuspensionRefusedError,
    TenantConflictError,
    TenantExistsError,
    UnknownTenantError,
)
from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    EnvironmentVariable,
    TenantCredentials,
    TenantStatus,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.tenants import TenantService

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 100.0, "payload_seconds": 40.0}
DAY = 86_400.0
NAMES = ("a", "b", "c")
POLICIES = (
    {},
    {"MultiTenant__TenantStatus__SuspendUnverifiedTenantsAnyway": True},
    {"MultiTenant__TenantStatus__RequireVerifiedEmailForSuspension": False},
)

#: Sequences of calls that are tried on each store; a full-size run sets it to 60 or more.
EXAMPLES = int(os.environ.get("SDK_TEST_MODEL_EXAMPLES", "20"))
PREFIX = "Sdk:MultiTenant:TenantStatus:"
ANYWAY = PREFIX + "SuspendUnverifiedTenantsAnyway"
NOT_REQUIRED = PREFIX + "RequireVerifiedEmailForSuspension"

#: The statuses from and to which each verb leads: the model's own table.
ROUTES = {
    "suspend": (("Active",), "Suspended", "Suspended"),
    "deactivate": (("Active", "Suspended"), "Deactivated", "Deactivated"),
    "reactivate": (("Suspended", "Deactivated", "Deleted"), "Active", "Reactivated"),
    "delete": (("Active", "Suspended", "Deactivated"), "Deleted", "Deleted"),
}

names = st.sampled_from(NAMES)
who = st.sampled_from((0, 1))
verbs = st.sampled_from(tuple(ROUTES))
reasons = st.sampled_from((None, "unpaid", "' OR 1=1 --", "\u2603"))


class TenantMachine(RuleBasedStateMachine):
    """Two services work on one store; each call is made to the model as well."""

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 1000.0
        self.rows: dict[str, Any] = {}
        self.audit: list[Any] = []
        self.announced: list[Any] = []
        self.last_audit = self.last_outbox = 0
        #: The revisions that the store has returned, by the number of the last audit row.
        self.revisions: dict[int, int] = {}
        self.stores: list[Any] = []
        for number in (0, 1):
            self.stores.append(self.open(number))
        self.policies = [0, 1]

    def open(self, number: int) -> Any:
        if self.backend == "memory":
            shared = self.stores[0] if self.stores else None
            return MemoryInbox(LeaseTerms(owner=f"o{number}", **TERMS), shares=shared)
        file = Path(self.directory.name) / "inbox.db"
        opening = open_inbox if self.backend == "postgres" else open_file
        return self.loop(lambda: opening(file, owner=f"o{number}", **TERMS))

    def service(self, by: int) -> TenantService:
        keys = {"MultiTenant__Enabled": True, **POLICIES[self.policies[by]]}
        return TenantService(settings_of(**keys), self.stores[by].tenants, clock=lambda: self.now)

    def call(self, by: int, verb: str, *args: Any, **options: Any) -> Any:
        """Return the result of a call, or the exception that it raises."""

        async def ask() -> Any:
            try:
                return await getattr(self.service(by), verb)(*args, **options)
            except Exception as error:
                return error

        return self.loop(ask)

    def note(self, name: str, action: str, **fields: Any) -> None:
        self.last_audit += 1
        row = self.rows[name]
        empty = dict.fromkeys(("previous_status", "new_status", "reason", "relaxation", "details"))
        self.audit.append(
            {
                **empty,
                "sequence": self.last_audit,
                "tenant_id": row.id,
                "tenant_identifier": name,
                "action": action,
                "occurred_at": self.now,
                **fields,
            }
        )

    @initialize(policies=st.tuples(st.sampled_from((0, 1, 2)), st.sampled_from((0, 1, 2))))
    def begin(self, policies: tuple[int, int]) -> None:
        self.policies = list(policies)
        self.add(0, "a", "a", True, None)

    # -- rules -----------------------------------------------------------------------------------

    @rule(
        by=who,
        name=names,
        organization=st.sampled_from((None, "o1", "o2")),
        verified=st.booleans(),
        reason=reasons,
    )
    def add_one(
        self, by: int, name: str, organization: str | None, verified: bool, reason: str | None
    ) -> None:
        self.add(by, name, organization, verified, reason)

    def add(
        self, by: int, name: str, organization: str | None, verified: bool, reason: str | None
    ) -> None:
        result = self.call(
            by,
            "add",
            name,
            name=name.upper(),
            organization_id=organization,
            site_manager_email="m@example.com",
            site_manager_email_verified=verified,
            reason=reason,
            actor="adder",
        )
        taken = organization and any(r.organization == organization for r in self.rows.values())
        if name in self.rows or taken:
            assert type(result) is TenantExistsError
            return
        self.rows[name] = SimpleNamespace(
            id=result.id,
            status="Active",
            verified=verified,
            email="m@example.com",
            organization=organization,
            created_at=self.now,
            deleted_at=None,
            version=1,
            variable=None,
        )
        self.note(name, "Created", new_status="Active", reason=reason, actor="adder")

    @rule(by=who, name=names, verb=verbs, reason=reasons, bypass=st.booleans(), by_id=st.booleans())
    def take_through(
        self, by: int, name: str, verb: str, reason: str | None, bypass: bool, by_id: bool
    ) -> None:
        row = self.rows.get(name)
        options = {"bypass_email_verification": bypass} if verb == "suspend" else {}
        key = row.id if row is not None and by_id else name
        result = self.call(by, verb, key, reason=reason, actor="mover", **options)
        if row is None:
            assert type(result) is UnknownTenantError
            return
        sources, target, transition = ROUTES[verb]
        if row.status == target:
            assert (result.no_op, result.previous_status, result.new_status) == (
                True,
                target,
                target,
            )
            return
        late = row.deleted_at is not None and self.now - row.deleted_at > 90 * DAY
        if row.status not in sources or late:
            assert type(result) is IllegalTransitionError
            self.refuse(name, transition, result, reason)
            return
        relaxation = None
        if verb == "suspend" and not row.verified:
            policy = self.policies[by]
            relaxation = NOT_REQUIRED if policy == 2 else ANYWAY if policy == 1 and bypass else None
            if relaxation is None:
                assert type(result) is SuspensionRefusedError
                self.refuse(name, transition, result, reason)
                return
        assert (result.no_op, result.previous_status, result.new_status, result.occurred_at) == (
            False,
            row.status,
            target,
            self.now,
        )
        assert (str(result.transition), result.relaxation) == (transition, relaxation)
        changed = {"previous_status": row.status, "new_status": target}
        row.status, row.version = target, row.version + 1
        row.deleted_at = self.now if target == "Deleted" else None
        said = {**changed, "reason": reason, "actor": "mover"}
        self.note(name, transition, relaxation=relaxation, **said)
        self.last_outbox += 1
        self.announced.append(
            {
                "sequence": self.last_outbox,
                "tenant_id": row.id,
                "tenant_identifier": name,
                "tenant_name": name.upper(),
                "transition": transition,
                "occurred_at": self.now,
                "site_manager_email": row.email,
                "site_manager_email_verified": row.verified,
                "site_manager_phone": None,
                **said,
            }
        )

    def refuse(self, name: str, transition: str, error: Exception, reason: str | None) -> None:
        status = self.rows[name].status
        self.note(
            name,
            "Refused",
            previous_status=status,
            new_status=status,
            details=f"{transition}: {error}",
            reason=reason,
            actor="mover",
        )

    @rule(by=who, name=names, organization=st.sampled_from((None, "o1", "o2")))
    def change_organization(self, by: int, name: str, organization: str | None) -> None:
        result = self.call(by, "change", name, organization_id=organization, actor="editor")
        row = self.rows.get(name)
        others = [r.organization for n, r in self.rows.items() if n != name]
        if row is None:
            assert type(result) is UnknownTenantError
        elif organization is not None and organization in others:
            assert type(result) is TenantExistsError
        elif row.organization != organization:
            assert result.organization_id == organization
            row.organization, row.version = organization, row.version + 1
            self.note(name, "Changed", details="organization_id", actor="editor")

    @rule(by=who, name=names, verb=verbs, behind=st.integers(1, 3))
    def act_on_what_was_seen_before_a_change(
        self, by: int, name: str, verb: str, behind: int
    ) -> None:
        if (row := self.rows.get(name)) is not None:
            result = self.call(by, verb, name, expected_version=row.version - behind)
            assert type(result) is TenantConflictError

    @rule(by=who, name=names, verified=st.booleans(), email=st.sampled_from((None, "n@x.org")))
    def change_contact(self, by: int, name: str, verified: bool, email: str | None) -> None:
        result = self.call(
            by,
            "change",
            name,
            site_manager_email=email,
            site_manager_email_verified=verified,
            site_manager_phone=None,
            actor="editor",
        )
        if (row := self.rows.get(name)) is None:
            assert type(result) is UnknownTenantError
            return
        verified = verified and email is not None
        differing = [
            field
            for field, old, new in (
                ("site_manager_email", row.email, email),
                ("site_manager_email_verified", row.verified, verified),
            )
            if old != new
        ]
        if differing:
            row.email, row.verified, row.version = email, verified, row.version + 1
            self.note(name, "Changed", details=", ".join(differing), actor="editor")

    @rule(by=who, name=names, variable=st.sampled_from((None, "V1", "V2")))
    def set_credentials(self, by: int, name: str, variable: str | None) -> None:
        sources = () if variable is None else (EnvironmentVariable(variable),)
        changed = TenantCredentials(webhook_secrets=sources)
        result = self.call(by, "change", name, credentials=changed, actor="editor")
        if (row := self.rows.get(name)) is None:
            assert type(result) is UnknownTenantError
        elif row.variable != variable:
            assert result.credentials == changed
            row.variable, row.version = variable, row.version + 1
            self.note(name, "Changed", details="credentials", actor="editor")

    @rule(by=who, bad=st.sampled_from(("slug", "email", "reason", "actor")))
    def ask_for_what_cannot_be(self, by: int, bad: str) -> None:
        match bad:
            case "slug":
                result = self.call(by, "add", "No Slug", name="x")
            case "email":
                result = self.call(by, "add", "d", name="x", site_manager_email="no address")
            case "reason":
                result = self.call(by, "suspend", "a", reason="two\nlines")
            case _:
                result = self.call(by, "delete", "a", actor="")
        assert type(result) in (InvalidTenantError, UnknownTenantError)

    @precondition(lambda self: any(row.status == "Deleted" for row in self.rows.values()))
    @rule(by=who, forget=st.booleans())
    def purge(self, by: int, forget: bool) -> None:
        name = next(name for name, row in self.rows.items() if row.status == "Deleted")
        row = self.rows[name]
        store = self.stores[by].tenants
        record = AuditRecord(
            tenant_id=row.id,
            tenant_identifier=name,
            action=AuditAction.PURGED,
            actor="purger",
            occurred_at=self.now,
        )

        async def ask() -> Any:
            return await store.purge(await store.get(row.id), record, forget_audit=forget)

        purged = self.loop(ask)
        kept_outbox = [each for each in self.announced if each["tenant_id"] != row.id]
        kept_audit = [a for a in self.audit if not forget or a["tenant_id"] != row.id]
        assert purged.outbox == len(self.announced) - len(kept_outbox)
        assert purged.audit == len(self.audit) - len(kept_audit)
        self.announced, self.audit = kept_outbox, kept_audit
        self.note(name, "Purged", actor="purger")
        del self.rows[name]

    @rule(days=st.sampled_from((0.1, 45.0, 90.0, 91.0)))
    def advance(self, days: float) -> None:
        self.now += days * DAY

    @rule(by=who)
    def reopen(self, by: int) -> None:
        if self.backend != "memory":
            self.loop(self.stores[by].close)
            self.stores[by] = self.open(by)

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for store in self.stores:
            found = self.loop(lambda store=store: self.look(store.tenants))
            tenants, deleted, counts, audit, outbox, revision = found
            assert [tenant.identifier for tenant in tenants] == sorted(self.rows)
            for tenant in tenants:
                row = self.rows[tenant.identifier]
                variables = [source.name for source in tenant.credentials.webhook_secrets]
                assert (
                    tenant.id,
                    tenant.status,
                    tenant.site_manager_email,
                    tenant.site_manager_email_verified,
                    tenant.organization_id,
                    tenant.created_at,
                    tenant.deleted_at,
                    tenant.version,
                    variables,
                ) == (
                    row.id,
                    row.status,
                    row.email,
                    row.verified,
                    row.organization,
                    row.created_at,
                    row.deleted_at,
                    row.version,
                    [row.variable] if row.variable else [],
                )
            statuses = [row.status for row in self.rows.values()]
            assert counts == {status: statuses.count(status) for status in TenantStatus}
            assert [t.identifier for t in deleted] == sorted(
                name for name, row in self.rows.items() if row.status == "Deleted"
            )
            assert audit == self.audit
            assert [
                {k: v for k, v in o.items() if k != "delivery_id"} for o in outbox
            ] == self.announced
            assert len({o["delivery_id"] for o in outbox}) == len(outbox)
            # The revision changes with each audit row, and only then.
            assert self.revisions.setdefault(self.last_audit, revision) == revision
            assert len(set(self.revisions.values())) == len(self.revisions)

    async def look(self, store: Any) -> Any:
        tenants: list[Any] = []
        while page := await store.page(after=tenants[-1].identifier if tenants else "", limit=2):
            tenants += page
        for tenant in tenants:
            assert await store.get(tenant.id) == tenant
            assert await store.find(tenant.identifier) == tenant
            if tenant.organization_id is not None:
                assert await store.owner_of(tenant.organization_id) == tenant
            own = await store.audit(tenant.id, limit=1000)
            assert [row.sequence for row in own] == [
                row["sequence"] for row in self.audit if row["tenant_id"] == tenant.id
            ]
        return (
            tenants,
            await store.page(status=TenantStatus.DELETED),
            await store.counts(),
            [attrs.asdict(row) for row in await store.audit(limit=1000)],
            [attrs.asdict(row) for row in await store.outbox(limit=1000)],
            await store.revision(),
        )

    def teardown(self) -> None:
        for store in self.stores:
            self.loop(store.close)
        self.loop.stop()
        self.directory.cleanup()


class SqliteTenantMachine(TenantMachine):
    backend = "sqlite"


class MemoryTenantMachine(TenantMachine):
    backend = "memory"


class PostgresTenantMachine(TenantMachine):
    backend = "postgres"


@pytest.mark.parametrize(
    "machine", [SqliteTenantMachine, MemoryTenantMachine, PostgresTenantMachine]
)
def test_any_order_of_calls_gives_the_model_s_results(machine: type[TenantMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            # Each step is a round trip to another process.
            max_examples=EXAMPLES // 3 if machine.backend == "postgres" else EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            # Without Phase.explain, which runs for minutes with a store on disk.
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
