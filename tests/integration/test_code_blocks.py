"""Every block of Python and of shell in the pages runs here, or a comment above it names why not.

The comments, which readers do not see:

``<!-- setup ... -->``
    Python that runs before the blocks below it.
``<!-- not run: REASON -->``, ``<!-- run by FILE -->``
    Above a block. With ``blocks`` as the first word, for every block of the page.
``<!-- run -->``
    Above a shell block: it runs here, in an empty directory. The others must name why not.

The Python blocks of a page run one after the other in one module. A block with tests is written
to a file, for pytest. Every command of ours in a shell block is parsed, also where it is not run.
"""

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import attrs
import pytest
import trio
from opentelemetry import trace
from opentelemetry.util._once import Once
from support.daemon import clean_environment
from support.deliveries import SECRET

from sdk_trio.cli.parse import UsageError, parse

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / f"{page}.md" for page in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
    ROOT / "benchmarks" / "README.md",
    *sorted(
        page
        for page in ROOT.glob("docs/**/*.md")
        # Signatures; their examples are files that have a test of their own.
        if not page.name.startswith("python-")
    ),
]
SHELLS = ("sh", "bash", "console")
ENVIRONMENT = {
    "SDK__WEBHOOKS__SECRET": SECRET,
    "SDK__ACCESSTOKEN": "token",
    "SDK__MODE": "Test",
    "SDK__SERVER__BIND": "127.0.0.1:0",
    "SDK__ADMIN__ENABLED": "false",
    "SDK__STORAGE__BACKEND": "Memory",
}
_PART = re.compile(
    r"^ *<!-- (?P<word>setup|not run:|run by|run|blocks not run:|blocks run by)\s(?P<note>.*?)-->\n"
    r"|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@attrs.frozen
class Block:
    """A block of a page; ``note`` is the comment that keeps it from running here."""

    page: Path
    line: int
    language: str
    text: str
    note: str = ""


def blocks_of(page: Path) -> list[Block]:
    """The blocks and the setups of a page, in order."""
    text = page.read_text("utf-8")
    found, of_page, above, end = [], "", "", 0
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["word"] == "setup":
            found.append(Block(page, line, "python", part["note"]))
        elif part["word"]:
            comment = f"{part['word']} {part['note']}".strip()
            if comment.startswith("blocks "):
                of_page = comment.removeprefix("blocks ")
            else:
                above, end = comment, part.end()
        else:
            is_near = above and not text[end : part.start()].strip()
            note = above if is_near else of_page
            body = inspect.cleandoc(f"\n{part['text']}")
            found.append(Block(page, line, part["language"], body, note))
            above = ""
    return found


BLOCKS = {page: blocks_of(page) for page in PAGES}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_tests(block: Block) -> bool:
    return re.search(r"^(async )?def test_", block.text, re.MULTILINE) is not None


def test_every_comment_names_a_reason_or_a_test_that_names_the_page():
    for page, blocks in BLOCKS.items():
        for block in blocks:
            place = f"{name(page)}:{block.line}"
            if block.note.startswith("run by "):
                test = (ROOT / block.note.split()[2]).read_text("utf-8")
                assert page.name in test, f"{place}: {block.note}"
            elif block.note != "run" and (block.note or block.language in SHELLS):
                assert block.note.startswith("not run: "), f"{place}: mark it, see this file"


def test_every_block_names_its_language():
    unnamed = [
        f"{name(p)}:{b.line}" for p, found in BLOCKS.items() for b in found if not b.language
    ]
    assert unnamed == []


PYTHON = {
    page: [b for b in blocks if b.language == "python" and not b.note and not has_tests(b)]
    for page, blocks in BLOCKS.items()
}


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=name)
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    # A page sets it, and later tests of this process must not be traced.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    module = types.ModuleType("blocks_of_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in PYTHON[page]:
        # The block keeps its lines, for tracebacks.
        text = "\n" * block.line + block.text
        code = compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            trio.run(awaited, code, vars(module))
        else:
            exec(code, vars(module))


async def awaited(code, names):
    with trio.fail_after(60):
        await eval(code, names)


#: The application that the tests in the pages test.
APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    grant(event.data.id)


def grant(order_id):
    pass


async def refund(client, order_id):
    order = await client.orders.get(order_id)
    await client.refunds.create(order_id=order.id, amount=order.amount)
"""

FIXTURES = """
import pytest


@pytest.fixture
def sdk_handlers():
    import app

    return app.handlers
"""


def test_the_tests_in_the_pages_pass(tmp_path):
    (tmp_path / "app.py").write_text(APPLICATION)
    (tmp_path / "conftest.py").write_text(FIXTURES)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\n")
    written = 0
    for page, blocks in BLOCKS.items():
        for block in blocks:
            if block.language == "python" and not block.note and has_tests(block):
                file = tmp_path / f"test_{page.stem.replace('-', '_')}_{block.line}.py"
                file.write_text(f"import app\n\nmy_application = app\n{block.text}\n")
                written += 1
    assert written
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def commands(text: str) -> list[list[str]]:
    """The words of each command of ours in a shell block."""
    text = re.sub(r"\$\([^()]*\)|\$\w+", "x", re.sub(r"\\\n", " ", text))
    found = []
    for line in text.splitlines():
        command = line.strip().removeprefix("$ ").partition(" #")[0].partition(" |")[0]
        ours = re.match(r"(?:\.venv/bin/)?(?:sdk-trio|python3? -m sdk_trio)\s+([^>]*)", command)
        if ours:
            found.append(shlex.split(ours[1].strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_exist(page):
    for block in BLOCKS[page]:
        for words in commands(block.text) if block.language in SHELLS else ():
            filled = [re.sub(r"^\.\.\.$|^\[.*\]$", "x", word) for word in words]
            try:
                parse([word for word in filled if word])
            except UsageError as error:
                pytest.fail(f"{name(page)}:{block.line}: {words}: {error}")
            except SystemExit as ended:
                assert not ended.code  # noqa: PT017 - help and the version end so


SHELL = [b for blocks in BLOCKS.values() for b in blocks if b.note == "run"]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{name(block.page)}:{block.line}")
def test_the_shell_commands_of_a_page_run(block, tmp_path):
    environment = {**clean_environment(), **ENVIRONMENT, "SDK__STORAGE__BACKEND": "Sqlite"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euc", block.text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
