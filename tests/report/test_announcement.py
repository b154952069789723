"""What takes long is told, what does not take long is not."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from torch import nn

from lightning_ort.compiler import first_run, region
from lightning_ort.report.announcement import Announcement


def test_told_once_it_has_taken_some_time():
    said, begun = [], threading.Event()
    say = lambda text: (said.append(text), begun.set())  # noqa: E731
    with Announcement(say, "Doing {it} ...", "Done {it} in {seconds}.", after=0):
        assert begun.wait(10)
    assert said[0] == "Doing {it} ..."
    assert re.fullmatch(r"Done \{it\} in \d+\.\d s\.", said[1]) and len(said) == 2


def test_nothing_is_told_of_what_is_short():
    said = []
    announcement = Announcement(said.append, "Doing ...", "Done.", after=60)
    assert 0 <= announcement.end() < 60
    announcement.drop()
    assert not said


def test_what_fails_has_not_ended():
    said, begun = [], threading.Event()
    announcement = Announcement(lambda text: (said.append(text), begun.set()), "Doing ...", "Done.", after=0)
    assert begun.wait(10)
    with pytest.raises(ValueError, match="no"), announcement:
        raise ValueError("no")
    assert said == ["Doing ..."]


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize("gradients", [True, False])
def test_checks_and_measuring_are_told(monkeypatch, gradients):
    said = []
    patient = lambda say, doing, done: Announcement(said.append, doing, done, after=0)  # noqa: E731
    for module in (first_run, region):
        monkeypatch.setattr(module, "Announcement", patient)
    module, x = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 1)), torch.randn(8, 48)

    @torch.compile(backend="lightning_ort")
    def step(x):
        return module(x).square().mean()

    with torch.set_grad_enabled(gradients):
        step(x)
    place = r"the graph of \w+\.py:\d+"
    patterns = [f"Comparing the first run of {place} with PyTorch ...", f"Compared the first run of {place} in .* s."]
    patterns += [f"Measuring where {place} runs fastest ...", f"Measured {place} in .* s."]
    for pattern in patterns:
        assert any(re.fullmatch(pattern, text) for text in said), (pattern, said)
