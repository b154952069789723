"""Dynamo is prepared for what it compiles in a step, and left alone by steps that compile nothing."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.variables.builtin import BuiltinVariable

from lightning_ort.compiler.dynamo import DYNAMO_SETTINGS, Preparation

pytestmark = pytest.mark.either_build

CONFIG = torch._dynamo.config


def state():
    """Of Dynamo: settings, and one of the methods that are others."""
    return [getattr(CONFIG, name) for name in DYNAMO_SETTINGS], BuiltinVariable.call_function


@pytest.fixture
def compiled():
    """A function, and what Dynamo was like each time that it was compiled."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(state())
        return graph.forward

    return torch.compile(lambda x: x + 1, backend=backend), seen


def test_when_something_is_compiled(compiled):
    function, seen = compiled
    before, callbacks = state(), list(torch._dynamo.callback_handler.start_callbacks)
    preparation = Preparation()
    for x, compilations in ((torch.ones(2), 1), (torch.zeros(2), 1), (torch.ones(2, 2), 2)):
        with preparation.when_compiling():
            made = len(seen)
            function(x)
            assert len(seen) == compilations
            # from then on, as errors are handled and frames behind breaks compiled
            assert (state()[1] is before[1]) is (made == compilations)
        assert state() == before
        assert torch._dynamo.callback_handler.start_callbacks == callbacks
    for settings, method in seen:
        assert settings == list(DYNAMO_SETTINGS.values()) and method is not before[1]


def test_an_error_leaves_dynamo_as_it_was(compiled):
    function, seen = compiled
    before = state()

    def fail():
        with Preparation().when_compiling():
            function(torch.ones(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert state() == before and len(seen) == 1


def test_throughout_a_reset(compiled):
    function, seen = compiled
    before = state()
    with Preparation().throughout():
        torch._dynamo.reset()
        function(torch.ones(2))
        assert state()[1] is not before[1]
    assert state() == before
    assert seen[0][0] == list(DYNAMO_SETTINGS.values())
