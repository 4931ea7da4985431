"""The channels for notifying site managers, declared once.

Settings, commands, doctor, metrics and stores read these rows. The channels' code is
in :mod:`sdk_trio.notifications.channels` (CONTRIBUTING.md).
"""

import enum
from typing import NamedTuple

#: The settings keys of the template texts that each transition has.
TEXTS = ("EmailSubject", "EmailBody", "SmsBody")


class ContactKind(enum.Enum):
    """A kind of address of a site manager: its label, and its command-line argument."""

    EMAIL = ("email address", "--email")
    PHONE = ("phone number", "--phone")

    @property
    def label(self) -> str:
        """The name that people use."""
        return self.value[0]

    @property
    def argument(self) -> str:
        """The argument of ``tenant set`` that sets it."""
        return self.value[1]


class NotificationChannel(NamedTuple):
    """One channel, as seen by all code except its own.

    ``name`` is used in commands, in message ids and in the store; the settings have a switch and a
    section of this name. ``texts`` are those of :data:`TEXTS` that it sends and that must not be
    blank while it is enabled. ``quoted`` are further texts that it sends, blank or not. ``contact``
    is the address that a tenant needs; None: the operator configures the receiver. ``target`` is
    the setting in its section that ``notify test --to`` replaces, if any. ``signs``: its credential
    signs, and may contain characters that a request head must not.
    """

    name: str
    texts: tuple[str, ...] = ()
    quoted: tuple[str, ...] = ()
    contact: ContactKind | None = None
    target: str | None = None
    signs: bool = False

    @property
    def key(self) -> str:
        """The name of its switch and of its section in the settings, such as ``Email``."""
        return self.name.capitalize()


_ROWS = (
    NotificationChannel(
        name="email", texts=("EmailSubject", "EmailBody"), contact=ContactKind.EMAIL
    ),
    NotificationChannel(name="sms", texts=("SmsBody",), contact=ContactKind.PHONE),
    # Its payload contains all texts; its receiver may use none of them.
    NotificationChannel(name="webhook", quoted=TEXTS, target="Url", signs=True),
)

#: The channels by name, in display order.
CHANNELS = {row.name: row for row in _ROWS}
