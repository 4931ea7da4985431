"""Samples as text of Prometheus, format 0.0.4. Pure (contracts 10, ADR 18)."""

from collections.abc import Iterable
from typing import Final

from ..base.metrics import Sample
from .metrics import METRICS, metric_of

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

#: What Python and the format call differently.
_NAMED: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}

_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class UnknownMetricError(ValueError):
    """A sample has a name that is not in the table of metrics."""


def expose(samples: Iterable[Sample]) -> bytes:
    """Return the samples, grouped by metric in the order of the table, with help and type.

    Raises:
        UnknownMetricError: a name is not in :data:`~.metrics.METRICS`.
    """
    lines: dict[str, list[str]] = {}
    for sample in samples:
        metric = metric_of(sample.name)
        if metric is None:
            raise UnknownMetricError(f"{sample.name} is not in the table of metrics")
        lines.setdefault(metric.name, []).append(_line(sample))
    text: list[str] = []
    for metric in METRICS:
        if metric.name in lines:
            text.append(f"# HELP {metric.name} {metric.help.translate(_HELP_ESCAPES)}")
            text.append(f"# TYPE {metric.name} {metric.kind}")
            text += lines[metric.name]
    return ("\n".join(text) + "\n").encode("utf-8", "replace")


def _number(value: float) -> str:
    if value.is_integer():
        return str(int(value))
    return _NAMED.get(str(value), repr(value))


def _line(sample: Sample) -> str:
    number = _number(float(sample.value))
    if not sample.labels:
        return f"{sample.name} {number}"
    labels = ",".join(f'{name}="{text.translate(_LABEL_ESCAPES)}"' for name, text in sample.labels)
    return f"{sample.name}{{{labels}}} {number}"
