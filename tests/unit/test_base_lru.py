"""Only the least recently used value is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base.lru import Lru


def test_the_least_recently_used_is_evicted():
    lru: Lru[str, int] = Lru(2)
    lru["a"] = 1
    lru["b"] = 2
    assert lru["a"] == 1
    lru["c"] = 3
    assert "b" not in lru
    assert lru.get("b") is None
    assert (lru.get("a"), lru.get("c")) == (1, 3)


def test_a_key_that_is_not_there():
    lru: Lru[str, int] = Lru(1)
    with pytest.raises(KeyError):
        lru["a"]
    lru.discard("a")
    assert len(lru) == 0


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="capacity of 1 or more"):
        Lru(0)


keys = st.integers(0, 5)
steps = st.one_of(
    st.tuples(st.just("set"), keys),
    st.tuples(st.sampled_from(["get", "look", "in", "discard"]), keys),
    st.tuples(st.just("clear"), st.just(0)),
)


@given(st.integers(1, 4), st.lists(steps, max_size=60))
def test_it_does_what_a_list_in_the_order_of_use_does(capacity, steps):
    lru: Lru[int, int] = Lru(capacity)
    model: list[tuple[int, int]] = []  # the least recently used first
    for value, (step, key) in enumerate(steps):
        held = dict(model)
        if step == "set":
            lru[key] = value
            model = [pair for pair in model if pair[0] != key] + [(key, value)]
            model = model[-capacity:]
        elif step in ("get", "look"):
            if step == "get":
                assert lru.get(key) == held.get(key)
            elif key in held:
                assert lru[key] == held[key]
            if key in held:
                model = [pair for pair in model if pair[0] != key] + [(key, held[key])]
        elif step == "in":
            assert (key in lru) == (key in held)
        elif step == "discard":
            lru.discard(key)
            model = [pair for pair in model if pair[0] != key]
        else:
            lru.clear()
            model = []
        assert len(lru) == len(model) <= capacity
        assert all(key in lru for key, _ in model)
