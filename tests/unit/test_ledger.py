"""The ledger of the long runs detects violated guarantees."""

import attrs
from support.ledger import Account, Again, account, by_process, runs_of

DEATHS = {1: 1000}


def kept(*lines: str, states=None, acknowledged=None, faults=(), deaths=DEATHS) -> Account:
    runs = runs_of(lines, deaths, last=10_000)
    found = {run.webhook_id: "done" for run in runs} if states is None else states
    ids = set(found) if acknowledged is None else acknowledged
    return account(ids, runs, found, deaths=deaths, faults=faults)


def test_single_runs_keep_every_guarantee():
    found = kept("10 start a 1", "20 finish a 1", "30 start b 2", "40 finish b 2")
    assert not found.broken
    assert found == attrs.evolve(found, acknowledged=2, states={"done": 2}, again=[])


def test_unknown_and_unfinished_events_are_lost():
    for states in ({}, {"a": "received"}, {"a": "running"}, {"a": "retrying"}):
        found = kept("10 start a 1", "20 finish a 1", states=states, acknowledged={"a"})
        assert found.lost == ["a"]
        assert found.broken
    for state in ("dead", "parked"):
        assert not kept(states={"a": state}).broken
    assert not kept(states={"a": "received"}, acknowledged=set()).broken


def test_an_event_that_is_done_without_a_finished_run_is_found():
    for lines in ([], ["10 start a 1"], ["10 start a 1", "20 stop a 1"]):
        found = kept(*lines, states={"a": "done"})
        assert found.never_finished == ["a"]
        assert found.broken


def test_a_run_after_a_finished_one_is_counted_with_its_distance_from_the_death():
    lines = ("10 start a 1", "20 finish a 1", "2000 start a 2", "2010 finish a 2")
    found = kept(*lines)
    assert found.again == [Again("a", 980 / 1e6, faulty=False)]
    assert not found.broken
    assert kept(*lines, faults=[(15, 25)]).again == [Again("a", 980 / 1e6, faulty=True)]
    assert kept(*lines, faults=[(1500, 1600)]).again == [Again("a", 980 / 1e6, faulty=False)]


def test_a_run_after_a_finished_one_without_a_death_needs_a_fault():
    lines = ("10 start a 2", "20 finish a 2", "30 start a 2", "40 finish a 2")
    found = kept(*lines)
    assert found.again_without_reason == [Again("a", None, faulty=False)]
    assert found.broken
    assert not kept(*lines, faults=[(5, 25)]).broken


def test_a_pid_that_the_system_gives_to_a_later_process_is_another_process():
    lines = ["10 start a 7", "2000 start a 8", "2010 finish a 8", "3000 start b 7"]
    numbered, deaths = by_process(lines, [(7, 1000), (8, 2500), (7, 4000)])
    assert deaths == {0: 1000, 1: 2500, 2: 4000}
    assert not kept(*numbered, states={"a": "done"}, deaths=deaths).broken
    # By the pid alone, the first run of a would have ended with the second process that had this
    # pid.
    assert kept(*lines, states={"a": "done"}, deaths={7: 4000, 8: 2500}).overlapping == ["a"]


def test_two_runs_of_one_id_at_a_time_overlap():
    beside = kept("10 start a 2", "15 start a 3", "20 finish a 2", "30 finish a 3")
    assert beside.overlapping == ["a"]
    assert beside.broken
    same_process = kept("10 start a 2", "15 start a 2", "20 finish a 2")
    assert same_process.overlapping == ["a"]
    # A run ends with its process at the latest; the next one runs after that.
    assert not kept("10 start a 1", "1000 start a 2", "1010 finish a 2").broken
    assert kept("10 start a 1", "999 start a 2", "1010 finish a 2").overlapping == ["a"]


def test_lanes_that_keep_their_order():
    assert not kept(
        "10 start lane1_0 1",
        "12 stop lane1_0 1",
        "15 start lane2_0 1",
        "20 start lane1_0 1",
        "30 finish lane1_0 1",
        "30 start lane1_1 1",
        "35 finish lane2_0 1",
        "2000 start lane1_1 2",
        "2001 finish lane1_1 2",
        "2002 start lane1_2 2",
        "2003 finish lane1_2 2",
    ).broken


def test_lanes_that_do_not():
    for lines, wrong in [
        (["10 start lane1_1 2", "20 finish lane1_1 2", "30 start lane1_0 2", "40 finish lane1_0 2"],
         ["lane1_1", "lane1_0"]),
        (["10 start lane1_0 2", "20 start lane1_1 2", "30 finish lane1_0 2", "40 finish lane1_1 2"],
         ["lane1_1"]),
        (["10 start lane1_0 2", "15 stop lane1_0 2", "20 start lane1_1 2", "30 finish lane1_1 2",
          "40 start lane1_0 2", "50 finish lane1_0 2"], ["lane1_1", "lane1_0"]),
        (["10 start lane1_0 1", "20 finish lane1_0 1", "30 start lane1_1 1", "40 finish lane1_1 1",
          "2000 start lane1_0 2", "2010 finish lane1_0 2"], ["lane1_0"]),
    ]:  # fmt: skip
        found = kept(*lines)
        assert found.out_of_order == wrong
        assert found.broken


def test_a_dead_letter_lets_its_lane_continue():
    found = kept(
        "10 start lane1_0 2",
        "15 stop lane1_0 2",
        "20 start lane1_1 2",
        "30 finish lane1_1 2",
        states={"lane1_0": "dead", "lane1_1": "done"},
    )
    assert not found.broken
