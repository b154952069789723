"""A mistake in a step is raised as eager raises it: its type, its message, and the user's line."""

from __future__ import annotations

import logging
import traceback
import types
from collections.abc import Iterator

import mistakes
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mistakes import Iterating, Mistaken, step_with_assertion
from parity import make_trainer, quiet, state_of
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.stock_only

MISTAKES = (
    "shape", "dtype", "device", "index", "label", "assertion", "arguments", "key", "attribute", "option", "raised",
    "after_a_break", "caught", "vector", "reduction", "twice", "otherwise", "unknown", "update",
)  # fmt: skip


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(6, generator=generator), i % 3) for i in range(8)]
    return DataLoader(rows, batch_size=4)


def error_of(module: Mistaken, strategy: str, how: str) -> Exception:
    torch._dynamo.reset()
    for parameter in module.parameters():  # some messages have values in them
        nn.init.constant_(parameter, 0.5)
    trainer = make_trainer(strategy, max_epochs=1)
    with quiet(), pytest.raises(Exception) as caught:  # noqa: PT011
        getattr(trainer, how)(module, data())
    return caught.value


def users_line(error: BaseException) -> tuple[int, str]:
    """The innermost line of the module."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == mistakes.__file__]
    return frames[-1].lineno, frames[-1].line


def assert_is_readable(error: BaseException) -> None:
    """Each frame is at an instruction of its code: IPython searches for it without end where it is at another."""
    for frame in iter_frames(error.__traceback__):
        assert 0 <= frame.tb_lasti < len(frame.tb_frame.f_code.co_code)


def iter_frames(frame: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def assert_like_eager(eager: Exception, other: Exception) -> None:
    assert type(other) is type(eager)
    assert str(other).partition(" grad_fn=")[0] == str(eager).partition(" grad_fn=")[0]
    assert users_line(other) == users_line(eager)
    assert type(other.__cause__) is type(eager.__cause__)
    assert_is_readable(other)
    # as long as eager's, but for the few frames of the strategy and of Dynamo's
    shown, expected = (len(traceback.format_exception(e)) for e in (other, eager))
    assert shown <= expected + 16, "".join(traceback.format_exception(other))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_is_eagers(mistake, caplog, capfd):
    eager = error_of(Mistaken(mistake), "auto", "fit")
    module = Mistaken(mistake)
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        other = error_of(module, "ort", "fit")
    assert_like_eager(eager, other)
    assert not caplog.records, "there is more to read than the error"
    assert "Traceback" not in capfd.readouterr().err
    assert all(v.isfinite().all() for v in state_of(module).values())


@pytest.mark.parametrize(("how", "manual"), [("fit", True), ("predict", False)])
@pytest.mark.parametrize("mistake", ["shape", "index"])
def test_in_other_steps(mistake, how, manual):
    errors = [error_of(Mistaken(mistake, manual=manual), strategy, how) for strategy in ("auto", "ort")]
    assert_like_eager(*errors)


class LogsPredictions(Mistaken):
    """Lightning refuses to log in predict_step; what a step does about an error there, it does as in eager."""

    caught = ""

    def predict_step(self, batch, batch_idx):
        scores = self(batch[0])
        if self.mistake == "vector":
            self.log("scores", scores)
        elif self.mistake == "caught":
            try:
                self.log("score", scores.sum())
            except Exception as error:
                self.caught = str(error)
        else:
            self.log("score", scores.sum())
            self.caught = "went on"
        return scores


def test_what_is_refused_at_its_line_in_predict_step():
    errors = [error_of(LogsPredictions("scalar"), strategy, "predict") for strategy in ("auto", "ort")]
    assert [type(e) for e in errors] == [MisconfigurationException] * 2
    lines = [traceback.extract_tb(e.__traceback__) for e in errors]
    assert ['self.log("score"' in "".join(f.line or "" for f in frames) for frames in lines] == [True, True]
    modules = [LogsPredictions("caught") for _ in range(2)]
    for module, strategy in zip(modules, ("auto", "ort"), strict=True):
        with quiet():
            make_trainer(strategy, max_epochs=1).predict(module, data())
    assert "doesn't support logging" in modules[0].caught
    assert modules[1].caught == modules[0].caught


def test_a_batch_of_unknown_size():
    errors = [error_of(Iterating(""), strategy, "fit") for strategy in ("auto", "ort")]
    assert "batch_size=" in str(errors[0])
    assert_like_eager(*errors)


def test_a_step_that_failed_is_compiled_when_its_data_are_right():
    """Dynamo would leave the function to Python from the first failure on."""
    module = Mistaken("shape")
    trainer = make_trainer("ort", max_epochs=1)
    with quiet(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        trainer.predict(module, data())
    module.mistake = "forward_only"
    module.forward_only = lambda x, y: module(x)
    with quiet():
        trainer.predict(module, data())
    assert trainer.strategy.report()["predict_step"].graphs > 0


def test_an_assertion_that_fails_later():
    """By then torch has no say in the run of a graph; the error is that of the assertion all the same."""
    compiled = torch.compile(step_with_assertion, backend="lightning_ort")
    compiled(torch.ones(3))
    with pytest.raises(AssertionError, match=r"^too large$") as caught:
        compiled(torch.ones(3) * 9)
    assert users_line(caught.value)[1] == 'assert (doubled < 10).all(), "too large"'
