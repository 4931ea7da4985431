# For: Settings
import sdk_trio

settings = sdk_trio.Settings.from_mapping(
    {
        "Webhooks": {
            "Secret": "whsec_OjfU9f6zAjH7sKKkRP8YGIkNFP9tDNKwVIXQknQItbo=",
            "Queue": {"Workers": 2},
        }
    },
    standalone=True,
)
print(settings.webhooks.queue.workers, settings.webhooks.path)
# Output: 2 /hooks/sdk
