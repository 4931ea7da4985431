# For: database_connections
import sdk_trio
from sdk_trio.contrib.django import database_connections

handlers = sdk_trio.HandlerRegistry()
handlers.around_threads(database_connections)
