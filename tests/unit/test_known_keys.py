"""The filter of known keys never takes a known one for a new one, and rarely the other way."""

from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.storage import known_keys as known_keys_module
from sdk_trio.storage.known_keys import KnownKeys

HASHES = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(HASHES), st.lists(HASHES))
def test_added_keys_may_be_reported_forever(first, later):
    keys = KnownKeys()
    added = set()
    for hashed in (*first, *later):
        # An added key is never reported as new; a key reported as new was not added.
        assert not (keys.add(hashed) and hashed in added)
        added.add(hashed)
    assert all(keys.may_hold(hashed) for hashed in added)
    assert keys.added <= len(added)


def test_it_grows_keeps_its_keys_and_is_rarely_wrong(monkeypatch):
    monkeypatch.setattr(known_keys_module, "FIRST_GENERATION", 256)
    keys = KnownKeys()
    hashes = [hash(f"msg_{number}") for number in range(20_000)]
    taken_for_known = sum(not keys.add(hashed) for hashed in hashes)
    assert all(keys.may_hold(hashed) for hashed in hashes)
    strangers = [hash(f"other_{number}") for number in range(20_000)]
    wrong = sum(keys.may_hold(hashed) for hashed in strangers)
    # Seven full generations of 0.5 %, each.
    assert wrong < 20_000 * 0.05
    assert taken_for_known < 20_000 * 0.05
