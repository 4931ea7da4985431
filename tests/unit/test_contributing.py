"""CONTRIBUTING.md names packages, files and functions that exist."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
PICTURE, WALK, OTHER_WALKS = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0:3]


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"`((?:sdk_trio|tests|docs|generate)/[\w/.-]*)`", PAGE))
    links = set(re.findall(r"\]\(([\w/.-]+)", PAGE))
    places = {path for path in named | links if not re.search("NAME|GROUP", path)}
    assert len(places) > 20
    assert [path for path in sorted(places) if not (ROOT / path).exists()] == []


def test_the_picture_has_the_packages_in_the_order_of_imports():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    layers = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    first = re.findall(r"[a-z]+", " ".join(layers))
    places = [re.search(rf"\b{package}\b(?![./])", PICTURE) for package in first]
    assert [package for package, place in zip(first, places, strict=True) if place is None] == []
    starts = [PICTURE.count("\n", 0, place.start()) for place in places]
    assert starts == sorted(starts)


def test_the_path_of_a_delivery_names_functions_that_exist():
    steps = re.findall(r"^\d +(\S+\.py) +(.*)$", WALK, re.MULTILINE)
    assert len(steps) == 9
    for path, text in steps:
        source = (ROOT / "sdk_trio" / path).read_text("utf-8")
        first = text.split()[0].rstrip(":,")
        for name in first.split("."):
            assert re.search(rf"\b(def|class) {name}\b", source), (path, name)
    assert len({path for path, _ in steps}) <= 7


def test_the_other_paths_name_files_that_exist():
    steps = re.findall(r"^ +([a-z]+)/(\w+\.py) +(\w+)", OTHER_WALKS, re.MULTILINE)
    assert len(steps) == 12
    for package, file, first in steps:
        source = (ROOT / "sdk_trio" / package / file).read_text("utf-8")
        assert re.search(rf"\b(def|class) {first}\b", source), (file, first)
    names = set(re.findall(r"[\w/]+\.py", OTHER_WALKS))
    there = {str(path) for path in (ROOT / "sdk_trio").rglob("*.py")}
    gone = [name for name in names if not any(path.endswith(f"/{name}") for path in there)]
    assert not gone
