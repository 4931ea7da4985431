"""A common alternative: FastAPI on uvicorn with the `standardwebhooks` package. Argument: PORT.

It stores nothing, does not detect duplicates, and the payload is an untyped dictionary.
"""

import os
import sys

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from standardwebhooks import Webhook, WebhookVerificationError

app = FastAPI()
webhook = Webhook(os.environ["BENCHMARK_SECRET"])
paid = 0


async def handle(event: dict) -> None:
    global paid
    paid += event["data"]["total_amount"]


HANDLERS = {"order.paid": handle}


@app.post("/hooks/sdk")
async def receive(request: Request) -> dict:
    body = await request.body()
    try:
        event = webhook.verify(body, dict(request.headers))
    except WebhookVerificationError:
        raise HTTPException(status_code=400) from None
    await HANDLERS[event["type"]](event)
    return {}


def serve(application: FastAPI) -> None:
    """Run an application as uvicorn's documentation recommends, without an access log."""
    uvicorn.run(
        application,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="error",
        ssl_certfile=os.environ.get("BENCHMARK_CERTIFICATE"),
        ssl_keyfile=os.environ.get("BENCHMARK_KEY"),
    )


if __name__ == "__main__":
    serve(app)
