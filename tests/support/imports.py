"""The imports between the modules of the package, read from their sources."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import of a module of the package by another; ``inside`` names a function around it."""

    importer: str
    imported: str
    inside: str


def modules(package: Path) -> dict[str, Path]:
    """Return the file of each module, by the module's dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(files: dict[str, Path]) -> Iterator[Import]:
    """Yield every import, those for type checkers and those inside functions included."""
    for module, path in files.items():
        yield from imports_of(ast.parse(path.read_text(encoding="utf-8")), module, files)


def imports_of(tree: ast.Module, module: str, files: dict[str, Path]) -> Iterator[Import]:
    """Yield the imports of one module."""
    is_package = files[module].name == "__init__.py"
    yield from _of(tree, module, module if is_package else module.rpartition(".")[0], files, "")


def _of(
    node: ast.AST, module: str, place: str, files: dict[str, Path], inside: str
) -> Iterator[Import]:
    for child in _statements(node):
        if isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = place.split(".")
                above = above[: len(above) - child.level + 1]
                base = ".".join([*above, base] if base else above)
            for name in child.names:
                whole = f"{base}.{name.name}"
                if (target := whole if whole in files else base) in files:
                    yield Import(module, target, inside)
        elif isinstance(child, ast.Import):
            yield from (Import(module, n.name, inside) for n in child.names if n.name in files)
        else:
            within = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _of(child, module, place, files, child.name if within else inside)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what can hold an import: expressions are left out, because most nodes are in them."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        children = getattr(node, field, ())
        if isinstance(children, list):
            yield from children
