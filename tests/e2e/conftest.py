"""What every test with processes of its own shares."""

import pytest


@pytest.fixture(autouse=True)
def admin_port(monkeypatch):
    """Let daemons pick their admin port: another program may listen on the usual one."""
    monkeypatch.setenv("SDK__ADMIN__BIND", "127.0.0.1:0")
