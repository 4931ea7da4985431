"""A real Prometheus on loopback that scrapes the programs of tests."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from .programs import program
from .proxies import free_port

#: Short, for a rate after a few seconds; long enough for an answer of a busy machine.
SCRAPE_SECONDS = 1.0

_CONFIGURATION = """\
global: {{scrape_interval: {interval}ms, scrape_timeout: {interval}ms, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: sdk_trio
    static_configs: [{{targets: ["{target}"]}}]
"""


@attrs.define
class Prometheus:
    """A running Prometheus."""

    client: httpx.AsyncClient

    async def api(self, path: str, **parameters: Any) -> Any:
        """Return the data of a response of its API; fail with its error."""
        answer = await self.client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    async def query(self, expression: str) -> list[Any]:
        """Return the current value of an expression: a list of series."""
        result: list[Any] = (await self.api("query", query=expression))["result"]
        return result


@asynccontextmanager
async def prometheus(directory: Path, target: str, rules: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes ``target`` (HOST:PORT) as the job ``sdk_trio``."""
    shutil.copy(rules, directory)
    configuration = directory / "prometheus.yml"
    interval = int(SCRAPE_SECONDS * 1000)
    configuration.write_text(
        _CONFIGURATION.format(interval=interval, rules=json.dumps(rules.name), target=target)
    )
    port = free_port()
    log = directory / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={configuration}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            cwd=directory,
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            while True:
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/-/ready")).status_code == 200:
                        break
                await trio.sleep(0.05)
            yield Prometheus(client)
    finally:
        process.kill()
        process.wait()
