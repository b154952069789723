"""Every test starts from the same seed, with two threads and nothing compiled."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch._dynamo

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fresh_state():
    """Reset what one test could hand on to the next."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
