"""The benchmark commands: what they return, not how fast anything is."""

from __future__ import annotations

import json

import pytest
from ondevice_wheel import WHEEL

from benchmarks.__main__ import main
from benchmarks.measure import Settings, measure
from benchmarks.models import MODELS, load
from benchmarks.ondevice import main as ondevice
from benchmarks.overhead import measure_overhead
from benchmarks.table import markdown
from benchmarks.training_session import main as training_session


@pytest.mark.stock_only
@pytest.mark.slow
def test_command_measures_each_strategy_in_turns(tmp_path, capsys):
    path = tmp_path / "results.json"
    report = main(["--models", "rl", "--strategies", "auto", "ort", "--quick", "--threads", "1", "--output", str(path)])

    assert json.loads(path.read_text()) == report
    assert {"cpu", "cores", "memory_gb"} <= set(report["machine"])
    assert {"python", "torch", "lightning"} <= set(report["versions"])
    assert any(name.startswith("onnxruntime") for name in report["versions"])
    assert [(r["model"], r["strategy"]) for r in report["results"]] == [("rl", "auto"), ("rl", "ort")]
    for result in report["results"]:
        assert "error" not in result
        assert len(result["turns_ms"]) == report["settings"]["rounds"] == 2
        assert min(result["turns_ms"]) <= result["step_ms"] <= max(result["turns_ms"])
        assert result["speed"]["least"] <= result["speed"]["median"] <= result["speed"]["most"]
        assert result["first_step_s"] > 0
        assert result["compile_s"] >= 0
        assert result["threads"] == 1
        # torch alone is larger than 100 MB
        assert 100 < result["peak_mb"] < 4000
    auto, ort = report["results"]
    assert auto["speed"] == {"median": 1, "least": 1, "most": 1}
    assert auto["compiler"] == {}
    assert ort["compiler"]["graphs"] == 1
    assert ort["compiler"]["in_torch"] == ort["compiler"]["graph_breaks"] == []
    assert 0 < ort["compiler"]["compile_seconds"] < ort["first_step_s"]
    assert "auto" in capsys.readouterr().out


@pytest.mark.stock_only
@pytest.mark.slow
def test_failure_of_a_child_is_a_result():
    (result,) = measure("no_such_model", ["auto"], Settings.quick())
    assert result["strategy"] == "auto"
    assert "No module named 'benchmarks.models.no_such_model'" in result["error"]


def test_markdown_shows_ratios_and_failures():
    auto = {"step_ms": 0.5, "compile_s": 0.0, "peak_mb": 400.0, "threads": 2, "compiler": {}}
    auto["speed"] = {"median": 1.0, "least": 1.0, "most": 1.0}
    ort = {"step_ms": 0.4, "compile_s": 1.5, "peak_mb": 440.0, "threads": 2}
    ort["speed"] = {"median": 1.25, "least": 1.2, "most": 1.3}
    ort["compiler"] = {"graphs": 2, "graphs_in_torch": 1, "graph_breaks": ["print"], "in_torch": []}
    report = {
        "date": "2030-01-01",
        "machine": {"cpu": "Abacus", "cores": 2, "memory_gb": 8.0, "load_average": 0.0},
        "versions": {"torch": "2.13.0"},
        "settings": {"strategies": ["auto", "ort"]},
        "results": [
            {"model": "rl", "strategy": "auto", **auto},
            {"model": "rl", "strategy": "ort", **ort},
            {"model": "mlp", "strategy": "ort", "error": "exit status 1"},
        ],
    }
    assert markdown(report).splitlines() == [
        "Abacus, 2 cores, 2 threads, 8.0 GB; load at the start 0.0; torch 2.13.0; 32-true; 2030-01-01",
        "",
        "| model | strategy | step | speed | range | compile | peak memory | graphs | breaks | fallbacks |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| rl | auto | 0.5 ms | 1.00x | 1.00-1.00 | 0.0 s | 400 MB (1.00x) |  |  |  |",
        "|  | ort | 0.4 ms | 1.25x | 1.20-1.30 | 1.5 s | 440 MB (1.10x) | 2 (1 in torch) | 1 | 0 |",
        "| mlp | ort | failed |  |  |  |  |  |  |  |",
    ]


def test_every_model_has_a_file():
    for name in MODELS:
        assert callable(load(name).make_module)
        assert callable(load(name).make_batch)


def test_overhead_is_split_into_parts():
    parts = measure_overhead(steps=5, warmup_steps=2)
    assert set(parts) == {"run", "call", "backward"}
    assert min(parts.values()) > 0


def test_ondevice_command_measures_the_contestants_in_turns(capsys):
    results = ondevice(["--models", "mlp", "--rounds", "1"])
    assert {"lightning_ort", "eager, fused AdamW"} <= set(results["mlp"])
    assert ("onnxruntime" in results["mlp"]) == WHEEL
    assert all(0 < value < 1e6 for value in results["mlp"].values())
    assert "lightning_ort" in capsys.readouterr().out


@pytest.mark.stock_only
def test_training_session_command_measures_both_in_turns(capsys):
    results = training_session(["--models", "mlp", "--rounds", "1", "--threads", "1"])
    assert list(results["mlp"]) == ["TrainingSession", "eager, fused Adam"]
    assert all(0 < value < 1e6 for value in results["mlp"].values())
    assert "TrainingSession" in capsys.readouterr().out
