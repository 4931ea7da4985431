# For: Runtime, Started, load_settings
import trio

import sdk_trio

settings = sdk_trio.load_settings(
    overrides={
        "Sdk:Webhooks:Secret": "whsec_OjfU9f6zAjH7sKKkRP8YGIkNFP9tDNKwVIXQknQItbo=",
        "Sdk:Server:Bind": "127.0.0.1:0",
        "Sdk:Admin:Enabled": False,
        "Sdk:Storage:Backend": "Memory",
    },
    standalone=True,
)


async def main() -> None:
    runtime = sdk_trio.Runtime(settings, sdk_trio.HandlerRegistry())
    async with trio.open_nursery() as nursery:
        started: sdk_trio.Started = await nursery.start(runtime.run)
        print("receiving at", started.receiver[0])
        runtime.shut_down("the example ends")


trio.run(main)
