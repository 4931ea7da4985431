"""Inline runs that do not wait for their claims: when a daemon has come so far."""

import threading

from .supervised import Daemon
from .waiting import PATIENCE_SECONDS, wait_until

#: Seconds that a handler needs to be seen at work.
SEEN_SECONDS = "0.3"


def claims_of(daemon: Daemon) -> bytes:
    """What the claims file holds at present."""
    return (daemon.directory / "data" / "inbox.claims").read_bytes()


def wait_until_unawaited(daemon: Daemon) -> None:
    """Deliver until a run begins without its claim: the keys of the store are learned by then.

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
