"""uvicorn with an ASGI application of a few lines: no framework, the `standardwebhooks` package.

Arguments: PORT and WORKERS.
"""

import sys

import uvicorn
from load import SECRET
from standardwebhooks import Webhook, WebhookVerificationError

webhook = Webhook(SECRET)
paid = 0


async def handle(event):
    global paid
    paid += event["data"]["total_amount"]


HANDLERS = {"order.paid": handle}
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"2")]


async def app(scope, receive, send):
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    try:
        event = webhook.verify(body, headers)
    except WebhookVerificationError:
        status = 400
    else:
        await HANDLERS[event["type"]](event)
        status = 200
    await send({"type": "http.response.start", "status": status, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"{}"})


if __name__ == "__main__":
    uvicorn.run(
        "bare_peer:app",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="error",
    )
