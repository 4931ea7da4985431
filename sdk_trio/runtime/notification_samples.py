"""What notifications have counted under their name as a metric (contracts 10). Pure."""

from collections.abc import Mapping

from ..monitoring import Sample


def sample_notifications(counts: Mapping[tuple[str, str], int]) -> tuple[Sample, ...]:
    """Return ``sdk_notifications_total{channel,result}`` of attempts by channel and result."""
    return tuple(
        Sample("sdk_notifications_total", (("channel", channel), ("result", result)), count)
        for (channel, result), count in sorted(counts.items())
    )
