"""Every exception that sdk_trio raises on purpose.

::

    SdkError
    ├── OptionsValidationError          settings are wrong; lists every problem with its full key
    │   └── NotInThisVersionError       a documented part that this version does not contain
    ├── NotSupportedError               the settings have a known value that cannot be used
    ├── HandlerAbortedError             a handler raised a BaseException; passed to on_error
    ├── NotAwaitedError                 a handler created a coroutine that never ran
    ├── PartEndedError                  a part of the runtime ended unexpectedly
    ├── HandlerRegistrationError        a handler was registered incorrectly
    │   └── MissingHandlersError        FailOnMissingHandlers and known types without a handler
    ├── StorageError
    │   ├── StoreUnavailableError       the store cannot read or write now
    │   │   └── StoreLostError          it was moved, removed or damaged: restart the receiver
    │   ├── StoreLockedError            another process uses the data directory
    │   └── StoreVersionError           the store was written by another version
    ├── EffectError                     the effects of an event cannot be applied exactly once
    │   └── EventTakenOverError         another process has claimed the event: nothing was applied
    ├── TenantError                     base class of tenant errors
    │   ├── TenantsDisabledError        MultiTenant:Enabled is false
    │   ├── InvalidTenantError          a slug, name, address or id that cannot be accepted
    │   ├── TenantExistsError           an identifier or organization id that is taken
    │   ├── UnknownTenantError          there is no such tenant
    │   ├── IllegalTransitionError      the status does not allow the transition
    │   ├── SuspensionRefusedError      the site manager's email is not verified
    │   ├── TenantConflictError         another change of the same tenant came first
    │   ├── TenantNotActiveError        its client and database are unavailable
    │   └── TenantCredentialsError      a tenant's credential cannot be read
    ├── UpgradeError                    base class of errors that stop the upgrade
    │   ├── NotQuiescentError           the host has not signalled that it is idle
    │   ├── UpgradeInProgressError      another host is running the upgrade
    │   ├── UpgradeTimedOutError        MaxRunDuration has passed; the position is saved
    │   ├── DefaultTenantError          the default tenant cannot be resolved
    │   └── SourceDatabaseError         the single-tenant database cannot be copied
    ├── NotificationError               base class of errors of one attempt to send
    │   ├── NotSentError                nothing of the request was sent: it may be retried
    │   │   ├── AddressInvalidError     the URL is invalid: retrying does not help
    │   │   └── AddressRefusedError     only private addresses, but only public ones are allowed
    │   └── AnswerLostError             it may have arrived: no complete answer came
    ├── ReplicationError                base class of replication and restore errors
    │   ├── ReplicatorError             the replicator's binary is missing or does not work
    │   └── RestoreError                a database cannot be restored, or is not the expected one
    ├── VerificationError               a delivery is not authentic
    ├── DeliveryDecodingError           a verified body is not an event
    ├── NotRunningError                 a part was used before its start, or is not part of the run
    ├── CallError                       a call to the upstream API; its subtree (ApiError by status,
    │                                   OutcomeUnknownError, ...) is drawn in client/errors.py
    ├── RetryLater                      raised *by handlers* to request a later attempt
    ├── Discard                         raised *by handlers*: finished, never run again
    └── DeadLetter                      raised *by handlers*: a dead letter at once

Every class carries ``exit_code``, the exit status of a command that ends with it
(sysexits: 1 failure, 2 usage, 69 unavailable, 78 configuration).
"""

from collections.abc import Sequence
from typing import ClassVar

import attrs

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_CONFIGURATION = 78


class SdkError(Exception):
    """Base of every exception of this package."""

    exit_code: ClassVar[int] = EXIT_FAILURE


@attrs.frozen
class Problem:
    """One problem of the settings.

    ``key`` is the full key (``Sdk:Webhooks:ToleranceSeconds``), ``message`` the problem and its
    fix, ``origin`` the source of the value (a file, a variable, an argument), if known. A problem
    of a whole file, such as a missing one, has the key ``Sdk``.
    """

    key: str
    message: str
    origin: str | None = None

    @property
    def is_of_source(self) -> bool:
        """Return whether the whole source is at fault, not the value of one key."""
        return self.key == "Sdk" and self.origin is not None

    def __str__(self) -> str:
        if self.is_of_source:
            return f"{self.origin}: {self.message}"
        where = f" (from {self.origin})" if self.origin else ""
        return f"{self.key}: {self.message}{where}"


class OptionsValidationError(SdkError):
    """The settings are invalid; ``problems`` lists all faults.

    ``warnings`` lists suspicious settings, such as a misspelt key; they often cause a problem.
    """

    exit_code = EXIT_CONFIGURATION

    def __init__(self, problems: Sequence[Problem], warnings: Sequence[Problem] = ()) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.warnings: tuple[Problem, ...] = tuple(warnings)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the settings:\n{lines}")


class NotInThisVersionError(OptionsValidationError):
    """The settings use documented features that this version does not contain."""


class NotSupportedError(SdkError):
    """A known value in the settings cannot be used; the message names usable ones."""

    exit_code = EXIT_CONFIGURATION


class HandlerAbortedError(SdkError):
    """A handler raised ``SystemExit`` or similar, or let its own cancellation propagate.

    ``on_error`` gets it instead of the original exception, which is its ``__cause__``.
    """


class NotAwaitedError(SdkError, TypeError):
    """A handler called an ``async`` function without ``await``, or returned an unused awaitable.

    ``place`` is the line that did it, or the line that defines the handler; None if unknown.
    """

    def __init__(self, message: str, place: str | None = None) -> None:
        self.place = place
        super().__init__(message)


class PartEndedError(SdkError):
    """A part of the runtime ended unexpectedly: an error of this package."""


class HandlerRegistrationError(SdkError):
    """A handler was registered incorrectly; the message names it and the fix."""

    exit_code = EXIT_CONFIGURATION


class MissingHandlersError(HandlerRegistrationError):
    """``FailOnMissingHandlers`` is true and known event types have no handler."""

    def __init__(self, missing: Sequence[str], message: str) -> None:
        self.missing: tuple[str, ...] = tuple(missing)
        super().__init__(message)


class StorageError(SdkError):
    """Base class of store errors."""


class StoreUnavailableError(StorageError):
    """The store cannot read or write now: disk full, I/O error, closed."""

    exit_code = EXIT_UNAVAILABLE


class StoreLostError(StoreUnavailableError):
    """The store was moved, or its files were removed, replaced, truncated or damaged, while in use.

    Not retried: a restart opens the store that exists then, or says why it cannot.
    """


class StoreLockedError(StorageError):
    """Another process holds the lock of the data directory."""

    exit_code = EXIT_UNAVAILABLE


class StoreVersionError(StorageError):
    """The store has a newer schema, was moved, or is not a store of this package."""

    # A restart does not fix it.
    exit_code = EXIT_CONFIGURATION


class EffectError(SdkError):
    """The effects of an event cannot be applied exactly once as requested."""


class EventTakenOverError(EffectError):
    """Another process has claimed the event in the meantime; nothing was applied here."""


class TenantError(SdkError):
    """Base class of tenant errors."""


class TenantsDisabledError(TenantError):
    """``Sdk:MultiTenant:Enabled`` is false, so there are no tenants."""

    exit_code = EXIT_CONFIGURATION


class InvalidTenantError(TenantError):
    """A value for a tenant is invalid: the message names it and the requirement."""

    exit_code = EXIT_USAGE


class TenantExistsError(TenantError):
    """Another tenant has this identifier, organization id or id."""


class UnknownTenantError(TenantError):
    """There is no such tenant."""


class IllegalTransitionError(TenantError):
    """The tenant's status does not allow the transition; nothing changed."""

    def __init__(self, message: str, *, status: str, transition: str) -> None:
        self.status = status
        self.transition = transition
        super().__init__(message)


class SuspensionRefusedError(TenantError):
    """The site manager's email is not verified, and no setting relaxes that rule."""


class TenantConflictError(TenantError):
    """Another change of the same tenant came first; nothing changed."""


class TenantNotActiveError(TenantError):
    """The tenant is not active, so its client and database are unavailable."""

    def __init__(self, identifier: str, status: str) -> None:
        self.identifier = identifier
        self.status = status
        super().__init__(
            f"the tenant {identifier!r} is {status}: its client and database are unavailable; run "
            f"'tenant reactivate {identifier}' to activate it"
        )


class TenantCredentialsError(TenantError):
    """A tenant's credential cannot be read: the message names its source, never its value."""

    exit_code = EXIT_CONFIGURATION


class UpgradeError(SdkError):
    """Base class of errors that stop the upgrade from a single tenant."""


class NotQuiescentError(UpgradeError):
    """``RequireGracefulQuiescence`` is true and the host has not signalled that it is idle."""


class UpgradeInProgressError(UpgradeError):
    """Another host is running the upgrade."""

    exit_code = EXIT_UNAVAILABLE


class UpgradeTimedOutError(UpgradeError):
    """``MaxRunDuration`` has passed; the next run continues at the saved position."""


class DefaultTenantError(UpgradeError):
    """The default tenant cannot be resolved: no resolver, or an unusable tenant."""

    exit_code = EXIT_CONFIGURATION


class SourceDatabaseError(UpgradeError):
    """The single-tenant database cannot be copied: missing, unreadable, damaged or in use."""


class NotificationError(SdkError):
    """Base class of errors that stop one attempt to send a message."""

    exit_code = EXIT_UNAVAILABLE


class NotSentError(NotificationError):
    """Nothing of the request left this machine: it may be retried."""


class AddressInvalidError(NotSentError):
    """The URL cannot be read, or its host is not a name; retrying does not help."""


class AddressRefusedError(NotSentError):
    """The host is this machine's or private, but only public hosts are allowed."""


class AnswerLostError(NotificationError):
    """The request may have arrived, but no complete answer came."""


class ReplicationError(SdkError):
    """Base class of errors of replication and restore."""


class ReplicatorError(ReplicationError):
    """The replicator's binary is missing or does not work."""

    exit_code = EXIT_UNAVAILABLE


class RestoreError(ReplicationError):
    """A database cannot be restored, or the restored one is not the expected one."""


class VerificationError(SdkError):
    """A delivery is not authentic. ``cause`` is a word for logs only, not for the sender."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = cause
        self.detail = detail
        super().__init__(f"{cause}: {detail}")


class DeliveryDecodingError(SdkError):
    """A verified body is not a JSON object with a string ``type``."""


class NotRunningError(SdkError):
    """A part was used before its start or after its end, or is not part of this run."""


class RetryLater(SdkError):
    """Raised by a handler: run it again, no earlier than in ``seconds``.

    An inline delivery is answered 503 with ``Retry-After``; an enqueued one waits in the store. The
    attempt counts as failed, but is logged as ``webhook.postponed``, not as a failure.
    """

    #: The delay is shorter than this, in seconds.
    LIMIT_SECONDS: ClassVar[int] = 86_400 * 30

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds < self.LIMIT_SECONDS:
            raise ValueError("RetryLater needs 0 to 2592000 seconds")
        self.seconds: float = float(seconds)
        self.reason = reason
        super().__init__(reason or f"requested a retry in {seconds:g} s")


class Discard(SdkError):
    """Raised by a handler: the event needs no handling. The reason is stored with it.

    It is done, is never run again, and an inline delivery is answered 200.
    """

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "no reason was given")


class DeadLetter(SdkError):
    """Raised by a handler: no further run can succeed, so the event is a dead letter at once.

    An inline delivery is answered 200. ``events replay`` runs it again.
    """

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "no reason was given")


def only_member(error: BaseException) -> BaseException:
    """Return the only leaf of nested groups of one; any other exception unchanged."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
