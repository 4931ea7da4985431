"""The client's types for editors and type checkers: mypy, pyright and its language server.

pyright comes from npm (`make emulators`), since its own package downloads it when it is run.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.programs import node_package, program

ROOT = Path(__file__).parents[2]
#: pyright finds the packages of the Python that it finds first. In a larger space for new objects,
#: node copies fewer of them.
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "NODE_OPTIONS": "--max-semi-space-size=64",
}

#: The share of the package's public symbols that have a type which every checker reads alike.
COMPLETE_PERCENT = 99.0

MISTAKES = """\
import sdk_trio


async def program(client: sdk_trio.Client) -> None:
    client.orders.list(stauts="paid")  # wrong: a misspelt filter
    client.orders.list(status="piad")  # wrong: a misspelt value
    client.orders.list(page="1")  # wrong: no number
    await client.orders.get()  # wrong: no id
    await client.orders.get(1.5)  # wrong: no id either
    await client.subscriptions.update("s", cancel_at_perod_end=True)  # wrong: a misspelt field
    await client.products.create(name="Book")  # wrong: a field that is required
    order = await client.orders.get("o")
    print(order.totl_amount)  # wrong: a misspelt field of the answer
    print(order.total_amount.upper())  # wrong: a number
    client.with_options(max_retires=0)  # wrong: a misspelt option
    print(order.status == "paid", order["brand_new"], client.orders.list(query={"brand_new": 1}))
    await client.orders.create.unchecked(brand_new=1)
"""


def as_sync(text: str) -> str:
    return text.replace("async def", "def").replace("await ", "").replace(".Client", ".SyncClient")


#: Programs with mistakes, by the names of their files.
CLIENTS = {"asynchronous": MISTAKES, "synchronous": as_sync(MISTAKES)}

#: Those of ``tests/typing`` whose mistakes mypy refuses, with the number of the mistakes.
TYPING = {"handlers": 14, "effects": 3}


def wrong_lines(text: str) -> list[int]:
    marked = [n for n, line in enumerate(text.splitlines(), 1) if "# wrong" in line]
    assert len(marked) == 10
    return marked


def refused_lines(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if "type: ignore[" in line]


def text_of_typing(name: str) -> str:
    return (ROOT / f"tests/typing/{name}_typing.py").read_text()


def written(directory: Path, programs: Mapping[str, str]) -> list[str]:
    """Write programs below ``directory``, and return the paths of their files."""
    for name, text in programs.items():
        (directory / f"{name}.py").write_text(text)
    return [str(directory / f"{name}.py") for name in programs]


def run(*command: str, cwd: Path, **environment: str) -> str:
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return ended.stdout


# Checkers read the package for seconds, so each of them gets all programs at once.


@pytest.fixture(scope="module")
def pyright() -> tuple[str, str]:
    return program("node"), str(node_package("pyright") / "index.js")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as an installation does, beside no sources."""
    directory = tmp_path_factory.mktemp("installed")
    (directory / "sdk_trio").symlink_to(ROOT / "sdk_trio")
    return directory


@pytest.fixture(scope="module")
def found_by_mypy(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[int]]:
    """The lines in which mypy finds an error, by the name of the program."""
    files = written(tmp_path_factory.mktemp("programs"), CLIENTS)
    # The cache of `make types`, if that has run.
    said = run(sys.executable, "-m", "mypy", "--strict", *files, cwd=ROOT)
    found = re.findall(r"(\w+)\.py:(\d+): error", said)
    return {each: sorted({int(line) for name, line in found if name == each}) for each in CLIENTS}


@pytest.fixture(scope="module")
def found_by_pyright(installed: Path, pyright: tuple[str, str]) -> Mapping[str, list[int]]:
    """The same of pyright, with the programs of ``tests/typing`` without their remarks."""
    typing = {name: re.sub(r" *# type: ignore\[.*", "", text_of_typing(name)) for name in TYPING}
    files = written(installed, CLIENTS | typing)
    errors = json.loads(run(*pyright, "--outputjson", *files, cwd=installed))["generalDiagnostics"]
    found = {
        (Path(e["file"]).stem, e["range"]["start"]["line"] + 1)
        for e in errors
        if e["severity"] == "error"
    }
    names = [*CLIENTS, *TYPING]
    assert {name for name, _ in found} <= {*names}, errors
    return {each: sorted(line for name, line in found if name == each) for each in names}


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLIENTS)
def test_mypy_finds_every_mistake_and_no_other(
    found_by_mypy: Mapping[str, list[int]], name: str
) -> None:
    assert found_by_mypy[name] == wrong_lines(CLIENTS[name])


@pytest.mark.parametrize("name", CLIENTS)
def test_pyright_finds_every_mistake_and_no_other(
    found_by_pyright: Mapping[str, list[int]], name: str
) -> None:
    assert found_by_pyright[name] == wrong_lines(CLIENTS[name])


@pytest.mark.parametrize("name", TYPING)
def test_pyright_refuses_the_same_handlers_as_mypy(
    found_by_pyright: Mapping[str, list[int]], name: str
) -> None:
    refused = refused_lines(text_of_typing(name))
    assert len(refused) == TYPING[name]
    assert found_by_pyright[name] == refused


# --- the whole package ---------------------------------------------------------------------------


def test_the_package_is_typed_so_that_every_checker_reads_it_alike(
    installed: Path, pyright: tuple[str, str]
) -> None:
    said = run(
        *pyright, "--verifytypes", "sdk_trio", "--ignoreexternal", "--outputjson",
        cwd=installed, PYTHONPATH=str(installed),
    )  # fmt: skip
    report = json.loads(said)["typeCompleteness"]
    counts = report["exportedSymbolCounts"]
    bare = [symbol["name"] for symbol in report["symbols"] if not symbol["isTypeKnown"]]
    assert report["pyTypedPath"].endswith("py.typed")
    assert counts["withKnownType"] > 5000, "the package was not found"
    assert 100 * report["completenessScore"] >= COMPLETE_PERCENT, (counts, bare[:200])


# --- an editor -----------------------------------------------------------------------------------

EDITED = """\
import sdk_trio

async def program(client: sdk_trio.Client, sync: sdk_trio.SyncClient) -> None:
    order = await client.orders.get("o")
    order.
    sync.orders.get("o").customer.
    client.orders.list(st)
    sync.subscriptions.update("s", cancel)
"""


class Editor:
    """As much of the language server protocol as an editor needs to ask about one file."""

    def __init__(self, process: "subprocess.Popen[bytes]", file: Path) -> None:
        self._process = process
        self._file = {"uri": file.as_uri()}
        self._asked = 0
        root = {"uri": file.parent.as_uri(), "name": "project"}
        self.ask("initialize", processId=None, capabilities={}, workspaceFolders=[root])
        self._send(method="initialized", params={})
        opened = {**self._file, "languageId": "python", "version": 1, "text": file.read_text()}
        self._send(method="textDocument/didOpen", params={"textDocument": opened})

    def at(self, method: str, text: str, after: str) -> dict:
        """Ask about the place after ``after`` in the text of the file."""
        before = text[: text.index(after) + len(after)]
        place = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2])}
        return self.ask(f"textDocument/{method}", textDocument=self._file, position=place)

    def completions(self, text: str, after: str) -> list[str]:
        return [item["label"] for item in self.at("completion", text, after)["items"]]

    def ask(self, method: str, **params: object) -> dict:
        self._asked += 1
        self._send(id=self._asked, method=method, params=params)
        while True:
            said = self._read()
            if said.get("id") == self._asked and "method" not in said:
                return said["result"]
            if "id" in said and "method" in said:  # a question of the server's
                self._send(id=said["id"], result=None)

    def _send(self, **message: object) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._process.stdin.flush()

    def _read(self) -> dict:
        length = 0
        while line := self._process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return json.loads(self._process.stdout.read(length))


@contextlib.contextmanager
def editing(file: Path):
    command = [program("node"), str(node_package("pyright") / "langserver.index.js"), "--stdio"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        try:
            yield Editor(process, file)
        finally:
            process.kill()


def test_an_editor_completes_fields_and_arguments(installed: Path) -> None:
    file = installed / "edited.py"
    file.write_text(EDITED)
    with editing(file) as editor:
        fields = editor.completions(EDITED, "    order.")
        assert {"total_amount", "status", "customer"} <= set(fields)
        assert "email" in editor.completions(EDITED, ".customer.")
        assert "status=" in editor.completions(EDITED, "list(st")
        assert "cancel_at_period_end=" in editor.completions(EDITED, '"s", cancel')
        shown = editor.at("hover", EDITED, "orders.lis")["contents"]["value"]
        assert "List the orders." in shown
        assert "Scopes: orders:read" in shown
        assert "created_after: str | date | None" in shown
