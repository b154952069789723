"""What ORTTrainer does where the original went wrong, and what both must do."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from orttrainer_models import ADAM, LAMB, MLP, SGD, batches, cross_entropy, description, make, options, trainer
from torch import nn

from lightning_ort import ORTTrainer, amp, optim
from lightning_ort.runtime.session import OrtSession

X, LABEL = batches(count=1)[0]


def eager_steps(model, optimizer, data, loss_fn=cross_entropy):
    losses = []
    for x, label in data:
        optimizer.zero_grad()
        loss = loss_fn(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_weights(model, other, tolerance=1e-5):
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def test_weights_are_trained_in_the_module():
    model = make()
    reference = copy.deepcopy(model)
    found = trainer(ADAM(lr=0.01, lambda_coef=0.1), model=model, utils={"grad_norm_clip": False})
    data = batches(count=6)
    losses = [found.train_step(x, label)[0].item() for x, label in data]
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    np.testing.assert_allclose(losses, eager_steps(reference, optimizer, data), rtol=0, atol=2e-6)
    assert_same_weights(model, reference)
    assert model.training and all(p.grad is None for p in model.parameters())


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 9, 10)

    def forward(self, x):
        return self.head(
            torch.relu(self.norm(self.conv(x.view(-1, 1, 4, 5)[:, :, :, :5].repeat(1, 1, 2, 1)[:, :, :5]))).flatten(1)
        )


def test_convolutions_and_batch_norm():
    """Neither weights nor statistics are those of the first step; evaluation uses the statistics."""
    torch.manual_seed(0)
    model = Normalized()
    reference = copy.deepcopy(model)
    found = trainer(SGD(lr=0.1), model=model)
    data = batches(count=5)
    losses = [found.train_step(x, label)[0].item() for x, label in data]
    expected = eager_steps(reference, torch.optim.SGD(reference.parameters(), 0.1), data)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    assert_same_weights(model, reference)
    reference.eval()
    _, logits = found.eval_step(X, LABEL)
    torch.testing.assert_close(logits, reference(X).detach(), rtol=0, atol=1e-5)
    weights = found.state_dict()["model"]["full_precision"]
    assert weights["norm.num_batches_tracked"] == 5
    np.testing.assert_allclose(weights["norm.running_mean"], reference.norm.running_mean, atol=1e-5)


def test_failed_steps_change_no_statistics():
    model = Normalized()
    found = trainer(model=model)
    found.train_step(X, LABEL)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((RuntimeError, IndexError), match="Nothing was updated"):
        found.train_step(X, LABEL + 100)
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())
    assert (found._train_step_info.step, found._accumulated) == (1, 0)


def test_accumulation_takes_the_mean_and_failed_steps_do_not_count():
    model = make()
    reference = copy.deepcopy(model)
    found = trainer(SGD(lr=0.5), model=model, batch={"gradient_accumulation_steps": 3})
    data = batches(count=6)
    for k, (x, label) in enumerate(data):
        found.train_step(x, label)
        with pytest.raises(RuntimeError):
            found.train_step(x[:, :3], label)
        with pytest.raises((RuntimeError, IndexError)):
            found.train_step(x, label + 100)
        assert found._train_step_info.step == k + 1
        assert found._train_step_info.optimization_step == (k + 1) // 3
    optimizer = torch.optim.SGD(reference.parameters(), 0.5)
    for three in (data[:3], data[3:]):
        optimizer.zero_grad()
        for x, label in three:
            (cross_entropy(reference(x), label) / 3).backward()
        optimizer.step()
    assert_same_weights(model, reference, 1e-6)


def test_clipping_by_the_norm_of_all_gradients():
    norms = {}
    for clip in (True, False):
        model = make()
        found = trainer(LAMB(lr=0.1, max_norm_clip=0.05, alpha=0.0, beta=0.0, epsilon=1e3), model=model,
                        utils={"grad_norm_clip": clip})  # fmt: skip
        found.train_step(X, LABEL)
        moments = found.state_dict()["optimizer"]
        norms[clip] = np.sqrt(sum((m["Moment_1"] ** 2).sum() for n, m in moments.items() if "Moment_1" in m))
    assert norms[True] == pytest.approx(0.05, rel=1e-5) and norms[False] > 0.5


def test_frozen_weights_and_weights_without_gradient_stay():
    model = make()
    model.fc2.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    found = trainer(model=model, utils={"frozen_weights": ["fc1.bias"]})
    for x, label in batches(count=2):
        found.train_step(x, label)
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"fc1.bias", "fc2.weight"}
    state = found.state_dict()
    assert state["model"]["full_precision"].keys() == before.keys()
    assert state["optimizer"].keys() == before.keys() - same


@pytest.mark.parametrize("config", [SGD(lr=0.1), ADAM(lr=0.01, lambda_coef=0.0)], ids=["SGD", "Adam"])
def test_weights_that_are_thawed_are_trained(config):
    """Layer by layer, as a network is fine-tuned, with states of their own from then on."""
    model = make()
    model.fc1.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    found = trainer(config, model=model, utils={"grad_norm_clip": False})
    kind = torch.optim.SGD if config.name == "SGDOptimizer" else torch.optim.AdamW
    weight_decay = {} if kind is torch.optim.SGD else {"weight_decay": 0.0}
    optimizer = kind(reference.parameters(), lr=config.lr, **weight_decay)
    for i, batch in enumerate(batches(count=6)):
        if i == 2:
            for module in (model, reference):
                module.fc1.weight.requires_grad_(True)
        if i == 4:
            for module in (model, reference):
                module.fc2.bias.requires_grad_(False)
        loss = found.train_step(*batch)[0].item()
        assert loss == pytest.approx(eager_steps(reference, optimizer, [batch])[0], abs=2e-6)
    assert_same_weights(model, reference)
    # where it is thawed before the state comes, it is trained on
    again = copy.deepcopy(model)
    again.fc1.weight.requires_grad_(False)
    other = trainer(config, model=again, utils={"grad_norm_clip": False})
    if config.name != "SGDOptimizer":
        with pytest.raises(RuntimeError, match=r"Unexpected keys: \['fc1.weight'"):
            other.load_state_dict(found.state_dict())
    for parameter in (*again.parameters(), *model.parameters()):
        parameter.requires_grad_(True)
    other.load_state_dict(found.state_dict())
    for trained in (found, other):
        trained.train_step(X, LABEL)
    assert_same_weights(again, model, 0)


def test_weights_thawed_in_one_of_several_processes_are_refused():
    model = make()
    model.fc1.weight.requires_grad_(False)
    found = trainer(model=model)
    found.train_step(X, LABEL)
    model.fc1.weight.requires_grad_(True)
    found._processes = object()
    with pytest.raises(RuntimeError, match=r"^fc1\.weight had requires_grad=False when .* make another ORTTrainer"):
        found.train_step(X, LABEL)
    found._processes = None
    found.train_step(X, LABEL)


def test_a_frozen_weight_may_have_any_of_its_names():
    model = make()
    model.again = model.fc1
    before = copy.deepcopy(model.state_dict())
    found = trainer(model=model, utils={"frozen_weights": ["again.bias"]})
    found.train_step(X, LABEL)
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"fc1.bias", "again.bias"}


def test_small_weights_and_shared_and_unused_ones():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(20, 4)
            self.b = nn.Linear(4, 20, bias=False)
            self.b.weight = nn.Parameter(torch.randn(20, 4))
            self.again = self.b
            self.unused = nn.Linear(3, 3)
            self.head = nn.Linear(20, 10)

        def forward(self, x):
            return self.head(self.again(self.a(self.b(self.a(x)))))

    torch.manual_seed(0)
    model = Odd()
    reference = copy.deepcopy(model)
    found = trainer(ADAM(lr=0.01), model=model, utils={"grad_norm_clip": False})
    data = batches(count=4)
    for x, label in data:
        found.train_step(x, label)
    eager_steps(reference, torch.optim.AdamW(reference.parameters(), 0.01, weight_decay=0), data)
    assert_same_weights(model, reference)
    names = found.state_dict()["model"]["full_precision"]
    assert "b.weight" in names and "again.weight" not in names
    assert torch.equal(model.unused.weight, reference.unused.weight)
    model.load_state_dict(found.state_dict(pytorch_format=True))


def test_dropout_follows_the_seed_and_is_off_in_evaluation():
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.5), nn.Linear(64, 10))
    reference = copy.deepcopy(model)
    model_desc = {"inputs": [("input", ["b", 20]), ("label", ["b"])], "outputs": description()["outputs"]}
    found = ORTTrainer(model, model_desc, SGD(lr=0.1), cross_entropy, options())
    data = batches(count=4)
    torch.manual_seed(7)
    losses = [found.train_step(x, label)[0].item() for x, label in data]
    torch.manual_seed(7)
    expected = eager_steps(reference, torch.optim.SGD(reference.parameters(), 0.1), data)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
    reference.eval()
    torch.testing.assert_close(found.eval_step(X, LABEL)[1], reference(X).detach(), rtol=0, atol=1e-5)
    assert model.training


def test_model_that_computes_its_loss_and_returns_a_dictionary():
    class WithLoss(MLP):
        def forward(self, x, label):
            logits = super().forward(x)
            return {"logits": logits, "loss": F.cross_entropy(logits, label)}

    model = WithLoss()
    model.load_state_dict(make().state_dict())
    model_desc = {**description(), "outputs": [("logits", ["b", 10]), ("loss", [], True)]}
    found = ORTTrainer(model, model_desc, ADAM(lr=0.01), options=options())
    same = trainer()
    for x, label in batches(count=3):
        logits, loss = found.train_step(label=label, x=x)
        expected_loss, expected_logits = same.train_step(x, label)
        assert torch.equal(loss, expected_loss) and torch.equal(logits, expected_logits)
        assert not loss.requires_grad and not logits.requires_grad


def test_evaluation_first_and_in_between_changes_nothing():
    found, same = trainer(), trainer()
    assert found.eval_step(X, LABEL)[1].shape == (16, 10)
    for x, label in batches(count=3):
        found.eval_step(x, label)
        assert torch.equal(found.train_step(x, label)[0], same.train_step(x, label)[0])
    assert found._train_step_info.step == 3


def test_learning_rate_may_change_without_a_new_graph():
    config = SGD(lr=0.1)
    model = make()
    reference = copy.deepcopy(model)
    found = trainer(config, model=model)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for k, (x, label) in enumerate(batches(count=4)):
        config.lr = optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        found.train_step(x, label)
        eager_steps(reference, optimizer, [(x, label)])
        if k == 0:
            update = found._optimizer.updater._update
    assert found._optimizer.updater._update is update
    assert_same_weights(model, reference, 1e-6)


def test_custom_schedule_is_asked_at_every_step():
    class Steps(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info):
            seen.append((train_step_info.step, train_step_info.optimization_step))
            return [0.25]

    seen = []
    found = trainer(lr_scheduler=Steps(), batch={"gradient_accumulation_steps": 2})
    for x, label in batches(count=4):
        found.train_step(x, label)
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert found.options.lr_scheduler.get_last_lr() == [0.25]


def test_many_trainers_in_one_process_stay_in_onnx_runtime(monkeypatch):
    """Each has its own code; otherwise Dynamo's limit of recompilations would send the ninth to torch."""
    sessions = []
    original = OrtSession.__init__
    monkeypatch.setattr(OrtSession, "__init__", lambda s, *a, **k: (sessions.append(s), original(s, *a, **k))[1])
    model_desc = {"inputs": [("input", ["b", 20]), ("label", ["b"])], "outputs": description()["outputs"]}
    for k in range(10):
        ORTTrainer(nn.Linear(20, 10), model_desc, SGD(), cross_entropy, options()).train_step(X, LABEL)
        assert len(sessions) == 2 * (k + 1)


def test_nan_in_inputs_reaches_the_weights_as_in_torch():
    found = trainer()
    found.train_step(X, LABEL)
    found.train_step(torch.full_like(X, torch.nan), LABEL)
    assert all(np.isnan(w).all() for n, w in found.state_dict()["model"]["full_precision"].items() if n == "fc3.weight")


def test_unused_imports_stay_out():
    """The strategy alone needs neither cerberus nor h5py."""
    import subprocess
    import sys

    code = "import sys, lightning_ort; print({'cerberus', 'h5py', 'lightning_ort.trainer'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


MIXED = {"mixed_precision": {"enabled": True}}


def test_mixed_precision_trains_with_scaled_gradients():
    model = make()
    reference = copy.deepcopy(model)
    scaler = amp.DynamicLossScaler(loss_scale=1024.0, up_scale_window=2)
    found = trainer(SGD(lr=0.1), model=model, mixed_precision={"enabled": True, "loss_scaler": scaler})
    data = batches(count=6)
    losses = [found.train_step(x, label)[0].item() for x, label in data]
    expected = eager_steps(reference, torch.optim.SGD(reference.parameters(), 0.1), data)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=5e-3)
    assert_same_weights(model, reference, 4e-3)  # torch under autocast ends 2.3e-3 from float32
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert scaler.loss_scale == 8192.0 and found._train_step_info.all_finite
    assert found.state_dict()["trainer_options"]["mixed_precision"] is True


def test_infinite_gradients_skip_the_update():
    model = make()
    scaler = amp.DynamicLossScaler(loss_scale=float(1 << 24), min_loss_scale=1.0)
    found = trainer(ADAM(lr=0.01), model=model, mixed_precision={"enabled": True, "loss_scaler": scaler})
    before = copy.deepcopy(model.state_dict())
    info = found._train_step_info
    found.train_step(X, LABEL)
    assert not info.all_finite and (info.step, info.optimization_step) == (1, 0)
    assert scaler.loss_scale == float(1 << 23)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert found.state_dict()["optimizer"]["fc1.bias"]["Update_Count"] == [1]
    for _ in itertools.takewhile(lambda _: not info.all_finite, range(20)):
        found.train_step(X, LABEL)
    assert info.all_finite and info.optimization_step == 1
    assert not torch.equal(model.fc1.weight, before["fc1.weight"])
