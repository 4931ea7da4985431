"""Forwarding: handlers that post events to applications, at a rate that the applications can
handle.

Each route is one handler. An event is *postponed* while its route is paused, its breaker is open,
an answer has asked to wait, or too many of its posts are in progress. It then waits in the store,
not in a worker, and no attempt is used. Postponed events return one by one, at
:data:`RETURNS_PER_SECOND`: a waiting backlog of any size costs the store little, and does not
overload an application that has just recovered.

A pause is a record in the store: commands write it, and this process polls it every second.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import trio

from ..base import opener
from ..base.breaker import (
    AttemptOutcome,
    BreakerPolicy,
    BreakerState,
    CircuitBreaker,
    CircuitRefusal,
    Permit,
)
from ..base.clock import wall
from ..base.logs import get_logger
from ..base.telemetry import Histogram, Sample, find_tracer, trace_headers
from ..base.throttle import TokenBucket, longest_wait
from ..config import KeyDerivation, Settings
from ..config.check import forward_secret_problem
from ..config.options.forward import RouteOptions
from ..config.table import FORWARD
from ..errors import (
    AddressInvalidError,
    AddressRefusedError,
    AnswerLostError,
    NotSentError,
    OptionsValidationError,
    Problem,
    StoreUnavailableError,
)
from ..events import Event, SourceEvent
from ..net.poster import HttpPoster, PostAnswer, dial_private, dial_unix
from ..net.socket import Dial
from ..records.deliveries import Postponed
from ..records.policies import Policy
from ..storage.ports import Inbox
from .bound import BoundHandler, RoutedHandler
from .handler import WebhookHandlerBase
from .outcomes import DeliveryRetries
from .recording import STORE_RETRY_SECONDS
from .routes import (
    WAITING,
    Judgement,
    Pause,
    PostFailedError,
    Route,
    Ruling,
    answer_text,
    checkpoint_of,
    judge,
    pause_of,
    routes_of,
)
from .signed_request import sign_body

_log = get_logger("webhooks")

#: The rate at which the postponed events of one route return.
RETURNS_PER_SECOND = 100.0

#: The interval in seconds at which the store is polled for pauses; the longest delay of a pause.
POLL_SECONDS = 1.0

#: The seconds until an event of a paused route is tried again, at the earliest.
PAUSED_SECONDS = 2.0

#: Seconds until an event that found no free post slot of its route is tried again.
CROWDED_SECONDS = 0.1

#: The breaker of a route. An application restarts in seconds, and one probe every ten seconds costs
#: it nothing. The sampling time is long, so that a route with one event an hour has a breaker too.
POLICY = BreakerPolicy(failure_threshold=5, sampling_seconds=3600.0, break_seconds=10.0)

#: Upper ends, in seconds, of the histogram of posts.
_POST_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

#: The results that are counted: a closed set, because each is a permanent time series.
RESULTS = ("done", "refused", "failed", "unavailable", "gone", "lost", "unreachable")

#: Values of ``sdk_forward_route_state``.
_STATES = {BreakerState.CLOSED: 0, BreakerState.OPEN: WAITING, BreakerState.PROBING: WAITING}
_PAUSED = 2

ReadVariable = Callable[[str], str | None]


class ForwardHandler(WebhookHandlerBase[Any]):
    """Posts the events of one route to its application.

    Args:
        route: the route.
        secrets: the secrets that sign each event.
        settings: ``Webhooks:Queue`` gives the workers and the retries.
        poster: sends the requests.
        inbox: the store that keeps a pause.
        clock: returns Unix seconds.
        traced: requests carry the trace of their run.
    """

    def __init__(
        self,
        route: Route,
        secrets: Sequence[str],
        settings: Settings,
        poster: HttpPoster,
        inbox: Inbox,
        *,
        clock: Callable[[], float],
        traced: bool = False,
    ) -> None:
        options, queue = route.options, settings.webhooks.queue
        self.route = route
        self.breaker: CircuitBreaker = CircuitBreaker(
            POLICY, clock=trio.current_time, on_change=self._log_breaker
        )
        self.paused: Pause | None = None
        self.counts: dict[str, int] = dict.fromkeys((*RESULTS, "postponed"), 0)
        self.seconds: Histogram = Histogram(_POST_SECONDS)
        self._secrets = tuple(secrets)
        self.policy: Policy = route.policy(queue)
        self._retries = DeliveryRetries.of_settings(settings).of(self.policy)
        self._poster = poster
        self._inbox = inbox
        self._clock = clock
        self._traced = traced
        self._added = dict(_header_of(header.reveal()) for header in options.headers)
        scheme, _, rest = options.url.partition(":")
        path = rest.partition(":")[2] or "/"
        self._url = f"http://localhost{path}" if scheme == "unix" else options.url
        self._most = options.concurrency or queue.workers
        self._slots = trio.CapacityLimiter(self._most)
        self._waiting = 0
        # Counts the starts and ends of writing our own pause to the store, so it is odd during a
        # write. A poll that overlaps the write may not find the pause.
        self._writes = 0
        self._held_until = 0.0
        self._returns = TokenBucket(per_second=RETURNS_PER_SECOND, burst=1.0)
        self._reason = ""
        self._failed_last: str | None = None
        self._answers: dict[str, str] = {}

    def take_answer(self, key: str) -> str | None:
        """Return the application's answer to the event of ``key``, once."""
        return self._answers.pop(key, None)

    # -- postponing --------------------------------------------------------------------------

    def hold(self) -> Postponed | None:
        """Return when an event is due again if the route cannot take it now; count the
        postponement."""
        reason, seconds = self._obstacle()
        if reason is None:
            return None
        return self._postpone(reason, seconds)

    def _obstacle(self) -> tuple[str | None, float]:
        name = self.route.name
        if self.paused is not None:
            resume = f"resume it with 'routes resume {name}'"
            return f"the route {name} is paused {self.paused}; {resume}", PAUSED_SECONDS
        asked = self._held_until - self._clock()
        if asked > 0:
            return f"the application of the route {name} requested a pause", asked
        if self.breaker.state is BreakerState.OPEN or self.breaker.probe_is_out:
            return self._outage(), POLICY.break_seconds / 2
        if self._slots.available_tokens == 0 and self._waiting >= self._most:
            return f"the route {name} has {self._most} posts in progress", CROWDED_SECONDS
        return None, 0.0

    def _outage(self) -> str:
        return f"the route {self.route.name} waits, because its application {self._reason}"

    def _postpone(self, reason: str, seconds: float) -> Postponed:
        self.counts["postponed"] += 1
        now = self._clock()
        # Each event gets its own due time, after those of all others.
        return Postponed(max(now + seconds, self._returns.book(now)), reason)

    async def poll(self) -> None:
        """Read the pause of the route from the store.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        before = self._writes
        pause = pause_of(await self._inbox.read_checkpoint(checkpoint_of(self.route.name)))
        overlapped = before % 2 == 1 or self._writes != before
        if overlapped or (pause is None) == (self.paused is None):
            return
        self.paused = pause
        if pause is not None:
            _log.warning("forward.paused", route=self.route.name, reason=pause.reason)
            return
        _log.info("forward.resumed", route=self.route.name)
        # A route is resumed once its application works again.
        self.breaker.close()
        self._held_until = 0.0
        self._returns = TokenBucket(per_second=RETURNS_PER_SECOND, burst=1.0)

    async def _pause(self, reason: str) -> None:
        """Pause the route without an operator: in this process at once, then in the store."""
        if self.paused is not None:
            return
        pause = self.paused = Pause(reason, self._clock(), "the application")
        _log.error(
            "forward.paused",
            route=self.route.name,
            reason=reason,
            hint=f"its events wait in the store: fix the application, then run 'routes resume "
            f"{self.route.name}'",
        )
        self._writes += 1
        try:
            await self._inbox.write_checkpoint(checkpoint_of(self.route.name), pause.as_text())
        except StoreUnavailableError as error:
            # The pause then applies to this process only; after a restart, the next post is
            # answered 410 again.
            _log.store_unavailable(error, route=self.route.name)
        finally:
            self._writes += 1

    def _log_breaker(self, state: BreakerState) -> None:
        name = self.route.name
        if state is BreakerState.OPEN:
            _log.warning(
                "forward.broken",
                route=name,
                reason=self._reason,
                retry_in=POLICY.break_seconds,
                hint="its events wait in the store and use up no attempts",
            )
        elif state is BreakerState.CLOSED:
            _log.info("forward.recovered", route=name)

    # -- posting -----------------------------------------------------------------------------

    async def handle_core(self, event: Event[Any]) -> None:
        """Post one event; returning means that the application has it.

        Raises:
            PostFailedError: the application does not have it, or the event is postponed.
        """
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            await self._post_if_allowed(event)
        finally:
            self._slots.release()

    async def _post_if_allowed(self, event: Event[Any]) -> None:
        permit = self._permit()
        if isinstance(permit, Postponed):
            await trio.lowlevel.checkpoint()
            raise PostFailedError("postponed", Ruling(postponed=permit))
        evidence = AttemptOutcome.NEUTRAL
        try:
            evidence, failure = await self._post(event, is_probe=permit.is_probe)
        finally:
            self.breaker.report(permit, evidence)
        if failure is not None:
            raise failure

    def _permit(self) -> Permit | Postponed:
        """Return the breaker's permit for one post now, or when the event is due again."""
        # The route may have changed while the event waited for its slot.
        postponed = self.hold()
        if postponed is not None:
            return postponed
        permit = self.breaker.acquire()
        if isinstance(permit, CircuitRefusal):
            return self._postpone(self._outage(), POLICY.break_seconds / 2)
        return permit

    async def _post(
        self, event: Event[Any], *, is_probe: bool
    ) -> tuple[AttemptOutcome, PostFailedError | None]:
        """Post an event; return the evidence for the breaker, and the failure if there is one."""
        begun = trio.current_time()
        try:
            answer = await self._poster.post(
                self._url,
                headers=self._headers(event),
                body=event.raw,
                timeout_seconds=self.route.options.timeout_seconds,
                head_counts=True,
            )
        except (AddressRefusedError, AddressInvalidError) as error:
            hint = ": set the route's AllowPublicAddresses if this is intended"
            return self._unreachable(f"has no allowed address: {error}{hint}")
        except NotSentError as error:
            return self._unreachable(f"cannot be reached: {error}")
        except AnswerLostError as error:
            self.counts["lost"] += 1
            text = f"gave no complete answer: {error}"
            return self._failed(event, Judgement(text, at_fault=True), None, is_probe)
        finally:
            self.seconds.observe(trio.current_time() - begun)
        return await self._judged(event, answer, is_probe)

    async def _judged(
        self, event: Event[Any], answer: PostAnswer, is_probe: bool
    ) -> tuple[AttemptOutcome, PostFailedError | None]:
        text = answer_text(answer.status, answer.body)
        longest = self._retries.cap_seconds
        judgement = judge(answer.status, answer.retry_after, longest=longest)
        if judgement.done:
            self.counts["done"] += 1
            self._failed_last = None
            self._answers[event.key] = text
            return AttemptOutcome.SUCCESS, None
        if judgement.pauses:
            self.counts["gone"] += 1
            await self._pause(judgement.text)
            held = self._postpone(self._obstacle()[0] or judgement.text, PAUSED_SECONDS)
            return AttemptOutcome.NEUTRAL, PostFailedError(text, Ruling(postponed=held))
        if judgement.holds:
            self._held_until = self._clock() + (judgement.retry_after or 0.0)
        failed = judgement.at_fault or judgement.unavailable
        kind = "unavailable" if judgement.unavailable else "failed" if failed else "refused"
        self.counts[kind] += 1
        return self._failed(event, judgement, text, is_probe)

    def _unreachable(self, text: str) -> tuple[AttemptOutcome, PostFailedError]:
        """Postpone an event of which nothing was sent."""
        self.counts["unreachable"] += 1
        self._reason = text
        held = self._postpone(self._outage(), 1.0)
        return AttemptOutcome.FAILURE, PostFailedError(text, Ruling(postponed=held))

    def _failed(
        self, event: Event[Any], judgement: Judgement, answer: str | None, is_probe: bool
    ) -> tuple[AttemptOutcome, PostFailedError]:
        ruling = Ruling(judgement.retry_after, judgement.most_attempts, answer=answer)
        if not (judgement.at_fault or judgement.unavailable):
            # It rejects this event, but it answers, so it is available.
            return AttemptOutcome.SUCCESS, PostFailedError(judgement.text, ruling)
        self._reason = judgement.text
        if is_probe:
            # The application was known to be unavailable: no attempt of the event is used.
            ruling = Ruling(postponed=self._postpone(self._outage(), POLICY.break_seconds))
        # One event that makes its application fail must not stop all others: repeated failures of
        # one event are no evidence against the application.
        is_repeated = judgement.at_fault and self._failed_last == event.key and not is_probe
        self._failed_last = event.key
        evidence = AttemptOutcome.NEUTRAL if is_repeated else AttemptOutcome.FAILURE
        return evidence, PostFailedError(judgement.text, ruling)

    def _headers(self, event: Event[Any]) -> Mapping[str, str]:
        now = int(self._clock())
        signed = [
            sign_body(
                event.raw,
                secret=secret,
                webhook_id=event.webhook_id,
                # The application deduplicates by this id, and two senders may use the same one.
                signer=event.key.partition(".")[2],
                timestamp=now,
                derivation=KeyDerivation.STANDARD,
            )
            for secret in self._secrets
        ]
        headers = {**self._added, **signed[0].headers}
        headers["webhook-signature"] = " ".join(each.signature for each in signed)
        headers["sdk-attempt"] = str(event.attempt)
        if event.tenant is not None:
            headers["sdk-tenant"] = event.tenant.identifier
        if isinstance(event, SourceEvent):
            headers["sdk-source"] = event.source
        if event.attempt < self._retries.max_attempts:
            longest = longest_wait(
                event.attempt,
                base_seconds=self._retries.base_seconds,
                cap_seconds=self._retries.cap_seconds,
            )
            headers["sdk-will-retry-after"] = str(ceil(longest))
        if self._traced:
            headers |= trace_headers()
        return headers

    # -- metrics -----------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of the route."""
        label = ("route", self.route.name)
        for result, count in self.counts.items():
            if result != "postponed":
                labels = (label, ("result", result))
                yield Sample("sdk_forward_attempts_total", labels, count)
        yield Sample("sdk_forward_postponed_total", (label,), self.counts["postponed"])
        state = _PAUSED if self.paused is not None else _STATES.get(self.breaker.state, WAITING)
        yield Sample("sdk_forward_route_state", (label,), state)
        yield from self.seconds.samples("sdk_forward_seconds", (label,))


class Forwarder:
    """The routes of a receiver, and the task that polls for pauses.

    Raises:
        OptionsValidationError: a secret is missing, or nothing can be signed with it.
    """

    def __init__(
        self,
        settings: Settings,
        inbox: Inbox,
        *,
        clock: Callable[[], float] = wall,
        read_variable: ReadVariable = os.environ.get,
    ) -> None:
        traced = find_tracer() is not None
        self.handlers: tuple[ForwardHandler, ...] = tuple(
            ForwardHandler(
                route,
                _secrets_of(route, read_variable),
                settings,
                _poster_of(route, clock),
                inbox,
                clock=clock,
                traced=traced,
            )
            for route in routes_of(settings)
        )

    @property
    def bound(self) -> tuple[RoutedHandler, ...]:
        """The routes as handlers, in their order."""
        return tuple(
            RoutedHandler(
                handler.route,
                BoundHandler(
                    handler.route.name,
                    handler,
                    enqueue=True,
                    ordered=handler.route.options.ordered or handler.policy.coalesce,
                    gate=handler,
                    policy=handler.policy,
                    group=handler.route.group,
                    limited=handler.policy.is_limited,
                ),
            )
            for handler in self.handlers
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll for pauses until cancelled; report the start once they are known.

        Raises:
            StoreUnavailableError: only at the start; later polls are retried.
        """
        await self._poll()
        task_status.started()
        while True:
            await trio.sleep(POLL_SECONDS)
            try:
                await self._poll()
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)

    async def _poll(self) -> None:
        await trio.lowlevel.checkpoint()
        for handler in self.handlers:
            await handler.poll()

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of all routes."""
        for handler in self.handlers:
            yield from handler.samples()


def _secrets_of(route: Route, read_variable: ReadVariable) -> Sequence[str]:
    name = route.options.secret_env_var or ""
    text = read_variable(name) or ""
    wrong = forward_secret_problem(text)
    if wrong is not None:
        problem = Problem(f"{FORWARD}:SecretEnvVar", f"names the variable {name}, which {wrong}")
        raise OptionsValidationError([problem])
    return text.split()


def _poster_of(route: Route, clock: Callable[[], float]) -> HttpPoster:
    return HttpPoster(clock=clock, dial=dial_of(route.options))


def dial_of(options: RouteOptions) -> Dial:
    """Return the function that connects to the application of a route."""
    if options.url.startswith("unix:"):
        return dial_unix(options.url.split(":")[1])
    return opener.dial_tcp if options.allow_public_addresses else dial_private


def _header_of(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":")
    return name.strip().lower(), value.strip()
