"""Settings of the network between client and upstream: a proxy, authorities, a certificate."""

import ssl

import pytest
import trio
import trustme
from support.connect_proxies import proxying
from support.ports import free_port
from support.upstreams import Upstream, http1_handler, http2_handler, serving
from support.waiting import PATIENCE_SECONDS

import sdk_trio
from sdk_trio.client.client import Client
from sdk_trio.client.errors import ConnectionFailedError
from sdk_trio.config import Mode, Secret, Settings
from sdk_trio.config.options.client import ConnectionOptions
from sdk_trio.errors import OptionsValidationError
from sdk_trio.net import pool
from sdk_trio.net.transport import VARIABLES, ignored_variable

CREDENTIALS = "ada:pass:word"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in (*VARIABLES, "NO_PROXY", "no_proxy", "SDK_PROXY_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_races(monkeypatch):
    """Dials are counted here: a machine under load must not make more of them."""
    monkeypatch.setattr(pool, "RACE_SECONDS", 60.0)
    monkeypatch.setattr(pool, "LONGEST_RACE_SECONDS", 60.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A private authority, a certificate of the server, one of a client, and their files."""
    directory = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.pem")
    client = ca.issue_cert("a-client.example")
    client.cert_chain_pems[0].write_to_path(directory / "client.pem")
    client.private_key_pem.write_to_path(directory / "client.key")
    trustme.CA().issue_cert("other").private_key_pem.write_to_path(directory / "other.key")
    (directory / "empty.pem").write_text("")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost", "127.0.0.1").configure_cert(server)
    ca.configure_trust(server)
    server.set_alpn_protocols(["h2", "http/1.1"])
    directory.joinpath("dir").mkdir()
    return directory, server


def settings_of(port, host="localhost", **connection):
    return Settings(
        mode=Mode.CUSTOM,
        custom_base_url=f"https://{host}:{port}",
        base_path="/",
        access_token=Secret("not-a-real-token"),
        connection=ConnectionOptions(**connection),
    )


@pytest.mark.parametrize("http2", [True, False])
@pytest.mark.parametrize("credentials", [None, CREDENTIALS])
async def test_every_connection_goes_through_the_proxy(files, monkeypatch, http2, credentials):
    directory, context = files
    upstream = Upstream()
    handler = http2_handler(upstream) if http2 else http1_handler(upstream)
    if credentials:
        monkeypatch.setenv("SDK_PROXY_CREDENTIALS", credentials)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            serving(upstream, handler, context=context),
            proxying(credentials=credentials) as proxy,
        ):
            # A name that cannot be resolved here: the proxy resolves it.
            settings = settings_of(
                upstream.port,
                "upstream.invalid",
                proxy_url=proxy.url,
                ca_file=str(directory / "ca.pem"),
                enable_http2=http2,
            )
            with pytest.raises(ConnectionFailedError, match="certificate"):
                async with Client(settings) as client:
                    await client.request("GET", "/", max_retries=0)
            settings = settings_of(
                upstream.port,
                proxy_url=f"{proxy.url}/",
                ca_file=str(directory / "ca.pem"),
                enable_http2=http2,
            )
            async with Client(settings) as client:
                answer = await client.request("GET", "/")
                assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            assert "ada" not in repr(client) + str(settings.connection)
    targets = [f"{host}:{upstream.port}" for host in ("upstream.invalid", "localhost")]
    assert proxy.targets == targets
    assert upstream.requests == 1
    assert not any(b"not-a-real-token" in head for head in proxy.heads)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, r"answered 407 .*ProxyCredentialsEnvVar"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", r"answered 401 .*ProxyCredentialsEnvVar"),
        (b"HTTP/1.1 403 Not that port\r\n\r\n", "answered 403 Not that port"),
        (b"SSH-2.0-OpenSSH\r\n", "not an HTTP proxy"),
        (b"", "not an HTTP proxy"),
        (b"HTTP/1.1 200 OK\r\n", "sent an incomplete answer"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "or extra data after it"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 40_000, "sent an incomplete answer"),
    ],
)
async def test_a_proxy_that_opens_no_tunnel_is_named(answer, said):
    with trio.fail_after(PATIENCE_SECONDS):
        async with proxying(credentials=CREDENTIALS, answer=answer) as proxy:
            settings = settings_of(1, proxy_url=proxy.url)
            async with Client(settings) as client:
                with pytest.raises(ConnectionFailedError, match=said) as caught:
                    await client.request("POST", "/", max_retries=0)
                assert proxy.url in str(caught.value)


async def test_a_proxy_that_is_not_there_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    with trio.fail_after(PATIENCE_SECONDS):
        async with Client(settings_of(1, proxy_url=url)) as client:
            with pytest.raises(ConnectionFailedError, match=f"the proxy {url} cannot be reached"):
                await client.request("POST", "/", max_retries=0)


def test_credentials_that_are_none_stop_the_start(monkeypatch):
    monkeypatch.setenv("SDK_PROXY_CREDENTIALS", "only-a-user")
    with pytest.raises(OptionsValidationError, match="user:password") as caught:
        Client(settings_of(1, proxy_url="http://127.0.0.1:3128"))
    assert "only-a-user" not in str(caught.value)


async def test_a_client_certificate_is_shown(files):
    directory, server = files
    upstream = Upstream()
    server.verify_mode = ssl.CERT_REQUIRED
    both = {
        "client_cert_file": str(directory / "client.pem"),
        "client_key_file": str(directory / "client.key"),
    }
    authority = {"ca_file": str(directory / "ca.pem")}
    try:
        with trio.fail_after(PATIENCE_SECONDS):
            async with serving(upstream, http2_handler(upstream), context=server):
                async with Client(settings_of(upstream.port, **authority, **both)) as client:
                    assert (await client.request("GET", "/")).status_code == 200
                async with Client(settings_of(upstream.port, **authority)) as client:
                    with pytest.raises(ConnectionFailedError):
                        await client.request("GET", "/", max_retries=0)
    finally:
        server.verify_mode = ssl.CERT_NONE


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ({"ca_file": "empty.pem"}, "Sdk:Connection:CaFile"),
        ({"ca_file": "missing.pem"}, "Sdk:Connection:CaFile"),
        ({"ca_file": "dir"}, "Sdk:Connection:CaFile"),
        (
            {"client_cert_file": "client.pem", "client_key_file": "other.key"},
            "Sdk:Connection:ClientCertFile",
        ),
        (
            {"client_cert_file": "empty.pem", "client_key_file": "client.key"},
            "Sdk:Connection:ClientCertFile",
        ),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(files, names, key):
    directory, _ = files
    paths = {name: str(directory / file) for name, file in names.items()}
    with pytest.raises(OptionsValidationError) as caught:
        Client(settings_of(1, **paths))
    [problem] = caught.value.problems
    assert problem.key == key
    assert str(directory) in problem.message


@pytest.mark.parametrize(
    ("connection", "key"),
    [
        ({"ProxyUrl": "https://proxy:3128"}, "ProxyUrl"),
        ({"ProxyUrl": "http://ada:secret@proxy:3128"}, "ProxyUrl"),
        ({"ProxyUrl": "http://proxy:3128/path"}, "ProxyUrl"),
        ({"ProxyUrl": "proxy:3128"}, "ProxyUrl"),
        ({"ProxyUrl": "http://proxy:3128", "EnableHttp3": True}, "EnableHttp3"),
        ({"ClientCertFile": "a.pem"}, "ClientKeyFile"),
        ({"ClientKeyFile": "a.pem"}, "ClientCertFile"),
        ({"ProxyCredentialsEnvVar": ""}, "ProxyCredentialsEnvVar"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(connection, key):
    with pytest.raises(OptionsValidationError) as caught:
        Settings.from_mapping({"Sdk": {"AccessToken": "x", "Connection": connection}})
    problems = [p for p in caught.value.problems if p.key.startswith("Sdk:Connection")]
    assert f"Sdk:Connection:{key}" in {problem.key for problem in problems}
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://p"}, "HTTPS_PROXY"),
        ({"all_proxy": "http://p"}, "all_proxy"),
        ({"HTTP_PROXY": "http://p"}, None),
        ({"HTTPS_PROXY": ""}, None),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "*"}, None),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "a.example, .Shop.example"}, None),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "api.shop.example"}, None),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "op.example,,other"}, "HTTPS_PROXY"),
    ],
)
def test_a_proxy_of_the_environment_that_is_not_used_is_noticed(environ, found):
    assert ignored_variable("api.shop.example", environ) == found


@pytest.mark.parametrize("proxy_url", [None, "http://127.0.0.1:3128"])
async def test_the_start_says_that_a_proxy_of_the_environment_is_not_used(
    monkeypatch, caplog, proxy_url
):
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:secret@proxy.example:3128")
    async with Client(settings_of(1, proxy_url=proxy_url)):
        pass
    assert ("client.proxy_ignored" in caplog.text) is (proxy_url is None)
    assert "secret@" not in caplog.text


async def test_a_transport_of_ones_own_is_made_of_public_names(files):
    directory, server = files
    upstream = Upstream()
    dialled = []

    async def dial(host, port):
        dialled.append(host)
        return await trio.open_tcp_stream("127.0.0.1", upstream.port)

    settings = settings_of(443, "api.upstream.invalid")
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    context.check_hostname = False
    transport = sdk_trio.Transport(settings.connection, verify=context, dial=dial)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            serving(upstream, http2_handler(upstream), context=server),
            sdk_trio.Client(settings, transport) as client,
        ):
            await client.request("GET", "/")
    assert dialled == ["api.upstream.invalid"]
