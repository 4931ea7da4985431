"""InlineTimeoutSeconds over real connections: the answer, and what becomes of the connection."""

import pytest
import trio
from support.serving import RawWire, delivery_request, registry, serving, signed

from sdk_trio.records.deliveries import DeliveryState

KEY = "Webhooks__InlineTimeoutSeconds"


@pytest.mark.parametrize(("seconds", "fast"), [(0.7, True), (0.7, False), (1.2, True)])
async def test_late_handlers_are_500_and_their_connection_goes_on(store, seconds, fast):
    async def handler(event):
        if event.webhook_id.startswith("slow"):
            await trio.sleep_forever()
        if event.webhook_id.startswith("stubborn"):
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                return

    keys = {**store, KEY: seconds, "Server__FastPath": fast}
    async with serving(registry(handler), **keys) as app:
        with await RawWire.connect(app.url) as wire:
            for name, status in [
                ("quick1", 200),
                ("slow1", 500),
                ("quick2", 200),
                ("stubborn", 200),
                ("slow2", 500),
                ("quick3", 200),
            ]:
                begun = trio.current_time()
                await wire.send(delivery_request(signed(webhook_id=name)))
                assert (await wire.answer()).status == status
                if not name.startswith("quick"):
                    assert trio.current_time() - begun >= seconds
                record = await app.store.get(name)
                expected = DeliveryState.DONE if status == 200 else DeliveryState.RETRYING
                assert record.state is expected


async def test_a_late_answer_to_the_last_request_closes_the_connection(store):
    async def handler(event):
        await trio.sleep_forever()

    async with serving(registry(handler), **{**store, KEY: 0.2}) as app:
        with await RawWire.connect(app.url) as wire:
            delivery = delivery_request(signed(webhook_id="slow"))
            await wire.send(delivery.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            assert (await wire.answer()).status == 500
            assert await wire.rest() == b""


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("ends_itself", [True, False])
async def test_a_late_run_that_the_store_cannot_record_is_503(store, fast, ends_itself):
    async def handler(event):
        with trio.move_on_after(30, shield=True):  # longer than the handler has, perhaps
            await app.store.close()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if not ends_itself:
                raise

    keys = {**store, KEY: 0.2, "Server__FastPath": fast}
    async with serving(registry(handler), **keys) as app:
        with await RawWire.connect(app.url) as wire:
            for name in ("first", "second"):
                await wire.send(delivery_request(signed(webhook_id=name)))
                answer = await wire.answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "5")
