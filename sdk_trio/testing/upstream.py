"""An upstream in memory for tests of code that calls a :class:`~sdk_trio.Client`.

A test sets up routes by the names of operations, with their responses, and checks the calls::

    async def test_refund(sdk_upstream):
        sdk_upstream.on("orders.get", "ord_1").gives({"id": "ord_1", "amount": 500})
        refund = sdk_upstream.on("refunds.create").gives({"id": "ref_1"}, status=201)
        async with sdk_upstream.client() as client:
            await my_application.refund(client, "ord_1")
        assert refund.call.json == {"order_id": "ord_1", "amount": 500}

Calls use the whole client: retries, breaker, masking, parsing. Waits between attempts are zero. A
request without a route fails the test with a list of the routes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

import attrs
import httpx
import trio

from ..client.client import Client
from ..client.operation import Operation, OperationAnswer, Pagination, operation
from ..client.operations import find_operation
from ..client.pipeline import RequestSources
from ..config import Settings

BASE_PATH = "/v1"


@attrs.frozen
class MockedCall:
    """One request as the upstream received it.

    ``path`` is relative to the base path. ``query`` has a list of values for each key. ``json`` is
    the body's JSON; None without a body. ``request`` is the whole request.
    """

    method: str
    path: str
    query: dict[str, list[str]]
    json: Any
    request: httpx.Request = attrs.field(repr=False)


class MockedRoute:
    """The responses to one kind of request, and the requests that got them.

    Responses are sent in the order in which they were set up; the last one is repeated.
    """

    def __init__(self, row: Operation, values: Mapping[str, str]) -> None:
        self._row = row
        # The path of the operation with its parameters as patterns. The values of the test are
        # matched exactly.
        pattern = re.sub(
            r"\\{(\w+)\\}",
            lambda match: re.escape(values[match[1]]) if match[1] in values else "[^/]+",
            re.escape(row.path),
        )
        self._pattern = re.compile(pattern)
        self._answers: list[Any] = []
        self.calls: list[MockedCall] = []

    @property
    def call(self) -> MockedCall:
        """Return the only call of this route.

        Raises:
            AssertionError: there was no call, or more than one.
        """
        if len(self.calls) != 1:
            raise AssertionError(f"{self} was called {len(self.calls)} times instead of once")
        return self.calls[0]

    def gives(
        self,
        document: Any = None,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> "MockedRoute":
        """Respond with ``document`` as JSON, or with the bytes of ``content``; return the route."""
        body = content if content is not None else json.dumps(document).encode()
        kind = {} if content is not None else {"Content-Type": "application/json"}
        self._answers.append((status, {**kind, **(headers or {})}, body))
        return self

    def gives_list(self, records: Sequence[Mapping[str, Any]]) -> "MockedRoute":
        """Respond with the page of ``records`` that each request asks for; return the route.

        Raises:
            ValueError: the operation does not return a list.
        """
        if self._row.pagination is Pagination.NONE and self._row.resource:
            raise ValueError(f"{self._row.full_name} returns no pages; use gives()")
        self._answers.append(list(records))
        return self

    def fails(self, error: Exception) -> "MockedRoute":
        """Raise ``error`` of httpx, such as ``ReadTimeout("...")``; return the route."""
        self._answers.append(error)
        return self

    def matches(self, method: str, path: str) -> bool:
        """Return whether this route matches a request."""
        return method == self._row.method and self._pattern.fullmatch(path) is not None

    def answer(self, call: MockedCall) -> httpx.Response:
        """Record ``call`` and return its response, or raise its error."""
        if not self._answers:
            raise AssertionError(f"{self} has no response; set one up with gives()")
        # The last response repeats, so that a test with retries need not count them.
        chosen = self._answers[min(len(self.calls), len(self._answers) - 1)]
        self.calls.append(call)
        if isinstance(chosen, Exception):
            raise chosen
        if isinstance(chosen, list):
            chosen = (200, {}, json.dumps(_page(chosen, call.query)).encode())
        status, headers, content = chosen
        return httpx.Response(status, headers=headers, content=content)

    def __repr__(self) -> str:
        return f"<route {self._row.method} {self._pattern.pattern.replace(chr(92), '')}>"


class MockUpstream(httpx.AsyncBaseTransport):
    """The upstream of a test: a transport that responds from routes and sends nothing.

    ``calls`` are all requests in order.
    """

    def __init__(self) -> None:
        self.routes: list[MockedRoute] = []
        self.calls: list[MockedCall] = []
        self._unexpected: list[str] = []

    def on(self, what: str, *values: object) -> MockedRoute:
        """Set up a route; it takes precedence over earlier ones.

        Args:
            what: an operation (``"orders.get"``), or a method and a path below the base path
                (``"GET /new/{id}"``) for routes without an operation.
            values: the values of the path's parameters, in order; omitted ones match any value.

        Raises:
            UnknownOperationError: there is no such operation; the message names similar ones.
            ValueError: there are more values than parameters.
        """
        # No name of an operation contains a blank before a slash.
        row = operation(what, OperationAnswer.JSON) if " /" in what else find_operation(what)
        if len(values) > len(row.parameters):
            raise ValueError(f"{what} has {len(row.parameters)} parameters in its path")
        named = dict(zip(row.parameters, map(str, values), strict=False))
        route = MockedRoute(row, named)
        # In front, so that a test can override the routes of a fixture.
        self.routes.insert(0, route)
        return route

    def client(self, overrides: Mapping[str, Any] | None = None) -> Client:
        """Return a client of this upstream; open it with ``async with`` or in a runtime.

        Args:
            overrides: settings, such as ``{"MaxRetries": 0}``.
        """
        settings = Settings.from_mapping(
            {
                "Mode": "Custom",
                "CustomBaseUrl": "https://upstream.example",
                "BasePath": BASE_PATH,
                "AccessToken": "a-token-for-tests",
                **(overrides or {}),
            },
            receiver=False,
        )
        # No randomness: with a fraction of zero, every jittered wait is zero.
        return Client(settings, self, sources=RequestSources(random=lambda: 0.0))

    def assert_expected(self) -> None:
        """Fail if a request had no route, or a route had no request.

        Raises:
            AssertionError: the message lists both.
        """
        problems = [*self._unexpected]
        problems += [f"{route} was never called" for route in self.routes if not route.calls]
        if problems:
            raise AssertionError("; ".join(problems))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Respond to ``request`` from the routes.

        Raises:
            AssertionError: no route matches it.
        """
        await trio.lowlevel.checkpoint()
        body = await request.aread()
        # Decoded, because routes contain the values themselves.
        path = unquote(request.url.path).removeprefix(BASE_PATH)
        call = MockedCall(
            request.method,
            path,
            parse_qs(request.url.query.decode("ascii"), keep_blank_values=True),
            _json_of(body),
            request,
        )
        self.calls.append(call)
        for route in self.routes:
            if route.matches(call.method, path):
                return route.answer(call)
        routes = ", ".join(map(repr, self.routes)) or "none"
        problem = f"no route matches {call.method} {path}; the routes are: {routes}"
        # Recorded as well as raised: an application that catches every exception would hide it from
        # the test.
        self._unexpected.append(problem)
        raise AssertionError(problem)


def _json_of(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


def _page(records: Sequence[Any], query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    limit, page = (int(query.get(name, [default])[0]) for name, default in _PAGE_DEFAULTS)
    last = -(-len(records) // limit)
    pagination = {"total_count": len(records), "max_page": last}
    return {"items": records[(page - 1) * limit : page * limit], "pagination": pagination}


_PAGE_DEFAULTS = (("limit", "10"), ("page", "1"))
