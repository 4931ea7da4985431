"""The runtime: all parts as tasks of one nursery, with a graceful stop."""

from ..server.serve import BindError
from .reload import Reloaded
from .runtime import Runtime
from .state import Started

__all__ = ["BindError", "Reloaded", "Runtime", "Started"]
