"""The older interface, ``lightning_ort.ort_trainer``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from orttrainer_models import Recording, batches, cross_entropy, make

from lightning_ort import amp
from lightning_ort.errors import CheckpointError
from lightning_ort.ort_trainer import (
    IODescription,
    LossScaler,
    ModelDescription,
    ORTTrainer,
    generate_sample,
    load_checkpoint,
    save_checkpoint,
)

X, LABEL = batches(count=1)[0]
RATE = torch.tensor([0.01])


def old_trainer(attributes=None, rate=None, **settings):
    description = ModelDescription(
        [IODescription("x", ["b", 20], torch.float32), IODescription("label", ["b"], torch.int64)],
        [IODescription("loss", []), IODescription("logits", ["b", 10])],
    )
    with pytest.warns(DeprecationWarning, match="keeps old scripts running"):
        return ORTTrainer(
            make(), cross_entropy, description, "AdamOptimizer", attributes, IODescription("Learning_Rate", [1]), "cpu",
            get_lr_this_step=rate, enable_grad_norm_clip=False, **settings,
        )  # fmt: skip


def test_older_interface_trains_the_same():
    recording = Recording("mlp_adam_lr1e-2")
    by_input, by_function = old_trainer(), old_trainer(rate=lambda step: 0.01)
    for k, (x, label) in enumerate(batches(count=5)):
        rate = torch.tensor([0.01])
        got = by_input.train_step(x, label, rate) if k % 2 else by_input.train_step(x, label, Learning_Rate=rate)
        same = by_function.train_step(x, label)
        assert torch.equal(got[0], same[0])
        np.testing.assert_allclose(float(got[0]), recording.arrays["losses"][k], rtol=0, atol=2e-6)
    assert by_function.eval_step(X, LABEL, fetches=["loss"]).shape == ()
    state = by_input.state_dict()
    assert state["Moment_1_fc1.bias"].shape == (32,) and state["Update_Count_fc1.bias"].tolist() == [6]
    fresh = old_trainer(rate=lambda step: 0.01)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.train_step(X, LABEL)[0], by_function.train_step(X, LABEL)[0])
    with pytest.raises(RuntimeError, match=r"unexpected keys: \['nope'\]"):
        fresh.load_state_dict({"nope": X}, strict=True)


def test_arguments_in_all_forms_are_the_same():
    """In order, in one list, by name, and through a call; lists and calls evaluate as well."""
    found, still = old_trainer(), torch.tensor([0.0])
    losses = [
        call(found)[0]
        for call in (
            lambda t: t.train_step(X, LABEL, still),
            lambda t: t.train_step([X, LABEL, still]),
            lambda t: t.train_step(X, Learning_Rate=still, label=LABEL),
            lambda t: t(X, LABEL, still),
            lambda t: t([X, LABEL], Learning_Rate=0.0),
            lambda t: t([X, LABEL, RATE]),
        )
    ]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert found._trainer._train_step_info.step == 6
    found.eval()
    loss, _ = found(X, LABEL)
    assert float(loss) < float(losses[0]) - 0.01
    assert torch.equal(found([X, LABEL])[0], loss) and found._trainer._train_step_info.step == 6
    found.train()
    assert torch.equal(found(X, LABEL, still)[0], loss)


def test_a_step_without_its_learning_rate_is_refused():
    found = old_trainer()
    with pytest.raises(AssertionError, match="The learning rate 'Learning_Rate' is missing"):
        found.train_step(X, LABEL)
    with pytest.raises(ValueError, match="Learning_Rate=inf: expected a number from 0 that is finite"):
        found.train_step(X, LABEL, torch.tensor([torch.inf]))
    with pytest.raises(AssertionError, match=r"3 inputs were given in order"):
        found.train_step(X, LABEL, RATE, RATE)
    assert found._trainer._train_step_info.step == 0


class Duck:
    """Without a base class: the scale falls at each update."""

    def __init__(self):
        self.loss_scale_ = 512.0
        self.told = []

    def update_loss_scale(self, is_all_finite):
        self.told.append(bool(is_all_finite))
        self.loss_scale_ /= 2


SCALERS = {
    "new": lambda: amp.DynamicLossScaler(loss_scale=512, up_scale_window=1),
    "old": lambda: LossScaler(ORTTrainer.loss_scale_input_name, True, 512, 1),
    "duck": Duck,
}


@pytest.mark.parametrize("name", SCALERS)
def test_scaler_of_the_users_moves_and_leaves_the_results_alone(name):
    """With a scaler a step gives loss and outputs, without one a flag as well."""
    scaler = SCALERS[name]()
    found = old_trainer(use_mixed_precision=True, loss_scaler=scaler)
    assert len(found.train_step(X, LABEL, RATE)) == 2
    expected = 256.0 if name == "duck" else 1024.0
    assert (scaler.loss_scale if name == "new" else scaler.loss_scale_) == expected
    assert len(found.train_step([X, LABEL, RATE])) == 2
    assert found._trainer._scale == expected
    state = found.state_dict()
    found.load_state_dict(state)
    plain = old_trainer(loss_scaler=SCALERS[name]())
    assert float(plain.train_step(X, LABEL, RATE)[0]) == pytest.approx(2.39035, abs=1e-4)


def test_loss_scale_of_a_step():
    """Without a scaler the script gives the scale, after the learning rate or by name, and is told of the gradients."""
    found = old_trainer(use_mixed_precision=True)
    weights = found.state_dict(include_optimizer_state=False)
    *_, finite = found.train_step(X, LABEL, RATE, torch.tensor(3e38))
    assert not finite.item() and found._trainer._skipped == 1
    after = found.state_dict(include_optimizer_state=False)
    assert all(torch.equal(after[n], w) for n, w in weights.items())
    *_, finite = found.train_step(X, LABEL, RATE, **{found.loss_scale_input_name: torch.tensor(128.0)})
    assert finite.item() and found._trainer._scale == 128
    assert len(old_trainer(use_mixed_precision=True).train_step(X, LABEL, RATE)) == 3


def test_old_scaler_moves_as_the_new_one():
    old, new = LossScaler("any", True, up_scale_window=3), amp.DynamicLossScaler(up_scale_window=3)
    info = torch.nn.Module()  # anything with an attribute
    for finite in (True, True, True, False, True, False, False):
        info.all_finite = finite
        old.update_loss_scale(torch.tensor(finite))
        new.update(info)
        assert (old.loss_scale_, old.stable_steps_) == (new.loss_scale, new._stable_steps_count)
    assert (old.up_scale_window_, old.min_loss_scale_, old.max_loss_scale_) == (3, 1.0, 2.0**24)
    fixed = LossScaler("any", False, loss_scale=8)
    fixed.update_loss_scale(False)
    assert fixed.loss_scale_ == 8 and not fixed.is_dynamic_scale_


def test_attributes_of_weights_and_the_model():
    attributes = {"fc1.weight": {"lambda": 0.1, "alpha": 0.8, "do_bias_correction": 1}}
    found = old_trainer(lambda name: attributes.get(name, {}))
    assert found._trainer.optim_config.hyper_parameters("fc1.weight")["lambda"] == 0.1
    assert found.onnx_model_ is None
    found.train_step(X, LABEL, RATE)
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in found.onnx_model_.graph.initializer}
    np.testing.assert_array_equal(weights["fc1.weight"], found.state_dict()["fc1.weight"])


@pytest.mark.parametrize(
    "description", [IODescription("y", ["b", 3], torch.int64, num_classes=2), IODescription("x", [4])]
)
def test_samples_are_made_up(description):
    sample = generate_sample(description)
    if description.num_classes_:
        assert (
            sample.shape == (1, 3) and sample.dtype == torch.int64 and 0 <= int(sample.min()) <= int(sample.max()) < 2
        )
    else:
        assert sample.shape == (4,) and sample.dtype == torch.float32
    with pytest.raises(ValueError, match=r"'n' is torch.int32: give num_classes"):
        generate_sample(IODescription("n", [1], torch.int32))


def test_checkpoints_go_on(tmp_path):
    first = old_trainer()
    first.train_step(X, LABEL, RATE)
    save_checkpoint(first, tmp_path, checkpoint_state_dict={"epoch": 3})
    second = old_trainer()
    assert load_checkpoint(second, tmp_path) == {"epoch": 3}
    assert torch.equal(first.train_step(X, LABEL, RATE)[0], second.train_step(X, LABEL, RATE)[0])
    with pytest.warns(UserWarning, match="already exists, overwriting"):
        save_checkpoint(first, str(tmp_path), include_optimizer_state=False)
    assert load_checkpoint(second, str(tmp_path)) == {}
    with pytest.raises(AssertionError, match="Couldn't find checkpoint file"):
        load_checkpoint(second, tmp_path, "other")
    with pytest.raises(AssertionError, match="directory doesn't exist"):
        save_checkpoint(first, tmp_path / "none")
    path = tmp_path / "ORT_checkpoint.ort.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"ORT_checkpoint.ort.pt is cut short or damaged"):
        load_checkpoint(second, tmp_path)
    torch.save({"weights": 1}, path)
    with pytest.raises(CheckpointError, match="holds no 'model'"):
        load_checkpoint(second, tmp_path)


DESCRIPTION = ModelDescription(
    [IODescription("x", ["b", 20]), IODescription("label", ["b"])],
    [IODescription("loss", []), IODescription("y", ["b", 10])],
)
WRONG = [
    ({"training_optimizer_name": "Adam"}, "training_optimizer_name='Adam'; expected one of AdamOptimizer"),
    ({"model_desc": [1]}, "model_desc=.*expected a ModelDescription"),
    ({"learning_rate_description": "lr"}, "learning_rate_description='lr': expected a IODescription"),
    ({"map_optimizer_attributes": 3}, "map_optimizer_attributes=3: expected a function"),
    ({"map_optimizer_attributes": lambda name: 3}, r"map_optimizer_attributes\('fc1.weight'\) gave 3"),
    ({"global_step": -1}, "global_step=-1: expected an integer from 0"),
    ({"loss_scaler": 3, "use_mixed_precision": True}, "loss_scaler=3: expected a LossScaler"),
    ({"device": None}, "device=None: expected 'cpu'"),
    ({"world_size": 2}, "world_size"),
]


@pytest.mark.filterwarnings("ignore:.*keeps old scripts running")
@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments(changed, message):
    arguments = {
        "model": make(), "loss_fn": cross_entropy, "model_desc": DESCRIPTION, "map_optimizer_attributes": None,
        "training_optimizer_name": "AdamOptimizer", "learning_rate_description": IODescription("lr", [1]),
        "device": "cpu",
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        ORTTrainer(**{**arguments, **changed})


def test_pieces_of_moments_are_refused(tmp_path):
    """ONNX Runtime cut weights where the share of a rank ends."""
    found = old_trainer(rate=lambda step: 0.01)
    state = found.state_dict()
    for rank, half in enumerate((slice(0, 300), slice(300, None))):
        piece = {"Moment_1_fc1.weight": state["Moment_1_fc1.weight"].ravel()[half]}
        torch.save({"model": {**state, **piece}}, tmp_path / f"ORT_checkpoint.ZeRO.{rank}.1.ort.pt")
    with pytest.raises(NotImplementedError, match=r"pieces of moments \(Moment_1_fc1.weight has shape \[340\]"):
        load_checkpoint(found, tmp_path)
