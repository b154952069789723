"""The report as a page: one file that loads nothing, whatever a user's code is called."""

from __future__ import annotations

import os
from html.parser import HTMLParser

import pytest

from lightning_ort.report import GraphBreak, GraphReport, InTorch, OptimizerReport, Report
from lightning_ort.report.timeline import TimedCall

pytestmark = pytest.mark.stock_only

VOID = {"meta", "br", "wbr"}


class Page(HTMLParser):
    """Checks that what is opened is closed; collects texts, classes and what could be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.texts.append("" if tag == "wbr" else " ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.texts.append(" ")

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).replace("\u00a0", " ").split())


@pytest.fixture
def report():
    found = Report()
    step = found.step("training_step")
    step.calls, step.graphs, step.compile_seconds = 300, 2, 1.2
    first = GraphReport(
        "onnxruntime", "it took the least time when they were measured side by side", gradients=True, calls=9,
        begins="/home/me/model.py:3: y = f(x)", ends="/home/me/model.py:9: loss = g(y)",
        inputs={"batch[0]": "32 x 3 float32", "___stack2": "3 x 5 float32"}, weights=4, elements=1200, segments=(2, 1),
        measured={"onnxruntime": 0.1, "eager": 0.2}, speed=2.0, gain=1.0,
    )  # fmt: skip
    step.each_graph = [first, GraphReport("eager", "it took the least time", calls=1, speed=1.0, gain=0.0)]
    entries = (
        ("onnxruntime", "piece", 1e-4, 4e-4, None),
        ("torch", "piece", 4e-4, 4.5e-4, None),
        ("python", "graph", 1e-4, 5e-4, first),
        ("torch", "backward", 6e-4, 8e-4, None),
    )
    phases = (("python", "training_step", 0.0, 5.5e-4, None), ("torch", "backward", 6e-4, 8e-4, None))
    step.timing.calls.append(TimedCall(0.0, 8e-4, entries, phases))
    step.graph_breaks = [
        GraphBreak("which way Python goes depends on the values of a tensor", "model.py:7: if y > 0:", "", "Dynamo: x"),
        GraphBreak("manual_backward is plain Python", "model.py:5: self.manual_backward(a)", "manual optimization"),
    ]
    step.in_torch = [InTorch("aten.det.default", "there is no such operator in ONNX", "model.py:4: x.det()")]
    step.recompilations = ["training_step: size 0 of x was 32 and is 12"]
    step.preferred.update(["aten.convolution.default"])
    found.step("validation_step").calls = 2
    found.optimizers.append(OptimizerReport("AdamW", in_ort=300, graphs=1, compile_seconds=0.2))
    return found


def test_the_page(report, tmp_path):
    path = report.save(tmp_path / "report.html")
    assert path == tmp_path / "report.html" and os.listdir(tmp_path) == ["report.html"]
    shown = Page(path.read_text(encoding="utf-8"))
    for text in (
        "a call takes 800 µs", "in torch alone about 1.2 ms", "compiling took 1.2 s", "paid back from call 3,000 on",
        "ONNX Runtime: 38%, 300 µs", "torch: 31%, 250 µs", "Python and the rest: 31%, 250 µs", "backward: 200 µs",
        "ONNX Runtime, in 3 pieces, 1 of them in torch: it took the least time", "batch[0] 32 x 3 float32",
        "4 weights, 1,200 numbers", "ONNX Runtime 100 µs, eager 200 µs", "not in it",
        "from /home/me/model.py:3: y = f(x) to /home",
        "aten.det.default: there is no such operator in ONNX",
        "which way Python goes depends on the values of a tensor model.py:7: if y > 0:",
        "by manual optimization: gradients and updates are asked for between two graphs.",
        "docs/report.md#graph-breaks-that-are-expected", "size 0 of x was 32 and is 12", "AdamW 300 0 1 200 ms",
        "aten.convolution.default, in one place", "No call has been timed: calls that compile, compare or measure",
    ):  # fmt: skip
        assert text in shown.text, text
    turns = [a for tag, a in shown.tags if tag == "i"]
    assert [a["class"] for a in turns] == ["python", "onnxruntime", "torch", "python", "python", "torch"]
    widths = [float(a["style"].removeprefix("width:").removesuffix("%")) for a in turns]
    assert widths == pytest.approx([12.5, 37.5, 6.25, 6.25, 12.5, 25.0])


def test_it_is_one_file_for_light_and_dark_screens(report, tmp_path):
    text = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    for loading in ("http:", "https:", "//", "<script", "src=", "<link", "@import", "url("):
        assert loading not in text, loading


def test_what_users_wrote_stays_text(tmp_path):
    report = Report()
    step = report.step("training_step")
    evil = "<script>alert(1)</script> & \"x\" 'y'"
    step.graph_breaks = [GraphBreak(evil, evil, "", evil), GraphBreak(evil, evil, "metrics")]
    step.in_torch, step.recompilations = [InTorch(evil, evil, evil)], [evil]
    step.each_graph = [GraphReport("onnxruntime", evil, begins=evil, ends=f"{evil}2", inputs={evil: "3 float32"})]
    for text in (report.save(tmp_path / "a.html").read_text(encoding="utf-8"), report._repr_html_()):
        shown = Page(text)
        assert not [tag for tag, _ in shown.tags if tag == "script"]
        assert shown.text.count(evil) == 13


def test_inputs_have_names_of_users(report):
    shown = Page(report._repr_html_())
    assert "batch[0] 32 x 3 float32 a value computed before: 3 x 5 float32" in shown.text and "stack" not in shown.text


def test_a_notebook_shows_the_same(report):
    text = report._repr_html_()
    shown = Page(text)
    assert "paid back from call 3,000 on" in shown.text and "<html" not in text
    # a notebook has colours of its own
    assert "background: #" not in text and "prefers-color-scheme" not in text


def test_lines_of_code_break_between_names(tmp_path):
    report = Report()
    report.step("training_step").graph_breaks = [GraphBreak("x", "/home/me/model.py:30: z = torch.exp(1.5)", "")]
    text = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "/home/<wbr>me/<wbr>model.<wbr>py:<wbr>30: z = torch.<wbr>exp(<wbr>1.5)" in text


def test_a_report_of_nothing(tmp_path):
    shown = Page(Report().save(tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No step has run in ONNX Runtime yet." in shown.text


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz", ".html"])
def test_another_suffix_is_refused(report, tmp_path, name):
    with pytest.raises(ValueError, match=r"a report is saved as a page: expected a name such as report\.html"):
        report.save(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_what_is_no_path_or_has_no_folder(report, tmp_path):
    with pytest.raises(TypeError, match="path=3: expected a path"):
        report.save(3)
    with pytest.raises(FileNotFoundError, match="folder"):
        report.save(tmp_path / "missing" / "report.html")


def test_a_page_that_cannot_be_written_leaves_the_old_one(report, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")

    def refuse(*args):
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match=r"report\.html"):
            report.save(path)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["report.html"]
    report.save(path)
    assert "What ran where" in path.read_text(encoding="utf-8")
