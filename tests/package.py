"""Builds the wheel and the sdist and checks them: ``make package``.

Each check prints one line: `ok`, `FAILED`, or `not possible` with the reason, for a check whose
data is not reachable. Status 1 if one failed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "package"
TOOLS = Path(sys.executable).parent
#: The public modules; the classes and functions that they export must have whole types.
PUBLIC = ("sdk_trio", "sdk_trio.events", "sdk_trio.testing", "sdk_trio.asgi", "sdk_trio.monitoring")
EXTRAS = "postgres,otel,http3,ed25519,testing,completion"

Outcome = tuple[str, str, str]


def main() -> int:
    """Run all checks; 1 if one failed."""
    shutil.rmtree(WORK, ignore_errors=True)
    failed = 0
    for name, outcome, detail in checks():
        print(f"{outcome:12} {name}: {detail}", flush=True)
        failed += outcome == "FAILED"
    return 1 if failed else 0


def checks() -> Iterator[Outcome]:
    """Yield the name, the outcome and the detail of each check."""
    shutil.rmtree(DIST, ignore_errors=True)
    first, second = build(DIST), build(WORK / "again")
    for file, digest in first.items():
        same = second.get(file) == digest
        yield "reproducible", "ok" if same else "FAILED", f"{file} sha256 {digest}"
    files = [str(DIST / name) for name in first]
    wheel = next(file for file in files if file.endswith(".whl"))
    yield of_program("description of the registry", "twine", "check", "--strict", *files)
    yield of_program("contents of the wheel", "check-wheel-contents", wheel)
    python = install(wheel)
    yield of_program("installed command", str(python.with_name("sdk-trio")), "version")
    yield bill_of_materials(python)
    yield audit(python)
    yield types(python)


def build(directory: Path) -> dict[str, str]:
    """Build into ``directory``; return the SHA-256 of each file."""
    when = run("git", "log", "-1", "--format=%ct").stdout.strip() or "0"
    command = [sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)]
    built = run(*command, environment={"SOURCE_DATE_EPOCH": when})
    if built.returncode:
        sys.exit(built.stdout + built.stderr)
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.iterdir())
        if file.name != ".gitignore"
    }


def install(wheel: str) -> Path:
    """Install the wheel with its extras into an environment of its own; return its Python."""
    venv.create(WORK / "installed", with_pip=True)
    python = WORK / "installed" / "bin" / "python"
    done = run(str(python), "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]")
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return python


def bill_of_materials(python: Path) -> Outcome:
    """Write the CycloneDX document of the installed packages beside the wheel."""
    file = DIST / "sdk_trio.cdx.json"
    command = [program("cyclonedx-py"), "environment", str(python), "--output-reproducible"]
    made = run(*command, "--output-file", str(file))
    if made.returncode:
        return "bill of materials", "FAILED", last_line(made)
    components = json.loads(file.read_text("utf-8"))["components"]
    return "bill of materials", "ok", f"{len(components)} components in {file.name}"


def audit(python: Path) -> Outcome:
    """Look for known vulnerabilities; a package that could not be looked up is not a success."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    made = run(program("pip-audit"), "--path", str(packages), "--format", "json", "--skip-editable")
    try:
        found = json.loads(made.stdout)["dependencies"]
    except (ValueError, KeyError):
        return "audit", "not possible", f"the data is not reachable: {last_line(made)}"
    bad = [f"{each['name']} {each['version']}" for each in found if each.get("vulns")]
    left_out = [each["name"] for each in found if "skip_reason" in each]
    if bad:
        return "audit", "FAILED", f"known vulnerabilities: {', '.join(bad)}"
    # Our own package is on no registry.
    if set(left_out) - {"sdk-trio"}:
        detail = f"{len(left_out)} of {len(found)} packages could not be looked up"
        return "audit", "not possible", detail
    return "audit", "ok", f"{len(found)} packages"


def types(python: Path) -> Outcome:
    """Check that the public names, and everything they have, are typed as Pyright sees it."""
    names = run(
        str(python),
        "-c",
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    names = importlib.import_module(module)\n"
        "    for name in names.__all__:\n"
        "        found = getattr(names, name)\n"
        "        home = getattr(found, '__module__', None) or module\n"
        "        print(f\"{home}.{getattr(found, '__qualname__', name)}\")\n",
        *PUBLIC,
    ).stdout.split()
    environment = {"VIRTUAL_ENV": str(WORK / "installed"), "PATH": f"{python.parent}:{TOOLS}"}
    environment["PATH"] += f":{os.environ['PATH']}"
    made = run(
        program("pyright"),
        *("--verifytypes", "sdk_trio", "--ignoreexternal", "--outputjson"),
        *("--pythonpath", str(python)),
        environment=environment,
        directory=WORK,
    )
    try:
        report = json.loads(made.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        return "types", "not possible", last_line(made)
    public = [each for each in report["symbols"] if belongs(each["name"], names)]
    unknown = [
        each["name"] for each in public if not each["isTypeKnown"] or each["isTypeAmbiguous"]
    ]
    score = f"{100 * report['completenessScore']:.1f} % with all private modules"
    if not public or unknown:
        return "types", "FAILED", f"{len(unknown)} of {len(public)}: {unknown[:5]}; {score}"
    return "types", "ok", f"100 % of {len(public)} public symbols, {score}"


def belongs(symbol: str, names: list[str]) -> bool:
    """Return whether a symbol is a public name or a member of one."""
    return any(symbol == name or symbol.startswith(f"{name}.") for name in names)


def program(name: str) -> str:
    """Return the path of a program of this environment."""
    return str(TOOLS / name)


def of_program(check: str, name: str, *arguments: str) -> Outcome:
    """Run a program; it succeeds if its status is 0."""
    made = run(name if "/" in name else program(name), *arguments)
    return check, "FAILED" if made.returncode else "ok", last_line(made)


def last_line(made: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a program has printed."""
    lines = (made.stdout.strip() or made.stderr.strip() or "no output").splitlines()
    return lines[-1]


def run(
    *command: str, environment: dict[str, str] | None = None, directory: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output as text."""
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "NO_COLOR": "1", **(environment or {})},
        capture_output=True,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main())
