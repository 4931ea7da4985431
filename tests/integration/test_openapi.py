"""The OpenAPI documents against the live servers, tried by schemathesis."""

import json
import os
import subprocess

import pytest
import trio
from support.admin import TOKEN, administered
from support.command_line import CommandLine, clear_environment
from support.programs import program
from support.serving import registry

import sdk_trio

#: How many requests it makes up for each operation, beside those that cover every value's edges.
EXAMPLES = os.environ.get("SDK_TEST_OPENAPI_EXAMPLES", "3")

#: Checks of every answer: no failure of the server, and nothing undocumented.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,unsupported_method,"
    "allow_header_conformance"
)


#: Checks of the requests: the document is neither looser nor stricter than the code.
OF_DATA = "negative_data_rejection,positive_data_acceptance"

#: A request that fits the document is accepted, unless it names a missing object, requests the feed
#: without WebSocket, or is too late.
ACCEPTED = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 401, 403, 404, 409, 426, 503]
"""


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    clear_environment(monkeypatch)
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


async def breaks(event):
    raise ValueError("no such product")


def printed(directory, capsys, *words):
    return CommandLine(directory, capsys)("openapi", *words).document


def try_out(directory, document, url, *words):
    """Let schemathesis make up requests to ``url`` as the document describes them."""
    file = directory / "openapi.json"
    file.write_text(json.dumps(document))
    (directory / "schemathesis.toml").write_text(ACCEPTED)
    return subprocess.run(
        [
            *(program("schemathesis"), "run", str(file), "--url", url),
            *("--max-examples", EXAMPLES, "--seed", "1", "--no-color", *words),
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("is_developed", [False, True], ids=["production", "development"])
async def test_the_admin_address_answers_as_documented(tmp_path, capsys, is_developed):
    document = printed(tmp_path, capsys, "--admin")
    keys = {"Webhooks__Queue__MaxAttempts": 1}
    if is_developed:  # there are samples to send, tenants, and messages
        keys |= {"Environment": "Development", "MultiTenant__Enabled": True}
    async with administered(registry(breaks, enqueue=True), patience=300, **keys) as admin:
        for number in range(3):
            await admin.app.deliver("order.paid", webhook_id=f"msg_{number}")
        with trio.fail_after(300):
            ran = await trio.to_thread.run_sync(
                lambda: try_out(
                    tmp_path,
                    document,
                    admin.runtime.started.admin[0],
                    *(
                        "--checks",
                        f"{CHECKS},{OF_DATA},ignored_auth",
                    ),
                    *("-H", f"Authorization: Bearer {TOKEN}"),
                )
            )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert (await admin.get("/readyz")).status_code == 200


async def test_the_receiver_answers_as_documented(tmp_path, capsys):
    document = printed(tmp_path, capsys)
    async with administered(registry(breaks), patience=300) as admin:
        with trio.fail_after(300):
            ran = await trio.to_thread.run_sync(
                lambda: try_out(
                    tmp_path,
                    document,
                    admin.runtime.started.receiver[0],
                    *("--checks", f"{CHECKS},negative_data_rejection"),
                )
            )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_command_prints_either_document(command_line):
    answer = command_line("openapi", "--set", "Sdk:Webhooks:Path=/in")
    assert list(answer.document["paths"]) == ["/in"]
    assert answer.document["openapi"].startswith("3.1")
    assert answer.document["info"]["version"] == sdk_trio.__version__
    tenants = ("--set", "Sdk:MultiTenant:Enabled=true")
    answer = command_line("openapi", "--set", "Sdk:Webhooks:Path=/in", *tenants)
    assert list(answer.document["paths"]) == ["/in", "/in/{identifier}"]
    answer = command_line("openapi", "--admin")
    assert set(answer.document["paths"]) == {
        *("/livez", "/readyz", "/healthz", "/metrics"),
        *("/api/status", "/api/events", "/api/events/{webhook_id}", "/api/events/replay"),
        *("/api/overview", "/api/dead", "/api/rejections", "/api/settings", "/api/doctor"),
        *("/api/tenants", "/api/tenants/{tenant}", "/api/tenants/{tenant}/audit"),
        *("/api/tenants/{tenant}/transition", "/api/notifications", "/api/notifications/preview"),
        *("/api/notifications/retry", "/api/replication", "/api/actions", "/api/types"),
        *("/api/events/trigger", "/api/relay", "/api/relay/secret", "/api/proof", "/feed"),
        *("/api/alerts", "/api/pauses", "/api/pause", "/api/resume"),
    }
