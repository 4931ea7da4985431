# For: SyncClient
import sdk_trio
from sdk_trio.testing import MockUpstream

upstream = MockUpstream()
settings = sdk_trio.load_settings(
    overrides={"Sdk:AccessToken": "token"}, environ={}, receiver=False
)
upstream.on("orders.get").gives({"id": "ord_1"})
# In a program: `with sdk_trio.SyncClient(sdk_trio.load_settings()) as client`.
with sdk_trio.SyncClient(settings, transport=upstream) as client:
    print(client.orders.get("ord_1").id)
# Output: ord_1
