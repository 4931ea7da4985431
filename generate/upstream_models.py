"""Models and operations of the upstream's own Python client, of every API version.

This module reads the sources of ``polar-sdk`` (a development dependency), so aliases keep their
names, and merges its API versions. A field that is missing or not required in one of them is
optional, and a type that differs becomes the union. It does not depend on the results:
:mod:`client_types` generates the client's stubs from it, :mod:`event_payloads` the data classes.
"""

import ast
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence

import attrs

#: The packages of the API versions, oldest first.
VERSIONS = ("v2026_04", "v2026_10", "v2027_01")

_SCOPES = re.compile(r"\*\*Scopes\*\*: ((?:`[\w:]+`\s*)+)")


# The SDK represents times as text; these are the names of such fields.
_TIME_ENDINGS = ("_at", "_period_start", "_period_end", "_timestamp", "trial_start", "trial_end")
_TIME_NAMES = ("timestamp", "evidence_due_by")


def is_time(name: str) -> bool:
    """Return whether text fields of that name are times, in events and in the client's records."""
    return name.endswith(_TIME_ENDINGS) or name in _TIME_NAMES


@attrs.frozen
class Field:
    """One field or parameter: ``type`` is an expression of names, unions and subscripts.

    ``default`` is the source of the SDK's default, if there is one. ``versions`` are those with the
    field, oldest first.
    """

    name: str
    type: str
    is_required: bool
    default: str | None = None
    versions: tuple[str, ...] = VERSIONS


@attrs.frozen
class Model:
    """A JSON object. ``is_input``: it is sent; ``extra`` is the type of additional members."""

    name: str
    is_input: bool
    fields: Mapping[str, Field]
    extra: str | None = None


@attrs.frozen
class Models:
    """The models by name, and the aliases: unions of models, and closed lists of texts.

    The SDK has modules for sent and for received objects. If both have the same name, the name of
    the sent object ends in ``Input`` here. ``sent`` are the aliases of sent objects. ``webhooks``
    maps an event's type to the type of its ``data``.
    """

    models: Mapping[str, Model]
    aliases: Mapping[str, str]
    sent: frozenset[str]
    webhooks: Mapping[str, str]


@attrs.frozen
class Facts:
    """One operation of the SDK: ``path`` and ``query`` are parameters, ``body`` are fields."""

    name: str
    path: tuple[Field, ...]
    query: tuple[Field, ...]
    body: tuple[Field, ...]
    returns: str
    scopes: tuple[str, ...]


@functools.cache
def read_models() -> Models:
    """Return every model of every version, merged."""
    in_both = frozenset[str]().union(*map(_in_both, VERSIONS))
    read = [_read_version(version, in_both) for version in VERSIONS]
    return Models(
        models={
            name: _merge_model([one.models[name] for one in read if name in one.models])
            for name in _in_order(name for one in read for name in one.models)
        },
        aliases={
            name: union(one.aliases[name] for one in read if name in one.aliases)
            for name in _in_order(name for one in read for name in one.aliases)
        },
        sent=frozenset[str]().union(*(one.sent for one in read)),
        webhooks={
            name: union(one.webhooks[name] for one in read if name in one.webhooks)
            for name in _in_order(name for one in read for name in one.webhooks)
        },
    )


def read_operations(models: Models) -> dict[str, Facts]:
    """Return every operation by its dotted name, its versions merged."""
    read = [dict(_operations(version, models)) for version in VERSIONS]
    return {
        name: _merge_facts([facts[name] for facts in read if name in facts])
        for name in _in_order(name for facts in read for name in facts)
    }


def union(types: typing.Iterable[str]) -> str:
    """Return the union of types, each member once, literals of one kind joined and None last."""
    members: list[str] = []
    literals: list[str] = []
    for text in types:
        for node in _union_members(ast.parse(text, mode="eval").body):
            if _subscripted(node) == "Literal":
                index = typing.cast("ast.Subscript", node).slice
                values = index.elts if isinstance(index, ast.Tuple) else [index]
                literals += [ast.unparse(value) for value in values]
            else:
                members.append(ast.unparse(node))
    if literals:
        members.insert(0, f"Literal[{', '.join(_in_order(literals))}]")
    return " | ".join(sorted(_in_order(members), key=lambda member: member == "None"))


def names_in(text: str) -> set[str]:
    """Return the names in a type."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


# --- one version --------------------------------------------------------------------------------


def _in_both(version: str) -> set[str]:
    """Return the names of both a sent and a received object."""
    return _defined(_parse(f"polar.{version}.inputs")) & _defined(
        _parse(f"polar.{version}.outputs")
    )


def _read_version(version: str, in_both: frozenset[str]) -> Models:
    sources = {
        name: _parse(f"polar.{version}.{name}") for name in ("literals", "inputs", "outputs")
    }
    models: dict[str, Model] = {}
    aliases: dict[str, str] = {}
    sent: set[str] = set()
    for module, source in sources.items():
        is_input = module == "inputs"
        # Sent objects never refer to received ones, so each name in that module is of a sent one.
        statements = _Renamed(in_both).visit(source).body if is_input else source.body
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                models[statement.name] = _model(statement, version, is_input=is_input)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                name = ast.unparse(statement.target)
                aliases[name] = _plain(statement.value)
                sent |= {name} if is_input else set()
    webhooks: dict[str, str] = {}
    for statement in _parse(f"polar.{version}.webhooks").body:
        if isinstance(statement, ast.ClassDef) and statement.name.startswith("Webhook"):
            payload = _model(statement, version, is_input=False)
            if {"type", "data"} <= payload.fields.keys():
                kind = ast.literal_eval(payload.fields["type"].type.removeprefix("Literal"))[0]
                webhooks[kind] = payload.fields["data"].type
    return Models(models, aliases, frozenset(sent), webhooks)


def _defined(source: ast.Module) -> set[str]:
    return {statement.name for statement in source.body if isinstance(statement, ast.ClassDef)}


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        if node.name in self._names:
            node.name += "Input"
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(f"{node.id}Input") if node.id in self._names else node


def _parse(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _model(statement: ast.ClassDef, version: str, *, is_input: bool) -> Model:
    is_dict = any(ast.unparse(base).endswith("TypedDict") for base in statement.bases)
    extra = next((k.value for k in statement.keywords if k.arg == "extra_items"), None)
    fields: dict[str, Field] = {}
    for line in statement.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            wrapped = _subscripted(line.annotation)
            kind = line.annotation
            if wrapped in ("NotRequired", "Required"):
                kind = typing.cast("ast.Subscript", kind).slice
            fields[line.target.id] = Field(
                line.target.id,
                _plain(kind),
                is_required=wrapped != "NotRequired" if is_dict else line.value is None,
                versions=(version,),
            )
    return Model(statement.name, is_input, fields, None if extra is None else _plain(extra))


def _operations(version: str, models: Models) -> Iterator[tuple[str, Facts]]:
    package = importlib.import_module(f"polar.{version}")
    base = importlib.import_module("polar.base").AsyncServiceBase
    for name, method in _methods(package.PolarAsync("token"), base):
        yield name, _facts(name, method, models)


def _methods(service: object, base: type) -> Iterator[tuple[str, typing.Any]]:
    for name, value in vars(service).items():
        if isinstance(value, base):
            for method_name, method in inspect.getmembers(value, inspect.iscoroutinefunction):
                if not method_name.startswith("_"):
                    yield f"{name}.{method_name}", method
            for inner, method in _methods(value, base):
                yield f"{name}.{inner}", method


def _facts(name: str, method: typing.Any, models: Models) -> Facts:
    path: list[Field] = []
    query: list[Field] = []
    bodies: list[Model] = []
    for number, variant in enumerate(typing.get_overloads(method.__func__) or [method.__func__]):
        for parameter in inspect.signature(variant).parameters.values():
            if parameter.name == "self" or parameter.name.startswith("request_"):
                continue
            kind = parse_type(parameter.annotation)
            if parameter.kind is parameter.VAR_KEYWORD:
                unpacked = typing.cast("ast.Subscript", ast.parse(kind, mode="eval").body)
                body = ast.unparse(unpacked.slice)
                bodies.append(models.models.get(f"{body}Input", models.models[body]))
            elif number == 0:
                is_required = parameter.default is parameter.empty
                default = None if is_required else repr(parameter.default)
                found = Field(parameter.name, kind, is_required, default)
                is_path = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                (path if is_path else query).append(found)
    scopes = _SCOPES.search(method.__doc__ or "")
    return Facts(
        name,
        tuple(path),
        tuple(query),
        # A body of several kinds has the fields of all; a field is required if all require it.
        tuple(_merge_fields([body.fields for body in bodies]).values()),
        parse_type(inspect.signature(method).return_annotation),
        tuple(re.findall(r"[\w:]+", scopes[1])) if scopes else (),
    )


def parse_type(annotation: str) -> str:
    """Return an annotation of the SDK without its module names."""
    return _plain(ast.parse(annotation, mode="eval").body)


# --- merging ------------------------------------------------------------------------------------


def _merge_model(found: Sequence[Model]) -> Model:
    return attrs.evolve(found[-1], fields=_merge_fields([model.fields for model in found]))


def _merge_fields(found: Sequence[Mapping[str, Field]]) -> dict[str, Field]:
    merged: dict[str, Field] = {}
    for name in _in_order(name for fields in found for name in fields):
        same = [fields[name] for fields in found if name in fields]
        merged[name] = Field(
            name,
            union(field.type for field in same),
            is_required=len(same) == len(found) and all(field.is_required for field in same),
            default=same[-1].default,
            versions=tuple(v for v in VERSIONS if any(v in field.versions for field in same)),
        )
    return merged


def _merge_facts(found: Sequence[Facts]) -> Facts:
    def merged(kind: str) -> tuple[Field, ...]:
        fields = [{field.name: field for field in getattr(facts, kind)} for facts in found]
        return tuple(_merge_fields(fields).values())

    return Facts(
        found[-1].name,
        merged("path"),
        merged("query"),
        merged("body"),
        union(facts.returns for facts in found),
        found[-1].scopes,
    )


# --- types as expressions ------------------------------------------------------------------------


class _WithoutModules(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr)


def _plain(node: ast.expr) -> str:
    return union([ast.unparse(_WithoutModules().visit(node))])


def _union_members(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from _union_members(node.left)
        yield from _union_members(node.right)
    else:
        yield node


def _subscripted(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Subscript):
        return None
    return ast.unparse(node.value).rpartition(".")[2]


def _in_order(names: typing.Iterable[str]) -> list[str]:
    """Return each name once, in the order of first occurrence."""
    return list(dict.fromkeys(names))
