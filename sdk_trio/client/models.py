"""The upstream's models, to annotate with: ``from sdk_trio.client.models import Order``.

Type checkers and editors read the stub beside this file, which knows every field. At run time there
are no such classes: every object of an answer is a :class:`~sdk_trio.client.records.Record`
whatever its model, requests take dicts, and closed lists of texts are texts. So nothing is lost
when the upstream adds a field, drops one, or answers a text that its list does not have.
"""

from collections.abc import Mapping
from typing import Any

from .records import Record
from .stubs import forms

Many = list
Model = Record
Fields = Record


class Unlisted(str):
    """A text that the upstream has since added to a closed list; compare it as any other."""

    __slots__ = ()


#: The classes at run time of what the stub defines by these words; all else is a record.
_CLASSES: Mapping[str, Any] = {"TypedDict": dict, "Mapping": dict, "Literal": str}


def __getattr__(name: str) -> Any:
    try:
        return _CLASSES.get(forms()[name], Record)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *forms()})
