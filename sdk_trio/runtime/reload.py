"""The decision of a reload: which new settings take effect now, and which at the next start. Pure.

``reloader.py`` carries it out. A setting that cannot change in a running program keeps its value
and is named at every reload until the next start. It is no error: a reload that fails because of it
would keep a leaked secret in force until somebody undoes an unrelated change.
"""

from collections.abc import Collection, Iterator
from typing import Any

import attrs

from ..config import Settings
from ..config.gates import is_below
from ..config.table import Setting, table

#: These paths can change in a running program, but TLS cannot be switched on or off: the addresses
#: that were announced at the start have its scheme.
_TLS_FILES = ("Sdk:Server:CertFile", "Sdk:Server:KeyFile")


@attrs.frozen
class Plan:
    """The result of the decision.

    ``settings`` are the running ones with every live key taken from the wanted ones. ``applied``
    are the full keys that change now, ``restart`` those that differ and wait for the next start.
    """

    settings: Settings
    applied: tuple[str, ...]
    restart: tuple[str, ...]


def plan_reload(running: Settings, wanted: Settings, *, live: Collection[str]) -> Plan:
    """Decide which settings of ``wanted`` replace those of ``running``.

    Args:
        running: the settings in force.
        wanted: valid settings, read from the sources now.
        live: full keys, or keys of sections, that some part can change while it runs.
    """
    settings = running
    applied: list[str] = []
    restart: list[str] = []
    for setting in _changed(running, wanted):
        if any(is_below(setting.key, key) for key in live) and _can_change(
            setting, running, wanted
        ):
            settings = _replaced(settings, setting.attributes, setting.of(wanted))
            applied.append(setting.key)
        else:
            restart.append(setting.key)
    return Plan(settings, tuple(applied), tuple(restart))


def _changed(running: Settings, wanted: Settings) -> Iterator[Setting]:
    return (setting for setting in table() if setting.of(running) != setting.of(wanted))


def _can_change(setting: Setting, running: Settings, wanted: Settings) -> bool:
    if setting.key not in _TLS_FILES:
        return True
    return running.server.cert_file is not None and wanted.server.cert_file is not None


def _replaced(section: Any, attributes: tuple[str, ...], value: Any) -> Any:
    """Return ``section`` with the value at ``attributes`` replaced, and all else the same."""
    first, *rest = attributes
    if rest:
        value = _replaced(getattr(section, first), tuple(rest), value)
    return attrs.evolve(section, **{first: value})
