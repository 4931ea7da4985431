# For: Transport
import sdk_trio

settings = sdk_trio.load_settings(
    overrides={"Sdk:AccessToken": "token"}, environ={"Sdk__Mode": "Test"}, receiver=False
)
# One pool of connections for several clients; `trust_env` and proxies are those of the settings.
transport = sdk_trio.Transport(settings.connection)
client = sdk_trio.Client(settings, transport=transport)
