"""One attempt on one channel, whatever the channel: what can go wrong becomes an outcome."""

from collections.abc import Callable, Mapping

import attrs
import trio

from ..config.notification_rules import ALLOW_PRIVATE_ADDRESSES
from ..errors import AddressInvalidError, AddressRefusedError, AnswerLostError, NotSentError
from .fault_logger import log_fault
from .outcome import Again, Ambiguous, Outcome, Refused, Skipped
from .ports import Answer, Poster

#: Reads an environment variable; None when it is not set.
ReadVariable = Callable[[str], str | None]


@attrs.frozen(kw_only=True)
class Request:
    """A request that is ready to be sent, and who judges its answer. ``repr`` shows no secret."""

    url: str = attrs.field(repr=False)
    headers: Mapping[str, str] = attrs.field(repr=False)
    body: bytes = attrs.field(repr=False)
    timeout_seconds: float
    judge: Callable[[Answer], Outcome] = attrs.field(repr=False)
    public_only: bool = False
    wants_body: bool = True


async def attempt(poster: Poster, prepare: Callable[[], Request | Skipped]) -> Outcome:
    """Prepare a request, send it once, and return what became of it.

    Raises nothing but ``Cancelled``; whether the request arrived is then unknown.
    """
    try:
        request = prepare()
    except Exception as error:  # a fault of ours must not end the other channels
        log_fault("notification.not_prepared", error)
        await trio.lowlevel.checkpoint()
        return Refused(f"unexpected {type(error).__name__} while the message was made")
    if isinstance(request, Skipped):
        await trio.lowlevel.checkpoint()
        return request
    outcome: Outcome
    try:
        answer = await poster.post(
            request.url,
            headers=request.headers,
            body=request.body,
            timeout_seconds=request.timeout_seconds,
            public_only=request.public_only,
            wants_body=request.wants_body,
        )
        outcome = request.judge(answer)
    except AddressRefusedError as error:
        outcome = Refused(f"{error}: set {ALLOW_PRIVATE_ADDRESSES} to true if this is meant")
    except AddressInvalidError as error:
        outcome = Refused(f"{error}: no message can be sent to this address")
    except NotSentError as error:
        outcome = Again(str(error))
    except AnswerLostError as error:
        outcome = Ambiguous(str(error))
    except Exception as error:  # it may have been sent
        log_fault("notification.answer_not_understood", error)
        outcome = Ambiguous(f"unexpected {type(error).__name__} while it was sent")
    return outcome  # noqa: ASYNC910 - a post that raises has waited too


def credential(read_variable: ReadVariable, name: str, *, for_header: bool = True) -> str | Skipped:
    """Return the value of a variable, or why it cannot be used; the value is never quoted.

    ``for_header``: it becomes part of a request's head, which takes visible ASCII only.
    """
    value = (read_variable(name) or "").strip()
    if not value:
        return Skipped(f"the variable {name} is not set")
    if for_header and not all("!" <= character <= "~" for character in value):
        return Skipped(
            f"the value of the variable {name} holds white space, a line break or characters "
            "outside ASCII: copy it again"
        )
    return value
