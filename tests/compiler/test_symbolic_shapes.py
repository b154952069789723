"""Sizes computed from others: each of torch's functions of them gives what it gives in torch."""

from __future__ import annotations

import math
import threading

import pytest
import sympy
import torch
from parity import needs_ort
from torch.utils._sympy import functions

from lightning_ort.compiler import ORTBackend, dynamo
from lightning_ort.compiler.dynamo import marked_open
from lightning_ort.compiler.symbolic_shapes import _FUNCTIONS, _function
from lightning_ort.runtime.config import RuntimeConfig

A, B = sympy.symbols("a b", integer=True, positive=True)

# functions of two numbers and of three, with arguments that are sums: what is printed without brackets goes wrong
TWO = ["FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "IntTrueDiv", "FloatTrueDiv", "LShift", "Max", "Min"]
ONE = ["ToFloat", "TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt", "Identity"]


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two(name):
    make = getattr(functions, name)
    function = _function([A, B], [3 * make(A + 4, B + 1) - make(B * 6, A + 1), make(A - B, 3) ** 2])
    for a, b in [(7, 3), (20, 1), (9, 9), (5, 2)]:
        exact = _FUNCTIONS[name]
        wanted = [3 * exact(a + 4, b + 1) - exact(b * 6, a + 1), exact(a - b, 3) ** 2]
        assert function(a, b) == pytest.approx(wanted, rel=1e-12), (a, b)


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one(name):
    make, exact = getattr(functions, name), _FUNCTIONS[name]
    function = _function([A, B], [2 * make(functions.IntTrueDiv(A + 4, B + 1)) - 1])
    for a, b in [(7, 3), (20, 1), (9, 9)]:
        assert function(a, b) == [2 * exact((a + 4) / (b + 1)) - 1]


def test_floats_have_all_digits():
    """Of a third of 3, a whole one would be missing."""
    function = _function([A, B], [functions.TruncToInt(sympy.Float(1 / 3) * functions.ToFloat(A))])
    assert function(3, 0) == [1]


def test_functions_within_functions():
    index = functions.ModularIndexing(A + 3, B, 5)
    function = _function([A, B], [functions.Mod(index + A, 4), sympy.Piecewise((A, A > B), (B, True)), sympy.sqrt(A)])
    for a, b in [(7, 3), (20, 6), (2, 9)]:
        assert function(a, b) == [((a + 3) // b % 5 + a) % 4, max(a, b), math.sqrt(a)]


@needs_ort
@pytest.mark.parametrize("change", [lambda x, n: x.new_ones(n + 1), lambda x, n: torch.randn(n + 1) * x[0, 0]])
def test_a_size_that_is_a_rest(change):
    def step(x, w):
        return (w * change(x, (len(x) + 3) % 4).sum()).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=ORTBackend(), dynamic=True)
    for n in (5, 6, 7, 8, 9, 13):
        x, w = torch.arange(3.0 * n).reshape(n, 3) + 1, torch.ones(3, requires_grad=True)
        gradients = []
        for function in (step, compiled):
            torch.manual_seed(n)
            w.grad = None
            function(x, w).backward()
            gradients.append(w.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


@needs_ort
def test_the_pointer_of_a_memory_bank():
    """The rest is an index: a wrong one writes the rows elsewhere, without a word."""

    class Bank(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(12, 3))
            self.pointer = 0

        def forward(self, x):
            first = self.pointer
            self.rows[first : first + 4] = x.detach()
            self.pointer = (first + 4) % 12
            return (x * self.rows.sum()).sum() + self.pointer

    torch._dynamo.reset()
    banks = Bank(), Bank()
    compiled = torch.compile(banks[1], backend=ORTBackend())
    for i in range(9):
        x = torch.full((4, 3), float(i))
        torch.testing.assert_close(compiled(x), banks[0](x))
        torch.testing.assert_close(banks[1].rows, banks[0].rows)
        assert banks[1].pointer == banks[0].pointer


@needs_ort
def test_a_size_that_turns_out_to_be_one():
    """By a computation: the pieces that a tensor is divided into, say."""

    def step(x, w):
        padded = torch.nn.functional.pad(x * w, (0, (7 - x.shape[-1]) % 4))
        parts = padded.unbind(-1)
        return parts[1].sum() + padded.chunk(padded.shape[-1], -1)[0].squeeze(-1).square().sum() + padded.mean()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=ORTBackend(), dynamic=True)
    for n in (5, 6, 2, 3, 9):
        found = []
        for function in (step, compiled):
            x, w = torch.linspace(0, 1, 2 * n).view(2, n), torch.ones(n, requires_grad=True)
            function(x, w).backward()
            found.append(w.grad)
        torch.testing.assert_close(found[1], found[0])


@needs_ort
def test_comparisons_that_always_hold_behind_a_break():
    def step(x):
        some, none = x.shape[0] > 0, x.numel() < 0
        doubled = x * 2
        torch._dynamo.graph_break()
        return doubled.sum() * (2 if some else 1), some, none

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=ORTBackend())
    for n in (4, 3, 2):
        found, some, none = compiled(torch.ones(n, 2))
        assert (found, some, none) == step(torch.ones(n, 2)) and type(some) is type(none) is bool


@pytest.mark.parametrize("placement", ["onnxruntime", "torch", "eager"])
@needs_ort
def test_a_size_that_a_tensor_tells(placement):
    """An integer on the CPU that is an input, such as the largest length of a batch, by which masks are made."""

    def step(x, length):
        kept = torch.arange(length) < torch.tensor(4)
        return (x[:, None].expand(-1, length) * kept).square().sum() + torch.ones(length).sum()

    torch._dynamo.reset()
    in_torch: list = []
    compiled = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement), on_fallback=in_torch.extend))
    for n in (3, 5, 7, 3):
        found = []
        for function in (step, compiled):
            x = torch.linspace(0, 1, 4, requires_grad=True)
            loss = function(x, torch.tensor(n))
            loss.backward()
            found.append([loss.detach(), x.grad])
        torch.testing.assert_close(found[1], found[0])
    assert not in_torch


def test_a_size_that_a_changed_tensor_tells():
    """What it is then nobody knows when the step is compiled."""

    def step(x, length):
        before = torch.arange(length).sum()
        length += 1
        return x.sum() * before * torch.arange(length).sum()

    torch._dynamo.reset()
    in_torch: list = []
    compiled = torch.compile(step, backend=ORTBackend(on_fallback=in_torch.extend))
    for n in (3, 5):
        mine, eagers = torch.tensor(n), torch.tensor(n)
        torch.testing.assert_close(compiled(torch.ones(3), mine), step(torch.ones(3), eagers))
        assert mine == eagers
    assert "a number is read from a tensor" in in_torch[0].reason


def test_marks_of_one_thread_are_not_those_of_another():
    """Two Trainers in two threads, one of which ends its step while the other compiles."""
    first, second = torch.zeros(3), torch.zeros(3)
    began, ended = threading.Event(), threading.Event()
    left = []

    def other():
        with marked_open([(second, 0)]):
            began.set()
            ended.wait(10)
            left.append(dynamo._OPEN in second.__dict__)
        left.append(dynamo._OPEN in second.__dict__)

    thread = threading.Thread(target=other)
    with marked_open([(first, 0)]):
        thread.start()
        began.wait(10)
    assert dynamo._OPEN not in first.__dict__
    ended.set()
    thread.join()
    assert left == [True, False]
