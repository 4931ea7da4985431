"""The upstream's models, for annotations: ``from sdk_trio.client.models import Order``.

Type checkers and editors read the stub next to this file, which has every field. At run time these
classes do not exist: every object of an answer is a :class:`~sdk_trio.client.records.Record`,
requests take dicts, and closed lists of texts are text. So nothing is lost if the upstream adds or
drops a field, or sends an unlisted text.
"""

from collections.abc import Mapping
from typing import Any

from .records import Record
from .stubs import forms

Many = list
Model = Record
Fields = Record


class Unlisted(str):
    """A text that the upstream has since added to a closed list; compare it like any other."""

    __slots__ = ()


#: The run-time classes of the stub's definitions with these words; all others are records.
_CLASSES: Mapping[str, Any] = {"TypedDict": dict, "Mapping": dict, "Literal": str}


def __getattr__(name: str) -> Any:
    try:
        return _CLASSES.get(forms()[name], Record)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *forms()})
