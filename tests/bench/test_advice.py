"""Which strategy pays from which step on, and the table of results."""

from __future__ import annotations

import pytest
from rich.console import Console

from lightning_ort.bench.advice import advice, break_even, stretches
from lightning_ort.bench.table import caption, markdown_table, print_table, step_columns, step_rows

pytestmark = pytest.mark.stock_only


def result(strategy: str, step_ms: float, compile_s: float = 0.0, **further) -> dict:
    return {"model": "net", "strategy": strategy, "step_ms": step_ms, "compile_s": compile_s, **further}


AUTO = result("auto", 2.0)


@pytest.mark.parametrize(
    ("step_ms", "compile_s", "steps"),
    [(1.0, 3.0, 3000), (1.0, 0.0, 0), (2.0, 0.0, None), (2.5, 1.0, None), (1.7, 1.0, 3334)],
)
def test_break_even(step_ms, compile_s, steps):
    assert break_even(result("ort", step_ms, compile_s), AUTO) == steps


def test_stretches_follow_the_least_time_in_all():
    ort, compiled, never = result("ort", 1.5, 1.0), result("compile", 1.0, 30.0), result("ort+inductor", 1.49, 40.0)
    found = stretches([compiled, never, AUTO, ort])
    assert [(start, r["strategy"]) for start, r in found] == [(0, "auto"), (2000, "ort"), (58_000, "compile")]
    for start, r in found[1:]:
        # the time up to that step, of each
        total = {s["strategy"]: s["compile_s"] + start * s["step_ms"] / 1e3 for s in (AUTO, ort, compiled, never)}
        assert total[r["strategy"]] == pytest.approx(min(total.values()))


def test_what_is_within_the_noise_is_no_reason():
    assert stretches([AUTO, result("ort", 1.96, 0.5)]) == [(0, AUTO)]


def test_a_strategy_that_costs_nothing_first_is_used_from_the_first_step_on():
    ort = result("ort", 1.0)
    assert stretches([AUTO, ort]) == [(0, ort)]


def test_advice_in_words():
    failed = {"model": "net", "strategy": "compile", "error": "no compiler"}
    assert advice([AUTO, failed, result("ort", 1.0, 3.0)]) == (
        "Use strategy='ort' for more than 3,000 steps: they are 2.00x as fast as those of auto (auto 2 ms, ort 1 ms), "
        "which by then has made up for 3.0 s of compiling. For less: strategy='auto'."
    )
    assert advice([AUTO, result("ort", 1.0)]) == (
        "Use strategy='ort': its steps are 2.00x as fast as those of auto (auto 2 ms, ort 1 ms), from the first one on."
    )
    assert advice([AUTO, result("ort", 1.99, 1.0)]) == (
        "Use strategy='auto': no other one is faster by more than 3% (auto 2 ms, ort 1.99 ms a step)."
    )
    assert advice([AUTO, result("ort", 1.5, 1.0), result("compile", 1.0, 30.0)]).endswith(
        "For less: strategy='auto', strategy='ort' from step 2,000 on."
    )


@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        ({}, ""),
        ({"graphs": 2, "graphs_in_torch": 0, "as_they_are": ["validation_step"]}, "2"),
        ({"graphs": 1, "graphs_in_torch": 0, "as_they_are": ["training_step"]}, "1 (step as it is)"),
        ({"graphs": 2, "graphs_in_torch": 1, "as_they_are": ["training_step"]}, "2 (1 in torch, step as it is)"),
    ],
)
def test_table_shows_who_runs_the_graphs(compiler, told):
    row = result("ort", 0.4, 1.5, peak_mb=440.0, threads=2, speed=None, compiler=compiler)
    assert next(step_rows([row]))[8] == told


def test_printed_table_cuts_no_figure(capsys):
    compiler = {"graphs": 12, "graphs_in_torch": 11, "as_they_are": ["training_step"]}
    speed = {"median": 1.25, "least": 1.2, "most": 1.3}
    ort = result("ort", 12.5, 10.5, peak_mb=4400.0, threads=2, speed=speed, compiler=compiler)
    auto = result("auto", 13.5, peak_mb=4000.0, threads=2, speed=speed, compiler={})
    rows = list(step_rows([auto, ort]))
    machine = {"cpu": "Abacus", "cores": 2, "memory_gb": 8.0, "load_average": 0.0}
    report = {"date": "", "machine": machine, "versions": {}, "settings": {}, "results": [auto, ort]}
    print_table(step_columns(), rows, report, Console(width=120))
    printed = capsys.readouterr().out
    assert "…" not in printed
    for cell in (cell for row in rows for cell in row):
        assert all(word in printed for word in cell.split())


def test_table_shows_ratios_and_failures():
    auto = result("auto", 0.5, 0.0, peak_mb=400.0, threads=2, compiler={})
    auto["speed"] = {"median": 1.0, "least": 1.0, "most": 1.0}
    ort = result("ort", 0.4, 1.5, peak_mb=440.0, threads=2, speed={"median": 1.25, "least": 1.2, "most": 1.3})
    ort["compiler"] = {"graphs": 2, "graphs_in_torch": 1, "graph_breaks": ["print"], "in_torch": []}
    report = {
        "date": "2030-01-01",
        "machine": {"cpu": "Abacus", "cores": 2, "memory_gb": 8.0, "load_average": 0.0},
        "versions": {"torch": "2.13.0"},
        "settings": {"strategies": ["auto", "ort"]},
        "results": [auto, ort, {"model": "mlp", "strategy": "ort", "error": "exit status 1"}],
    }
    assert (
        caption(report)
        == "Abacus, 2 cores, 2 threads, 8.0 GB; load at the start 0.0; torch 2.13.0; 32-true; 2030-01-01"
    )
    assert markdown_table(step_columns(), list(step_rows(report["results"]))).splitlines() == [
        "| model | strategy | step | speed | range | compile | pays from | peak memory | graphs | breaks | fallbacks |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| net | auto | 0.5 ms | 1.00x | 1.00-1.00 | 0.0 s |  | 400 MB (1.00x) |  |  |  |",
        "|  | ort | 0.4 ms | 1.25x | 1.20-1.30 | 1.5 s | 15,000 | 440 MB (1.10x) | 2 (1 in torch) | 1 | 0 |",
        "| mlp | ort | failed |  |  |  |  |  |  |  |  |",
    ]
