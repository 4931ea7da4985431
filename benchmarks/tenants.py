"""The cost of many tenants, compared with few: look-up, add, list, suspend, start, memory.

    python benchmarks/tenants.py [--few 100] [--many 5000] [--rounds 5] [--json FILE]

Both stores are filled once: every tenant has its own organization, manager and key file. Then each
round measures both, and ratios are computed within a round. For commands the figure is the CPU time
of the whole process (``version`` is one without work), for the daemon the CPU time per delivery and
the resident memory. It takes about two minutes.
"""

import argparse
import base64
import hashlib
import hmac
import http.client
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import attrs
from load import KEY, SECRET
from report import spread
from stores import fill_tenants

import sdk_trio  # noqa: F401 - fails here, and not in each command, where it is not installed

PATH = "/hooks/sdk"
PATIENCE = 60.0
#: Deliveries of each measurement. The first ones go to every tenant in turn.
DELIVERIES = 1000
#: Tenants that are added through one open store.
ADDED = 200
ENVIRONMENT = {
    **os.environ,
    "SDK__WEBHOOKS__SECRET": SECRET,
    "PYTHONPATH": str(Path(__file__).parent / "servers"),
}
_CLOCK = os.sysconf("SC_CLK_TCK")


@attrs.define
class Host:
    """A data directory with many tenants, or few."""

    directory: Path
    count: int
    added: int = 0

    @property
    def settings(self) -> list[str]:
        keys = {
            "Sdk:Storage:Path": self.directory / "data",
            "Sdk:MultiTenant:Enabled": "true",
            "Sdk:Webhooks:RequireHttps": "false",
            "Sdk:Server:Bind": "127.0.0.1:0",
            "Sdk:Admin:Enabled": "false",
            "Sdk:Logging:Level": "Warning",
        }
        return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]

    def new_identifier(self) -> str:
        self.added += 1
        return f"added-{self.added}"

    def key_of(self, number: int) -> bytes:
        return hashlib.sha256(b"%d" % number).digest()


def command(host: Host, *words: str) -> float:
    """Run a command and return its CPU time in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "sdk_trio", *words, *(host.settings if words[1:] else [])],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def commands(host: Host) -> dict[str, float]:
    """Measure each command once."""
    chosen = f"tenant-{random.randrange(host.count):06d}"
    key = host.directory / "keys" / "0"
    manager = ("--email", "a@example.com", "--email-verified")
    first = host.new_identifier()
    return {
        "version": command(host, "--version"),
        "tenant add": command(host, "tenant", "add", first, "--name", "N", *manager),
        "tenant add, with a key file": command(
            host,
            *("tenant", "add", host.new_identifier(), "--name", "N"),
            *("--webhook-secret-file", f"{key}-{host.added}"),
        ),
        "tenant show": command(host, "tenant", "show", chosen),
        "tenant list --limit 50": command(host, "tenant", "list", "--limit", "50"),
        "tenant list --status Suspended --limit 50": command(
            host, "tenant", "list", "--status", "Suspended", "--limit", "50"
        ),
        "tenant list --search, all are looked at": command(
            host, "tenant", "list", "--search", chosen
        ),
        "tenant audit IDENTIFIER": command(host, "tenant", "audit", chosen),
        "tenant audit --limit 50": command(host, "tenant", "audit", "--limit", "50"),
        "tenant suspend": command(host, "tenant", "suspend", first),
        "tenant reactivate": command(host, "tenant", "reactivate", first),
    }


_ADD = """
import sys, time, trio
from sdk_trio.config import Settings
from sdk_trio.storage.open import open_store
from sdk_trio.tenants import TenantService

async def main(path, prefix, count):
    settings = Settings.from_mapping(
        {"Storage:Path": path, "MultiTenant:Enabled": True}, standalone=True, receiver=False)
    async with open_store(settings, owner="bench") as store:
        service = TenantService(settings, store.tenants)
        begun = time.process_time()
        for number in range(int(count)):
            await service.add(f"{prefix}-{number}", name="N", organization_id=f"{prefix}-{number}")
        print(1e6 * (time.process_time() - begun) / int(count))

trio.run(main, *sys.argv[1:])
"""


def additions(host: Host) -> dict[str, float]:
    """Measure the cost of adding one tenant through the service of an open store."""
    words = (str(host.directory / "data"), host.new_identifier(), str(ADDED))
    done = subprocess.run(
        [sys.executable, "-c", _ADD, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"TenantService.add, us": float(done.stdout)}


def daemon(host: Host) -> dict[str, float]:
    """Measure start, deliveries of both kinds, and the time until a new tenant has its address."""
    log = host.directory / "log"
    began = time.perf_counter()
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "sdk_trio", "run", "--standalone", "--app",
             "tenants_app:handlers", *host.settings],
            stdout=err,
            stderr=err,
            env=ENVIRONMENT,
        )  # fmt: skip
    try:
        port = wait_for_port(process, host)
        found = {"start, ms": 1000 * (time.perf_counter() - began)}
        found["start, CPU ms"] = 1000 * cpu_seconds(process.pid)
        found["memory at the start, MB"] = resident_mb(process.pid)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        for kind, sign in (("organization", of_organization), ("address", of_address)):
            for number in range(host.count):
                deliver(connection, *sign(host, number))
            numbers = [random.randrange(host.count) for _ in range(DELIVERIES)]
            signed = [sign(host, number) for number in numbers]
            before = cpu_seconds(process.pid)
            for path, headers, body in signed:
                deliver(connection, path, headers, body)
            used = cpu_seconds(process.pid) - before
            found[f"delivery by {kind}, CPU us"] = 1e6 * used / DELIVERIES
        found["memory after all were seen, MB"] = resident_mb(process.pid)
        before = cpu_seconds(process.pid)
        for _ in range(3):
            command(host, "tenant", "add", host.new_identifier(), "--name", "N")
        time.sleep(1.2)
        found["tenant add x 3, CPU ms of the daemon"] = 1000 * (cpu_seconds(process.pid) - before)
        return found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def wait_for_port(process: "subprocess.Popen[bytes]", host: Host) -> int:
    """Return the port of a daemon that has started."""
    file = host.directory / "data" / "runtime.json"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            known = json.loads(file.read_text())
            if known["pid"] == process.pid:
                return int(known["url"].partition("//")[2].partition("/")[0].partition(":")[2])
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.005)
    raise SystemExit(f"the daemon did not start: {(host.directory / 'log').read_text()}")


def deliver(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str], body: bytes
) -> None:
    """Post one delivery; require the response 200."""
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise SystemExit(f"{path} was answered {answer.status}")


def of_organization(host: Host, number: int) -> tuple[str, dict[str, str], bytes]:
    """Make a delivery to the host's address; its body has the tenant's organization."""
    return PATH, *signed(KEY, f"org-{number:06d}")


def of_address(host: Host, number: int) -> tuple[str, dict[str, str], bytes]:
    """Make a delivery to the tenant's address, with its own secret."""
    return f"{PATH}/tenant-{number:06d}", *signed(host.key_of(number), None)


def signed(key: bytes, organization: str | None) -> tuple[dict[str, str], bytes]:
    """Sign a small order.paid document with its own id."""
    data = {"id": str(uuid.uuid4()), "organization_id": organization}
    document = {"type": "order.paid", "timestamp": "2026-01-02T03:04:05Z", "data": data}
    body = json.dumps(document).encode()
    webhook_id, moment = str(uuid.uuid4()), str(int(time.time()))
    mac = hmac.digest(key, b"%b.%b.%b" % (webhook_id.encode(), moment.encode(), body), "sha256")
    return {
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{base64.b64encode(mac).decode()}",
    }, body


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, including its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        hosts = [Host(Path(place) / str(n), n) for n in (arguments.few, arguments.many)]
        for host in hosts:
            fill_tenants(host.directory, host.count, host.key_of)
        runs: list[dict[int, dict[str, float]]] = []
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            found: dict[int, dict[str, float]] = {host.count: {} for host in hosts}
            for measure in (commands, additions, daemon):
                for host in hosts if number % 2 == 0 else reversed(hosts):
                    found[host.count] |= measure(host)
            runs.append(found)
    print(table(runs, arguments.few, arguments.many))
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1))


def table(runs: list[dict[int, dict[str, float]]], few: int, many: int) -> str:
    """Return medians with their range as Markdown; each ratio is that of one round."""
    lines = [f"| what | {few} tenants | {many} tenants | ratio |", "|---|---|---|---|"]
    for name in runs[0][few]:
        one = [run[few][name] for run in runs]
        other = [run[many][name] for run in runs]
        ratios = [b / a for a, b in zip(one, other, strict=True) if a]
        unit = "" if name.endswith(("us", "MB", "ms", "daemon")) else ", CPU ms"
        digits = 1 if statistics.median(other) < 100 else 0
        lines.append(
            f"| {name}{unit} | {spread(one, digits)} | {spread(other, digits)} | {spread(ratios)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
