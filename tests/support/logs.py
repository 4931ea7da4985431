"""Logs of processes that may still be writing them."""

import json
from collections.abc import Mapping
from typing import Any


def entries_in(text: str, event: str | None = None) -> list[Mapping[str, Any]]:
    """Return the logged events in ``text``, or those of one name; other lines are left out.

    An incomplete last line is left out as well.
    """
    lines = text.rpartition("\n")[0].splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry for entry in entries if event in (None, entry["event"])]
