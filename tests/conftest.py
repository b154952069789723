"""Every test starts from the same seed, with nothing compiled."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
import torch._dynamo

# two threads, or one each where pytest-xdist runs a test on each core
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def fresh_state():
    """Reset what one test could hand on to the next."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
