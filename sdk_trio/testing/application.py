"""A runtime under test: real sockets on the loopback address, its store in memory."""

import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, cast

import attrs
import msgspec
import trio

from ..asgi import asyncio_loop
from ..base.clock import wall
from ..config import Secret, Settings, StorageBackend
from ..config.options.sources import SourceOptions
from ..config.sources import read_section, split_mapping_key
from ..config.table import fold
from ..errors import NotRunningError, only_member
from ..events import Event
from ..records.deliveries import DeliveryRecord, DeliveryState, key_of, signer_of
from ..records.policies import glob_of
from ..runtime import Runtime
from ..storage.ports import Inbox
from ..tenants.upgrade import Quiescence
from ..webhooks import HandlerRegistry, Services, WebhookHandlerBase
from ..webhooks.bound import BoundHandler, BoundHandlers, HandlersOfSource
from ..webhooks.outcomes import place_of
from ..webhooks.signature import new_secret
from ..webhooks.signed_request import SignedDelivery, own_url, post
from ..webhooks.sources.signing import SourceDelivery, make_body, new_id, sign_as
from .signing import sign_delivery

#: The seconds after which :meth:`AppUnderTest.settle` gives up.
SETTLE_SECONDS = 10.0

#: The wait before a retry is random between 0 and these seconds, the largest value of the setting.
#: So a test practically never sees a retry that it has not requested: 1 in 86 400 occurs within a
#: second.
RETRY_SECONDS = 86_400.0

_RETRY_KEYS = ("Webhooks:Queue:RetryBaseSeconds", "Webhooks:Queue:RetryCapSeconds")

#: The records that one query of the store returns.
_PAGE = 500

_OUTCOMES = [state.value for state in DeliveryState]


class UnexpectedStateError(AssertionError):
    """A delivery is not in the state that its test expects.

    The exception of the handler, if it raised one, is the cause.
    """


class RecordedHandler(WebhookHandlerBase[Any]):
    """Records the last exception of a handler for the test, by the delivery's key."""

    def __init__(self, inner: WebhookHandlerBase[Any], raised: dict[str, BaseException]) -> None:
        self._inner = inner
        self._raised = raised

    async def handle_core(self, event: Event[Any]) -> None:
        """Run the handler, and record its exception, unless it is a cancellation."""
        try:
            await self._inner.handle_core(event)
        except trio.Cancelled:
            raise
        except BaseException as error:
            self._raised[event.key] = error
            raise
        self._raised.pop(event.key, None)

    async def on_error(self, event: Event[Any], error: Exception) -> None:
        """Record an error of the run itself, such as a missing ``await``, and call ``on_error``."""
        self._raised.setdefault(event.key, error)
        await self._inner.on_error(event, error)


class RecordedHandlers(HandlerRegistry):
    """The handlers of ``registry``; ``raised`` has the last exception of each delivery's run."""

    def __init__(self, registry: HandlerRegistry) -> None:
        super().__init__(catalog=registry.catalog)
        # The registrations are shared: a test may add one before the start.
        vars(self).update(vars(registry))
        # A test needs no handlers for other types, and pytest shows the log of a failure.
        self.warns_of_missing = False
        self._bind = registry.bind
        self._registry = registry
        self.raised: dict[str, BaseException] = {}

    def bind(self, services: Services[Any]) -> BoundHandlers:
        """Build the handlers, each with a recorder around it."""
        bound = self._bind(services)
        return msgspec.structs.replace(
            bound,
            by_type={name: self._record(handler) for name, handler in bound.by_type.items()},
            fallback=bound.fallback and self._record(bound.fallback),
            by_source={
                name: HandlersOfSource(
                    {each: self._record(handler) for each, handler in own.by_type.items()},
                    own.fallback and self._record(own.fallback),
                )
                for name, own in bound.by_source.items()
            },
        )

    @contextmanager
    def beside_asyncio(self) -> Iterator[None]:
        """Run an asyncio loop in a thread for the block, if a handler has ``asyncio=True``."""
        if not self.needs_host_loop:
            yield
            return
        with asyncio_loop() as loop:
            self._registry.host_loop = loop
            yield

    @contextmanager
    def stored(self, settings: Settings) -> Iterator[Settings]:
        """Return the settings, with a store on disk for the block if memory is not enough."""
        # Memory, the default for tests, has no transactions.
        if not (self.transactional and settings.storage.backend is StorageBackend.MEMORY):
            yield settings
            return
        with TemporaryDirectory() as directory:
            storage = msgspec.structs.replace(
                settings.storage, backend=StorageBackend.SQLITE, path=directory
            )
            yield msgspec.structs.replace(settings, storage=storage)

    def _record(self, bound: BoundHandler) -> BoundHandler:
        return msgspec.structs.replace(bound, handler=RecordedHandler(bound.handler, self.raised))


@attrs.frozen
class Delivered:
    """The outcome of one delivery in a test.

    ``status`` and ``body`` are the receiver's response. ``record`` is the stored record after the
    handler has ended; None if none was stored. ``error`` is the last failure. ``exception`` is the
    handler's exception with its traceback, if it raised one.
    """

    webhook_id: str
    status: int
    body: bytes
    record: DeliveryRecord | None
    exception: BaseException | None = None

    @property
    def state(self) -> DeliveryState | None:
        """Return ``done``, ``retrying``, ``dead`` or ``parked``; None if nothing was stored."""
        return self.record.state if self.record else None

    @property
    def error(self) -> str | None:
        """Return the error of the handler's last failed run."""
        return self.record.last_error if self.record else None


def settings_for_tests(overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return settings for tests: a fresh secret, a free port, plain HTTP, the store in memory.

    There is no admin address. A failed event of the queue waits for :meth:`AppUnderTest.retry`
    instead of seconds. If ``overrides`` has ``RetryBaseSeconds`` or ``RetryCapSeconds``, both have
    their ordinary defaults.

    ``overrides`` maps keys to values, such as ``{"Webhooks:Queue:MaxAttempts": 2}``.
    """
    overrides = overrides or {}
    given = {fold(entry.path) for entry in read_section(overrides, None).entries}
    retries = dict.fromkeys(_RETRY_KEYS, RETRY_SECONDS)
    if any(fold(split_mapping_key(key)) in given for key in _RETRY_KEYS):
        retries = {}
    return Settings.from_mapping(
        {
            "Environment": "Development",
            # Port 0, so that tests can run in parallel.
            "Server:Bind": ["127.0.0.1:0"],
            # Tests of an application do not need it.
            "Admin:Enabled": False,
            "Storage:Backend": "Memory",
            "Webhooks:RequireHttps": False,
            # A handler that hangs must fail its test soon.
            "Webhooks:GracefulDrainTimeoutSeconds": 2,
            "Webhooks:Secret": Secret(new_secret(secrets.token_bytes(32)), made_for_tests=True),
            **retries,
            **overrides,
        },
        standalone=True,
    )


class AppUnderTest:
    """A running runtime, with methods that deliver events to it as the upstream does."""

    def __init__(self, runtime: Runtime, raised: Mapping[str, BaseException] | None = None) -> None:
        self.runtime = runtime
        self._raised = {} if raised is None else raised

    @property
    def settings(self) -> Settings:
        """The settings in force; after a reload, the new settings."""
        return self.runtime.settings

    @property
    def store(self) -> Inbox:
        """The inbox of the running receiver."""
        return self.runtime.receiver.store

    @property
    def url(self) -> str:
        """The address that deliveries are posted to."""
        return self._url_of(self.settings.webhooks.path)

    def _url_of(self, path: str) -> str:
        started = self.runtime.started
        if started is None:
            raise NotRunningError("the runtime under test has not been started")
        return own_url(started.receiver[0], path)

    def _source(self, name: str) -> SourceOptions:
        for source in self.settings.sources:
            if source.name == name:
                return source
        raise ValueError(f"Sdk:Sources has no source {name!r}")

    def sign_as(
        self,
        source: str,
        event: str | bytes,
        data: Any = None,
        *,
        type: str | None = None,
        webhook_id: str | None = None,
        timestamp: int | None = None,
    ) -> SourceDelivery:
        """Sign a delivery as the sender of a source does, without sending it.

        Args:
            source: its name in the settings.
            event: an event type, or the exact body.
            data: any JSON value, placed where the scheme has the data of its events.
            type: with an exact body: the type, for senders that name it in a header.
            webhook_id: default: a new one.
            timestamp: Unix seconds of the signature; default: now.

        Raises:
            ValueError: there is no such source, or nothing can be signed.
        """
        options = self._source(source)
        at = int(wall()) if timestamp is None else timestamp
        identifier = new_id() if webhook_id is None else webhook_id
        kind = (type or "") if isinstance(event, bytes) else event
        body = (
            event
            if isinstance(event, bytes)
            else make_body(options, event, data, webhook_id=identifier, timestamp=at)
        )
        return sign_as(options, kind, body, webhook_id=identifier, timestamp=at)

    def sign(
        self,
        event: str | bytes | type[Event[Any]],
        data: Mapping[str, Any] | None = None,
        *,
        webhook_id: str | None = None,
        timestamp: int | None = None,
    ) -> SignedDelivery:
        """Sign a delivery with the secret of the running receiver, without sending it."""
        if isinstance(event, type):
            event = event.wire_type
        return sign_delivery(
            event,
            data,
            # From the settings in force, so that a test can rotate the secret.
            secret=self.settings.webhooks.all_secrets[0],
            webhook_id=webhook_id,
            timestamp=timestamp,
            derivation=self.settings.webhooks.key_derivation,
        )

    async def pause(self, types: str = "*", *, source: str | None = None) -> None:
        """Pause the events whose type matches the glob ``types``, as ``events pause`` does.

        They are the upstream's, or those of ``source``. Deliveries are answered 200, and their
        events stay ``received`` until :meth:`resume`.
        """
        now = self.runtime.clock()
        await self.store.pause(glob_of(types, source), actor="test", reason="", until=None, now=now)
        await self.runtime.receiver.pauses.poll()

    async def resume(self) -> None:
        """End all pauses, and wait until the events that waited for them have ended.

        Raises:
            TooSlowError: the handlers did not end in 10 seconds.
        """
        await self.store.resume(None, actor="test", now=self.runtime.clock())
        await self.runtime.receiver.pauses.poll()
        await self.settle()

    async def deliver(
        self,
        event: str | bytes | type[Event[Any]] | SignedDelivery | SourceDelivery,
        data: Any = None,
        *,
        source: str | None = None,
        type: str | None = None,
        webhook_id: str | None = None,
        settle: bool = True,
        expect: DeliveryState | str | None = None,
    ) -> Delivered:
        """Post one delivery and, with ``settle``, wait until its handler has ended.

        An ordered event that waits for another one's retry is still ``received``.

        Args:
            event: an event type or class, the exact body, or a signed delivery.
            data: merged into the sample's ``data``; of a source, any JSON value, as for
                :meth:`sign_as`.
            source: deliver as the sender of this source; None: as the upstream.
            type: with ``source`` and an exact body: the type, where the sender has it in a header.
            webhook_id: default: a new one.
            settle: False: return with the response, while an enqueued handler may still run.
            expect: the state that the event must then have, such as ``done``.

        Raises:
            ValueError: ``expect`` is not a state, or ``source`` is not in the settings.
            UnexpectedStateError: the event has another state than ``expect``; the handler's own
                exception is the cause.
            DeliveryFailedError: the receiver cannot be reached.
            TooSlowError: the handler did not end in 10 seconds.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        _require_outcome(expect)
        signed: SignedDelivery | SourceDelivery
        if isinstance(event, SignedDelivery | SourceDelivery):
            signed = event
        elif source is not None and isinstance(event, str | bytes):
            signed = self.sign_as(source, event, data, type=type, webhook_id=webhook_id)
        else:
            signed = self.sign(cast("Any", event), data, webhook_id=webhook_id)
        url = self.url if source is None else self._url_of(self._source(source).route)
        posted = await post(url, signed, ca_file=self.settings.server.cert_file)
        # The response to an enqueued delivery means only that it was stored. A test needs the
        # outcome of the handler.
        record = await self._settled(signed.webhook_id, source) if settle else None
        key = key_of(signed.webhook_id, source and signer_of(source))
        exception = self._raised.get(key if record is None else record.key)
        delivered = Delivered(signed.webhook_id, posted.status, posted.body, record, exception)
        if expect is not None and delivered.state != expect:
            text = _difference(record, expect, exception, f"; the response was {posted.status}")
            raise UnexpectedStateError(text) from _shown(exception)
        return delivered

    async def retry(self, *, expect: DeliveryState | str | None = None) -> list[DeliveryRecord]:
        """Run every event that waits for its retry now, and wait until all handlers have ended.

        Each run counts as a further attempt, unlike a replay. Inline events are not included,
        because they wait for their sender: deliver them again with their id. After a cancellation
        the queue still runs the events.

        Args:
            expect: the state that each of them must then have, such as ``done``.

        Returns:
            The records of these events after their run, oldest arrival first.

        Raises:
            ValueError: ``expect`` is not a state.
            UnexpectedStateError: one of them has another state than ``expect``; the handler's own
                exception is the cause.
            TooSlowError: a handler did not end in 10 seconds.
        """
        __tracebackhide__ = True
        _require_outcome(expect)
        waiting = await self._records(DeliveryState.RETRYING)
        keys = [record.key for record in waiting if record.next_attempt_at is not None]
        # With a clock at 0 every retry counts as decided in the future, and becomes due.
        await self.store.reschedule(now=0.0)
        self.runtime.receiver.wake()
        await self.settle()
        records = [record for key in keys if (record := await self.store.get(key)) is not None]
        for record in records:
            if expect is not None and record.state != expect:
                exception = self._raised.get(record.key)
                text = _difference(record, expect, exception)
                raise UnexpectedStateError(text) from _shown(exception)
        return records

    async def settle(self) -> None:
        """Wait until no event is received, running or due.

        Retries that are not due may remain, and ordered events that wait for them.

        Raises:
            TooSlowError: an event still ran or waited after 10 seconds.
        """
        with trio.fail_after(SETTLE_SECONDS):
            while True:
                if not await self._has_unsettled_events():
                    return
                await trio.sleep(0.01)

    async def _has_unsettled_events(self) -> bool:
        counts = await self.store.counts()
        if counts[DeliveryState.RUNNING] or self.runtime.receiver.runs:
            return True
        if not (counts[DeliveryState.RETRYING] or self.runtime.receiver.pauses.active):
            return counts[DeliveryState.RECEIVED] > 0
        # The counts do not distinguish a waiting retry from a claimed one, or from an event that
        # waits for it. Read all records, because one may have begun to run after the counts.
        records = await self._records()
        waiting = [record for record in records if record.state is DeliveryState.RETRYING]
        return any(self._is_unsettled(record, waiting) for record in records)

    async def _settled(self, webhook_id: str, source: str | None) -> DeliveryRecord | None:
        with trio.fail_after(SETTLE_SECONDS):
            while True:
                # Several signers may have used the id; use the delivery that arrived last.
                records = await self.store.find_by_id(webhook_id)
                found = [record for record in records if record.source == source]
                record = max(found, key=lambda one: one.sequence, default=None)
                if record is None:
                    return None
                waiting = (
                    await self._records(DeliveryState.RETRYING, subject=record.subject)
                    if record.ordered and record.state is DeliveryState.RECEIVED
                    else ()
                )
                if not self._is_unsettled(record, waiting):
                    return record
                await trio.sleep(0.01)

    def _is_unsettled(self, record: DeliveryRecord, waiting: Iterable[DeliveryRecord]) -> bool:
        """Return whether a record is still being handled: received, running, or a due retry.

        A claimed retry is still due, because only its start changes the record. A handler that
        calls ``services.finish`` may continue after its event is done. An ordered event is settled
        while it waits for an earlier one of its subject that is in ``waiting``, and any event while
        its type is paused.
        """
        if record.state is DeliveryState.RECEIVED and self.runtime.receiver.pauses.holds(
            record.type, record.signer
        ):
            return False
        if record.state is DeliveryState.RECEIVED:
            return not any(
                _is_behind(record, earlier) and not self._is_unsettled(earlier, ())
                for earlier in waiting
            )
        due_at = record.next_attempt_at
        if record.state is DeliveryState.RUNNING or (
            due_at is not None and due_at <= self.runtime.clock()
        ):
            return True
        return any(run.key == record.key for run in self.runtime.receiver.runs)

    async def _records(
        self, state: DeliveryState | None = None, *, subject: str | None = None
    ) -> list[DeliveryRecord]:
        records: list[DeliveryRecord] = []
        after = 0
        while page := await self.store.find(
            state=state, subject=subject, after_sequence=after, limit=_PAGE
        ):
            records += page
            after = page[-1].sequence
        return records


def _is_behind(record: DeliveryRecord, earlier: DeliveryRecord) -> bool:
    """Return whether an ordered event waits until ``earlier`` is finished."""
    return (
        record.ordered
        and earlier.ordered
        and earlier.sequence < record.sequence
        and (earlier.tenant_id, earlier.source, earlier.subject)
        == (record.tenant_id, record.source, record.subject)
    )


def _require_outcome(expect: str | None) -> None:
    if expect is not None and expect not in _OUTCOMES:
        raise ValueError(f"expect must be one of {', '.join(_OUTCOMES)}, not {expect!r}")


def _shown(exception: BaseException | None) -> BaseException | None:
    """Return a handler's exception with only the frames of its own code."""
    if exception is None:
        return None
    trace = exception.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        "sdk_trio."
    ):
        trace = trace.tb_next
    return exception if trace is None else exception.with_traceback(trace)


def _difference(
    record: DeliveryRecord | None, expected: str, exception: BaseException | None, answer: str = ""
) -> str:
    state = "not in the inbox" if record is None else record.state.value
    text = f"expected {expected}, but the event is {state}{answer}"
    if record is None or record.last_error is None:
        return text
    place = None if exception is None else place_of(exception)
    return f"{text}; {record.last_error}{f' ({place})' if place else ''}"


def _signalled() -> Quiescence:
    """Return the signal that only the test writes the data."""
    quiescence = Quiescence()
    quiescence.signal("only the test uses the store")
    return quiescence


@asynccontextmanager
async def running_app(
    handlers: HandlerRegistry | None = None, settings: Settings | None = None
) -> AsyncIterator[AppUnderTest]:
    """Run a runtime for the length of a ``with`` block, and drain it at the end.

    If the block raises, handlers that still run are cancelled instead.

    Args:
        handlers: the handlers under test; None: every event is parked.
        settings: default: :func:`settings_for_tests`, with a store on disk if handlers need
            transactions.
    """
    # A real runtime on a real socket, so that a test includes verification, store and queue.
    recorded = RecordedHandlers(HandlerRegistry() if handlers is None else handlers)
    with ExitStack() as stack:
        if settings is None:
            settings = stack.enter_context(recorded.stored(settings_for_tests()))
        stack.enter_context(recorded.beside_asyncio())
        runtime = Runtime(settings, recorded, quiescence=_signalled())
        failed: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                try:
                    yield AppUnderTest(runtime, recorded.raised)
                except BaseException:
                    runtime.force()  # a failed test must not wait for its handlers
                    raise
                runtime.shut_down("the test ended")
        except BaseExceptionGroup as group:
            # Raise the test's own exception without the group of the nursery.
            failed = only_member(group)
        if failed is not None:
            raise failed
