"""The counters of notifications as metrics (docs/reference/metrics.md). Pure."""

from collections.abc import Iterable, Mapping

from ..base.metrics import Sample
from ..notifications.channel_runner import RESULTS


def sample_notifications(
    counts: Mapping[tuple[str, str], int], channels: Iterable[str]
) -> tuple[Sample, ...]:
    """Return ``sdk_notifications_total{channel,result}`` of attempts by channel and result.

    Results that have not happened yet are reported as 0. A counter that first appears with the
    value 1 shows no increase, so the first failed message would raise no alert. Messages of a
    channel that is switched off by now, which a restart finds, are counted, too.
    """
    known = {(channel, result): 0 for channel in channels for result in RESULTS.values()}
    return tuple(
        Sample("sdk_notifications_total", (("channel", channel), ("result", result)), count)
        for (channel, result), count in sorted((known | dict(counts)).items())
    )
