# For: open_feed, FeedReader, FeedRefusedError
import sdk_trio


async def follow(url: str, token: str) -> None:
    """Print each message of a receiver's feed; `open_feed` connects again after an outage."""
    try:
        async with sdk_trio.open_feed(url, token=token) as feed:
            async for message in feed:
                print(message)
    except sdk_trio.FeedRefusedError as error:
        print("cannot be followed:", error)
