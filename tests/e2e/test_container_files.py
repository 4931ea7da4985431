"""The files below ``examples/container`` and ``examples/kubernetes``, without an engine.

Linters and the published schemas read them, and what the image would run is run: as its user, on
a read-only root, as process 1, with its environment.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from support.deliveries import SECRET
from support.programs import program
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.cli.receiver import LIVE, READY
from sdk_trio.config import Settings
from sdk_trio.config.sources import SECRETS_DIRECTORY

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCKERFILE = EXAMPLES / "container" / "Dockerfile"
COMPOSE = EXAMPLES / "container" / "compose.yaml"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))


def passes(*command):
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_linter_finds_nothing_in_the_dockerfile():
    passes(program("hadolint"), DOCKERFILE)


def test_the_compose_file_fits_its_schema():
    passes(program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifests_fit_the_schemas_of_kubernetes(manifest):
    passes(program("kubernetes-validate"), "--strict", manifest)


def manifest(name):
    return yaml.safe_load((EXAMPLES / "kubernetes" / f"{name}.yaml").read_text())


def test_the_pod_may_do_little_and_is_given_time_to_drain():
    """The profile "restricted" of the Pod Security Standards, and a root that is read-only."""
    spec = manifest("statefulset")["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 1  # SQLite
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    delay = float(variables["SDK__SERVER__SHUTDOWNDELAYSECONDS"])
    drain = Settings().webhooks.graceful_drain_timeout_seconds
    assert pod["terminationGracePeriodSeconds"] > delay + drain + 5
    # The delay is longer than the probe needs to notice.
    assert delay > container["readinessProbe"]["periodSeconds"]
    paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")]
    assert paths == [LIVE, READY]
    upgrade = Settings().multi_tenant.single_tenant_upgrade.max_run_duration.total_seconds()
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > upgrade
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["secrets"] == SECRETS_DIRECTORY
    assert mounts["data"] == instruction("VOLUME")[0]


def test_the_manifests_know_each_other():
    stateful, service, policy = map(manifest, ("statefulset", "service", "networkpolicy"))
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"web": 8080, "admin": 8081}
    # The admin address is in no Service, and open to one namespace only.
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["web"]
    user, group = instruction("USER").split(":")
    context = stateful["spec"]["template"]["spec"]["securityContext"]
    assert [str(context["runAsUser"]), str(context["runAsGroup"])] == [user, group]


def test_the_compose_service_may_do_little_and_is_given_time_to_drain():
    service = yaml.safe_load(COMPOSE.read_text())["services"]["receiver"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert float(service["stop_grace_period"].removesuffix("s")) > 35
    for secret in service["secrets"]:
        assert re.fullmatch(r"Sdk__\w+", secret["target"])


def instruction(name):
    """The arguments of an instruction of the last stage; JSON where it is in that form."""
    stage = DOCKERFILE.read_text().replace("\\\n", " ").split("\nFROM ")[-1]
    (text,) = re.findall(rf"^{name} (.*)$", stage, re.MULTILINE)
    text = text.replace("${UID}", re.search(r"ARG UID=(\d+)", stage)[1])
    return json.loads(text) if text.startswith("[") else text


def health_command():
    (text,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    return json.loads(text)


#: Runs as process 1: a data directory of its own, everything else read-only, another user.
CONTAINER = """
set -e
mount -t tmpfs -o mode=0700,uid={user},gid={user} tmpfs "$DATA"
mount -o remount,bind,ro /
cd "$APP"
exec setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs --bounding-set=-all \
    --inh-caps=-all "$@"
"""


@pytest.fixture
def place():
    """A directory that other users can reach, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="sdk-trio-container-"))
    directory.chmod(0o755)
    for name in ("data", "app", "secrets"):
        (directory / name).mkdir()
        (directory / name).chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.may_skip  # only root may build a container
def test_the_image_s_command_works_as_its_user_on_a_read_only_root(place):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may build a container")
    user = instruction("USER").partition(":")[0]
    sandbox = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    sandbox += ["sh", "-c", CONTAINER.format(user=user), "sh"]
    shutil.copy(EXAMPLES / "container" / "application.py", place / "app")
    (place / "secrets" / "Sdk__Webhooks__Secrets__0").write_text(SECRET)
    environment = {
        **os.environ,
        **dict(pair.split("=", 1) for pair in instruction("ENV").split() if "PATH" not in pair[:4]),
        "DATA": str(place / "data"),
        "APP": str(place / "app"),
        "CREDENTIALS_DIRECTORY": str(place / "secrets"),
        # In an image it has its own root and its own ports.
        "SDK__STORAGE__PATH": str(place / "data"),
        "SDK__SERVER__BIND__0": "127.0.0.1:0",
        "SDK__ADMIN__BIND": "127.0.0.1:0",
    }
    if subprocess.run([*sandbox, "true"], env=environment, capture_output=True).returncode:
        pytest.skip("this machine cannot build containers")
    (name,) = instruction("ENTRYPOINT")
    assert name == health_command()[0] == "sdk-trio"
    command = [sys.executable, "-m", "sdk_trio"]
    with (place / "log").open("w") as log:
        container = subprocess.Popen(
            [*sandbox, *command, *instruction("CMD"), "--standalone"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        started = wait_for(place / "log", "runtime.started", container)
        (admin,) = started["admin"]
        words = [*command, *health_command()[1:], "--url", admin]
        assert subprocess.run(words, env=environment, timeout=PATIENCE_SECONDS).returncode == 0
        assert subprocess.run([*words, "--ready"], timeout=PATIENCE_SECONDS).returncode == 0
        daemon = children_of(container.pid)
        subprocess.run(["kill", "-TERM", *daemon], check=True)
        assert container.wait(PATIENCE_SECONDS) == 0
        assert wait_for(place / "log", "runtime.stopped")["persisted"] == 0
    finally:
        container.kill()
        container.wait()


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_for(log, event, process=None):
    def said():
        ended = process is not None and process.poll() is not None
        for line in log.read_text().rpartition("\n")[0].splitlines():
            if line.startswith("{") and json.loads(line)["event"] == event:
                return json.loads(line)
        assert not ended, log.read_text()
        return None

    return wait_until(said, log.read_text)
