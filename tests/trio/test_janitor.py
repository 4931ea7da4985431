"""Retention and the report of unused secrets, once an hour, in virtual time."""

import socket
from typing import Any, cast

import trio
from support.deliveries import SECRET, arrival, memory_inbox
from support.keyed import ByKey

from sdk_trio.config import Settings
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import Done
from sdk_trio.runtime.processes import Processes
from sdk_trio.runtime.worker import FromProcess, MessageSocket, ProcessReport, encoded, framed
from sdk_trio.runtime.worker_process import WorkerCommand, WorkerProcess
from sdk_trio.webhooks import HandlerRegistry, WebhookReceiver
from sdk_trio.webhooks.receiver import Janitor, Share
from sdk_trio.webhooks.secret_usage import SecretUsage

DAY = 86_400.0


async def run_for(seconds, inbox, usage, *, deliver_with=None):
    """Run the janitor for ``seconds``; a secret matches every hour meanwhile."""
    janitor = Janitor(inbox, usage, clock=trio.current_time)
    with trio.move_on_after(seconds + 1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(janitor.run)
            while True:
                if deliver_with is not None:
                    usage.record(deliver_with, trio.current_time())
                await trio.sleep(3600)


async def test_records_past_their_retention_are_removed_and_others_kept(autojump_clock):
    inbox = ByKey(memory_inbox(dedup_seconds=2 * DAY, payload_seconds=2 * DAY))
    for name in ("finished", "waiting"):
        await inbox.accept(arrival(webhook_id=name, now=trio.current_time()).delivery, leased=True)
    await inbox.start("finished", now=trio.current_time())
    await inbox.finish("finished", Done(), now=trio.current_time())
    await run_for(DAY, inbox, SecretUsage(1, trio.current_time()))
    assert await inbox.get("finished") is not None
    await run_for(2 * DAY, inbox, SecretUsage(1, trio.current_time()))
    assert await inbox.get("finished") is None
    assert await inbox.get("waiting") is not None


async def test_a_secret_that_matches_no_longer_is_reported_once_a_day(autojump_clock, caplog):
    await run_for(3 * DAY, memory_inbox(), SecretUsage(2, trio.current_time()), deliver_with=0)
    reports = [r.sdk for r in caplog.records if r.getMessage().startswith("webhook.secret_unused")]
    assert [fields["index"] for _, fields in reports] == [1, 1, 1]


async def test_matches_of_secrets_count_in_all_processes(autojump_clock, caplog):
    others = [SECRET[:-4] + end for end in ("aaaa", "bbbb")]
    keys = {"Webhooks:Secret": SECRET, "Webhooks:Secrets": others}
    settings = Settings.from_mapping(keys, standalone=True)
    now = trio.current_time
    share = Share(deliveries=False)
    receiver = WebhookReceiver(settings, HandlerRegistry(), clock=now, share=share)
    command = WorkerCommand((), 2, end_seconds=1, forced_end_seconds=1)
    processes = Processes(settings, command, receiver)

    async def report(number: int, *matches: int) -> None:
        """Send one more report of a process, over a real socket pair."""
        ours, theirs = socket.socketpair()
        samples = [
            ("sdk_webhook_secret_matches_total", [("index", str(index))], float(count))
            for index, count in enumerate(matches)
        ]
        message = FromProcess("report", report=ProcessReport(samples=samples))
        with theirs:
            theirs.sendall(framed(encoded(message)))
        process = known[number]
        process.messages = MessageSocket(ours)
        await processes._receive(process)
        process.messages.close()

    known = {
        number: WorkerProcess(number, "", settings, *cast("Any", [None] * 4)) for number in (1, 2)
    }
    janitor = Janitor(memory_inbox(), receiver._endpoint.secret_usage, clock=now)
    with trio.move_on_after(1.5 * DAY):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(janitor.run)
            for hour in range(100):
                # Each process sees two of the three secrets; no process uses the third.
                await report(1, hour + 1, 0, 0)
                await report(2, 1, hour + 1, 0)
                await trio.sleep(3600)
    reports = [r.sdk for r in caplog.records if r.getMessage().startswith("webhook.secret_unused")]
    assert [fields["index"] for _, fields in reports] == [2]


async def test_a_store_that_fails_does_not_end_the_janitor(autojump_clock):
    inbox, calls = memory_inbox(), []

    async def purge(*, now):
        calls.append(now)
        raise StoreUnavailableError("disk full")

    inbox.purge = purge
    await run_for(3 * 3600, inbox, SecretUsage(1, trio.current_time()))
    assert len(calls) == 4
