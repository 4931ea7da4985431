"""The upstream as reconciliation sees it: whether it answers, and which endpoints it disabled."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..config.options.webhooks import WebhooksOptions
from ..errors import SdkError
from ..reconcile.plan import choose_endpoints
from ..reconcile.reconciler import Upstream


class UpstreamWatch:
    """The last answer to a question for the webhook endpoints.

    Args:
        options: ``Sdk:Webhooks``, which say which endpoints are this receiver's.
    """

    def __init__(self, options: WebhooksOptions) -> None:
        self._options = options
        #: How many endpoints of this receiver are disabled; None: not known.
        self.disabled: int | None = None
        #: Whether the last question was answered; None: none was asked.
        self.answers: bool | None = None

    def watched(self, upstream: Upstream) -> Upstream:
        """Return ``upstream``, whose answers this watch notes."""
        return _WatchedUpstream(upstream, self)

    def note(self, listed: Sequence[Any] | None) -> None:
        """Note the endpoints that the upstream listed; None: the call failed."""
        self.answers = listed is not None
        if listed is None:
            return
        try:
            chosen = choose_endpoints(
                listed,
                configured=self._options.reconciliation.endpoint_ids,
                path=self._options.path,
            )
        except SdkError:  # none of them is this receiver's: the reconciler reports it
            self.disabled = None
        else:
            self.disabled = sum(not endpoint.enabled for endpoint in chosen)


class _WatchedUpstream:
    def __init__(self, upstream: Upstream, watch: UpstreamWatch) -> None:
        self._upstream = upstream
        self._watch = watch

    async def endpoints(self) -> list[Any]:
        try:
            listed = await self._upstream.endpoints()
        except SdkError:
            self._watch.note(None)
            raise
        self._watch.note(listed)
        return listed

    async def read(
        self,
        endpoint_ids: Sequence[str],
        query: Mapping[str, str],
        visit: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        await self._upstream.read(endpoint_ids, query, visit)

    async def redeliver(self, webhook_id: str) -> bool:
        return await self._upstream.redeliver(webhook_id)
