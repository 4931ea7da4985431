"""Bursts of changes become one: the window opens with the first of them (spec 2.7). Pure.

A window that began anew with each change would never end while changes keep coming.
"""

import math


class Debounce:
    """Says when what was noted is due.

    Args:
        window: seconds from the first change of a burst until it is due; 0: at once.
    """

    def __init__(self, window: float) -> None:
        self.window = window
        self.due_at = math.inf

    def note(self, now: float) -> None:
        """Note a change: it is due with the first one since the last :meth:`take`.

        What was postponed is not made to wait any longer than a window.
        """
        self.due_at = min(self.due_at, now + self.window)

    def postpone(self, now: float, seconds: float) -> None:
        """Have what failed be due again ``seconds`` after ``now``, or with the next change."""
        self.due_at = now + seconds

    def take(self, now: float) -> bool:
        """Return whether changes are due; they are then taken, and the next one opens a window."""
        if now < self.due_at:
            return False
        self.due_at = math.inf
        return True
