"""The cost of importing events: no compiled decoder, no samples."""

import subprocess
import sys


def test_importing_events_builds_no_decoder_and_loads_no_samples() -> None:
    program = (
        "import sys, sdk_trio.events, sdk_trio.events.values as values\n"
        "assert values.decoder_for.cache_info().currsize == 0\n"
        "assert 'sdk_trio.events.samples' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
