# For: Threaded
import sdk_trio
from sdk_trio.asgi import Threaded
from sdk_trio.testing import settings_for_tests

handlers = sdk_trio.HandlerRegistry()
# An ASGI application: `uvicorn module:application`, or mounted in FastAPI or Starlette.
application = Threaded(settings_for_tests(), handlers)
