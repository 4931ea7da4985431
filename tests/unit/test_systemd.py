"""The variables and sockets of a service manager: sd_notify(3), sd_listen_fds(3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deliveries import settings

from sdk_trio.errors import OptionsValidationError
from sdk_trio.runtime import systemd
from sdk_trio.runtime.systemd import ServiceEnvironment, read_environment, with_inherited_sockets

PID = 4711
ADMIN = {"Admin__Enabled": True, "Admin__Bind": "fd:admin"}


def test_a_process_without_a_service_manager():
    assert read_environment({}, pid=PID) == ServiceEnvironment()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NOTIFY_SOCKET": "/run/notify"}, {"notify_socket": "/run/notify"}),
        ({"NOTIFY_SOCKET": "@abstract"}, {"notify_socket": "@abstract"}),
        ({"NOTIFY_SOCKET": "@"}, {}),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, {}),
        ({"WATCHDOG_USEC": "1500000"}, {"watchdog_seconds": 1.5}),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "4711"}, {"watchdog_seconds": 1.5}),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, {}),
        ({"WATCHDOG_USEC": "0"}, {}),
        ({"LISTEN_FDS": "2", "LISTEN_PID": "4711"}, {"sockets": ("unknown", "unknown")}),
        (
            {"LISTEN_FDS": "2", "LISTEN_PID": "4711", "LISTEN_FDNAMES": "web:admin"},
            {"sockets": ("web", "admin")},
        ),
        (
            {"LISTEN_FDS": "2", "LISTEN_PID": "4711", "LISTEN_FDNAMES": "web"},
            {"sockets": ("web", "unknown")},
        ),
        ({"LISTEN_FDS": "2", "LISTEN_PID": "1", "LISTEN_FDNAMES": "web:admin"}, {}),
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "web:admin"}, {}),
        ({"LISTEN_FDS": "9" * 12, "LISTEN_PID": "4711"}, {}),
    ],
)
def test_variables_and_sockets_are_read(variables, expected):
    assert read_environment(variables, pid=PID) == ServiceEnvironment(**expected)


@given(st.dictionaries(st.sampled_from(systemd.VARIABLES), st.text(max_size=30)))
def test_any_values_of_the_variables_allow_a_start(variables):
    found = read_environment(variables, pid=PID)
    assert found.watchdog_seconds is None or found.watchdog_seconds > 0
    assert all(found.sockets)


def test_names_become_descriptors_and_several_sockets_may_share_a_name():
    given_settings = settings(Server__Bind=["fd:web", "127.0.0.1:0", "fd:9"], **ADMIN)
    resolved = with_inherited_sockets(given_settings, ("web", "admin", "web"))
    assert resolved.server.bind == ("fd:3", "fd:5", "127.0.0.1:0", "fd:9")
    assert resolved.admin.bind == "fd:4"


@pytest.mark.parametrize(
    ("sockets", "keys", "words"),
    [
        ((), ["Sdk:Server:Bind", "Sdk:Admin:Bind"], "none at all"),
        (("other",), ["Sdk:Server:Bind", "Sdk:Admin:Bind"], "only 'other'"),
        (("web", "admin", "admin"), ["Sdk:Admin:Bind"], "2 sockets with the name 'admin'"),
    ],
)
def test_all_missing_and_surplus_sockets_are_reported(sockets, keys, words):
    with pytest.raises(OptionsValidationError) as caught:
        with_inherited_sockets(settings(Server__Bind=["fd:web"], **ADMIN), sockets)
    assert [problem.key for problem in caught.value.problems] == keys
    assert all(words in problem.message for problem in caught.value.problems)


def test_a_disabled_admin_address_needs_no_socket():
    off = settings(Admin__Enabled=False, Admin__Bind="fd:admin")
    assert with_inherited_sockets(off, ()).admin.bind == "fd:admin"


@given(st.text(max_size=60))
def test_a_status_cannot_inject_another_message(status):
    for message in (systemd.status_line(status), systemd.ready(status), systemd.stopping(status)):
        lines = message.splitlines()
        assert [line for line in lines if line.startswith("STATUS=")] == lines[-1:]
        assert len(lines) <= 2
