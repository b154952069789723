"""Pooled memory is handed out again only when nobody holds it."""

from __future__ import annotations

import pytest
import torch

from lightning_ort.runtime.memory import TensorPool, release_free_memory


def make_pool() -> TensorPool:
    return TensorPool([(3, 4), (), (5,)], torch.float32, torch.device("cpu"))


def test_tensors_of_a_set_do_not_overlap():
    tensors = make_pool().take()
    assert [t.shape for t in tensors] == [(3, 4), (), (5,)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert [t.unique().tolist() for t in tensors] == [[0], [1], [2]]
    assert all(t.is_contiguous() and t.data_ptr() % 4 == 0 for t in tensors)


def test_free_memory_is_used_again():
    pool = make_pool()
    first = pool.take()
    place = first[0].data_ptr()
    del first
    assert pool.take()[0].data_ptr() == place


def test_held_memory_is_left_alone():
    pool = make_pool()
    held = pool.take()[2]
    held.fill_(7)
    for _ in range(5):
        for tensor in pool.take():
            tensor.fill_(0)
    assert held.tolist() == [7] * 5


def test_a_gradient_counts_as_held():
    """Breaks when torch changes the private count of references to a storage."""
    pool = make_pool()
    parameter = torch.nn.Parameter(torch.zeros(5))
    parameter.grad = pool.take()[2].fill_(1)
    taken = [pool.take() for _ in range(4)]
    for tensors in taken:
        tensors[2].fill_(0)
    assert parameter.grad.tolist() == [1] * 5


def test_a_storage_that_is_held_without_a_tensor_is_left_alone():
    pool = make_pool()
    storage = pool.take()[2].fill_(7).untyped_storage()
    for _ in range(5):
        for tensor in pool.take():
            tensor.fill_(0)
    assert 7 in torch.empty(0).set_(storage)


@pytest.mark.parametrize("change", [lambda s: s.resize_(0), lambda s: s.share_memory_()], ids=["freed", "moved"])
def test_memory_that_was_freed_or_moved_is_not_handed_out(change):
    pool = make_pool()
    storage = pool.take()[0].untyped_storage()
    change(storage)
    del storage
    for _ in range(3):
        tensors = pool.take()
        assert all(t.untyped_storage().nbytes() and not t.is_shared() for t in tensors)
        del tensors


@pytest.mark.parametrize("initialized", [True, False])
def test_memory_on_a_gpu_is_given_back_where_there_is_one(monkeypatch, initialized):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    release_free_memory()

    assert calls == ["empty"] * initialized
