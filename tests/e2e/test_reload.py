"""HUP and changed key files, under load: all of the new settings, or all of the old ones."""

import os
import signal

import pytest
import trio
from support.deliveries import SECRET
from support.senders import Senders
from support.service_manager import service_manager
from support.waiting import until

from sdk_trio.webhooks.signature import new_secret

#: The polling interval for changed key files in these tests, in seconds.
POLL_SECONDS = 0.3

NEW_SECRET = new_secret(b"a secret of this test, 32 bytes.")


@pytest.fixture
def manager(tmp_path):
    with service_manager(tmp_path) as manager:
        # What a reload does is seen at its own request only, unless a test wants it otherwise.
        manager.settings["Server:KeyFilePollSeconds"] = "0"
        yield manager


def key_file(manager, number):
    return manager.directory / "credentials" / f"Sdk__Webhooks__Secrets__{number}"


async def hang_up(manager, event, count=1):
    manager.processes[-1].send_signal(signal.SIGHUP)
    return await manager.wait_for(event, count)


async def test_a_broken_file_is_named_and_rejects_nothing(manager):
    config = manager.directory / "settings.json"
    config.write_text("{}")
    daemon = manager.start("--config", str(config))
    senders = Senders(await manager.url(), retry=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(senders.run)
        await senders.wait_for(50)
        config.write_text('{"Sdk": {"Webhooks": {"ToleranceSeconds": 1,')
        failed = await hang_up(manager, "runtime.reload_failed")
        assert str(config) in failed["problems"][0]
        # Every problem at once; the new secret beside them does not come into force either.
        config.write_text('{"Sdk": {"Webhooks": {"ToleranceSeconds": 0, "KeyDerivation": "X"}}}')
        key_file(manager, 0).write_text(NEW_SECRET)
        failed = await hang_up(manager, "runtime.reload_failed", 2)
        assert len(failed["problems"]) == 2
        await senders.wait_for(50)
        senders.stop()
    assert senders.answers == {200: len(senders.accepted)}
    assert await manager.stop(daemon) == 0
    everything = (manager.directory / "log").read_text()
    assert SECRET not in everything
    assert NEW_SECRET not in everything


async def test_a_named_file_that_vanished_is_reported_once(manager):
    config = manager.directory / "named.json"
    config.write_text("{}")
    daemon = manager.start("--config", str(config))
    await manager.url()
    config.unlink()
    failed = await hang_up(manager, "runtime.reload_failed")
    assert [str(config) in problem for problem in failed["problems"]] == [True]
    assert await manager.stop(daemon) == 0


VANISHING = {
    "appsettings.json": (),
    "appsettings.Production.json": (),
    "sdk.toml": (),
    "named.Production.json": ("--config", "named.json"),
}


@pytest.mark.parametrize("name", VANISHING)
async def test_a_file_that_vanished_keeps_its_settings_until_it_is_back(manager, name):
    directory = manager.directory
    (directory / "named.json").write_text("{}")
    text = '{"Sdk": {"Webhooks": {"RateLimitPerMinute": 1}}}'
    if name == "sdk.toml":
        text = "[Sdk.Webhooks]\nRateLimitPerMinute = 1\n"
    (directory / name).write_text(text)
    daemon = manager.start(*VANISHING[name])
    sender = Senders(await manager.url())
    (directory / name).rename(directory / "elsewhere")
    failed = await hang_up(manager, "runtime.reload_failed")
    assert failed["level"] == "error"
    assert [name in problem for problem in failed["problems"]] == [True]
    assert "was removed" in failed["problems"][0]
    assert [await sender._attempt(each) for each in "ab"] == [200, 429]
    # It need not say the same when it is back.
    (directory / name).write_text(text.replace("1", "2"))
    reloaded = await hang_up(manager, "runtime.reloaded")
    assert reloaded["changed"] == ["Sdk:Webhooks:RateLimitPerMinute"]
    assert await manager.stop(daemon) == 0


async def test_a_rotation_in_its_order_rejects_no_delivery(manager):
    daemon = manager.start()
    senders = Senders(await manager.url(), retry=False)
    old = Senders(senders.url, retry=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(senders.run)
        await senders.wait_for(50)
        # The new secret joins the old one, the provider is switched, the old one is removed.
        key_file(manager, 1).write_text(NEW_SECRET)
        reloaded = await hang_up(manager, "runtime.reloaded")
        assert reloaded["changed"] == ["Sdk:Webhooks:Secrets"]
        assert reloaded["files"] == [str(key_file(manager, 1))]
        senders.secret = NEW_SECRET
        await senders.wait_for(50)
        assert await old._attempt("with-the-old-one") == 200
        key_file(manager, 1).rename(key_file(manager, 0))
        await hang_up(manager, "runtime.reloaded", 2)
        await senders.wait_for(50)
        assert await old._attempt("with-the-old-one-again") == 400
        senders.stop()
    assert senders.answers == {200: len(senders.accepted)}
    assert await manager.stop(daemon) == 0
    everything = (manager.directory / "log").read_text()
    assert SECRET not in everything
    assert NEW_SECRET not in everything


async def test_keys_that_need_a_restart_are_named_and_the_others_apply(manager):
    config = manager.directory / "settings.json"
    config.write_text("{}")
    daemon = manager.start("--config", str(config))
    await manager.url()
    config.write_text(
        '{"Sdk": {"Webhooks": {"Path": "/other", "RateLimitPerMinute": 1}, '
        '"Logging": {"Level": "Debug"}}}'
    )
    for count in (1, 2):
        reloaded = await hang_up(manager, "runtime.reloaded", count)
        assert reloaded["restart_needed_for"] == ["Sdk:Webhooks:Path"]
        assert reloaded["level"] == "warning"
        applied = ["Sdk:Webhooks:RateLimitPerMinute", "Sdk:Logging:Level"]
        assert reloaded["changed"] == (applied if count == 1 else [])
    sender = Senders(await manager.url())
    assert [await sender._attempt(name) for name in "ab"] == [200, 429]
    await manager.wait_for("webhook.received")  # of level Info
    assert await manager.stop(daemon) == 0


def rename_over(manager):
    """As most programs replace a file."""
    fresh = manager.directory / "fresh"
    fresh.write_text(NEW_SECRET)
    fresh.rename(key_file(manager, 0))


def swap_link(manager):
    """As Kubernetes replaces a whole directory: the files are links through one link."""
    fresh = manager.directory / "version-2"
    fresh.mkdir()
    (fresh / "Sdk__Webhooks__Secrets__0").write_text(NEW_SECRET)
    link = manager.directory / "link"
    link.symlink_to(fresh)
    link.rename(manager.directory / "credentials" / "..data")


def as_kubernetes_mounts(manager):
    first = manager.directory / "version-1"
    (manager.directory / "credentials").rename(first)
    (manager.directory / "credentials").mkdir()
    (manager.directory / "credentials" / "..data").symlink_to(first)
    key_file(manager, 0).symlink_to("..data/Sdk__Webhooks__Secrets__0")


@pytest.mark.parametrize(
    ("prepare", "change"), [(lambda manager: None, rename_over), (as_kubernetes_mounts, swap_link)]
)
async def test_a_key_file_that_was_swapped_is_noticed_without_a_signal(manager, prepare, change):
    prepare(manager)
    manager.settings["Server:KeyFilePollSeconds"] = str(POLL_SECONDS)
    daemon = manager.start()
    sender = Senders(await manager.url(), secret=NEW_SECRET)
    assert await sender._attempt("before") == 400
    # Touched, but not changed: nothing happens, or there would be one reload more below.
    os.utime(key_file(manager, 0))
    await trio.sleep(2 * POLL_SECONDS)
    change(manager)
    reloaded = await manager.wait_for("runtime.reloaded")
    assert reloaded["cause"] == "key files"
    assert reloaded["files"] == [str(key_file(manager, 0))]
    assert await sender._attempt("after") == 200
    assert await manager.stop(daemon) == 0
    assert len(manager.logged("runtime.reloaded")) == 1


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGTERM], 0),
        # The second signal that ends forces; one more HUP does not.
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGHUP], 0),
        ([signal.SIGTERM, signal.SIGINT], 128 + signal.SIGINT),
        ([signal.SIGKILL], -signal.SIGKILL),
    ],
)
async def test_a_stop_during_a_reload_stops(manager, signals, status):
    """A settings file that never answers keeps the reload waiting, and nothing else."""
    config = manager.directory / "settings.json"
    config.write_text("{}")
    daemon = manager.start("--config", str(config))
    senders = Senders(await manager.url())
    config.unlink()
    os.mkfifo(config)
    place = len(manager.messages)
    daemon.send_signal(signal.SIGHUP)
    await manager.said("RELOADING=1", after=place)
    # An event that is still handled when the signals come, so that there is something to force.
    hold = manager.directory / "hold"
    if status:
        hold.touch()
    assert await senders._attempt("meanwhile", seconds=0 if status else 0.5) == 200
    for number in signals:
        daemon.send_signal(number)
        if number == signal.SIGTERM:
            await manager.wait_for("runtime.draining")
    assert await manager.ended(daemon) == status
    assert not manager.logged("runtime.reloaded")
    hold.unlink(missing_ok=True)
    # Whatever was cut short is taken up by the next start, with the settings of that start.
    config.unlink()
    config.write_text('{"Sdk": {"Webhooks": {"RateLimitPerMinute": 1}}}')
    daemon = manager.start("--config", str(config))
    senders.url = await manager.url()
    assert [await senders._attempt(name) for name in "ab"] == [200, 429]
    await until(lambda: {"meanwhile", "a"} <= set(manager.handled()))
    assert await manager.stop(daemon) == 0
    assert manager.handled().count("meanwhile") == 1


async def test_a_key_file_that_hangs_does_not_hold_up_a_stop(manager):
    manager.settings["Server:KeyFilePollSeconds"] = str(POLL_SECONDS)
    daemon = manager.start()
    sender = Senders(await manager.url())
    os.mkfifo(manager.directory / "credentials" / "Sdk__AccessToken")
    await trio.sleep(3 * POLL_SECONDS)  # it looks in this time, and gets no answer
    assert await sender._attempt("meanwhile") == 200
    assert await manager.stop(daemon) == 0
    assert not manager.logged("runtime.reload_failed")


async def test_a_hup_before_it_serves_is_a_reload_after_the_start(manager):
    """A settings file that answers late keeps the start waiting, until HUP has come."""
    config = manager.directory / "settings.json"
    os.mkfifo(config)
    daemon = manager.start("--config", str(config))
    # A reader has it open: the program reads its settings.
    opened = await trio.to_thread.run_sync(lambda: config.open("w"))
    daemon.send_signal(signal.SIGHUP)
    # The reload, which may come as soon as the first text is read, finds the next one whole.
    next_one = manager.directory / "next.json"
    next_one.write_text('{"Sdk": {"Webhooks": {"ToleranceSeconds": 200}}}')
    next_one.replace(config)
    with opened:
        opened.write("{}")
    reloaded = await manager.wait_for("runtime.reloaded")
    assert reloaded["changed"] == ["Sdk:Webhooks:ToleranceSeconds"]
    assert await manager.stop(daemon) == 0
