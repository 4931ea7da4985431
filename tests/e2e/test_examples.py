"""The examples do what their first lines describe, run as separate programs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from support.deliveries import SECRET
from support.ports import free_port
from support.scripted_upstream import TOKEN, ScriptedUpstream, scripted_upstream

from sdk_trio.testing import sign_delivery
from sdk_trio.webhooks.signed_request import post

ROOT = Path(__file__).parents[2]


async def delivered_to_example(
    name: str,
    url: str | None,
    environment: dict[str, str] | None = None,
    subject: str = "from-a-test",
) -> str:
    """Start an example, deliver to it over the network, and return what it printed."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-u", str(ROOT / "examples" / name)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "SDK__WEBHOOKS__SECRET": SECRET,
            "SDK__WEBHOOKS__REQUIREHTTPS": "false",
            "SDK__STORAGE__BACKEND": "Memory",
            "SDK__ADMIN__ENABLED": "false",
            **(environment or {}),
        },
    )
    printed = b""
    try:
        with trio.fail_after(60):
            while url is None:
                printed += await process.stdout.receive_some()
                found = re.search(rb"(http://\S+)\n", printed)
                url = found and found.group(1).decode()
            signed = sign_delivery("order.paid", {"id": subject}, secret=SECRET)
            while True:
                try:
                    answer = await post(url, signed)
                except Exception:
                    await trio.sleep(0.05)  # the process is still starting
                else:
                    break
            assert answer.status == 200
            # To the end of its line: unbuffered, a print is several writes.
            while not re.search(subject.encode() + rb".*\n", printed):
                printed += await process.stdout.receive_some()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        await process.stdout.aclose()
    return printed.decode()


async def test_the_embedded_example_receives_and_handles():
    assert "paid: from-a-test" in await delivered_to_example("embedded.py", None)


async def test_the_standalone_example_receives_and_handles(monkeypatch):
    port = free_port()
    monkeypatch.setenv("PORT", str(port))
    url = f"http://127.0.0.1:{port}/hooks/sdk"
    assert "paid: from-a-test" in await delivered_to_example("standalone.py", url)


def environment_of(upstream: ScriptedUpstream) -> dict[str, str]:
    return {
        "SDK__MODE": "Custom",
        "SDK__ENVIRONMENT": "Development",
        "SDK__CUSTOMBASEURL": upstream.url,
        "SDK__ACCESSTOKEN": TOKEN,
    }


async def test_the_full_stack_example_reads_the_paid_order():
    async with scripted_upstream() as upstream:
        environment = environment_of(upstream)
        printed = await delivered_to_example("full_stack.py", None, environment, "ord_5")
        assert "paid: ord_5 paid" in printed
        assert "no such order: ord_99" in await delivered_to_example(
            "full_stack.py", None, environment, "ord_99"
        )


async def test_the_program_of_the_how_to_runs(tmp_path):
    page = (ROOT / "docs/how-to/call-the-upstream.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    async with scripted_upstream() as upstream:
        ended = await trio.run_process(
            [sys.executable, str(program)],
            capture_stdout=True,
            env={**os.environ, **environment_of(upstream)},
            cwd=tmp_path,
        )
    shown = ended.stdout.decode().splitlines()
    assert shown == ["paid 1", *(f"ord_{n}" for n in range(1, 8)), "cus_1 200"]


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: Path(page).name
)
def test_the_python_in_the_documentation_parses(page):
    text = (ROOT / page).read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)


def test_the_links_of_the_documentation_lead_somewhere():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
