"""The version, for everything that tells it; the package is built with this one too."""

__version__ = "0.1.0"
