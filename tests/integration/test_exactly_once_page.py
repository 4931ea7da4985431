"""The programs of docs/how-to/exactly-once.md, as they stand there; each event comes twice."""

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import apsw
import pytest
from support.daemon import clean_environment
from support.postgres import running_server

from sdk_trio import MARKERS_SCHEMA
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app, settings_for_tests

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "exactly-once.md"


def programs() -> dict[str, str]:
    """The blocks of the page that begin with a file's name, by that name."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def load(name: str) -> Any:
    # A module, because declarative classes look their annotations up in one.
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(programs()[f"{name}.py"], name, "exec"), vars(module))
    return module


def test_every_program_of_the_page_is_run_here() -> None:
    blocks = PAGE.read_text(encoding="utf-8").count("```python\n")
    assert blocks == len(programs()) == 8


ACCESS = "CREATE TABLE access (order_id text NOT NULL, invoice text)"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    psycopg = pytest.importorskip("psycopg")
    dsn = running_server().empty()
    monkeypatch.setenv("APP_DSN", dsn)
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(ACCESS)
        connection.execute(MARKERS_SCHEMA)
        yield connection


async def test_a_marker_beside_what_psycopg_writes(server: Any) -> None:
    handlers = load("with_psycopg").handlers
    for _ in range(2):  # the second inbox knows nothing of the first
        async with running_app(handlers) as app:
            await app.deliver(app.sign(OrderPaidEvent, {"id": "o1"}, webhook_id="m"), expect="done")
    assert server.execute("SELECT order_id FROM access").fetchall() == [("o1",)]


async def test_a_marker_beside_what_sqlalchemy_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    file = tmp_path / "app.db"
    monkeypatch.setenv("APP_URL", f"sqlite:///{file}")
    program = load("with_sqlalchemy")
    program.Base.metadata.create_all(program.engine)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(MARKERS_SCHEMA)
        for _ in range(2):
            async with running_app(program.handlers) as app:
                signed = app.sign(OrderPaidEvent, {"id": "o1"}, webhook_id="m")
                await app.deliver(signed, expect="done")
        assert connection.execute("SELECT order_id FROM access").fetchall() == [("o1",)]
    program.engine.dispose()


@pytest.mark.parametrize("name", ["with_transaction", "with_transaction_sqlalchemy", "with_finish"])
async def test_effects_in_the_database_of_the_store(server: Any, tmp_path: Path, name: str) -> None:
    settings = settings_for_tests({"Storage:Backend": "Postgres", "Storage:Path": str(tmp_path)})
    async with running_app(load(name).handlers, settings) as app:
        delivered = await app.deliver(OrderPaidEvent, {"id": "o1"}, expect="done")
        await app.deliver(app.sign(OrderPaidEvent, webhook_id=delivered.webhook_id))
    assert server.execute("SELECT order_id FROM access").fetchall() == [("o1",)]


async def test_effects_in_the_file_of_the_store(tmp_path: Path) -> None:
    settings = settings_for_tests({"Storage:Backend": "Sqlite", "Storage:Path": str(tmp_path)})
    async with running_app(load("with_transaction_sqlite").handlers, settings) as app:
        delivered = await app.deliver(OrderPaidEvent, {"id": "o1"}, expect="done")
        await app.deliver(app.sign(OrderPaidEvent, webhook_id=delivered.webhook_id))
    with closing(apsw.Connection(str(tmp_path / "inbox.db"))) as connection:
        assert list(connection.execute("SELECT order_id FROM app_access")) == [("o1",)]


# Django's settings are global to the process, so its application runs in a separate one.
DJANGO = """
import json, os, sys
import django
from django.conf import settings

sys.path.insert(0, os.getcwd())
settings.configure(
    INSTALLED_APPS=["shop"],
    DATABASES={"default": json.loads(sys.argv[1])},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    USE_TZ=True,
)
django.setup()
from django.core.management import call_command
from django.db import connection

call_command("migrate", verbosity=0)

import trio
import sdk_trio
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app
from shop.models import Access
from shop.webhooks import grant_access, handlers


async def run():
    async with running_app(handlers) as app:
        signed = app.sign(OrderPaidEvent, {"id": "o1"}, webhook_id="m")
        await app.deliver(signed, expect="done")

for _ in range(2):
    trio.run(run)
from datetime import UTC, datetime
from sdk_trio.events.payloads import Order
now = datetime.now(UTC)
event = OrderPaidEvent("x", "order.paid", now, Order(id="o"), b"", 1, now)
try:
    sdk_trio.first_time(connection, event)
except sdk_trio.EffectError as error:
    assert "transaction.atomic()" in str(error)
else:
    raise AssertionError("a marker that would be committed alone")
print(list(Access.objects.values_list("order_id", flat=True)))
"""

MODELS = """
from django.db import models

class Access(models.Model):
    order_id = models.TextField()
"""

INITIAL = """
from django.db import migrations, models

class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel(
            "Access", [("id", models.AutoField(primary_key=True)), ("order_id", models.TextField())]
        )
    ]
"""


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_marker_beside_what_django_writes(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("django")
    migrations = tmp_path / "shop" / "migrations"
    migrations.mkdir(parents=True)
    for package in (migrations.parent, migrations):
        (package / "__init__.py").touch()
    (migrations.parent / "models.py").write_text(MODELS)
    (migrations / "0001_initial.py").write_text(INITIAL)
    for name in ("shop/migrations/0002_markers.py", "shop/webhooks.py"):
        (tmp_path / name).write_text(programs()[name])
    database: dict[str, Any] = {"ENGINE": f"django.db.backends.{engine}", "NAME": "app.db"}
    if engine == "postgresql":
        psycopg = pytest.importorskip("psycopg")
        found = psycopg.conninfo.conninfo_to_dict(running_server().empty())
        names = {"dbname": "NAME", "host": "HOST", "user": "USER"}
        database |= {names[key]: value for key, value in found.items()}
    ran = subprocess.run(
        [sys.executable, "-c", DJANGO, json.dumps(database)],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "['o1']"
