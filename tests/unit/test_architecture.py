"""What every module offers is there, and the tree of exceptions is drawn as it is."""

import importlib
import inspect
import pkgutil
from importlib import metadata
from pathlib import Path

import pytest

import sdk_trio
from sdk_trio import errors

PACKAGE = Path(sdk_trio.__file__).parent


def _modules():
    for module in pkgutil.walk_packages([str(PACKAGE)], "sdk_trio."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("name", ["sdk_trio", *_modules()])
def test_every_name_that_a_module_offers_is_there(name):
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    assert len(set(offered)) == len(offered)
    for public in offered:
        assert getattr(module, public) is not None


def test_the_public_names_can_be_listed_and_others_are_refused():
    assert set(sdk_trio.__all__) <= set(dir(sdk_trio))
    with pytest.raises(AttributeError, match="no_such_name"):
        sdk_trio.no_such_name  # noqa: B018 - the access itself is tested


def test_the_package_was_built_with_the_version_that_it_tells():
    assert sdk_trio.__version__ == metadata.version("sdk-trio")


def _errors():
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    ]


@pytest.mark.parametrize("kind", _errors(), ids=lambda kind: kind.__name__)
def test_the_tree_of_exceptions_shows_each_below_its_parent(kind):
    lines = inspect.getdoc(errors).splitlines()
    depths = {}
    for line in lines:
        bare = line.lstrip(" │├└─")
        if bare.partition(" ")[0].isidentifier():
            depths.setdefault(bare.partition(" ")[0], (len(line) - len(bare), lines.index(line)))
    assert kind.__name__ in depths
    if kind is not errors.SdkError:
        depth, place = depths[kind.__name__]
        above = [
            (line_place, name)
            for name, (its_depth, line_place) in depths.items()
            if its_depth < depth and line_place < place and hasattr(errors, name)
        ]
        assert max(above)[1] == kind.__mro__[1].__name__
    assert kind.exit_code in (1, 2, 69, 78)
