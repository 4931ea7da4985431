"""The channels on which site managers are told, each declared once: settings, commands, doctor,
metrics and stores go by these rows.

What a channel does is in :mod:`sdk_trio.notifications.channels` (CONTRIBUTING.md).
"""

import enum
from typing import NamedTuple

#: The texts that each transition has a template of, by their keys in the settings.
TEXTS = ("EmailSubject", "EmailBody", "SmsBody")


class ContactKind(enum.Enum):
    """An address that a site manager may have: its name for people, and the argument for it."""

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
    """One channel, as all but its own code know it.

    ``name`` is the word that people type, a message's id ends with, and the store keeps; the
    settings have a switch and a section of this name.
    ``texts`` are those of :data:`TEXTS` that it sends and that may not be blank while it is on.
    ``quoted`` are further ones that it sends, blank or not.
    ``contact`` is the address that a tenant needs; None: the receiver is the operator's.
    ``target`` is the setting within its section that ``notify test --to`` replaces, if any.
    ``signs`` says that its credential signs, and so may hold what the head of a request may not.
    """

    name: str
    texts: tuple[str, ...] = ()
    quoted: tuple[str, ...] = ()
    contact: ContactKind | None = None
    target: str | None = None
    signs: bool = False

    @property
    def key(self) -> str:
        """Its switch and its section in the settings, such as ``Email``."""
        return self.name.capitalize()


_ROWS = (
    NotificationChannel(
        name="email", texts=("EmailSubject", "EmailBody"), contact=ContactKind.EMAIL
    ),
    NotificationChannel(name="sms", texts=("SmsBody",), contact=ContactKind.PHONE),
    # Its payload has all texts, and its receiver may use none of them.
    NotificationChannel(name="webhook", quoted=TEXTS, target="Url", signs=True),
)

#: The channels by their names, in the order in which they are shown.
CHANNELS = {row.name: row for row in _ROWS}
