"""Runs ``doctor`` in this process, and returns its findings as data, each checked for its form."""

from functools import partial

import attrs
import trio

from support.deliveries import SECRET
from support.scripted_upstream import TOKEN

FIELDS = {"level", "check", "where", "what", "remedy"}


@attrs.frozen
class Found:
    status: int
    findings: list
    text: str

    def of(self, check, level=None):
        return [f for f in self.findings if f["check"] == check and level in (None, f["level"])]

    def one(self, check, level, what):
        matching = [f for f in self.of(check, level) if what in f["what"]]
        assert len(matching) == 1, self.of(check)
        assert matching[0]["remedy"] or level in ("note", "ok")
        return matching[0]


class Doctor:
    """Runs ``doctor`` in its own directory; secrets are in its environment."""

    def __init__(self, command_line, monkeypatch):
        self.command_line = command_line
        self.monkeypatch = monkeypatch
        self.set("Webhooks__Secret", SECRET)
        self.set("Webhooks__RequireHttps", "false")

    @property
    def data(self):
        return self.command_line.data

    def set(self, name, value):
        self.monkeypatch.setenv(f"SDK__{name}".upper(), str(value))

    def __call__(self, *words):
        answer = self.command_line("doctor", "--format", "json", *words)
        assert all(set(finding) == FIELDS for finding in answer.document)
        assert SECRET not in answer.out + answer.err
        assert TOKEN not in answer.out + answer.err
        return Found(answer.status, answer.document, answer.out)

    def alone(self, *words):
        return self("--standalone", *words)

    async def beside(self, *words):
        """Run it in a thread, while this loop serves requests."""
        return await trio.to_thread.run_sync(partial(self, *words))
