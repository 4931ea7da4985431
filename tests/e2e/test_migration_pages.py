"""The pages for those who come from elsewhere: what stands there before and after is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.daemon import clean_environment
from support.deliveries import SECRET

PAGES = Path(__file__).parents[2] / "docs" / "how-to"

#: Serves a signed and a forged delivery to an ASGI application, with its lifespan around them.
SERVED = """
import asyncio, importlib, os, sys
import httpx
from sdk_trio.testing import sign_delivery


async def main():
    module, _, name = sys.argv[1].partition(":")
    application = getattr(importlib.import_module(module), name)
    requests, answers = asyncio.Queue(), asyncio.Queue()
    requests.put_nowait({"type": "lifespan.startup"})
    living = asyncio.create_task(
        application({"type": "lifespan", "asgi": {}, "state": {}}, requests.get, answers.put)
    )
    started = asyncio.create_task(answers.get())
    await asyncio.wait({living, started}, return_when=asyncio.FIRST_COMPLETED)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(application), base_url="http://test", timeout=60
    )
    secret = os.environ["WEBHOOK_SECRET"]
    signed = sign_delivery("order.paid", {"id": "o_1"}, secret=secret)
    forged = {**signed.headers, "webhook-id": "another"}
    for headers, status in ((signed.headers, 200), (forged, 400)):
        answer = await client.post("/webhooks/payments", headers=headers, content=signed.body)
        assert answer.status_code == status, (answer.status_code, answer.text)
    async with asyncio.timeout(60):
        while not granted():
            await asyncio.sleep(0.02)
    assert granted() == ["o_1"]
    requests.put_nowait({"type": "lifespan.shutdown"})
    # Django has no lifespan and raises an exception.
    await asyncio.gather(living, return_exceptions=True)


"""

IN_A_FILE = """
def granted():
    with open("granted", "a+") as file:
        file.seek(0)
        return file.read().split()
"""

IN_DJANGO = """
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
import django

django.setup()
from django.core.management import call_command

call_command("migrate", run_syncdb=True, verbosity=0)


def granted():
    import sqlite3

    return [order for (order,) in sqlite3.connect("db").execute("SELECT order_id FROM shop_access")]
"""

RUN = "\n\nasyncio.run(main())\n"

EAGER = "import tasks\n\ntasks.celery.conf.task_always_eager = True\n"

#: Delivers by the test kit, as the page says of the tests.
BY_KIT = """
import trio
from app import handlers
from sdk_trio.testing import running_app


async def main():
    async with running_app(handlers) as app:
        await app.deliver("order.paid", {"id": "o_1"}, expect="done")


trio.run(main)
assert open("granted").read().split() == ["o_1"]
"""

_GRANT = """
{kind} grant_access(order_id):
    with open("granted", "a") as file:
        file.write(f"{{order_id}}\\n")
"""

#: What a Django project has beside what the page shows.
SHOP = {
    "shop/__init__.py": "",
    "shop/urls.py": "urlpatterns = []\n",
    "shop/asgi.py": (
        "from django.core.asgi import get_asgi_application\n\n"
        "application = get_asgi_application()\n"
    ),
    "shop/settings.py": (
        'SECRET_KEY = "x" * 50\nALLOWED_HOSTS = ["*"]\nROOT_URLCONF = "shop.urls"\nUSE_TZ = True\n'
        'INSTALLED_APPS = ["shop"]\nDEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"\n'
        'DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db"}}\n'
    ),
    "shop/models.py": (
        "from django.db import models\n\n\nclass Access(models.Model):\n"
        "    order_id = models.TextField(unique=True)\n"
    ),
}


def files_of(page, section):
    """The blocks of a section that begin with the name of their file."""
    text = (PAGES / page).read_text(encoding="utf-8")
    text = re.search(rf"^## {section}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    blocks = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no files in {section}"
    return dict(blocks)


CASES = [
    ("from-fastapi.md", "Before", "main:app", "async def", IN_A_FILE),
    ("from-fastapi.md", "After", "main:app", "async def", IN_A_FILE),
    ("from-celery.md", "Before", "main:app", "def", EAGER + IN_A_FILE),
    ("from-celery.md", "After", None, "def", BY_KIT),
    ("from-django.md", "Before", "shop.asgi:application", None, IN_DJANGO),
    ("from-django.md", "After", "shop.asgi:application", None, IN_DJANGO),
]


@pytest.mark.parametrize(
    ("page", "section", "application", "kind", "driver"),
    CASES,
    ids=[f"{page[5:-3]}-{section.lower()}" for page, section, *_ in CASES],
)
def test_the_code_of_a_page_works(tmp_path, page, section, application, kind, driver):
    files = files_of(page, section)
    given = {"shop.py": _GRANT.format(kind=kind)} if kind else SHOP
    files = given | files
    files["driver.py"] = SERVED + driver + RUN if application else driver
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {
        **clean_environment(),
        "PYTHONPATH": str(tmp_path),
        "WEBHOOK_SECRET": SECRET,
        "BROKER_URL": "memory://",
        "SDK__WEBHOOKS__REQUIREHTTPS": "false",
        "SDK__ADMIN__ENABLED": "false",
        "PATH": os.environ["PATH"],
    }
    ran = subprocess.run(
        [sys.executable, "driver.py", *([application] if application else [])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
