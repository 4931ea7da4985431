"""The making of calls: method, address, headers, token, idempotency key and options."""

import platform
import random
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Self

import attrs
import httpx
import trio

from .._version import __version__
from ..errors import NotRunningError
from .call import (
    METHODS_WITH_BODY,
    Call,
    CallOptions,
    HeaderList,
    Unset,
    checked_method,
    checked_path,
    chosen,
    credentials_in,
    encode_json,
    encode_query,
    idempotency_key,
    join_url,
    may_execute_twice,
    merge_headers,
    without_path_secrets,
)
from .operation import PreparedCall
from .pipeline import AttemptHook, Pipeline, Policies
from .plan import ClientConfig, token_problem
from .retry import BudgetPolicy
from .sender import ResponseStream

JSON_TYPE = "application/json"
FORM_TYPE = "application/x-www-form-urlencoded"


@attrs.frozen(kw_only=True)
class RequestSources:
    """The clock, randomness and keys of a client; tests put their own in.

    ``clock`` must be the one that Trio's deadlines are on. ``random`` returns 0 to 1, ``new_key``
    a text that was never used before.
    """

    clock: Callable[[], float] = trio.current_time
    wall_clock: Callable[[], float] = time.time
    random: Callable[[], float] = random.random
    new_key: Callable[[], str] = lambda: str(uuid.uuid4())


class CallBuilder:
    """Makes a :class:`Call` of a request's arguments and sends it; a client's views share it.

    An async context manager: it is open while its transport is.

    Args:
        plan: the settings in the form that the client uses.
        transport: sends requests; entered and left with the client.
        sources: time and chance.
        budget: how fast the retry budget fills.
    """

    def __init__(
        self,
        plan: ClientConfig,
        transport: httpx.AsyncBaseTransport,
        *,
        sources: RequestSources,
        budget: BudgetPolicy,
    ) -> None:
        self.plan = plan
        self.hooks: list[AttemptHook] = []
        self._transport = transport
        self._sources = sources
        self._budget = budget
        self._pipeline: Pipeline | None = None
        self._is_open = False
        agent = f"sdk-trio/{__version__} python/{platform.python_version()}"
        self._headers = plan.headers(user_agent=agent)
        self._authorized = self._with_token(plan.access_token)
        self._secrets: tuple[str, ...] = (plan.access_token,)

    def prepare(self, wanted: ClientConfig) -> Callable[[], None]:
        """Check ``wanted`` and return a function that puts its reloadable part into force.

        That is the rate, also for calls that wait already; and token, timeouts, retries and
        hedging for every call that is made from then on.

        Raises:
            ValueError: the token cannot be sent.
        """
        # Addresses and connection settings are left out, because open connections and breakers
        # belong to them. A changed one takes a restart.
        plan = attrs.evolve(
            self.plan,
            access_token=wanted.access_token,
            attempt_timeout=wanted.attempt_timeout,
            total_timeout=wanted.total_timeout,
            hedge_after=wanted.hedge_after,
            retry=wanted.retry,
            limit=wanted.limit,
        )
        authorized = self._with_token(plan.access_token)

        def commit() -> None:
            self.plan, self._authorized = plan, authorized
            self._secrets = (plan.access_token,)
            if self._pipeline is not None:
                self._pipeline.limiters.change(plan.limit)

        return commit

    async def __aenter__(self) -> Self:
        # The counters, breakers and budget outlive the closing, so that they can be read
        # afterwards. Opening again would mix them with those of the second life.
        if self._pipeline is not None:
            raise RuntimeError("a client is opened once: make another one")
        await self._transport.__aenter__()
        self._is_open = True
        self._pipeline = Pipeline(
            self._transport,
            Policies(
                retry=self.plan.retry,
                budget=self._budget,
                breaker=self.plan.breaker,
                limit=self.plan.limit,
            ),
            clock=self._sources.clock,
            wall_clock=self._sources.wall_clock,
            random=self._sources.random,
            hooks=self.hooks,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The pipeline first: calls that wait between attempts must not find a closed transport.
        self._is_open = False
        if self._pipeline is not None:
            self._pipeline.close()
        await self._transport.__aexit__(kind, error, traceback)  # noqa: ASYNC102 - it bounds it itself

    @property
    def pipeline(self) -> Pipeline:
        """Return the pipeline of a client that is open or was open.

        Raises:
            NotRunningError: it was never opened.
        """
        if self._pipeline is None:
            raise NotRunningError("the client is not open: use it inside 'async with Client(...)'")
        return self._pipeline

    async def send(self, call: PreparedCall) -> httpx.Response:
        """Send an operation's call; see :meth:`Client.request`."""
        return await self.bring(self._call_of(call))

    def stream(self, call: PreparedCall) -> ResponseStream:
        """Send an operation's call and leave the body to be read; see :meth:`Client.stream`."""
        return ResponseStream(self._call_of(call, is_stream=True), self.bring)

    async def bring(self, call: Call) -> httpx.Response:
        """Send ``call`` through the pipeline.

        Raises:
            NotRunningError: the client is not open.
            CallError: there is no success.
        """
        if not self._is_open:
            raise NotRunningError("the client is not open: use it inside 'async with Client(...)'")
        return await self.pipeline.send(call)

    def _call_of(self, call: PreparedCall, *, is_stream: bool = False) -> Call:
        content, content_type = None, None
        if not isinstance(call.json, Unset):
            content, content_type = encode_json(call.json), JSON_TYPE
        elif call.form is not None:
            content, content_type = encode_query(call.form).encode("ascii"), FORM_TYPE
        return self.call(
            call.method,
            call.path,
            query=encode_query(call.query),
            content=content,
            content_type=content_type,
            options=call.options,
            is_stream=is_stream,
        )

    def call(
        self,
        method: str,
        path: str,
        *,
        query: str,
        content: bytes | None,
        content_type: str | None,
        options: CallOptions,
        is_stream: bool = False,
    ) -> Call:
        """Put one call together; its deadline is set when it is sent.

        The caller bounds the body of a stream: the settings' limit is for bodies that are read into
        memory.

        Raises:
            TypeError, ValueError: ``method`` is no method, ``path`` is not below the base path, or
                something cannot be sent.
        """
        plan = self.plan
        method = checked_method(method)
        token, headers, secrets = plan.access_token, self._authorized, self._secrets
        if not isinstance(options.access_token, Unset):
            token = options.access_token
            headers = self._with_token(token)
            secrets = (token, *secrets)
        added: dict[str, str | None] = {}
        key = idempotency_key(method, options, new_key=self._sources.new_key)
        if key is not None:
            added[plan.idempotency_header] = key
        if not isinstance(options.organization_id, Unset):
            added[plan.organization_header] = options.organization_id
        if content_type is not None:
            added["Content-Type"] = content_type
        # A request of these methods has a length even without a body (RFC 9110, 8.6).
        if content is not None or method in METHODS_WITH_BODY:
            added["Content-Length"] = str(len(content or b""))
        if options.headers:
            added.update(options.headers)
            secrets = (*secrets, *credentials_in(options.headers))
        attempt_timeout = chosen(options.attempt_timeout, plan.attempt_timeout)
        max_retries = chosen(options.max_retries, plan.retry.max_retries)
        # Computed for each call: its own options for timeout and retries change the time it needs.
        total_timeout = plan.total_timeout or plan.total_timeout_of(
            attempt_timeout=attempt_timeout, max_retries=max_retries
        )
        return Call(
            method=method,
            path=without_path_secrets(checked_path(path).partition("?")[0]),
            url=join_url(plan.base_url, path, query),
            origin=plan.origin,
            headers=merge_headers(headers, added) if added else headers,
            content=content or b"",
            token=token,
            secrets=secrets,
            idempotent=may_execute_twice(
                method, options, upstream_honours_keys=plan.upstream_honours_keys
            ),
            total_timeout=chosen(options.total_timeout, total_timeout),
            attempt_timeout=attempt_timeout,
            max_retries=max_retries,
            hedge_after=chosen(options.hedge_after, plan.hedge_after),
            accepts_any_status=chosen(options.accepts_any_status, False),
            is_stream=is_stream,
            max_answer_bytes=chosen(
                options.max_answer_bytes, None if is_stream else plan.max_answer_bytes
            ),
        )

    def _with_token(self, token: str) -> HeaderList:
        if problem := token_problem(token):
            raise ValueError(f"the access token {problem}")
        bearer = (b"Authorization", f"Bearer {token}".encode("ascii"))
        return HeaderList([*self._headers, bearer])
