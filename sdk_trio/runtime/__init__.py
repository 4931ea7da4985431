"""The runtime: every part as a sibling task of one nursery, and its orderly end."""

from ..server.serve import BindError
from .reload import Reloaded
from .runtime import Runtime, Started

__all__ = ["BindError", "Reloaded", "Runtime", "Started"]
