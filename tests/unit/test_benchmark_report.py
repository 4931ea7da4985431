"""Figures of the benchmark: unreliable ones, remarks, and the page that shows them."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.delitem(sys.modules, "report", raising=False)
    return importlib.import_module("report")


def run(rate: float, *, used: float = 0.95, cpu_us: float = 100.0, errors: int = 0):
    return {
        "rate": rate,
        "cpu_us": cpu_us,
        "used": used,
        "errors": errors,
        "generator_used": 0.5,
        "count": 100,
        "slowest_ms": [rate],
    }


def kept(name: str, runs, *, quick: bool = False, cores: int = 2, disk: str = "ext4"):
    facts = {"cores": cores, "disk": disk}
    return {"groups": {name: {"runs": runs, "quick": quick, "facts": facts}}}


def test_one_idle_round_invalidates_the_rate_but_not_the_cost(report):
    found = kept(
        "limit",
        {
            "all": {
                "memory": [run(9000), run(2000, used=0.4)],
                "fastapi": [run(3000, cpu_us=300), run(3000, cpu_us=300)],
            }
        },
    )
    memory, fastapi = (report.Column("limit", "all", s, "rate") for s in ("memory", "fastapi"))
    assert memory.of(found) == []
    assert fastapi.of(found) == [3000, 3000]
    assert report.ratios(found, memory, fastapi) == []
    assert (
        "| store in memory: CPU of FastAPI without a store to ours | 3.00 (3.00-3.00) | >= 2.3 |"
        in report.goals(found)
    )
    (problem,) = report.problems(found)
    assert problem == (
        "limit, memory: its rate is not reliable: it used 0.40 of its core, and the generator 0.50 "
        "of its own"
    )


def test_a_server_that_waits_for_the_disk_may_have_an_idle_core(report):
    found = kept("full", {"all": {"inline": [run(5000, used=0.5)]}})
    assert report.Column("full", "all", "inline", "rate").of(found) == [5000]
    assert report.problems(found) == []


def test_a_response_other_than_200_is_reported(report):
    found = kept("full", {"all": {"inline": [run(9000, errors=3)]}})
    assert report.problems(found) == ["full, inline: 3 responses were not 200, or missing"]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"quick": True}, "quick"), ({"cores": 1}, "one core"), ({"disk": "tmpfs on x"}, "in memory")],
)
def test_figures_that_must_not_be_quoted_have_a_reason(report, change, word):
    (problem,) = report.problems(kept("full", {"all": {"inline": [run(9000)]}}, **change))
    assert word in problem


def test_a_high_quantile_is_of_all_rounds(report):
    calm = {"count": 1000, "slowest_ms": [float(10 - n) for n in range(10)]}
    rough = {"count": 1000, "slowest_ms": [float(100 - n) for n in range(10)]}
    every = sorted([*calm["slowest_ms"], *rough["slowest_ms"], *([0.0] * 1980)])
    assert report.pooled([calm, rough], 0.999) == every[1998]
    assert report.pooled([calm, rough], 0.995) == every[1990]


def test_the_page_and_its_chart_show_the_stored_figures(report):
    figures = json.loads(report.FIGURES.read_text())
    text = report.PAGE.read_text()
    advice = "run: python benchmarks/report.py"
    assert report.page_with(text, figures) == text, advice
    assert report.PICTURE.read_text() == report.draw(figures), advice
