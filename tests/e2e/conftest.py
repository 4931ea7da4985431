"""Fixtures shared by all tests that start processes."""

import httpx
import pytest
from support.waiting import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def admin_port(monkeypatch):
    """Let daemons pick their admin port: another program may listen on the usual one."""
    monkeypatch.setenv("SDK__ADMIN__BIND", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def patient_httpx(monkeypatch):
    """Let the tests' own requests wait: a busy machine needs more than httpx's five seconds."""
    for name in ("connect", "read", "write", "pool"):
        monkeypatch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, name, PATIENCE_SECONDS)
