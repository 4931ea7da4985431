"""Waits until a daemon begins inline runs without waiting for their claims."""

import threading

from .supervised import Daemon
from .waiting import PATIENCE_SECONDS, wait_until

#: Seconds that a handler takes, so that a test can observe it.
SEEN_SECONDS = "0.3"


def claims_of(daemon: Daemon) -> bytes:
    """Return the current content of the claims file."""
    return (daemon.directory / "data" / "inbox.claims").read_bytes()


def wait_until_unawaited(daemon: Daemon) -> None:
    """Deliver until a run begins before its claim is stored; the store's keys are cached by then.

    The daemon was started with :data:`SEEN_SECONDS` as ``ASIDE``.
    """
    for number in range(int(PATIENCE_SECONDS / float(SEEN_SECONDS))):
        webhook_id = f"aside-{daemon.starts}-{number}"
        sender = threading.Thread(
            target=daemon.deliver, args=(webhook_id,), kwargs={"inline": True}
        )
        sender.start()
        wait_until(lambda name=webhook_id: daemon.runs(name), daemon.log)
        seen = webhook_id.encode() in claims_of(daemon)
        sender.join()
        if seen:
            return
    raise AssertionError(f"every claim is waited for: {daemon.log()}")
