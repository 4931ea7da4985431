"""Connection slots without sockets: the shares of descriptors, and evictions."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.server.limits import Limits, share_descriptors
from sdk_trio.server.slots import ConnectionSlots


@pytest.mark.parametrize(
    ("limit", "receiver", "admin"),
    [(64, 16, 8), (256, 144, 32), (1024, 768, 128), (65_536, 65_280, 128), (20, 1, 2)],
)
def test_descriptors_are_divided(limit, receiver, admin):
    shares = share_descriptors(limit)
    assert (shares.receiver, shares.admin) == (receiver, admin)


@given(st.integers(0, 2**31))
def test_the_shares_leave_descriptors_to_the_rest_of_the_program(limit):
    shares = share_descriptors(limit)
    assert min(shares.receiver, shares.admin, shares.refusals) >= 1
    if limit >= 64:
        assert limit - shares.receiver - shares.admin - 2 * shares.refusals >= 36


@attrs.define(eq=False)
class Client:
    """A connection: ``idle``, with an ``unfinished`` request, or ``busy``."""

    source: str | None
    state: str
    since: float
    gave_way: bool = False

    @property
    def idle_since(self):
        return self.since if self.state == "idle" and not self.gave_way else None

    @property
    def unfinished_since(self):
        return self.since if self.state == "unfinished" and not self.gave_way else None

    def evict(self):
        assert not self.gave_way
        self.gave_way = True


def connect(slots, clients, source, state, now):
    """Reserve a slot; an evicted connection frees its own at once."""
    before = list(clients)
    peer = (source, 1)
    if not slots.reserve(slots.source_of(peer), peer, now):
        assert not any(client.gave_way for client in clients)
        return None
    for client in before:
        if client.gave_way:
            clients.remove(client)
            slots.free(client, slots.source_of((client.source, 1)))
    client = Client(source, state, now)
    slots.register(client, slots.source_of((source, 1)))
    clients.append(client)
    return client


def slots_of(**limits):
    return ConnectionSlots(Limits(**limits), lambda host: None if host == "proxy" else host)


sources = st.sampled_from(["a", "b", "c", "d", "proxy"])
states = st.sampled_from(["idle", "unfinished", "busy"])


@given(
    st.integers(1, 12),
    st.booleans(),
    st.lists(st.tuples(sources, states, st.booleans()), max_size=60),
)
def test_slots_are_shared_fairly(most, evicts_own, arrivals):
    slots, clients = slots_of(connections=most, source_evicts_own=evicts_own), []
    for number, (source, state, finishes) in enumerate(arrivals):
        before = list(clients)
        count = sum(client.source == source for client in clients)
        client = connect(slots, clients, source, state, float(number))
        gone = [other for other in before if other not in clients]
        assert len(gone) <= 1
        assert len(clients) <= most
        half = max(1, most // 2)
        assert source == "proxy" or sum(it.source == source for it in clients) <= half
        if client is None:
            # There was no connection to evict.
            idle = any(it.state == "idle" for it in before)
            assert not idle or (count >= half and source != "proxy")
            assert len(before) == most or count >= half
        for ended in gone:
            assert ended.state != "busy"
            if ended.state == "unfinished" and ended.source != source:
                assert source == "proxy" or ended.source != "proxy"
                theirs = sum(it.source == ended.source for it in before)
                assert source == "proxy" or theirs >= count
        if finishes and clients:
            ended = clients.pop(0)
            slots.free(ended, slots.source_of((ended.source, 1)))


def test_the_oldest_request_of_the_largest_source_is_evicted_first():
    slots, clients = slots_of(connections=8), []
    for number, source in enumerate("aaabbc"):
        connect(slots, clients, source, "unfinished", float(number))
    idle = connect(slots, clients, "c", "idle", 6.0)
    connect(slots, clients, "proxy", "unfinished", 7.0)
    ended = []
    for number, source in enumerate("defgh"):
        before = list(clients)
        assert connect(slots, clients, source, "busy", 10.0 + number) is not None
        ended += [client for client in before if client not in clients]
    assert ended[0] is idle
    assert [(client.source, client.since) for client in ended[1:]] == [
        ("a", 0.0),
        ("a", 1.0),  # two of "a" and of "b" were left: the older one
        ("b", 3.0),
        ("a", 2.0),
    ]
    assert connect(slots, clients, "proxy", "busy", 20.0) is not None


def test_a_client_that_continues_in_time_keeps_its_slot():
    slots, clients = slots_of(connections=2, sweep_seconds=0.5), []
    first = connect(slots, clients, "a", "unfinished", 0.0)
    second = connect(slots, clients, "b", "unfinished", 1.0)
    assert connect(slots, clients, "c", "unfinished", 2.0) is not None
    assert first not in clients
    second.since = 2.1  # it has finished a request and begun another one
    assert connect(slots, clients, "d", "busy", 2.2) is None
    assert connect(slots, clients, "d", "busy", 2.8) is not None


def test_a_busy_connection_may_be_evicted_later():
    """Candidates are listed once in a sweep, and a client that pipelines is busy at times."""
    slots, clients = slots_of(connections=4), []
    for number, source in enumerate("aabb"):
        connect(slots, clients, source, "unfinished", float(number))
    assert connect(slots, clients, "c", "busy", 10.0) is not None
    waiting = clients[:-1]
    for client in waiting:
        client.state = "busy"
    assert connect(slots, clients, "d", "busy", 10.0) is None
    for client in waiting:
        client.state = "unfinished"
    assert connect(slots, clients, "d", "busy", 10.0) is not None


def test_two_sources_do_not_evict_each_other_alternately():
    slots, clients = slots_of(connections=4), []
    for number, source in enumerate("aabb"):
        connect(slots, clients, source, "unfinished", float(number))
    assert connect(slots, clients, "c", "busy", 10.0) is not None
    assert [client.source for client in clients] == ["a", "b", "b", "c"]
    assert connect(slots, clients, "a", "unfinished", 20.0) is None
