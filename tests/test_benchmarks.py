"""The benchmark commands: what they return, not how fast anything is."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import types
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from ondevice_wheel import WHEEL
from torch.utils.data import DataLoader

from benchmarks import curves, page, scaling
from benchmarks.__main__ import main
from benchmarks.data_parallel import main as data_parallel
from benchmarks.everyday import PROJECTS
from benchmarks.everyday import load as load_project
from benchmarks.freed_memory import main as freed_memory
from benchmarks.models import MODELS, load
from benchmarks.ondevice import main as ondevice
from benchmarks.overhead import measure_overhead
from benchmarks.panels import digest, panels_of
from benchmarks.parts import STEPS, columns_of, rows_of, run_part
from benchmarks.project import run
from benchmarks.projects import of_a_minute
from benchmarks.training_session import main as training_session
from lightning_ort.bench.child import Turns
from lightning_ort.bench.measure import Settings

pytestmark = pytest.mark.either_build


@pytest.mark.slow
def test_command_measures_each_strategy_in_turns(tmp_path, capsys):
    options = ["--only", "models", "--models", "rl", "--strategies", "auto", "ort", "--precision", "32-true"]
    (report,) = main([*options, "--quick", "--threads", "1", "--output", str(tmp_path)])

    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == report and path.name == page.path_of(report).name
    assert report["part"] == "models"
    assert {"cpu", "cores", "memory_gb"} <= set(report["machine"])
    assert {"python", "torch", "lightning"} <= set(report["versions"])
    assert any(name.startswith("onnxruntime") for name in report["versions"])
    assert [(r["model"], r["strategy"]) for r in report["results"]] == [("rl", "auto"), ("rl", "ort")]
    for result in report["results"]:
        assert "error" not in result
        assert len(result["turns_ms"]) == report["settings"]["rounds"] == 2
        assert min(result["turns_ms"]) <= result["step_ms"] <= max(result["turns_ms"])
        # whatever the machine did meanwhile, times and speeds say the same
        assert result["step_ms"] * result["speed"]["median"] == pytest.approx(median(report["results"][0]["turns_ms"]))
        assert result["speed"]["least"] <= result["speed"]["median"] <= result["speed"]["most"]
        assert result["first_step_s"] > 0
        assert result["compile_s"] >= 0
        assert result["threads"] == 1
        # torch alone is larger than 100 MB
        assert 100 < result["peak_mb"] < 4000
        assert 0 < result["above_start_mb"] < result["peak_mb"]
    auto, ort = report["results"]
    assert auto["speed"] == {"median": 1, "least": 1, "most": 1}
    assert auto["compiler"] == {}
    assert ort["compiler"]["graphs"] == 1
    assert ort["compiler"]["in_torch"] == ort["compiler"]["graph_breaks"] == []
    assert 0 < ort["compiler"]["compile_seconds"] < ort["first_step_s"]
    assert "auto" in capsys.readouterr().out


@pytest.mark.slow
def test_failure_of_a_child_is_a_result():
    report = run_part("growth", "32-true", ["auto"], Settings.quick(), layers=["no number"])
    (result,) = report["results"]
    assert result["strategy"] == "auto"
    assert "TypeError" in result["error"]
    assert rows_of(report) == [("no number layers", "auto", "failed", *[""] * 6)]


def test_what_is_saved_is_a_whole_part(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "models", "--models", "rl", "--save"])
    assert "--save keeps whole parts" in capsys.readouterr().err


def test_a_gpu_is_for_steps_and_waited_for(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["--only", "models", "--accelerator", "cuda", "--save"])
    with pytest.raises(SystemExit):
        main(["--accelerator", "cuda"])
    assert capsys.readouterr().err.count("--accelerator is for all parts but everyday") == 2

    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    replies = io.StringIO()
    turns = Turns(io.StringIO('{"seconds": 0, "steps": 2}\n'), replies)
    device = torch.device("cuda", 0)
    trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(root_device=device))
    turns._wait(trainer)
    for number in range(3):
        turns.on_train_batch_start(trainer, None, None, number)
    assert waited == [device] * 4
    assert len(json.loads(replies.getvalue())["times"]) == 2


def test_page_and_pictures_show_the_saved_results():
    reports = page.saved_reports()
    assert reports
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_results(text, page.rendered(reports)) == text, "python -m benchmarks.page"
    short = page.SHORT_PAGE.read_text(encoding="utf-8")
    assert page.with_results(short, page.summary(reports)) == short, "python -m benchmarks.page"
    float32 = [r for r in reports if r["part"] in STEPS and r["settings"]["precision"] == "32-true"]
    networks = [r["model"] for report in float32 for r in report["results"] if r["strategy"] == "ort"]
    assert networks and len(re.findall(r"^\| .* \d\.\d\d \(\d", short, re.M)) == len(networks)
    assert {page.picture_of(r).name for r in reports} == {p.name for p in page.PICTURES.iterdir()}
    for report in reports:
        assert digest(panels_of(report)) in page.picture_of(report).read_text(encoding="utf-8")
        assert report["machine"]["cpu"] in text


def test_page_of_several_devices_shows_the_saved_results():
    text = scaling.PAGE.read_text(encoding="utf-8")
    assert page.with_results(text, scaling.rendered(scaling.saved_reports())) == text, "python -m benchmarks.page"


def test_ring_on_paper():
    link = scaling.Link("", 1e9, 1e-5)
    assert scaling.all_reduce(4e6, 2, link) == pytest.approx(4e-3 + 2e-5)
    assert scaling.all_reduce(4e6, 5, link) == pytest.approx(6.4e-3 + 8e-5)
    # without latency, all ranks together have 2 P / B at most
    assert scaling.half(lambda n: 1 / (1 + scaling.all_reduce(4e6, n, scaling.Link("", 1e9, 0.0)))) == 1 << 20
    assert scaling.half(lambda n: 10 / (10 + n)) == 10
    assert scaling.half(lambda n: 1 / (1 + n)) is None


def test_table_of_ranks():
    one = {"model": "mlp", "ranks": 1, "scaling": "weak", "threads": 2, "gradient_bytes": 1e6, "sent_bytes": 0.0}
    one |= {"torch_ms": [3.0, 4.4, 5.0], "ort_ms": [2.0, 2.2, 2.0]}
    two = one | {"ranks": 2, "sent_bytes": 1.1e6, "torch_ms": [6.0], "ort_ms": [4.0]}
    report = {"part": "data-parallel", "results": [one, two, two | {"scaling": "strong"}], "settings": {}, "date": ""}
    report |= {"machine": {"cpu": "X", "cores": 2, "memory_gb": 1, "load_average": 0.0}, "versions": {}}
    assert scaling.rows(report) == [
        ("mlp", "", "1", "4.40 ms", "2.00 ms", "2.00x", "1.50-2.50", "100%", "1.00 MB", ""),
        ("mlp", "weak", "2", "6.00 ms", "4.00 ms", "1.50x", "1.50-1.50", "50%", "1.00 MB", "1.10 MB"),
        ("mlp", "strong", "2", "6.00 ms", "4.00 ms", "1.50x", "1.50-1.50", "25%", "1.00 MB", "1.10 MB"),
    ]
    # 8 ranks at 1 Gbit/s: 14 ms of bytes, 1.4 ms of latencies, beside 2 ms of computing
    assert "| mlp | 1 Gbit/s, 100 µs | 11% |" in scaling.rendered([report])
    assert scaling.path_of(report).name == "data-parallel-x.json"


@pytest.mark.slow
def test_steps_of_two_ranks(tmp_path):
    options = ["--models", "mlp", "--ranks", "2", "--scaling", "strong", "--steps", "4", "--rounds", "1"]
    (result,) = data_parallel([*options, "--output", str(tmp_path)])["results"]
    assert result["gradient_bytes"] == 4 * (784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)
    # two ranks send each other as much as there is
    assert 1 < result["sent_bytes"] / result["gradient_bytes"] < 1.5
    assert result["scaling"] == "strong" and all(t > 0 for t in (*result["torch_ms"], *result["ort_ms"]))
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["results"] == [result]


def test_ranks_that_are_saved_are_all(capsys):
    with pytest.raises(SystemExit):
        data_parallel(["--ranks", "2", "--save"])
    assert "--save keeps all models, ranks and scalings" in capsys.readouterr().err


def test_the_picture_of_losses_shows_those_that_are_kept():
    losses = json.loads(curves.LOSSES.read_text())
    assert digest(curves.curve_panels(losses)) in curves.PICTURE.read_text(encoding="utf-8"), (
        "python -m benchmarks.curves"
    )
    for project, strategies in losses.items():
        assert len(strategies["auto"]) == len(strategies["ort"]) == 120
        # as long as they are on top of each other, they say what the documentation says
        assert strategies["ort"] == pytest.approx(strategies["auto"], rel=0.03), project
        assert np.mean(strategies["ort"][-10:]) < 0.9 * np.mean(strategies["ort"][:10]), "nothing was learned"


def test_losses_are_those_of_each_step():
    both = {strategy: curves.train("tabular", strategy, 3) for strategy in ("auto", "ort")}
    assert len(both["ort"]) == 3 and both["ort"] == pytest.approx(both["auto"], rel=1e-4)
    assert len(set(both["ort"])) == 3


def test_page_without_a_place_for_results():
    with pytest.raises(ValueError, match="no lines"):
        page.with_results("# Benchmarks", "none")


def test_growth_is_drawn_by_layers():
    auto = {"strategy": "auto", "peak_mb": 500.0, "above_start_mb": 100.0, "threads": 2, "compiler": {}}
    auto |= {"speed": {"median": 1.0, "least": 1.0, "most": 1.0}}
    results = [
        {**auto, "model": f"{n} layers", "layers": n, "step_ms": 10.0 * n, "compile_s": 0.5 * n} for n in (4, 12)
    ]
    report = {"part": "growth", "results": results}
    assert rows_of(report)[1] == (
        "12 layers",
        "auto",
        "120 ms",
        "1.00x",
        "1.00-1.00",
        "6.0 s",
        "",
        "500 MB (1.00x)",
        "100 MB",
    )
    assert len(columns_of("growth")) == 9
    step, compiling, memory = panels_of(report)
    assert step.labels == ["4", "12"] and step.series == {"auto": [40.0, 120.0]}
    assert compiling.series == {"auto": [2.0, 6.0]} and memory.series == {"auto": [100.0, 100.0]}


def test_projects_are_compared_as_scripts_of_a_minute():
    auto = {"model": "gan", "strategy": "auto", "run": "cold", "script_s": 24.0, "fit_s": 20.0, "epoch_s": [2.0, 2.0]}
    auto |= {"cpu_s": 40.0, "val_loss": 0.5, "peak_mb": 500.0, "threads": 2, "compiler": {}}
    cold = {**auto, "strategy": "ort", "script_s": 32.0, "epoch_s": [12.0, 1.0, 1.0]}
    cold["compiler"] = {"compile_seconds": 11.0, "graphs": 3}
    assert of_a_minute(auto, auto) == 1.0
    # twenty further epochs
    assert of_a_minute(cold, auto) == (32.0 + 20 * 1.0) / (24.0 + 20 * 2.0)
    assert of_a_minute(cold, {**auto, "fit_s": 70.0}) == 32.0 / 24.0
    failed = {"model": "gan", "strategy": "compile", "run": "cold", "error": "exit status 1"}
    report = {"part": "everyday", "results": [auto, failed, cold]}
    assert rows_of(report) == [
        ("gan", "auto", "24.0 s", "1.00", "1.00", "40.0 s", "", "", "500 MB", "0.500"),
        ("", "compile, cold", "failed", *[""] * 7),
        ("", "ort, cold", "32.0 s", "1.33", "0.81", "40.0 s", "11.0 s", "3", "500 MB", "0.500"),
    ]
    ratios, seconds = panels_of(report)
    assert ratios.series == {"ort, cold": [0.812]} and seconds.series == {"ort, cold": [11.0]}
    # a machine that has become slower meanwhile
    again = {**auto, "run": "again", "script_s": 40.0, "fit_s": 36.0, "epoch_s": [3.0, 3.0, 3.0]}
    later = {**cold, "strategy": "compile"}
    report = {"part": "everyday", "results": [auto, cold, again, later]}
    ratio = (32.0 + 32 / 3 * 1.0) / (32.0 + 32 / 3 * 3.0)
    assert [row[3:5] for row in rows_of(report)] == [
        ("1.00", "1.00"),
        ("1.00", f"{ratio:.2f}"),
        ("1.67", f"{(40.0 + 20 * 3.0) / (24.0 + 20 * 2.0):.2f}"),
        ("0.80", f"{(32.0 + 8 * 1.0) / (40.0 + 8 * 3.0):.2f}"),
    ]


@pytest.mark.slow
def test_a_project_runs_twice_with_each_strategy():
    report = run_part("everyday", "32-true", ["ort"], Settings.quick(1), projects=["tabular"], seconds=0.0)
    auto, cold, warm, again = report["results"]
    assert [(r["strategy"], r["run"]) for r in report["results"]] == [
        ("auto", "cold"),
        ("ort", "cold"),
        ("ort", "warm"),
        ("auto", "again"),
    ]
    for result in (auto, cold, warm, again):
        assert "error" not in result, result
        assert result["epochs"] == len(result["epoch_s"]) == 1
        assert 0 < result["fit_s"] < result["script_s"]
        assert result["val_loss"] == pytest.approx(auto["val_loss"], rel=1e-3)
    assert cold["compiler"]["graphs"] >= 3 and cold["compiler"]["compile_seconds"] > 0


@pytest.mark.parametrize("name", PROJECTS)
def test_every_project_trains(name, monkeypatch):
    definition = load_project(name)
    monkeypatch.setattr(definition, "BATCH", 4)
    data = definition.make_data()
    for loader in ("train_dataloader", "val_dataloader", "predict_dataloader"):
        batches = list(itertools.islice(getattr(data, loader)(), 2))
        monkeypatch.setattr(data, loader, lambda batches=batches: DataLoader(batches, batch_size=None))
    monkeypatch.setattr(definition, "make_data", lambda: data)
    result = run(name, "auto", epochs=1)
    assert result["batches"] == 2 and result["epochs"] == 1 and math.isfinite(result["val_loss"])


def test_every_model_has_a_file():
    for name in MODELS:
        assert callable(load(name).make_module)
        assert callable(load(name).make_batch)


def test_overhead_is_split_into_parts():
    parts = measure_overhead(steps=5, warmup_steps=2)
    assert set(parts) == {"run", "call", "backward", "call of nothing", "backward of nothing"}
    assert min(parts.values()) > 0


@pytest.mark.slow
def test_freed_memory_command_counts_pages(capsys):
    rows = freed_memory(["--rounds", "1", "--steps", "4", "--rows", "2", "--pixels", "32"])
    assert [row[:2] for row in rows] == [[s, m] for s in ("auto", "ort") for m in ("given back", "kept")]
    for _, _, milliseconds, speed, pages, peak in rows:
        assert float(milliseconds.removesuffix(" ms")) > 0 < float(speed.removesuffix("x"))
        assert int(pages.replace(",", "")) >= 0 and int(peak.removesuffix(" MB").replace(",", "")) > 100
    assert "| auto | kept |" in capsys.readouterr().out


def test_ondevice_command_measures_the_contestants_in_turns(capsys):
    results = ondevice(["--models", "mlp", "--rounds", "1"])
    assert {"lightning_ort", "eager, fused AdamW"} <= set(results["mlp"])
    assert ("onnxruntime" in results["mlp"]) == WHEEL
    assert all(0 < value < 1e6 for value in results["mlp"].values())
    assert "lightning_ort" in capsys.readouterr().out


def test_training_session_command_measures_both_in_turns(capsys):
    results = training_session(["--models", "mlp", "--rounds", "1", "--threads", "1"])
    assert list(results["mlp"]) == ["TrainingSession", "eager, fused Adam"]
    assert all(0 < value < 1e6 for value in results["mlp"].values())
    assert "TrainingSession" in capsys.readouterr().out


def test_results_name_no_folder_of_a_machine():
    files = list((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.json"))
    found = {path.name: re.findall(r'[("\' ]/\w[^"]*', path.read_text()) for path in files}
    assert found and not any(found.values()), found
