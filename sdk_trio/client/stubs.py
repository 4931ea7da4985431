"""Facts about operations and models, read from the generated stubs at run time. Pure.

``make generate`` writes ``models.pyi`` and ``operations/table.pyi`` for editors and type checkers.
At run time the same text gives the arguments of operations and the fields of records. Each entry is
parsed on first use, because a program uses few of some 190 operations
(docs/adr/0030-generated-types.md).
"""

import functools
import pkgutil
import re
from collections.abc import Mapping

import attrs

#: The arguments of every operation; :func:`known_operation` omits them.
_OWN_PARAMETERS = {
    ("query", "Mapping[str, Any] | None"),
    ("body", "Mapping[str, Any]"),
    ("options", "CallOptions"),
}


def _read(name: str) -> str:
    text = pkgutil.get_data("sdk_trio.client", name)
    assert text is not None
    return text.decode()


# Read at import. After an in-place upgrade, a later read could find the files of another version,
# or none.
_OPERATIONS = _read("operations/table.pyi")
_MODELS = _read("models.pyi")

_METHOD = r"""
    \ +(?:async\ )?def\ {name}\(\n
    \ +self,\n
    (?P<parameters>(?:\ {{8}}.*,\n)*)
    \ +\)\ ->\ (?P<returns>.+):\n
    \ +\"""(?P<summary>.+)\n
    \n
    .+\n
    (?:\ +Scopes:\ (?P<scopes>.+)\.\n)?
"""

_PARAMETER = re.compile(r" +(\*{0,2}\w+): (.+?)( = .+)?,\n")

_CLASS = re.compile(r"^class (\w+)\((\w+).*\):\n((?: {4}\w+: .+\n)*)", re.MULTILINE)
_ALIAS = re.compile(r"^(\w+): TypeAlias = (.+)$", re.MULTILINE)
_FIELD = re.compile(r" {4}(\w+): (.+)\n")


@attrs.frozen
class KnownOperation:
    """The stub's entry of an operation.

    ``fields`` are the arguments by name, path parameters first: the type as text, and whether the
    upstream requires the field. ``is_open``: it also accepts other arguments. ``returns`` is the
    type of a call's result.
    """

    summary: str
    scopes: tuple[str, ...]
    returns: str
    fields: Mapping[str, tuple[str, bool]]
    is_open: bool


@functools.cache
def known_operation(full_name: str) -> KnownOperation | None:
    """Return the entry of an operation (``orders.list``), None if the upstream lacks it."""
    resource, _, name = full_name.rpartition(".")
    begin = _OPERATIONS.find(f'path="{resource}"):')
    end = _OPERATIONS.find("\nclass ", begin)
    method = re.compile(_METHOD.format(name=re.escape(name)), re.VERBOSE)
    found = method.search(_OPERATIONS, begin, end if end > 0 else len(_OPERATIONS))
    if begin < 0 or found is None:
        return None
    fields = {
        name: (kind, not default)
        for name, kind, default in _PARAMETER.findall(found["parameters"])
        if (name, kind) not in _OWN_PARAMETERS
    }
    # The OAuth 2 forms, whose fields the upstream does not describe.
    is_open = fields.pop("**fields", None) is not None
    return KnownOperation(
        summary=found["summary"],
        scopes=tuple((found["scopes"] or "").replace(",", "").split()),
        returns=found["returns"].replace("builtins.", ""),
        fields=fields,
        is_open=is_open,
    )


@functools.cache
def forms() -> Mapping[str, str]:
    """Return the first word of each model's definition by the model's name.

    It is ``TypedDict`` or ``Mapping`` for an object to send, ``Literal`` for a closed list of
    texts, and ``Model``, ``Fields`` or another model for a record.
    """
    aliases = {name: re.split(r"\W", kind, maxsplit=1)[0] for name, kind in _aliases().items()}
    return {name: base for name, (base, _) in _classes().items()} | aliases


@functools.cache
def fields_of(model: str) -> Mapping[str, str]:
    """Return the fields of a record's model: the type of each by name."""
    return dict(_FIELD.findall(_classes()[model][1]))


@functools.cache
def time_names() -> frozenset[str]:
    """Return the names of all fields that are times in some model."""
    return frozenset(re.findall(r"^ {4}(\w+): .*\bdatetime\b", _MODELS, re.MULTILINE))


@functools.cache
def models_in(kind: str) -> frozenset[str]:
    """Return the record models in a type; for a union, those of its members."""
    found: set[str] = set()
    for name in re.findall(r"\w+", kind):
        if name in _aliases():
            found |= models_in(_aliases()[name])
        elif _classes().get(name, ("", ""))[0] in ("Model", "Fields"):
            found.add(name)
    return frozenset(found)


@functools.cache
def _classes() -> dict[str, tuple[str, str]]:
    return {name: (base, fields) for name, base, fields in _CLASS.findall(_MODELS)}


@functools.cache
def _aliases() -> dict[str, str]:
    return dict(_ALIAS.findall(_MODELS))
