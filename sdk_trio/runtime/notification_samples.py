"""What notifications have counted under their name as a metric (contracts 10). Pure."""

from collections.abc import Iterable, Mapping

from ..base.metrics import Sample
from ..notifications.channel_runner import RESULTS


def sample_notifications(
    counts: Mapping[tuple[str, str], int], channels: Iterable[str]
) -> tuple[Sample, ...]:
    """Return ``sdk_notifications_total{channel,result}`` of attempts by channel and result.

    What has not happened yet is there as 0: a counter that begins with 1 shows no increase, so
    the first message that fails would ring no alarm. A restart that finds messages of a channel
    which is switched off counts them too.
    """
    known = {(channel, result): 0 for channel in channels for result in RESULTS.values()}
    return tuple(
        Sample("sdk_notifications_total", (("channel", channel), ("result", result)), count)
        for (channel, result), count in sorted((known | dict(counts)).items())
    )
