"""The client of the upstream API: the class that programs use.

It contains no call logic: ``resources`` and ``operation`` build calls, ``pipeline`` retries, limits
and hedges them, ``transport`` sends their requests.
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

#: The settings that :meth:`Client.prepare_reload` can change while calls are in progress.
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

    Its attributes are the upstream's resources (``client.orders.get(id)``); :meth:`request` calls
    any other route. All tasks of a program can share one client. The settings
    (docs/reference/configuration.md) control retries, hedging, limits and timeouts.

    Args:
        settings: validated settings.
        transport: sends requests instead of the client's own connections; it is entered and exited
            with the client. It must raise httpx's errors.
        budget: how fast the retry budget fills.
        sources: clock, randomness and keys; replaceable in tests.

    Raises:
        OptionsValidationError: the settings lack a value that a client needs.
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
        # A transport of the user may honor such variables, as httpx's does; a warning would be
        # wrong.
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
        """Check ``settings`` and return a function that applies its :data:`LIVE_KEYS`.

        All other settings stay unchanged. Calls in progress, and their retries, keep their token
        and timeouts. The rate applies at once: waiting calls keep their order.

        Raises:
            OptionsValidationError: the token is missing or invalid; nothing has changed.
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
        """Call a route without a method of its own, or get a response unchanged.

        Args:
            method: the HTTP method.
            path: exact, below the base path, including a trailing slash if it has one.
            params: the query; a list repeats its key, None is omitted.
            json: a body of any JSON-compatible values.
            content: a body as bytes; ``headers`` should then name its media type.
            options: options of this call; ``fields`` are the same options as keywords.

        Returns:
            The response, with its body read.

        Raises:
            ApiError: the upstream answered without success.
            OutcomeUnknownError: a write was sent and may or may not have been executed.
            UnexpectedAnswerError: a success whose body is larger than ``max_answer_bytes``, or
                broken for a write: the write has been executed.
            ConnectionFailedError, AttemptTimeoutError, DeadlineExceededError, CircuitOpenError:
                there is no answer.
            TypeError, ValueError: an argument is invalid; nothing was sent.

        Cancellation takes effect at once; a write that was already sent may have been executed.
        """
        try:
            call = self._call(method, path, params, json, content, options, fields)
        except (TypeError, ValueError) as error:
            raise without_frames(error)
        finally:
            # Error reports, such as Sentry's, include the variables of each frame: none may hold a
            # body or credentials.
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
        ``response.aiter_bytes()`` or a similar method. The head is retried as usual, but never
        hedged; errors of the body are raised while it is read. Its size is limited only by the
        option ``max_answer_bytes``.
        """
        try:
            call = self._call(method, path, params, json, content, options, fields)
            return self._pipeline.stream(call)
        except (TypeError, ValueError) as error:
            raise without_frames(error)
        finally:
            del params, json, content, options, fields  # error reports include variables

    def on_attempt(self, hook: HookType) -> HookType:
        """Call ``hook`` with the :class:`CallAttempt` of every finished attempt.

        It runs in the task of the call and must not block. Its exceptions are logged. Returns
        ``hook``, so it can be used as a decorator.
        """
        self._pipeline.hooks.append(hook)
        return hook

    @property
    def sender(self) -> OperationSender:
        """Return the sender of the operations' calls."""
        return self._pipeline

    @property
    def plan(self) -> ClientConfig:
        """Return the current plan; its ``repr`` masks the token."""
        return self._pipeline.plan

    @property
    def counters(self) -> ClientCounters:
        """Return the totals so far; they keep counting, so copy numbers to compare them."""
        return self._pipeline.opened.counters

    @property
    def retry_budget(self) -> float:
        """Return how many retries and hedges the budget allows now."""
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
    """The upstream's deliveries, endpoints and records, through an open ``client``.

    Every method raises ``CallError`` if the call fails.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._webhooks = client.webhooks

    async def endpoints(self) -> list[Any]:
        """Return every webhook endpoint, as its JSON object."""
        # Raw, since the reconciler is in another package and does not know records.
        return [item.raw async for item in self._webhooks.list_webhook_endpoints()]

    async def read(
        self,
        endpoint_ids: Sequence[str],
        query: Mapping[str, str],
        visit: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        """Await ``visit`` with each page of the deliveries to these endpoints, as JSON objects.

        ``query`` has further filters. On cancellation no further page is requested.
        """
        listing = self._webhooks.list_webhook_deliveries(
            endpoint_id=list(endpoint_ids), query=dict(query)
        )
        async for page in listing.pages():
            await visit([item.raw for item in page.items])

    async def redeliver(self, webhook_id: str) -> bool:
        """Request another delivery of an event; return whether the upstream accepted.

        Retried after a failure: a second delivery is harmless, because the inbox detects it.
        """
        try:
            await self._webhooks.with_options(idempotent=True).redeliver_webhook_event(webhook_id)
        except (NotFoundError, UnprocessableEntityError):
            return False  # noqa: ASYNC910 - the call waited
        return True

    async def enable(self, endpoint_id: str) -> None:
        """Enable a webhook endpoint that the upstream has disabled."""
        await self._webhooks.update_webhook_endpoint(endpoint_id, body={"enabled": True})

    async def read_state(
        self, kind: str, sorting: str, page: int, limit: int
    ) -> tuple[Sequence[Any], int | None, bool]:
        """Return one page of a list, such as ``orders``, in rising order of ``sorting``.

        ``limit`` is the number of records of a page.

        Returns:
            The records as JSON objects, the number of records in the list (None: not counted), and
            whether another page may follow.
        """
        resource = getattr(self._client, kind)
        query = {"sorting": [sorting], "page": page, "limit": limit}
        found = await resource.list(query=query).first_page()
        return [item.raw for item in found.items], found.total_count, found.has_next
