"""The files of a new application, as ``init`` writes them. Pure."""

APPSETTINGS = """\
{
  "Sdk": {
    "Mode": "Test",
    "Server": {
      "Bind": ["127.0.0.1:8080"],
      "TrustedProxies": ["127.0.0.1"]
    },
    "Webhooks": {
      "Path": "/hooks/sdk",
      "RequireHttps": true,
      "ToleranceSeconds": 300,
      "FailOnMissingHandlers": false,
      "Queue": {
        "Capacity": 1000,
        "Workers": 8,
        "MaxAttempts": 8
      }
    },
    "Storage": {
      "Backend": "Sqlite"
    },
    "Logging": {
      "Level": "Info"
    }
  }
}
"""

ENV_EXAMPLE = """\
# Secrets never go into appsettings.json. Copy this file to .env, which is read in the Development
# environment only and is not committed; elsewhere set the same variables, or put each value into
# a file of that name in a directory of secrets.
#
# The secrets that the upstream issued for this endpoint; two while one is being replaced.
SDK__WEBHOOKS__SECRETS__0=
# The organization access token, for calls of the upstream; not needed with --standalone.
#SDK__ACCESSTOKEN=
"""

APP = '''\
"""The handlers of this application: `sdk-trio run --app app:handlers`."""

from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

handlers = HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    """Runs at least once for each paid order: make it idempotent by event.webhook_id."""
    print(f"order {event.data.id} is paid")
'''

#: Lines that ``.gitignore`` must hold: both name secrets and data of customers.
GITIGNORE_LINES = (".env", "sdk-data/")

#: Each new file and its content; ``.gitignore`` is completed instead.
FILES = {"appsettings.json": APPSETTINGS, ".env.example": ENV_EXAMPLE, "app.py": APP}
