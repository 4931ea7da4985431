"""``health`` against real admin addresses, and against none."""

import contextlib
import io
import socket

import pytest
import trio
from support.deliveries import settings
from support.serving import registry, works

from sdk_trio.cli.main import main
from sdk_trio.runtime import Runtime


async def health(*words):
    """Run the command in a thread and return its exit status and output."""
    out, err = io.StringIO(), io.StringIO()

    def run():
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main(["health", *words])

    status = await trio.to_thread.run_sync(run)
    return status, out.getvalue() + err.getvalue()


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "unix:{}/admin.sock"])
async def test_it_reports_whether_the_daemon_runs_and_accepts_deliveries(tmp_path, bind):
    keys = {"Admin__Enabled": True, "Admin__Bind": bind.format(tmp_path)}
    runtime = Runtime(
        settings(Server__ShutdownDelaySeconds=30, Storage__Path=str(tmp_path / "data"), **keys),
        registry(works),
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            started = await nursery.start(runtime.run)
            url = started.admin[0]
            assert await health("--url", url) == (0, "/livez 200\n")
            assert await health("--url", url, "--ready") == (0, "/readyz 200\n")
            if bind.startswith("unix:"):
                assert (await health("--set", f"Sdk:Admin:Bind={url}"))[0] == 0
            # Readiness fails at once, and everything else continues.
            runtime.shut_down("test")
            assert await health("--url", url, "--ready") == (1, "/readyz 503\n")
            assert await health("--url", url) == (0, "/livez 200\n")
            runtime.force()
    status, printed = await health("--url", url)
    assert status == 69
    assert f"{url}/livez does not answer: " in printed


async def test_an_address_that_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr("sdk_trio.cli.receiver.ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, printed = await health("--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert status == 69
    assert "timed out" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "Sdk:Admin:Enabled=false"], "Sdk:Admin:Enabled is false"),
        (["--set", "Sdk:Admin:Bind=fd:admin"], "give the address with --url"),
        (["--url", "ftp://localhost:1"], "--url takes http://HOST:PORT"),
        (["--url", "http://localhost:port"], "--url takes http://HOST:PORT"),
        (["--url", "localhost:8081"], "--url takes http://HOST:PORT"),
    ],
)
async def test_an_address_that_cannot_be_asked_is_a_usage_error(words, message):
    status, printed = await health(*words)
    assert status == 2
    assert message in printed
