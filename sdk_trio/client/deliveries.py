"""The upstream's list of its deliveries, and requests to repeat one, for reconciliation."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from .client import Client
from .errors import NotFoundError, UnprocessableEntityError


class UpstreamDeliveries:
    """The upstream's list of deliveries, through ``client``, which is open.

    Every method raises ``CallError`` when the upstream could not be asked.
    """

    def __init__(self, client: Client) -> None:
        self._webhooks = client.webhooks

    async def endpoints(self) -> list[Any]:
        """Return every webhook endpoint, as its JSON object."""
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
