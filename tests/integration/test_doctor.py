"""``doctor`` against real files, stores, receivers and upstreams."""

import os
import stat
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import apsw
import attrs
import pytest
import trio
import trustme
from support.deliveries import SECRET
from support.doctor import Doctor

from sdk_trio.cli.doctor import Report, machine, store
from sdk_trio.cli.sign import provide_dev_secret
from sdk_trio.config import Settings
from sdk_trio.records.deliveries import DeliveryState, NewDelivery
from sdk_trio.records.tenants import Tenant, TenantStatus
from sdk_trio.runtime.presence import SETTINGS_SECRET, Presence, announced
from sdk_trio.storage.examine import examine
from sdk_trio.storage.open import open_inbox
from sdk_trio.webhooks.outcomes import parked_reason


@pytest.fixture
def doctor(command_line, monkeypatch):
    return Doctor(command_line, monkeypatch)


def test_a_new_installation_has_no_problem(doctor):
    found = doctor.alone()
    assert found.status == 0
    assert [f for f in found.findings if f["level"] == "problem"] == []
    assert {f["check"] for f in found.findings} >= {
        *("settings", "secrets", "https", "permissions", "disk", "descriptors", "clock", "store"),
        *("receiver", "upstream", "handlers", "tenants", "notifications", "replication"),
    }
    found.one("permissions", "note", "does not exist yet")
    found.one("receiver", "note", "no receiver is running")
    found.one("store", "note", "no inbox yet")
    # A command that looks creates nothing.
    assert not doctor.data.exists()


def test_invalid_settings_are_all_listed_and_nothing_else_is_looked_at(doctor):
    doctor.set("Webhooks__ToleranceSeconds", "never")
    doctor.set("Webhooks__Secret", " padded ")
    found = doctor()
    assert found.status == 78
    problems = found.of("settings", "problem")
    assert [f["where"] for f in problems] == [
        "Sdk:Webhooks:ToleranceSeconds (variable SDK__WEBHOOKS__TOLERANCESECONDS)",
        "Sdk:AccessToken",
        "Sdk:Webhooks:Secret (variable SDK__WEBHOOKS__SECRET)",
    ]
    assert all(f["remedy"] for f in problems)
    assert found.of("secrets") == []


def test_a_directory_of_dev_is_examined_as_dev_runs_it(doctor, command_line):
    doctor.monkeypatch.delenv("SDK__WEBHOOKS__SECRET")
    refused = doctor()
    assert refused.status == 78
    assert "doctor --dev" in refused.one("settings", "note", "valid settings")["remedy"]
    checked = command_line("config", "check")
    assert checked.status == 78
    assert "config check --dev" in checked.err
    found = doctor("--dev", "--offline")
    found.one("settings", "note", "'dev' has not been started here yet")
    provide_dev_secret(str(doctor.data))
    found = doctor("--dev", "--offline")
    assert [f for f in found.findings if f["level"] == "problem"] == []
    found.one("secrets", "ok", "KeyDerivation")
    assert command_line("config", "check", "--dev").status == 0


def test_the_remedy_of_a_setting_is_what_to_do_about_it(doctor, tmp_path):
    for name in ("CertFile", "KeyFile"):
        doctor.set(f"Server__{name}", tmp_path / "missing.pem")
    remedies = {f["remedy"] for f in doctor.alone().of("settings", "problem")}
    assert remedies == {"put the file there or change the key"}
    doctor.set("Webhooks__Secret", "short")
    (found,) = doctor.alone().of("settings", "problem")
    assert found["remedy"].startswith("copy the whole secret")


def test_a_key_file_with_lines_too_many(doctor, tmp_path):
    file = tmp_path / "credentials" / "Sdk__Webhooks__Secret"
    file.parent.mkdir()
    file.touch(mode=0o600)
    doctor.monkeypatch.delenv("SDK__WEBHOOKS__SECRET")
    doctor.monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent))
    file.write_text(f"{SECRET}\n")
    assert doctor.alone().status == 0
    file.write_text(f"{SECRET}\n\n")
    found = doctor.alone()
    assert found.status == 78
    wrong = found.one("settings", "problem", "begins or ends with white space or a line break")
    assert (wrong["where"], wrong["remedy"]) == (f"Sdk:Webhooks:Secret ({file})", "remove it")


def test_secrets_that_are_the_same_or_do_not_look_like_one(doctor):
    doctor.set("Webhooks__Secrets__0", SECRET)
    doctor.set("Webhooks__Secrets__1", "a-text-of-some-length-that-is-no-base64")
    found = doctor.alone()
    found.one("settings", "warning", "is the same secret as Sdk:Webhooks:Secret")
    found.one("settings", "warning", "does not begin with whsec_")
    doctor.set("Webhooks__Secrets__1", "whsec_a-text-of-some-length-that-is-no-base64")
    doctor.alone().one("settings", "warning", "is not base64 after whsec_")
    assert found.status == 0


def test_variables_of_notifications_that_are_not_set(doctor):
    for name, value in {
        "Enabled": "true",
        "EnabledChannels__Email": "true",
        "Email__FromAddress": "a@b.example",
    }.items():
        doctor.set(f"MultiTenant__Notifications__{name}", value)
    doctor.monkeypatch.delenv("EMAIL_API_KEY", raising=False)
    found = doctor.alone()
    unset = found.one("settings", "warning", "names the variable EMAIL_API_KEY, which is not set")
    assert unset["remedy"] == "set it"


def test_the_table_is_for_people(doctor):
    answer = doctor.command_line("doctor", "--standalone")
    assert answer.status == 0
    assert answer.out.splitlines()[0].startswith("note")
    assert "         -> " in answer.out
    assert "problem: 0" in answer.err


def test_a_data_directory_that_others_may_enter(doctor):
    doctor.data.mkdir(mode=0o755)
    os.chmod(doctor.data, 0o755)
    found = doctor.alone().one("permissions", "warning", "can be entered or listed by other users")
    assert "mode 0755" in found["what"]
    assert found["remedy"].startswith(f"chmod 0700 {doctor.data}")
    (doctor.data / "inbox.db").touch(mode=0o644)
    (doctor.data / "inbox.db").chmod(0o644)
    found = doctor.alone().one("permissions", "problem", "open to other users (mode 0755)")
    assert "inbox.db" in found["what"]


def test_files_with_secrets_that_others_can_read(doctor, tmp_path):
    secrets = tmp_path / "credentials"
    secrets.mkdir()
    doctor.monkeypatch.delenv("SDK__WEBHOOKS__SECRET")
    doctor.monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(secrets))
    for name, mode in {
        "Sdk__Webhooks__Secrets__0": 0o604,
        "Sdk__Webhooks__Secrets__1": 0o640,
    }.items():
        (secrets / name).write_text(f"secret-of-mode-{mode}-and-of-chance-{'kqz7'[mode % 4]}\n")
        (secrets / name).chmod(mode)
    (tmp_path / "appsettings.json").write_text('{"Sdk": {"AccessToken": "tok-in-a-file"}}')
    (tmp_path / "appsettings.json").chmod(0o600)
    found = doctor.alone()
    open_file = found.one("permissions", "problem", "every user of this machine may read")
    assert open_file["where"].startswith("Sdk:Webhooks:Secrets:0 (")
    assert "chmod 0600" in open_file["remedy"]
    found.one("permissions", "note", "its group may read")
    found.one("permissions", "ok", "only its owner reads")
    assert "tok-in-a-file" not in found.text
    assert found.status == 1


def test_the_files_of_the_data_directory_that_hold_secrets(doctor):
    doctor.data.mkdir(mode=0o700)
    for name in ("admin-token", "dev-secret"):
        (doctor.data / name).write_text("x")
        (doctor.data / name).chmod(0o644)
    exposed = doctor.alone().of("permissions", "problem")
    assert [f["where"].partition(" (")[0] for f in exposed] == [
        *("the secret of dev", "the admin token")
    ]


def test_a_certificate_and_a_key_that_do_not_fit(doctor, tmp_path):
    authority = trustme.CA()
    one, other = authority.issue_cert("a.example"), authority.issue_cert("a.example")
    one.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    other.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    doctor.set("Server__CertFile", tmp_path / "cert.pem")
    doctor.set("Server__KeyFile", tmp_path / "key.pem")
    doctor.alone().one("permissions", "problem", "cannot be used together")
    assert doctor.command_line("config", "check", "--standalone").status == 78
    one.private_key_pem.write_to_path(tmp_path / "key.pem")
    assert doctor.alone().of("permissions", "problem") == []


@pytest.mark.parametrize(
    ("begins", "ends", "level", "what"),
    [
        (-90, 90, "ok", "valid for 90 more days"),
        (-60, 29, "note", "expires in 29 days"),
        (-60, 6, "warning", "expires in 6 days"),
        (-60, -1, "problem", "has expired"),
        (1, 90, "problem", "not yet valid"),
    ],
)
@pytest.mark.parametrize("key_type", list(trustme.KeyType))
def test_until_when_the_certificate_is_valid(doctor, tmp_path, begins, ends, level, what, key_type):
    now = datetime.now(UTC) + timedelta(minutes=10)
    issued = trustme.CA().issue_cert(
        "a.example",
        not_before=now + timedelta(days=begins),
        not_after=now + timedelta(days=ends),
        key_type=key_type,
    )
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "cert.pem").write_text("")
    for certificate in issued.cert_chain_pems:
        certificate.write_to_path(tmp_path / "cert.pem", append=True)
    doctor.set("Server__CertFile", tmp_path / "cert.pem")
    doctor.set("Server__KeyFile", tmp_path / "key.pem")
    found = doctor.alone().one("permissions", level, what)
    assert str(tmp_path / "cert.pem") in found["where"]
    # A warning at worst: `run` starts all the same, and a unit may check before each restart.
    checked = doctor.command_line("config", "check", "--standalone", "--format", "json")
    keys = [row["key"] for row in checked.document]
    assert (checked.status, "Sdk:Server:CertFile" in keys) == (0, level in ("warning", "problem"))


def test_a_data_directory_that_is_no_directory(doctor):
    doctor.data.write_text("")
    doctor.alone().one("permissions", "problem", "cannot read and write it as a directory")


@pytest.mark.parametrize(
    ("free_bytes", "free_nodes", "growth", "level", "what"),
    [
        (50e6, 10**6, None, "problem", "50.0 MB free"),
        (500e6, 10**6, None, "warning", "500.0 MB free"),
        (5e9, 10, None, "problem", "10 file nodes left"),
        (5e9, 10**6, 1e9, "warning", "last for 5 days"),
        (5e9, 10**6, 1e6, "ok", "5.0 GB free"),
    ],
)
def test_the_free_space_on_the_disk(
    monkeypatch, tmp_path, free_bytes, free_nodes, growth, level, what
):
    real = os.statvfs(tmp_path)
    values = list(real)
    values[1], values[4], values[5], values[7] = 1, int(free_bytes), 10**7, free_nodes
    # A full disk cannot be had here; the figures are of the same kind.
    monkeypatch.setattr(machine.os, "statvfs", lambda _: os.statvfs_result(values))
    settings = Settings.from_mapping(
        {"Webhooks:Secret": SECRET, "Storage:Path": str(tmp_path)}, standalone=True
    )
    report = Report("disk")
    machine.check_disk(settings, report, growth)
    assert any(f.level == level and what in f.what for f in report.findings), report.findings


def test_the_limit_of_open_files(monkeypatch, tmp_path):
    settings = Settings.from_mapping({"Webhooks:Secret": SECRET}, standalone=True)
    for limit, level in ((150, "problem"), (1000, "note"), (50_000, "ok")):
        monkeypatch.setattr(machine, "reachable_descriptor_limit", lambda limit=limit: limit)
        report = Report("descriptors")
        machine.check_descriptors(settings, report)
        assert [f.level for f in report.findings] == [level]


def test_the_limit_of_the_running_receiver_is_what_counts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    presence = Presence("http://127.0.0.1:1", "http://127.0.0.1:1/", os.getpid(), SETTINGS_SECRET)
    (tmp_path / "sdk-data").mkdir(mode=0o700)
    settings = Settings.from_mapping({"Webhooks:Secret": SECRET}, standalone=True)
    report = Report("descriptors")
    with announced(tmp_path / "sdk-data", presence):
        machine.check_descriptors(settings, report)
    assert f"process {os.getpid()}" in report.findings[0].what


@pytest.mark.parametrize(
    ("state", "what"),
    [(0, "synchronized by NTP"), (5, "not synchronized"), (-1, "does not report")],
)
def test_the_kernel_s_state_of_the_clock(monkeypatch, state, what):
    class Library:
        @staticmethod
        def adjtimex(_):
            return state

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda *_, **__: Library)
    report = Report("clock")
    machine.check_clock(report)
    assert what in report.findings[0].what


def test_a_store_with_work_for_an_operator(doctor):
    doctor.command_line.seed(
        ("msg_dead", DeliveryState.DEAD),
        ("msg_parked", DeliveryState.PARKED),
        ("msg_waits", DeliveryState.RECEIVED),
        ("msg_done", DeliveryState.DONE),
    )
    connection = apsw.Connection(str(doctor.data / "inbox.db"))
    connection.execute("UPDATE arrival SET received_at = received_at - 1e9")
    connection.close()
    found = doctor.alone()
    found.one("store", "ok", "no damage")
    found.one("store", "warning", "1 dead letters")
    found.one("store", "warning", "order.paid (1)")
    assert "--error TEXT" in found.one("store", "warning", "1 dead letters")["remedy"]
    found.one("store", "warning", "oldest unfinished event arrived")
    assert found.status == 0


def test_each_reason_for_parking_is_named(doctor):
    doctor.command_line.seed(("msg_done", DeliveryState.DONE))

    async def park():
        settings = Settings.from_mapping(
            {"Storage:Path": str(doctor.data)}, standalone=True, receiver=False
        )
        async with open_inbox(settings, owner="seed") as inbox:
            tenant = Tenant(id=str(uuid.uuid4()), identifier="acme", name="Acme", created_at=0.0)
            suspended = attrs.evolve(tenant, status=TenantStatus.SUSPENDED)
            for webhook_id, reason in (("a", parked_reason(None)), ("b", parked_reason(suspended))):
                delivery = NewDelivery(webhook_id, "order.paid", b"{}", 1, 1.0)
                await inbox.park(delivery, reason)

    trio.run(park)
    found = doctor.alone()
    none = found.one("store", "warning", "no handler for this type")
    assert none["remedy"].startswith("register one")
    held = found.one("store", "warning", "its tenant acme is Suspended")
    assert held["remedy"].startswith("reactivate the tenant")


def test_leases_that_no_process_has_taken_over_are_a_warning(doctor):
    doctor.command_line.seed(("msg_waits", DeliveryState.RECEIVED))
    connection = apsw.Connection(str(doctor.data / "inbox.db"))
    connection.execute("UPDATE work SET lease_owner = 'gone', lease_until = 1e9")
    connection.close()
    doctor.alone().one("store", "warning", "1 events belong to a process that hangs")


def test_a_queue_that_is_nearly_full_is_a_warning(doctor, monkeypatch):
    doctor.command_line.seed(*((f"msg_{n}", DeliveryState.RECEIVED) for n in range(8)))
    monkeypatch.setenv("SDK__WEBHOOKS__QUEUE__CAPACITY", "10")
    doctor.alone().one("store", "warning", "8 events wait for a worker, and the queue has 10")
    monkeypatch.setenv("SDK__WEBHOOKS__QUEUE__CAPACITY", "11")
    assert "wait for a worker" not in str(doctor.alone().findings)


def test_a_store_without_work(doctor):
    doctor.command_line.seed(("msg_done", DeliveryState.DONE))
    doctor.alone().one("store", "ok", "none is dead, parked or old")


def test_a_store_of_another_version_or_program_is_left_alone(doctor, monkeypatch):
    doctor.command_line.seed(("msg_1", DeliveryState.DONE))
    file = doctor.data / "inbox.db"

    def pragma(name, value):
        connection = apsw.Connection(str(file))
        connection.pragma(name, value)
        connection.close()

    with monkeypatch.context() as patch:
        patch.setattr(store, "VERSION", 2)
        doctor.alone().one("store", "note", "the next start brings it to 2")
    pragma("user_version", -1)
    doctor.alone().one("store", "problem", "was moved to PostgreSQL")
    pragma("user_version", -2)
    doctor.alone().one("store", "problem", "is being filled")
    pragma("user_version", 99)
    doctor.alone().one("store", "problem", "version 99")
    pragma("application_id", 7)
    doctor.alone().one("store", "problem", "another program")


def test_a_damaged_store(doctor):
    doctor.command_line.seed(*((f"msg_{n}", DeliveryState.DONE, b"x" * 3000) for n in range(40)))
    file = doctor.data / "inbox.db"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 8192] = b"\xff" * 8192
    file.write_bytes(content)
    found = doctor.alone()
    assert any("damage" in f["what"] for f in found.of("store", "problem")), found.of("store")
    file.write_bytes(b"no database at all" * 100)
    found = doctor.alone()
    assert "not a SQLite database" in found.of("store", "problem")[0]["what"]
    assert found.of("disk") != []


def test_a_store_that_is_too_large_to_be_checked(doctor, monkeypatch):
    doctor.command_line.seed(*((f"msg_{n}", DeliveryState.DONE) for n in range(3)))
    monkeypatch.setattr("sdk_trio.storage.examine._INSTRUCTIONS", 1)
    monkeypatch.setattr(store, "CHECK_SECONDS", -1.0)
    doctor.alone().one("store", "note", "too large to be checked")


def test_a_write_ahead_log_that_is_held_back(doctor, monkeypatch):
    doctor.command_line.seed(("msg_1", DeliveryState.DONE))
    reader = apsw.Connection(str(doctor.data / "inbox.db"))
    reader.execute("BEGIN; SELECT * FROM arrival").fetchall()
    writer = apsw.Connection(str(doctor.data / "inbox.db"))
    writer.execute("UPDATE ended SET attempts = attempts + 1")
    monkeypatch.setattr(store, "LARGE_LOG_BYTES", 1000)
    doctor.alone().one("store", "warning", "a long-running reader")
    reader.close()
    writer.close()


def test_the_growth_is_measured_over_the_newest_deliveries(doctor):
    now = 1_800_000_000.0 + 2 * 86_400
    doctor.command_line.seed(*((f"msg_{n}", DeliveryState.DONE) for n in range(3)))
    file = doctor.data / "inbox.db"
    found = examine(file, now=now, check_seconds=5)
    assert found.contents.growth_per_day == pytest.approx(file.stat().st_size / 2, rel=0.01)
    assert examine(file, now=1_800_000_100.0, check_seconds=5).contents.growth_per_day is None


def test_the_growth_of_a_store_that_was_moved_from_postgresql(doctor):
    doctor.command_line.seed(*((f"msg_{n}", DeliveryState.DONE) for n in range(4)))
    file = doctor.data / "inbox.db"
    # Its sequences have gaps between the days.
    moved = apsw.Connection(str(file))
    for table in ("arrival", "ended"):
        moved.execute(f"UPDATE {table} SET sequence = sequence + (1 << 38) WHERE sequence > 2")
    moved.execute(f"UPDATE tally SET number = {1 << 38} WHERE name = 'removed'")
    moved.close()
    found = examine(file, now=1_800_000_000.0 + 2 * 86_400, check_seconds=5)
    # Half of the deliveries came in the last two days.
    assert found.contents.growth_per_day == pytest.approx(file.stat().st_size / 4, rel=0.05)


def test_tenants_whose_credentials_cannot_be_read(doctor, tmp_path):
    doctor.set("MultiTenant__Enabled", "true")
    doctor.monkeypatch.delenv("SDK__WEBHOOKS__SECRET")
    doctor.alone().one("tenants", "note", "and so no tenants")
    line = doctor.command_line
    assert (
        line("tenant", "add", "acme", "--name", "A", "--access-token-env", "ACME_TOKEN").status == 0
    )
    found = doctor.alone()
    found.one("tenants", "problem", "variable ACME_TOKEN")
    found.one("tenants", "problem", "neither the host nor any tenant")
    doctor.monkeypatch.setenv("ACME_TOKEN", "planted-token")
    key_file = tmp_path / "key"
    key_file.write_text("whsec_x\n")
    line("tenant", "add", "b", "--name", "B", "--webhook-secret-file", str(key_file))
    (tmp_path / "none").write_text(SECRET)
    line("tenant", "add", "c", "--name", "C", "--webhook-secret-file", str(tmp_path / "none"))
    (tmp_path / "none").unlink()
    found = doctor.alone()
    assert "planted-token" not in found.text
    found.one("tenants", "problem", "a webhook secret of its own")
    found.one("tenants", "problem", "No such file")
    key_file.write_text(SECRET)
    (tmp_path / "none").write_text(SECRET)
    doctor.alone().one("tenants", "ok", "3 active tenants")


def test_handlers_of_the_application(doctor, tmp_path):
    (tmp_path / "doctored_app.py").write_text(
        "import sdk_trio\nfrom sdk_trio.events import OrderPaidEvent\n"
        "handlers = sdk_trio.HandlerRegistry()\n"
        "@handlers.on(OrderPaidEvent)\nasync def paid(event): pass\n"
    )
    found = doctor.alone("--app", "doctored_app:handlers")
    assert "27 of 28" in found.one("handlers", "note", "have no handler")["what"]
    doctor.set("Webhooks__FailOnMissingHandlers", "true")
    doctor.alone("--app", "doctored_app:handlers").one("handlers", "problem", "does not start")
    (tmp_path / "settled_app.py").write_text(
        "from doctored_app import handlers\n"
        "known = (row.event_class for row in handlers.catalog.known)\n"
        "handlers.ignore(*(each for each in known if each.wire_type != 'order.paid'))\n"
    )
    doctor.alone("--app", "settled_app:handlers").one("handlers", "ok", "")
    wrong = doctor.alone("--app", "doctored_app:nothing")
    wrong.one("handlers", "problem", "no attribute 'nothing'")
    assert wrong.of("store") != []


def replicated(tmp_path, **keys):
    return Settings.from_mapping(
        {
            "Webhooks:Secret": SECRET,
            "MultiTenant:FileDb:Replication": {
                "UseReplication": True,
                "ReplicaTargetType": "LocalDisk",
                "LocalDisk": {"Path": str(tmp_path / "replica")},
                "AutoRegenerateOnTenantChange": True,
                "ConfigOutputPath": str(tmp_path / "replicator.yml"),
                "ReplicatorPidFilePath": str(tmp_path / "pid"),
                **keys,
            },
        },
        standalone=True,
    )


def test_the_replicator_and_its_process(tmp_path):
    def look(*, may_run=False, **keys):
        report = Report("replication")
        machine.check_replication(
            replicated(tmp_path, **keys), {"PATH": ""}, report, may_run=may_run
        )
        return [(f.level, f.what) for f in report.findings]

    level, what = look(ReplicatorPath=str(tmp_path / "none"))[0]
    assert (level, "not an executable file" in what) == ("warning", True)
    level, what = look(ReplicatorPath=str(tmp_path / "none"), Supervise=True)[0]
    assert (level, "nothing is replicated" in what) == ("problem", True)
    binary = tmp_path / "litestream"
    binary.write_text("#!/bin/sh\necho v9\n")
    binary.chmod(0o755)
    (_, unasked), (level, what) = look(ReplicatorPath=str(binary))
    assert "version was not checked" in unasked
    assert look(may_run=True, ReplicatorPath=str(binary))[0][1].endswith("version v9")
    assert (level, "there is no pid file" in what) == ("problem", True)
    (tmp_path / "pid").write_text("words")
    assert "does not contain a number" in look(ReplicatorPath=str(binary))[1][1]
    (tmp_path / "pid").write_text("-1")
    assert "which is not a process id" in look(ReplicatorPath=str(binary))[1][1]
    obeying = "import signal; signal.signal(1, print); print(flush=True); signal.pause()"
    command = [sys.executable, "-c", obeying]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (tmp_path / "pid").write_text(str(process.pid))
        assert look(ReplicatorPath=str(binary))[1][0] == "ok"
        process.kill()
    (_, child) = look(ReplicatorPath=str(binary), Supervise=True)
    assert child == ("ok", "true: the daemon runs the replicator as its child")


def test_replication_without_tenants_is_a_problem(doctor, tmp_path):
    replication = "MultiTenant__FileDb__Replication"
    doctor.set(f"{replication}__UseReplication", "true")
    doctor.set(f"{replication}__ReplicaTargetType", "LocalDisk")
    doctor.set(f"{replication}__LocalDisk__Path", tmp_path / "replica")
    doctor.set(f"{replication}__ConfigOutputPath", tmp_path / "replicator.yml")
    doctor.alone().one("settings", "problem", "needs tenants, whose databases are replicated")


async def test_a_bare_replicator_would_die_of_the_signal(tmp_path):
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                ["/bin/sleep", "30"],
                executable=_copy_of_sleep(tmp_path),
                check=False,
            )
        )
        (tmp_path / "pid").write_text(str(process.pid))
        report = Report("replication")
        machine.check_replication(replicated(tmp_path), {"PATH": ""}, report, may_run=False)
        process.kill()
    assert any("which SIGHUP would end" in f.what for f in report.findings), report.findings


def _copy_of_sleep(tmp_path):
    copy = tmp_path / "bin" / "litestream"
    copy.parent.mkdir()
    copy.write_bytes(Path("/bin/sleep").read_bytes())
    copy.chmod(stat.S_IRWXU)
    return copy
