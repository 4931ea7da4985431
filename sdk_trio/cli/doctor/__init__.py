"""``doctor``: find faults and their remedies.

This file defines the findings of the checks in the other files, each with a remedy; ``run.py`` runs
them all.
"""

import enum
from collections.abc import Iterable

import attrs


class Level(enum.StrEnum):
    """The levels of findings."""

    PROBLEM = "problem"
    """Something does not work, or is not safe."""
    WARNING = "warning"
    """Something will fail one day, or is probably a mistake."""
    NOTE = "note"
    """Something that was not checked, or that is useful to know."""
    OK = "ok"


_RANK = {level: rank for rank, level in enumerate(Level)}


@attrs.frozen
class Finding:
    """One finding.

    ``check`` is the name of the check, ``where`` the full key, file or address, ``what`` a sentence
    about it, ``remedy`` the advice; a finding without a fault needs no remedy.
    """

    level: Level
    check: str
    where: str
    what: str
    remedy: str = ""


@attrs.frozen
class Report:
    """Collects the findings of one check."""

    check: str
    findings: list[Finding] = attrs.field(factory=list)

    def ok(self, where: str, what: str) -> None:
        """Add a finding without a fault."""
        self.findings.append(Finding(Level.OK, self.check, where, what))

    def note(self, where: str, what: str, remedy: str = "") -> None:
        """Add a finding that is useful to know."""
        self.findings.append(Finding(Level.NOTE, self.check, where, what, remedy))

    def warning(self, where: str, what: str, remedy: str) -> None:
        """Add a finding that needs attention."""
        self.findings.append(Finding(Level.WARNING, self.check, where, what, remedy))

    def problem(self, where: str, what: str, remedy: str) -> None:
        """Add a finding that must be fixed."""
        self.findings.append(Finding(Level.PROBLEM, self.check, where, what, remedy))


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the worst first, otherwise in their order."""
    return sorted(findings, key=lambda finding: _RANK[finding.level])
