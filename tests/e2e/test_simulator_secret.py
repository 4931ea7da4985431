"""The simulator of a real process: whom it answers, and which secret it signs with."""

import hmac
import json
import signal
import socket

import httpx
import pytest
from support.daemon import Place
from support.deliveries import SECRET

from sdk_trio.testing import sign_delivery
from sdk_trio.webhooks.signature import sign

SIMULATE = "/test/webhook/simulate/order.paid"
OWN_SECRET = "whsec_ZYi2SptnRGqVWE69YmXzhwe3HB3GHULU"  # a test value


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.environ["SDK_ENVIRONMENT"] = "Development"
    place.environ["SIMULATED"] = OWN_SECRET
    return place


def own_secret(place):
    place.environ["SDK__SIMULATOR__SECRETENVVAR"] = "SIMULATED"
    return place


def simulation_mark_of(secret):
    return hmac.new(secret.encode(), b"simulated", "sha256").hexdigest()


def outer_address():
    """An address of this machine that is not its loopback, or a skip; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        return probe.getsockname()[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_simulator_that_was_given_no_secret_signs_with_one_of_its_own(place, processes):
    reload = f"--set=Sdk:Server:Processes={processes}"
    with place.daemon(reload) as daemon:
        for _ in range(2):
            simulated = [
                httpx.post(daemon.receiver + SIMULATE, timeout=60).json() for _ in range(6)
            ]
            assert [each["status"] for each in simulated] == [200] * 6
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for("runtime.reloaded")
        assert httpx.post(daemon.receiver + SIMULATE + "x").status_code == 404
    # The configured secret has signed none of them.
    shown = place.run("events", "show", simulated[0]["webhookId"], "--format", "json")
    raw = json.loads(shown.stdout)["raw"].encode()
    signature = sign(SECRET, simulated[0]["webhookId"], simulated[0]["timestamp"], raw)
    assert simulated[0]["signature"] != signature


@pytest.mark.parametrize("fast_path", ["true", "false"])
def test_a_simulated_delivery_arrives_as_the_settings_demand_and_others_do_not(place, fast_path):
    del place.environ["SDK__WEBHOOKS__REQUIREHTTPS"]
    words = (
        "--set=Sdk:Webhooks:AllowedSourceIpRanges=203.0.113.0/24",
        f"--set=Sdk:Server:FastPath={fast_path}",
    )
    with own_secret(place).daemon(*words) as daemon, httpx.Client(timeout=60) as client:
        assert client.post(daemon.receiver + SIMULATE).json()["status"] == 200
        signed = sign_delivery("order.paid", secret=OWN_SECRET)
        url = f"{daemon.receiver}/hooks/sdk"
        mark = simulation_mark_of(OWN_SECRET)
        for value in (None, "", "1", OWN_SECRET, mark[:-1], mark.upper()):
            headers = {**signed.headers, **({} if value is None else {"sdk-simulated": value})}
            answer = client.post(url, content=signed.body, headers=headers)
            assert (answer.status_code, answer.text) == (400, '{"error":"invalid webhook"}')
        # The exemption of one request on a connection is not the next one's.
        headers = {**signed.headers, "sdk-simulated": mark}
        assert client.post(url, content=signed.body, headers=headers).status_code == 200
        assert client.post(url, content=signed.body, headers=signed.headers).status_code == 400
    place.environ["SDK_ENVIRONMENT"] = "Production"
    with place.daemon(*words) as daemon:
        headers = {**signed.headers, "sdk-simulated": mark}
        url = f"{daemon.receiver}/hooks/sdk"
        assert httpx.post(url, content=signed.body, headers=headers).status_code == 400


def test_a_secret_of_its_own_is_accepted_by_this_receiver_and_by_none_of_production(place):
    with own_secret(place).daemon() as daemon:
        simulated = httpx.post(daemon.receiver + SIMULATE).json()
        assert simulated["status"] == 200
        assert httpx.get(f"{daemon.admin}/livez").status_code == 200
    body = place.run("events", "show", simulated["webhookId"], "--format", "json")
    raw = json.loads(body.stdout)["raw"].encode()
    headers = {
        "webhook-id": simulated["webhookId"],
        "webhook-timestamp": str(simulated["timestamp"]),
        "webhook-signature": simulated["signature"],
    }
    place.environ["SDK_ENVIRONMENT"] = "Production"
    with place.daemon() as daemon:
        url = f"{daemon.receiver}/hooks/sdk"
        assert httpx.post(url, content=raw, headers=headers).status_code == 400
        assert httpx.post(daemon.receiver + SIMULATE).status_code == 404


def test_the_secret_of_dev_is_signed_with_and_a_configured_one_is_not(place):
    with place.daemon(start=("dev",)) as daemon:
        simulated = httpx.post(daemon.receiver + SIMULATE).json()
    assert simulated["status"] == 200
    headers = place.directory / "headers"
    headers.write_text(
        f"webhook-id: {simulated['webhookId']}\nwebhook-timestamp: {simulated['timestamp']}\n"
        f"webhook-signature: {simulated['signature']}\n"
    )
    shown = place.run("events", "show", simulated["webhookId"], "--format", "json")
    (place.directory / "body").write_text(json.loads(shown.stdout)["raw"])
    place.environ["DEV"] = (place.data / "dev-secret").read_text().strip()
    place.environ["CONFIGURED"] = SECRET
    for name, status in (("DEV", 0), ("CONFIGURED", 1)):
        verified = place.run("verify", "--secret-env", name, "--headers", "headers", "body")
        assert verified.returncode == status, verified.stdout + verified.stderr


def test_the_secret_of_another_installation_is_refused_at_the_start(place):
    place.environ["SIMULATED"] = SECRET
    found = own_secret(place).checked()
    [problem] = [f for f in found if f["level"] == "error"]
    assert problem["key"] == "Sdk:Simulator:SecretEnvVar"
    assert "use a secret of its own" in problem["message"]


def test_a_receiver_needs_no_other_secret_in_development(place):
    del place.environ["SDK__WEBHOOKS__SECRET"]
    assert own_secret(place).checked() == []
    found = place.checked(SDK_ENVIRONMENT="Production")
    assert [f["key"] for f in found] == ["Sdk:Webhooks:Secret"]


HOSTILE = {
    "a rebound name": ({"host": "evil.example"}, 403),
    "a foreign page": ({"origin": "https://evil.example"}, 403),
    "a page without origin": ({"origin": "null"}, 403),
    "another port's page": ({"origin": "http://127.0.0.1:1"}, 403),
    "a browser's word": ({"sec-fetch-site": "cross-site"}, 403),
    "a proxy": ({"x-forwarded-for": "198.51.100.1"}, 403),
    "another proxy": ({"forwarded": "for=198.51.100.1"}, 403),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "a text": ({"content-type": "text/plain"}, 415),
}


def test_it_answers_this_machine_alone(place):
    place.environ["SDK__SERVER__BIND"] = "0.0.0.0:0"
    with own_secret(place).daemon() as daemon:
        port = daemon.receiver.rpartition(":")[2]
        url = f"http://127.0.0.1:{port}{SIMULATE}"
        for name, (headers, status) in HOSTILE.items():
            answer = httpx.post(url, headers=headers, content=b"{}")
            assert (name, answer.status_code) == (name, status)
            assert "signature" not in answer.text
        for headers in (
            {"content-type": "application/json; charset=utf-8"},
            {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"},
            {"origin": f"http://127.0.0.1:{port}", "sec-fetch-site": "same-origin"},
        ):
            assert httpx.post(url, headers=headers, content=b"{}").json()["status"] == 200
        # From elsewhere there seems to be none.
        far = httpx.post(
            f"http://{outer_address()}:{port}{SIMULATE}", headers={"host": "localhost"}
        )
        assert (far.status_code, far.json()) == (404, {"error": "not found"})
        reasons = {entry["reason"] for entry in daemon.logged("webhook.simulation_refused")}
        assert len(reasons) == 5
