"""Placeholders of message templates: ``{TenantName}`` and five others. Pure (spec 2.9).

A template is text with holes, and no format string: ``str.format`` would reach into objects
(``{TenantName.__init__}``) and eat memory (``{TenantName:>100000000}``).
"""

import re
from collections.abc import Mapping

PLACEHOLDERS = (
    "TenantName",
    "TenantIdentifier",
    "NewStatus",
    "PreviousStatus",
    "Reason",
    "OccurredAt",
)

_WORD = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")
_BRACES = re.compile(r"\{([^{}]*)\}")


def substitute(template: str, values: Mapping[str, str]) -> str:
    """Return ``template`` with each ``{Word}`` of ``values`` replaced; other text stays as it is.

    One pass: a value that holds a placeholder is not looked into.
    """
    return _WORD.sub(lambda found: values.get(found[1], found[0]), template)


def unknown_placeholders(template: str) -> tuple[str, ...]:
    """Return what stands between braces in a template and no value replaces, each text once.

    Also what other kinds of templates take for a placeholder: ``{0}``, ``{TenantName:>9}``.
    """
    found = dict.fromkeys(match[1] for match in _BRACES.finditer(template))
    return tuple(word for word in found if word not in PLACEHOLDERS)
