"""The settings: their sources, their types, and the checks of their values.

``load_settings`` reads all sources; ``Settings.from_mapping`` reads only a mapping;
``read_settings`` returns problems, warnings and origins as data.
"""

from .check import unmet_needs
from .fields import KeyDerivation, Mode, StorageBackend
from .load import Loaded, load_settings, read_settings
from .options import BUNDLED_API_VERSION, Settings, bundled_api_version
from .secret import ParsedSecret, Secret, parse_secret
from .show import describe, json_schema

__all__ = [
    "BUNDLED_API_VERSION",
    "bundled_api_version",
    "Settings",
    "Secret",
    "Mode",
    "KeyDerivation",
    "StorageBackend",
    # reading
    "load_settings",
    "read_settings",
    "Loaded",
    # inspecting
    "describe",
    "json_schema",
    "unmet_needs",
    "parse_secret",
    "ParsedSecret",
]
