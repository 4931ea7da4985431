"""The clients of tenants: shared while used, closed when not, renewed when the token changes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.lowlevel
import trio.testing
from support.deliveries import settings as settings_of

from sdk_trio.config import Secret, Settings
from sdk_trio.errors import NotInThisVersionError, NotRunningError, TenantCredentialsError
from sdk_trio.records.tenants import (
    CredentialSource,
    EnvironmentVariable,
    KeyFile,
    Tenant,
    TenantCredentials,
)
from sdk_trio.tenants.credentials import MAX_FILE_BYTES, CredentialReader
from sdk_trio.tenants.tenancy import ClientPool

SETTINGS = msgspec.structs.replace(settings_of(), access_token=Secret("host-token"))


@attrs.define(eq=False)
class FakeClient:
    """Stands for a client: knows its token, and which of them are open."""

    token: str
    log: list["FakeClient"]
    task: Any = None

    async def __aenter__(self) -> "FakeClient":
        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.checkpoint()
        self.log.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is trio.lowlevel.current_task(), "left in the task that entered it"
        self.log.remove(self)


@attrs.define
class Kit:
    """A pool, the environment of its tokens, and the clients that are open."""

    variables: dict[str, str] = attrs.Factory(dict)
    open: list[FakeClient] = attrs.Factory(list)
    reader: CredentialReader = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = CredentialReader(lambda: self.variables)

    def make(self, settings: Settings) -> FakeClient:
        assert settings.access_token is not None
        return FakeClient(settings.access_token.reveal(), self.open)

    @property
    def tokens(self) -> list[str]:
        return [client.token for client in self.open]

    def tenant(self, name: str, token: str | None = None) -> Tenant:
        if token is not None:
            self.variables[f"TOKEN_{name}"] = token
            self.reader.reload()
        source = None if token is None else EnvironmentVariable(f"TOKEN_{name}")
        return tenant_with(source, name)

    @asynccontextmanager
    async def pool(self, **options: Any) -> AsyncIterator[ClientPool]:
        pool = ClientPool(SETTINGS, self.reader, self.make, **options)
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            yield pool
            nursery.cancel_scope.cancel()


def tenant_with(source: CredentialSource | None, name: str = "a", *secrets: Any) -> Tenant:
    credentials = TenantCredentials(access_token=source, webhook_secrets=secrets)
    return Tenant(
        id=f"id-{name}", identifier=name, name=name, created_at=0, credentials=credentials
    )


async def test_a_tenant_s_blocks_share_one_client_with_its_own_token() -> None:
    kit = Kit()
    a, b = kit.tenant("a", "token-a"), kit.tenant("b", "token-b")
    async with kit.pool() as pool:
        async with pool.lease(a) as one, pool.lease(a) as two, pool.lease(b) as other:
            assert one is two
            assert (one.token, other.token) == ("token-a", "token-b")
        async with pool.lease(a) as again:
            assert again is one
    assert kit.open == []


async def test_many_tasks_at_once_open_one_client() -> None:
    kit = Kit()
    a = kit.tenant("a", "token-a")
    seen = set()

    async def use(pool: ClientPool) -> None:
        async with pool.lease(a) as client:
            seen.add(client)
            await trio.testing.wait_all_tasks_blocked()

    async with kit.pool() as pool, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(use, pool)
    assert len(seen) == 1


async def test_tenants_without_a_token_of_their_own_share_the_host_s() -> None:
    kit = Kit()
    async with (
        kit.pool() as pool,
        pool.lease(kit.tenant("a")) as one,
        pool.lease(kit.tenant("b")) as two,
    ):
        assert one is two
        assert one.token == "host-token"


async def test_a_token_that_cannot_be_read_is_an_error_and_never_the_host_s() -> None:
    kit = Kit()
    tenant = kit.tenant("a", "token-a")
    kit.variables.clear()
    kit.reader.reload()
    async with kit.pool() as pool:
        with pytest.raises(TenantCredentialsError, match=r"'a'.*variable TOKEN_a.*not set"):
            async with pool.lease(tenant):
                raise AssertionError("given out")
        assert kit.open == []


async def test_after_a_rotation_the_next_block_gets_a_new_client() -> None:
    kit = Kit()
    tenant = kit.tenant("a", "old")
    async with kit.pool() as pool:
        async with pool.lease(tenant) as before:
            kit.tenant("a", "new")
            async with pool.lease(tenant) as after:
                assert (before.token, after.token) == ("old", "new")
                assert sorted(kit.tokens) == ["new", "old"], "what is in use is not closed"
        await trio.testing.wait_all_tasks_blocked()
        assert kit.tokens == ["new"]


async def test_an_unused_client_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    kit = Kit()
    async with kit.pool(idle_seconds=100) as pool:
        async with pool.lease(kit.tenant("a", "a")):
            await trio.sleep(1000)
            assert kit.tokens == ["a"]
        await trio.sleep(90)
        assert kit.tokens == ["a"]
        await trio.sleep(40)
        assert kit.tokens == []
        assert pool.open_count == 0


async def test_ten_thousand_tenants_keep_no_more_clients_open_than_allowed() -> None:
    kit = Kit()
    tenants = [kit.tenant(str(number)) for number in range(10)]
    kit.variables.update({f"TOKEN_{number}": f"t{number}" for number in range(10_000)})
    kit.reader.reload()
    tenants = [tenant_with(EnvironmentVariable(f"TOKEN_{n}"), str(n)) for n in range(10_000)]
    most = 0
    async with kit.pool(max_open=8) as pool:
        for tenant in tenants:
            async with pool.lease(tenant):
                most = max(most, len(kit.open))
        assert pool.open_count == 8
        assert not pool._locks
    assert most <= 9, "one of them being closed"


async def test_cancelled_anywhere_a_block_leaves_no_client_behind() -> None:
    for steps in range(12):
        kit = Kit()
        tenant = kit.tenant("a", "a")

        async def use(pool: ClientPool, tenant: Tenant = tenant) -> None:
            async with pool.lease(tenant):
                await trio.lowlevel.checkpoint()

        async with kit.pool(max_open=1) as pool:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use, pool)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert len(kit.open) == pool.open_count
            assert not pool._locks
            async with pool.lease(kit.tenant("b", "b")):
                await trio.testing.wait_all_tasks_blocked()
                assert kit.tokens == ["b"]


async def test_a_client_that_cannot_be_opened_fails_its_block_alone() -> None:
    kit = Kit()

    def refuse(_: Settings) -> FakeClient:
        raise ValueError("no")

    pool = ClientPool(SETTINGS, kit.reader, refuse)
    with pytest.raises(NotRunningError):
        async with pool.lease(kit.tenant("a")):
            raise AssertionError("given out")
    without = ClientPool(SETTINGS, kit.reader, None)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        await nursery.start(without.run)
        for each, error in ((pool, ValueError), (without, NotInThisVersionError)):
            with pytest.raises(error):
                async with each.lease(kit.tenant("a")):
                    raise AssertionError("given out")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"\xff\xfe", "UTF-8"),
        (b"x" * (MAX_FILE_BYTES + 1), "larger"),
    ],
)
async def test_a_faulty_key_file_is_reported_without_its_content(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    reader = CredentialReader(dict)
    with pytest.raises(TenantCredentialsError, match=f"'a'.*{file}.*{why}") as caught:
        await reader.access_token(tenant_with(KeyFile(str(file))))
    assert len(str(caught.value)) < 300
    assert await reader.webhook_secrets(tenant_with(None, "a", KeyFile(str(file)))) == ()


async def test_each_line_of_each_source_is_a_secret_and_none_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b" one\r\n\ntwo \n")
    reader = CredentialReader(lambda: {"V": "three"})
    secrets = await reader.webhook_secrets(
        tenant_with(None, "a", KeyFile(str(file)), EnvironmentVariable("V"))
    )
    assert [secret.reveal() for secret in secrets] == ["one", "two", "three"]
    assert "one" not in repr(secrets)


class ReloadableClient(FakeClient):
    """Like the real client: takes new settings without being replaced."""

    retries: int | None = None

    def prepare_reload(self, settings: Settings) -> Any:
        assert settings.access_token is not None
        assert settings.access_token.reveal() == self.token, "its own token stays"
        return lambda: setattr(self, "retries", settings.max_retries)


async def test_a_reload_changes_open_clients_in_their_place(monkeypatch: Any) -> None:
    kit = Kit()
    monkeypatch.setattr(
        kit.__class__,
        "make",
        lambda self, settings: ReloadableClient(settings.access_token.reveal(), self.open),
    )
    a, b = kit.tenant("a", "token-a"), kit.tenant("b")
    async with kit.pool() as pool, pool.lease(a) as one, pool.lease(b) as two:
        pool.prepare_reload(msgspec.structs.replace(SETTINGS, max_retries=7))()
        assert (one.retries, two.retries) == (7, 7)
        async with pool.lease(a) as again, pool.lease(b) as shared:
            assert (again, shared) == (one, two)


async def test_after_a_reload_a_client_that_cannot_change_gives_way_to_a_new_one() -> None:
    kit = Kit()
    made: list[Settings] = []
    make = kit.make

    def remembering(settings: Settings) -> FakeClient:
        made.append(settings)
        return make(settings)

    pool = ClientPool(SETTINGS, kit.reader, remembering)
    tenant = kit.tenant("a", "token-a")
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        async with pool.lease(tenant) as before:
            # Nothing that clients go by: the same one serves.
            webhooks = msgspec.structs.replace(SETTINGS.webhooks, tolerance_seconds=60)
            pool.prepare_reload(msgspec.structs.replace(SETTINGS, webhooks=webhooks))()
            async with pool.lease(tenant) as same:
                assert same is before
            pool.prepare_reload(msgspec.structs.replace(SETTINGS, max_retries=7))()
            async with pool.lease(tenant) as after:
                assert after is not before
                assert len(kit.open) == 2, "what is in use is not closed"
        await trio.testing.wait_all_tasks_blocked()
        assert [settings.max_retries for settings in made] == [SETTINGS.max_retries, 7]
        assert len(kit.open) == 1
        nursery.cancel_scope.cancel()
