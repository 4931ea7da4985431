"""Every exception that sdk_trio raises on purpose.

::

    SdkError
    ├── OptionsValidationError          settings are wrong; lists every problem with its full key
    │   └── NotInThisVersionError       a documented part that this version does not contain
    ├── NotSupportedError               the settings have a known value that cannot be used
    ├── HandlerAbortedError             a handler raised what is no Exception; given to on_error
    ├── NotAwaitedError                 a handler made a coroutine or the like that never ran
    ├── PartEndedError                  a part of the runtime ended without having been asked to
    ├── HandlerRegistrationError        a handler was registered wrongly
    │   └── MissingHandlersError        FailOnMissingHandlers and known types without a handler
    ├── StorageError
    │   ├── StoreUnavailableError       the store cannot read or write at present
    │   │   └── StoreLostError          its files were taken away or damaged: only a restart helps
    │   ├── StoreLockedError            another process uses the data directory
    │   └── StoreVersionError           the store was written by another version
    ├── EffectError                     the effects of an event cannot be applied once as asked
    │   └── EventTakenOverError         another process has the event by now: nothing was applied
    ├── TenantError                     base of what concerns tenants
    │   ├── TenantsDisabledError        MultiTenant:Enabled is false
    │   ├── InvalidTenantError          a slug, name, address or id that cannot be accepted
    │   ├── TenantExistsError           an identifier or organization id that is taken
    │   ├── UnknownTenantError          there is no such tenant
    │   ├── IllegalTransitionError      the status does not allow the transition
    │   ├── SuspensionRefusedError      the site manager's email is not verified
    │   ├── TenantConflictError         another change of the same tenant came first
    │   ├── TenantNotActiveError        its client and database are not given out
    │   └── TenantCredentialsError      a tenant's credential cannot be read
    ├── UpgradeError                    base of what stops the upgrade from a single tenant
    │   ├── NotQuiescentError           the host has not signalled that it is quiet
    │   ├── UpgradeInProgressError      another host runs the upgrade at this moment
    │   ├── UpgradeTimedOutError        MaxRunDuration is over; the position is kept
    │   ├── DefaultTenantError          the default tenant cannot be resolved
    │   └── SourceDatabaseError         the single-tenant database cannot be copied
    ├── NotificationError               base of what stops one attempt to send a message
    │   ├── NotSentError                nothing of the request left: it may be tried again
    │   │   ├── AddressInvalidError     the URL can be sent to by nobody, now or later
    │   │   └── AddressRefusedError     only private addresses, where public ones are asked for
    │   └── AnswerLostError             it may have arrived: no whole answer came
    ├── ReplicationError                base of what concerns replication and restore
    │   ├── ReplicatorError             the replicator's binary is missing, or does not do its work
    │   └── RestoreError                a database cannot be restored, or is not what it should be
    ├── VerificationError               a delivery is not authentic
    ├── DeliveryDecodingError           a verified body is no event
    ├── NotRunningError                 a part was used before its start, or is not part of the run
    ├── CallError                       a call to the upstream API; its subtree (ApiError by status,
    │                                   OutcomeUnknownError, ...) is drawn in client/errors.py
    └── RetryLater                      raised *by handlers* to ask for a later attempt

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
    """One thing that is wrong with the settings.

    ``key`` is the full key (``Sdk:Webhooks:ToleranceSeconds``), ``message`` what is wrong and
    what to do, ``origin`` where the value came from (a file, a variable, an argument), if known.
    A problem of a file as a whole, such as a missing one, has the key ``Sdk``.
    """

    key: str
    message: str
    origin: str | None = None

    @property
    def is_of_source(self) -> bool:
        """Whether the origin as a whole is wrong and not the value of one key."""
        return self.key == "Sdk" and self.origin is not None

    def __str__(self) -> str:
        if self.is_of_source:
            return f"{self.origin}: {self.message}"
        where = f" (from {self.origin})" if self.origin else ""
        return f"{self.key}: {self.message}{where}"


class OptionsValidationError(SdkError):
    """The settings are invalid; ``problems`` holds every one of them.

    ``warnings`` are what is odd about them beside that: often the cause, such as a misspelt key.
    """

    exit_code = EXIT_CONFIGURATION

    def __init__(self, problems: Sequence[Problem], warnings: Sequence[Problem] = ()) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.warnings: tuple[Problem, ...] = tuple(warnings)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the settings:\n{lines}")


class NotInThisVersionError(OptionsValidationError):
    """The settings ask for documented parts that this version does not contain."""


class NotSupportedError(SdkError):
    """The settings have a known value that cannot be used; the message says what can."""

    exit_code = EXIT_CONFIGURATION


class HandlerAbortedError(SdkError):
    """A handler raised ``SystemExit`` or its like, or let a cancellation of its own escape.

    ``on_error`` gets it in the place of what was raised, which is its ``__cause__``.
    """


class NotAwaitedError(SdkError, TypeError):
    """A handler called an ``async`` function without ``await``, or returned what never runs.

    ``place`` is the line that did it, or the line that defines the handler; None if neither is
    known.
    """

    def __init__(self, message: str, place: str | None = None) -> None:
        self.place = place
        super().__init__(message)


class PartEndedError(SdkError):
    """A part of the runtime ended without having been asked to: an error of this package."""


class HandlerRegistrationError(SdkError):
    """A handler was registered wrongly: the message says which and how to register it."""

    exit_code = EXIT_CONFIGURATION


class MissingHandlersError(HandlerRegistrationError):
    """``FailOnMissingHandlers`` is true and known event types have no handler."""

    def __init__(self, missing: Sequence[str], message: str) -> None:
        self.missing: tuple[str, ...] = tuple(missing)
        super().__init__(message)


class StorageError(SdkError):
    """Base of what can go wrong with the store."""


class StoreUnavailableError(StorageError):
    """The store cannot read or write at present: disk full, I/O error, closed."""

    exit_code = EXIT_UNAVAILABLE


class StoreLostError(StoreUnavailableError):
    """The store's files were removed, replaced, cut or damaged while they were in use.

    It is not tried again: a restart opens what is there by then.
    """


class StoreLockedError(StorageError):
    """Another process holds the lock of the data directory."""

    exit_code = EXIT_UNAVAILABLE


class StoreVersionError(StorageError):
    """The store's schema is newer than this version, it was moved, or is no store of ours."""

    # No restart mends it.
    exit_code = EXIT_CONFIGURATION


class EffectError(SdkError):
    """The effects of an event cannot be applied once in the way that was asked for."""


class EventTakenOverError(EffectError):
    """Another process has taken the event over meanwhile, so nothing was applied here."""


class TenantError(SdkError):
    """Base of what concerns tenants."""


class TenantsDisabledError(TenantError):
    """``Sdk:MultiTenant:Enabled`` is false, so there are no tenants."""

    exit_code = EXIT_CONFIGURATION


class InvalidTenantError(TenantError):
    """A value for a tenant cannot be accepted: the message says which, and what it must be."""

    exit_code = EXIT_USAGE


class TenantExistsError(TenantError):
    """Another tenant has this identifier, organization id or id."""


class UnknownTenantError(TenantError):
    """There is no such tenant."""


class IllegalTransitionError(TenantError):
    """The tenant's status does not allow the transition; nothing was changed."""

    def __init__(self, message: str, *, status: str, transition: str) -> None:
        self.status = status
        self.transition = transition
        super().__init__(message)


class SuspensionRefusedError(TenantError):
    """The site manager's email is not verified, and nothing relaxes that rule."""


class TenantConflictError(TenantError):
    """Another change of the same tenant came first; nothing was changed by this one."""


class TenantNotActiveError(TenantError):
    """The tenant is not active, so neither its client nor its database is given out."""

    def __init__(self, identifier: str, status: str) -> None:
        self.identifier = identifier
        self.status = status
        super().__init__(
            f"the tenant {identifier!r} is {status}: only active tenants can be worked with; "
            f"'tenant reactivate {identifier}' makes it active again"
        )


class TenantCredentialsError(TenantError):
    """A tenant's credential cannot be read: the message names its source, never its value."""

    exit_code = EXIT_CONFIGURATION


class UpgradeError(SdkError):
    """Base of what stops the upgrade from a single tenant."""


class NotQuiescentError(UpgradeError):
    """``RequireGracefulQuiescence`` is true and the host has not signalled that it is quiet."""


class UpgradeInProgressError(UpgradeError):
    """Another host runs the upgrade at this moment."""

    exit_code = EXIT_UNAVAILABLE


class UpgradeTimedOutError(UpgradeError):
    """``MaxRunDuration`` is over: the position is kept, the next run goes on from there."""


class DefaultTenantError(UpgradeError):
    """The default tenant cannot be resolved: no resolver, or a tenant that cannot be used."""

    exit_code = EXIT_CONFIGURATION


class SourceDatabaseError(UpgradeError):
    """The single-tenant database cannot be copied: missing, unreadable, damaged or in use."""


class NotificationError(SdkError):
    """Base of what stops one attempt to send a message."""

    exit_code = EXIT_UNAVAILABLE


class NotSentError(NotificationError):
    """Nothing of the request left this machine: it may be tried again."""


class AddressInvalidError(NotSentError):
    """The URL cannot be read, or its host is no name: trying again is no use."""


class AddressRefusedError(NotSentError):
    """The host is of this machine or a private network, where only public ones are asked for."""


class AnswerLostError(NotificationError):
    """The request may have arrived, and no whole answer came."""


class ReplicationError(SdkError):
    """Base of what concerns the replication of tenants' databases."""


class ReplicatorError(ReplicationError):
    """The replicator's binary is missing, or does not do its work."""

    exit_code = EXIT_UNAVAILABLE


class RestoreError(ReplicationError):
    """A database cannot be restored, or what was restored is not what it should be."""


class VerificationError(SdkError):
    """A delivery is not authentic. ``cause`` is one word for logs, never for the sender."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = cause
        self.detail = detail
        super().__init__(f"{cause}: {detail}")


class DeliveryDecodingError(SdkError):
    """A verified body is no JSON object with a string ``type``."""


class NotRunningError(SdkError):
    """A part was used before its start or after its end, or is no part of this run."""


class RetryLater(SdkError):
    """Raised by a handler: run me again, no earlier than in ``seconds``.

    An inline delivery is answered 503 with ``Retry-After``; an enqueued one waits in the store.
    The attempt counts as a failed one, but is no failure in the log: ``webhook.postponed``.
    """

    #: The delay is shorter than this, in seconds.
    LIMIT_SECONDS: ClassVar[int] = 86_400 * 30

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds < self.LIMIT_SECONDS:
            raise ValueError("RetryLater takes 0 to 2592000 seconds")
        self.seconds = float(seconds)
        self.reason = reason
        super().__init__(reason or f"asked to be retried in {seconds:g} s")


def only_member(error: BaseException) -> BaseException:
    """Return the only exception of nested groups of one; any other exception as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
