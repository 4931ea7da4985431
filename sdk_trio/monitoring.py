"""The public home of :class:`Check`, for applications that add checks to ``/readyz``."""

from .base.telemetry import Check

__all__ = ["Check"]
