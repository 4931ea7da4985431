"""Takes the replicator's output over into our own logs, line by line."""

from collections import deque
from collections.abc import Mapping, Sequence

import trio

from ..base.logs import get_logger
from ..config.replication_options import ReplicationOptions
from .child_log import ChildLine, LineLimiter, read_line

_log = get_logger("replication")

#: A longer line is cut.
MAX_LINE_BYTES = 16_384


def secret_values(options: ReplicationOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that must not show up in a log: those of the credentials' variables.

    Args:
        options: the replication's.
        environ: the environment that holds them.
    """
    names = (
        options.object_store.access_key_id_env_var,
        options.object_store.secret_access_key_env_var,
        options.blob_store.access_key_env_var,
    )
    # The longest first, because one may be a part of another.
    return tuple(sorted({environ[n] for n in names if environ.get(n)}, key=len, reverse=True))


class ChildOutputReader:
    """Logs the output of one child; what it said last goes to ``last_lines``.

    Args:
        secrets: values that are masked.
        limiter: of lines that repeat themselves.
        last_lines: gets every warning, error and line that is no log line.
    """

    def __init__(
        self, secrets: Sequence[str], limiter: LineLimiter, last_lines: "deque[str]"
    ) -> None:
        self._secrets = secrets
        self._limiter = limiter
        self._last_lines = last_lines

    async def run(self, output: trio.abc.ReceiveStream) -> None:
        """Read until the end of ``output`` and close it. Cancelled, it closes it at once."""
        pending = bytearray()
        async with output:
            async for piece in output:
                pending += piece
                *lines, rest = pending.split(b"\n")
                for line in lines:
                    self._take(bytes(line[:MAX_LINE_BYTES]))
                pending = bytearray(rest[:MAX_LINE_BYTES])
        self._take(bytes(pending))

    def _take(self, raw: bytes) -> None:
        if not raw.strip():
            return
        line = read_line(raw, self._secrets)
        if line.level != "debug":
            error = line.fields.get("error")
            self._last_lines.append(f"{line.message}: {error}" if error else line.message)
        admitted, held = self._limiter.admit(line, trio.current_time())
        for message, count in held.items():
            _log.warning("replication.lines_held_back", message=message, count=count)
        if admitted:
            _write(line)


def _write(line: ChildLine) -> None:
    fields: dict[str, object] = {"message": line.message}
    if line.fields:
        fields["detail"] = line.fields
    {"debug": _log.debug, "warning": _log.warning, "error": _log.error}[line.level](
        "replication.replicator_said", **fields
    )
