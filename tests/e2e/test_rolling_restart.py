"""Restarts under load: no connection is refused, and all events answered 200 have run."""

import os
import socket

import pytest
import trio
from support.ports import free_port
from support.programs import program
from support.senders import Senders
from support.service_manager import service_manager
from support.waiting import until

#: Restarts of one run; a full-size run sets SDK_TEST_RESTARTS=10.
RESTARTS = int(os.environ.get("SDK_TEST_RESTARTS", "2"))


async def all_run(manager, senders):
    """Wait until everything that was answered 200 has been handled, then stop the last daemon."""
    await until(lambda: set(senders.accepted) <= set(manager.handled()))


async def test_with_an_inherited_socket_no_delivery_is_refused_or_lost(tmp_path):
    """The activator holds the socket: while no daemon runs, connections wait in its backlog."""
    with service_manager(tmp_path) as manager, socket.create_server(("127.0.0.1", 0)) as held:
        manager.settings["Server:Bind:0"] = "fd:web"
        daemon = manager.start(sockets={"web": held})
        senders = Senders(await manager.url())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(senders.run)
            await senders.wait_for(100)
            for _ in range(RESTARTS):
                assert await manager.stop(daemon) == 0
                daemon = manager.start(sockets={"web": held})
                await senders.wait_for(100)
            senders.stop()
        await all_run(manager, senders)
        assert await manager.stop(daemon) == 0
    # Some get 503 while the old process drains; none is refused a connection.
    assert set(senders.answers) <= {200, 503, "ConnectionError"}
    assert senders.answers[200] == len(senders.accepted) == len(set(senders.accepted))
    assert len(senders.accepted) > 100 * RESTARTS
    assert len(manager.logged("runtime.started")) == RESTARTS + 1


NGINX = """
daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log {directory}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
    upstream receivers {{ {servers} }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://receivers; proxy_next_upstream off; }}
    }}
}}
"""


def configure(directory, port, addresses):
    servers = " ".join(f"server {address.removeprefix('http://')};" for address in addresses)
    text = NGINX.format(directory=directory, servers=servers, port=port)
    (directory / "nginx.conf").write_text(text)


async def wait_until_reachable(port):
    with trio.fail_after(60):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            except OSError:
                await trio.sleep(0.02)
            else:
                return


async def test_behind_a_balancer_that_watches_readiness_every_delivery_is_answered_200(tmp_path):
    """The delay is what the balancer needs to notice: nginx tries no second receiver here."""
    nginx, port = program("nginx"), free_port()
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with service_manager(places[0]) as first, service_manager(places[1]) as second:
        for manager in (first, second):
            manager.settings["Server:ShutdownDelaySeconds"] = "3"
        daemons = [first.start(), second.start()]
        addresses = [await first.url(), await second.url()]
        configure(tmp_path, port, addresses)
        command = [nginx, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
        async with trio.open_nursery() as nursery:
            balancer = await nursery.start(trio.run_process, command)
            try:
                await wait_until_reachable(port)
                senders = Senders(f"http://127.0.0.1:{port}")
                async with trio.open_nursery() as sending:
                    sending.start_soon(senders.run)
                    await senders.wait_for(50)
                    for number, manager in enumerate((first, second)):
                        # What a balancer's probe sees: STOPPING comes with /readyz failing.
                        place = len(manager.messages)
                        daemons[number].terminate()
                        await manager.said("STOPPING=1", after=place)
                        configure(tmp_path, port, [addresses[1 - number]])
                        await trio.run_process([*command, "-s", "reload"])
                        assert await manager.ended(daemons[number]) == 0
                        daemons[number] = manager.start()
                        addresses[number] = await manager.url()
                        configure(tmp_path, port, addresses)
                        await trio.run_process([*command, "-s", "reload"])
                        await senders.wait_for(50)
                    senders.stop()
                await until(lambda: set(senders.accepted) <= {*first.handled(), *second.handled()})
                assert [await first.stop(daemons[0]), await second.stop(daemons[1])] == [0, 0]
            finally:
                balancer.terminate()
    assert senders.answers == {200: len(senders.accepted)}
    assert len(first.logged("runtime.leaving")) == 2


@pytest.mark.parametrize("passed", ["another", None])
async def test_a_socket_that_was_not_passed_is_named(tmp_path, passed):
    with service_manager(tmp_path) as manager, socket.create_server(("127.0.0.1", 0)) as held:
        manager.settings["Server:Bind:0"] = "fd:web"
        daemon = manager.start(sockets={passed: held} if passed else None)
        assert await manager.ended(daemon) == 78
        (line,) = (tmp_path / "log").read_text().splitlines()[1:]
        assert "Sdk:Server:Bind: the service manager passed no socket with the name 'web'" in line
