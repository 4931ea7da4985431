"""The channels of notifications: a declared channel is present wherever it is needed."""

from pathlib import Path

import msgspec

from sdk_trio.config.options.notifications import (
    EnabledChannelsOptions,
    NotificationsOptions,
    TemplateOptions,
    enabled_channels,
)
from sdk_trio.config.table import TRANSITIONS, table, unused_texts
from sdk_trio.records.channels import CHANNELS, TEXTS, NotificationChannel
from sdk_trio.records.notifications import NotificationId, parse_notification_id
from sdk_trio.records.tenants import Transition
from sdk_trio.runtime.notifications import make_channels

SECTION = "Sdk:MultiTenant:Notifications"


def test_every_channel_has_a_switch_a_section_and_code() -> None:
    assert list(EnabledChannelsOptions.__struct_fields__) == list(CHANNELS)
    keys = {setting.key for setting in table()}
    for channel in CHANNELS.values():
        assert f"{SECTION}:EnabledChannels:{channel.key}" in keys
        assert any(key.startswith(f"{SECTION}:{channel.key}:") for key in keys)
        assert channel.target is None or f"{SECTION}:{channel.key}:{channel.target}" in keys
    assert list(make_channels(NotificationsOptions())) == list(CHANNELS)


def test_every_template_has_the_texts_of_each_channel() -> None:
    in_templates = {
        key.rpartition(":")[2] for key in (s.key for s in table()) if "Templates" in key
    }
    assert set(TEXTS) == in_templates
    assert len(TemplateOptions.__struct_fields__) == len(TEXTS)
    for channel in CHANNELS.values():
        assert {*channel.texts, *channel.quoted} <= set(TEXTS)
    assert list(TRANSITIONS) == [str(transition) for transition in Transition]


def test_the_page_has_a_row_for_every_channel_and_whether_it_may_send_twice() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "notify-site-managers.md"
    rows = [
        line.split("|")[1:] for line in page.read_text("utf-8").splitlines() if line[:3] == "| `"
    ]
    written = {row[0].strip(" `"): row[3].split()[0].strip(":,") for row in rows[: len(CHANNELS)]}
    channels = make_channels(NotificationsOptions())
    assert written == {name: "yes" if channels[name].repeatable else "no" for name in CHANNELS}


def test_the_ids_of_its_messages_can_be_typed() -> None:
    for name in CHANNELS:
        assert parse_notification_id(f"17-{name}") == NotificationId(17, name)


def test_the_enabled_channels_are_those_that_are_switched_on() -> None:
    none = EnabledChannelsOptions(**dict.fromkeys(CHANNELS, False))
    for name in CHANNELS:
        one = msgspec.structs.replace(none, **{name: True})
        assert enabled_channels(NotificationsOptions(enabled_channels=one)) == (name,)


def test_a_text_is_checked_while_one_channel_that_sends_it_is_on() -> None:
    first = NotificationChannel(name="first", texts=("EmailSubject", "EmailBody"))
    second = NotificationChannel(name="second", texts=("EmailSubject",))
    assert unused_texts([first], [second]) == []
    assert unused_texts([second], [first]) == ["EmailBody"]
    assert unused_texts([], [first, second]) == ["EmailBody", "EmailSubject"]
