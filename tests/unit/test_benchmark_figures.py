"""What the benchmark leaves out: rates of servers that were waiting for somebody else."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    for name in ("figures", "peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("figures")


def run(rate: float, *, used: float = 0.95, cpu_us: float = 100.0, crowded: bool = False):
    return {
        "rate": rate,
        "cpu_us": cpu_us,
        "used": used,
        "crowded": crowded,
        "errors": 0,
        "generator_used": 0.5,
    }


def test_one_idle_round_refuses_the_rate_and_leaves_the_cost(figures):
    runs = {
        "inline": [run(9000), run(2000, used=0.4)],
        "fastapi": [run(3000, cpu_us=300), run(3000, cpu_us=300)],
    }
    assert figures.column(runs, "inline", "rate") == []
    assert figures.ratios(runs, ("inline", "rate"), ("fastapi", "rate")) == []
    assert "| inline to FastAPI | - | 3.00 (3.00-3.00) | >= 3 |" in figures.goals(runs)
    (problem,) = figures.problems(runs, processes=1)
    assert problem.startswith("inline: rate refused")


def test_who_waits_for_the_disk_may_leave_its_core_idle(figures):
    runs = {"durable": [run(5000, used=0.5)]}
    assert figures.column(runs, "durable", "rate") == [5000]
    assert figures.problems(runs, processes=1) == []


def test_a_generator_on_the_servers_cores_refuses_every_rate_once(figures):
    runs = {"durable": [run(5000, crowded=True)], "inline": [run(9000, crowded=True)]}
    assert figures.column(runs, "durable", "rate") == figures.column(runs, "inline", "rate") == []
    assert figures.column(runs, "inline", "cpu_us") == [100.0]
    (problem,) = figures.problems(runs, processes=2)
    assert "more cores" in problem


def test_an_answer_that_is_no_200_is_named(figures):
    runs = {"node": [{**run(9000), "errors": 3}]}
    assert figures.problems(runs, processes=1) == ["node: 3 answers were not 200"]
