"""The runtime: every part as a sibling task of one nursery, and its orderly end."""

from .reloader import Reloaded
from .runtime import Runtime, Started
from .server import BindError

__all__ = ["BindError", "Reloaded", "Runtime", "Started"]
