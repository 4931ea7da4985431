"""What the frames of a client cost: followed by their heads alone, before h2 sees them. Pure.

h2 keeps the rules of HTTP/2, but not every bound: it takes in a frame of 16 MB before it says that
16 KB are allowed, and answers any number of frames that carry nothing. Known floods (CVE-2019-9512
to 9518, CVE-2023-44487, CVE-2025-8671) are such frames. Here each costs a part of an allowance that
grows with time and with requests that are answered.
"""

from typing import Final

from h2.errors import ErrorCodes

PREFACE_BYTES: Final = 24
_HEAD_BYTES: Final = 9

#: The smallest that a server may allow (RFC 9113, 4.2); there is nothing to gain by more.
MAX_FRAME_BYTES: Final = 16_384

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x9
_END_HEADERS: Final = 0x4

#: What a client may spend at once, and what it is given back each second. The costliest thing that
#: it can buy is a request that it resets: 90 at once, then 9 a second.
CAPACITY: Final = 1000.0
PER_SECOND: Final = 100.0

#: For a stream that is reset, by the client or by what it made us do.
RESET_COSTS: Final = 10.0

#: For a request that is refused: HTTP/1.1 ends the connection, which has its price for a client.
REFUSAL_COSTS: Final = 10.0

#: A frame costs 1, unless it is one of these.
_COSTS: Final = {_RST_STREAM: RESET_COSTS, _SETTINGS: 5.0}

#: A part of a body that is as long as this is given back, if somebody waits for it.
CARRYING_BYTES: Final = 256

#: For a request that was answered: its own frames, and those with which its answer is taken in.
REQUEST_EARNS: Final = 10.0
#: For each whole frame of an answer: the client gives two windows back.
ANSWER_FRAME_EARNS: Final = 3.0


class FrameError(Exception):
    """The connection has to end; ``code`` is the one of HTTP/2 that says why."""

    def __init__(self, code: ErrorCodes, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class FrameMeter:
    """Follows one client's frames.

    ``begun`` is when what has arrived in part began, by the clock that ``feed`` is given: the
    preface, a frame, or a head of several frames. None: nothing is incomplete. ``in_body``: it is
    a part of a body.
    """

    __slots__ = ("_allowance", "_filled", "_head", "_in_block", "_skip", "begun", "in_body")

    def __init__(self, now: float) -> None:
        self._head = b""
        self._skip = PREFACE_BYTES
        self._in_block = False
        self._allowance = CAPACITY
        self._filled = now
        self.begun: float | None = None
        self.in_body = False

    def feed(self, data: bytes, now: float) -> None:
        """Count the frames in the next bytes of the connection; ``now`` is in seconds.

        Raises:
            FrameError: a frame is too long, or there have been too many.
        """
        self._allowance = min(CAPACITY, self._allowance + (now - self._filled) * PER_SECOND)
        self._filled = now
        at, end = 0, len(data)
        while at < end:
            if self._skip:
                step = min(self._skip, end - at)
                self._skip -= step
                at += step
            else:
                part = data[at : at + _HEAD_BYTES - len(self._head)]
                at += len(part)
                self._head += part
                if len(self._head) < _HEAD_BYTES:
                    break
                self._begin_frame(self._head)
                self._head = b""
            if not self._skip and not self._in_block:
                self.begun = None
        if self.begun is None and (self._skip or self._head or self._in_block):
            self.begun = now

    def _begin_frame(self, head: bytes) -> None:
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if length > MAX_FRAME_BYTES:
            raise FrameError(ErrorCodes.FRAME_SIZE_ERROR, "a frame is too long")
        if kind in (_HEADERS, _CONTINUATION):
            self._in_block = not flags & _END_HEADERS
        self.in_body = kind == _DATA
        self._skip = length
        self.spend(_COSTS.get(kind, 1.0))

    def spend(self, cost: float) -> None:
        """Count what the client has caused otherwise.

        Raises:
            FrameError: it is too much.
        """
        self._allowance -= cost
        if self._allowance < 0:
            raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def earn(self, gain: float) -> None:
        """Give the client back what its requests may cost."""
        self._allowance = min(CAPACITY, self._allowance + gain)
