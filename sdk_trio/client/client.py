"""The client of the upstream API: the class that programs use.

It holds no logic of calls itself: ``resources`` and ``operation`` make calls of the operations,
``pipeline`` retries, limits and hedges them, ``transport`` sends their requests.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx
import msgspec

from ..base.breaker import CircuitBreaker
from ..base.logs import get_logger
from ..config import Settings
from ..net.transport import URL_KEY as PROXY_URL_KEY
from ..net.transport import Transport, ignored_variable, require_trio
from .answers import ResponseStream
from .call import (
    NO_OPTIONS,
    UNSET,
    Call,
    CallOptions,
    OperationSender,
    OptionFields,
    Query,
    checked_method,
    checked_path,
)
from .errors import NotFoundError, UnprocessableEntityError, without_frames
from .layers import AttemptHook, ClientCounters
from .layers.retry import BudgetPolicy
from .operation import query_pairs
from .operations import Resources
from .pipeline import ClientConfig, Pipeline, RequestSources, plan_of, token_warning
from .resources import Awaiting

logger = get_logger("client")

HookType = TypeVar("HookType", bound=AttemptHook)

#: The settings that :meth:`Client.prepare_reload` can change while calls are made.
LIVE_KEYS = (
    "Sdk:AccessToken",
    "Sdk:TimeoutMs",
    "Sdk:TotalTimeoutMs",
    "Sdk:MaxRetries",
    "Sdk:Upstream:RequestsPerMinute",
    "Sdk:Resilience:HedgeAfterMs",
)


class Client(Resources[Awaiting], path=""):
    """The client of the upstream API: ``async with Client(settings) as client: ...``.

    Its attributes are the upstream's resources (``client.orders.get(id)``); :meth:`request` reaches
    every other route. All tasks of a program can share one client. The settings
    (docs/reference/configuration.md) say how calls are retried, hedged, limited and given up.

    Args:
        settings: validated settings.
        transport: sends requests in place of the client's own connections; it is entered and left
            with the client. Its errors must be httpx's.
        budget: how fast the retry budget fills.
        sources: clock, randomness and keys; tests put their own in.

    Raises:
        OptionsValidationError: the settings lack something that a client needs.
    """

    def __init__(
        self,
        settings: Settings,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        budget: BudgetPolicy | None = None,
        sources: RequestSources | None = None,
    ) -> None:
        self._settings = settings
        # A transport of the user's may follow such variables, as httpx's own does; a warning would
        # be wrong there.
        self._dials_itself = transport is None and not settings.connection.proxy_url
        self._pipeline = Pipeline(
            plan_of(settings),
            Transport(settings.connection) if transport is None else transport,
            budget=budget,
            sources=sources,
        )
        super().__init__(self._pipeline)

    async def __aenter__(self) -> Self:
        require_trio()
        await self._pipeline.__aenter__()
        plan = self._pipeline.plan
        logger.info(
            "client.started", **plan.summary(), **msgspec.structs.asdict(self._settings.connection)
        )
        if self._dials_itself and (name := ignored_variable(plan.host)):
            logger.warning("client.proxy_ignored", variable=name, key=PROXY_URL_KEY)
        if warning := token_warning(plan.access_token, self._settings.mode):
            logger.warning("client.token_doubted", reason=warning)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._pipeline.__aexit__(kind, error, traceback)  # noqa: ASYNC102 - the transport bounds it

    def prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Check ``settings`` and return a function that puts its :data:`LIVE_KEYS` into force.

        All other settings stay as they are. Calls that have begun, and their retries, keep the
        token and the times that they began with. The rate counts at once: queued calls keep their
        position.

        Raises:
            OptionsValidationError: the token is missing or cannot be sent; nothing has changed.
        """
        commit_plan = self._pipeline.prepare_reload(plan_of(settings))

        def commit() -> None:
            commit_plan()
            self._settings = msgspec.structs.replace(
                self._settings, access_token=settings.access_token
            )

        return commit

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Query | None = None,
        json: Any = UNSET,
        content: bytes | None = None,
        options: CallOptions = NO_OPTIONS,
        **fields: Unpack[OptionFields],
    ) -> httpx.Response:
        """Call a route that has no method of its own, or get an answer as it came.

        Args:
            method: the HTTP method.
            path: exact, below the base path, with its slash at the end if it has one.
            params: the query; a list repeats its key, None is left out.
            json: a body, of any values that have a form in JSON.
            content: a body as bytes; ``headers`` should then name its media type.
            options: options of this call; ``fields`` are the same as keywords.

        Returns:
            The answer, its body read.

        Raises:
            ApiError: the upstream answered, and not with success.
            OutcomeUnknownError: a write was sent and may or may not have been executed.
            UnexpectedAnswerError: a success, larger than ``max_answer_bytes`` or, of a write,
                broken: the write has been executed.
            ConnectionFailedError, AttemptTimeoutError, DeadlineExceededError, CircuitOpenError:
                there is no answer.
            TypeError, ValueError: something cannot be sent; nothing was.

        Cancelling takes effect at once; a write that was already sent may have been executed.
        """
        try:
            call = self._call(method, path, params, json, content, options, fields)
        except (TypeError, ValueError) as error:
            raise without_frames(error)
        finally:
            # Reports of a failure, such as Sentry's, hold the variables of each frame: neither
            # body nor credentials may be among them.
            del params, json, content, options, fields
        return await self._pipeline.send(call)

    def stream(
        self,
        method: str,
        path: str,
        *,
        params: Query | None = None,
        json: Any = UNSET,
        content: bytes | None = None,
        options: CallOptions = NO_OPTIONS,
        **fields: Unpack[OptionFields],
    ) -> ResponseStream:
        """Make a call as :meth:`request` does, for bodies that do not fit into memory.

        ``async with client.stream("GET", "/orders/export") as response``, then
        ``response.aiter_bytes()`` or one of its relatives. The head is retried as any answer is,
        never hedged; errors of the body are raised while it is read. Its size is bounded only by
        the option ``max_answer_bytes``.
        """
        try:
            call = self._call(method, path, params, json, content, options, fields)
            return self._pipeline.stream(call)
        except (TypeError, ValueError) as error:
            raise without_frames(error)
        finally:
            del params, json, content, options, fields  # reports of a failure show variables

    def on_attempt(self, hook: HookType) -> HookType:
        """Call ``hook`` with the :class:`CallAttempt` of every attempt when it has ended.

        It runs in the task of the call and must not block. Its exceptions are logged. It returns
        ``hook``, so that it can be used as a decorator.
        """
        self._pipeline.hooks.append(hook)
        return hook

    @property
    def sender(self) -> OperationSender:
        """Return the sender of the operations' calls."""
        return self._pipeline

    @property
    def plan(self) -> ClientConfig:
        """Return the plan in force; its ``repr`` masks the token."""
        return self._pipeline.plan

    @property
    def counters(self) -> ClientCounters:
        """Return the totals so far; they go on counting, so copy the numbers that you compare."""
        return self._pipeline.opened.counters

    @property
    def retry_budget(self) -> float:
        """Return how many retries and hedges could be paid for now."""
        return self._pipeline.opened.budget.balance

    @property
    def breaker(self) -> CircuitBreaker:
        """Return the upstream's circuit breaker: ``state``, ``isolate()`` and ``close()``."""
        return self._pipeline.opened.breakers.of(self._pipeline.plan.origin)

    def __repr__(self) -> str:
        return f"<Client of {self._pipeline.plan.base_url}>"

    def _call(
        self,
        method: str,
        path: str,
        params: Query | None,
        json: Any,
        content: bytes | None,
        options: CallOptions,
        fields: OptionFields,
    ) -> Call:
        if json is not UNSET and content is not None:
            raise TypeError("a request takes json or content, not both")
        if content is not None and not isinstance(content, bytes):
            raise TypeError(f"content takes bytes, not {type(content).__name__}")
        merged = self._options
        if options is not NO_OPTIONS:
            merged = merged.merged_with(options)
        if fields:
            merged = merged.merged_with(CallOptions(**fields))
        return Call(
            method=checked_method(method),
            path=checked_path(path),
            query=tuple(query_pairs(params or {})),
            json=json,
            content=content,
            options=merged,
        )


class UpstreamDeliveries:
    """The upstream's list of deliveries, through ``client``, which is open.

    Every method raises ``CallError`` when the upstream could not be asked.
    """

    def __init__(self, client: Client) -> None:
        self._webhooks = client.webhooks

    async def endpoints(self) -> list[Any]:
        """Return every webhook endpoint, as its JSON object."""
        # Raw, since the reconciler belongs to another room and knows no records.
        return [item.raw async for item in self._webhooks.list_webhook_endpoints()]

    async def read(
        self,
        endpoint_ids: Sequence[str],
        query: Mapping[str, str],
        visit: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        """Await ``visit`` with each page of the deliveries to these endpoints, as JSON objects.

        ``query`` are further filters. Cancelled, no further page is asked for.
        """
        listing = self._webhooks.list_webhook_deliveries(
            endpoint_id=list(endpoint_ids), query=dict(query)
        )
        async for page in listing.pages():
            await visit([item.raw for item in page.items])

    async def redeliver(self, webhook_id: str) -> bool:
        """Ask for another delivery of an event; return whether the upstream agreed.

        It is asked again after a failure: a second delivery does no harm, as the inbox knows it.
        """
        try:
            await self._webhooks.with_options(idempotent=True).redeliver_webhook_event(webhook_id)
        except (NotFoundError, UnprocessableEntityError):
            return False  # noqa: ASYNC910 - the call waited
        return True
