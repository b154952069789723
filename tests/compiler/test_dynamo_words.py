"""Dynamo's reasons in plain words, none of them cut."""

from __future__ import annotations

import pytest

from lightning_ort.compiler.dynamo_words import compiled_again, function_name, graph_break, why

pytestmark = pytest.mark.stock_only


def raw(summary: str, explanation: str) -> str:
    """A reason as Dynamo writes them."""
    return (
        f"{summary}\n  Explanation: {explanation}\n  Hint: Do something else.\n\n  Developer debug context: x\n\n"
        " For more details about this graph break, please visit: https://example.org/gb0098.html"
    )


def disabled(reason: str) -> str:
    return raw(
        "Skip calling `torch.compiler.disable()`d function",
        "Skip calling function `<function f at 0x7f>` since it was wrapped with `torch.compiler.disable` "
        f"(reason: {reason})",
    )


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (disabled("manual_backward is plain Python"), "manual_backward is plain Python", "manual optimization"),
        (disabled("toggle_optimizer is plain Python"), "toggle_optimizer is plain Python", "manual optimization"),
        (disabled("updates are no part of a graph"), "updates are no part of a graph", "manual optimization"),
        (disabled("metrics are plain Python"), "metrics are plain Python", "metrics"),
        (disabled("all_gather is plain Python"), "all_gather is plain Python", "calls of Lightning"),
        (disabled("a user's own reason"), "a user's own reason", ""),
        (
            raw(
                "Attempted to inline function marked as skipped",
                "Dynamo developers have intentionally marked that the function `Optimizer.zero_grad` should not be "
                "traced.\n  Hint: x, skip reason: file matches MOD_SKIPLIST (/x/torch/_compile)",
            ),
            "Optimizer.zero_grad is called, which is plain Python",
            "manual optimization",
        ),
    ],
)
def test_breaks_that_this_package_or_manual_optimization_asks_for(text, reason, expected):
    found = graph_break(text, "model.py:3: self.manual_backward(loss)")
    assert (found.reason, found.expected, found.dynamo) == (reason, expected, "")
    assert found.source == "model.py:3: self.manual_backward(loss)"


def test_plain_words_come_before_dynamos_which_are_whole():
    text = raw("Failed to trace builtin operator", "Dynamo does not know how to trace\n  `print` (has_kwargs True).")
    text = text.replace("trace\n", "trace builtin operator `print`\n")
    found = graph_break(text, "")
    assert found.reason == "print() is called with what Dynamo cannot follow"
    assert found.dynamo == "Dynamo does not know how to trace builtin operator `print` `print` (has_kwargs True)"
    jump = graph_break("generic_jump TensorVariable()", "")
    assert jump.reason == "which way Python goes depends on the values of a tensor"
    assert jump.dynamo == "Dynamo: generic_jump TensorVariable()"


def test_a_reason_without_plain_words_is_dynamos_explanation():
    long = "Something new that nobody has words for (a call of f(x)), with a second sentence. And a third one"
    assert graph_break(raw("New", f"{long}."), "").reason == long
    assert why("A line of its own\nand more") == "A line of its own"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8/0: tensor 'x' size mismatch at index 0. expected 32, actual 12", "size 0 of x was 32 and is 12"),
        (
            "9/1: tensor '___stack0' size mismatch at index 2. expected 3, actual 4",
            "size 2 of a value computed before was 3 and is 4",
        ),
        (
            "1/0: i == 0                            # if i in (1, 2): x = x*i  # mp/rep/model.py:51 in training_step",
            "not any more: i == 0 (if i in (1, 2): x = x*i)",
        ),
        ("2/0: L['self'].scale == 3", "self.scale == 3"),
    ],
)
def test_why_a_step_was_compiled_again(text, words):
    assert compiled_again(text) == words


def test_names_of_functions():
    assert function_name("torch_dynamo_resume_in_training_step_at_33") == "training_step from line 33 on"
    assert function_name("validation_step") == "validation_step"
