"""What is not supported is refused before any training, in words that name the flag, and nothing is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import Regressor, curve
from parity import STRATEGY, assert_same_state, make_trainer, quiet, state_of

if STRATEGY != "ort":
    pytest.skip("refusals are those of strategy='ort'", allow_module_level=True)

import onnxruntime

from lightning_ort import ORTPrecision, ORTStrategy

pytestmark = pytest.mark.stock_only


class Prepared(Regressor):
    """Brings an optimizer that already has moments, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self(torch.ones(2, 12)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.optimizer


def assert_refused(match: str, **flags) -> BaseException:
    """Trainer and fit raise an error that matches; module and optimizer are as they were and train elsewhere."""
    module = Prepared()
    state, moments = state_of(module), copy.deepcopy(module.optimizer.state_dict())
    attributes = sorted(vars(module))
    with quiet(), pytest.raises(Exception, match=match) as error:
        make_trainer(**flags).fit(module, curve())
    assert type(error.value) is not Exception
    assert len(str(error.value)) > 20
    assert module.steps == 0, "training had begun"
    assert_same_state(state, state_of(module), 0)
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    after = module.optimizer.state_dict()
    assert after["param_groups"] == moments["param_groups"]
    for index, values in moments["state"].items():
        assert all(torch.equal(after["state"][index][name], value) for name, value in values.items())
    assert set(vars(module)) - set(attributes) <= {"_trainer"}
    with quiet():
        make_trainer("auto", max_steps=2).fit(module, curve())
    assert module.steps == 2
    return error.value


def test_several_devices_on_one():
    assert_refused(r"device='cpu'.*2 devices", devices=2, strategy=ORTStrategy(device="cpu"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start_method": "thread"}, "start_method='thread': expected 'popen', 'spawn', 'fork' or 'forkserver'"),
        ({"timeout": 30}, "timeout=30: expected a positive datetime.timedelta"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook='fp16': expected a function"),
        ({"ddp_comm_state": object()}, "ddp_comm_state is for a ddp_comm_hook"),
        ({"model_averaging_period": 4}, "model_averaging_period=4.*PostLocalSGDState"),
        ({"shard_optimizer": 1}, "shard_optimizer=1: expected True or False"),
        ({"process_group_backend": 5}, "process_group_backend=5: expected a name"),
        ({"cluster_environment": "slurm"}, "cluster_environment='slurm': expected an object"),
        ({"find_unused_parameters": "no"}, "find_unused_parameters='no': expected True or False"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan: expected a number above 0"),
        ({"find_unused": True}, "no argument 'find_unused'.*find_unused_parameters"),
    ],
)
def test_options_of_several_devices(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        ORTStrategy(**options)


def test_layers_of_one_device_are_synchronized_as_they_are():
    with quiet():
        trainer = make_trainer("ort", sync_batchnorm=True, max_steps=2)
        trainer.fit(Regressor(), curve())
    assert trainer.global_step == 2


def test_precision():
    assert_refused(r"(?i)precision|transformer.engine", precision="transformer-engine")


class Foreign(Precision):
    """Of another library."""

    precision = "8-mixed"


@pytest.mark.parametrize("strategy", ["ort", ORTStrategy()])
def test_foreign_precision(strategy):
    error = assert_refused(r"precision", plugins=[Foreign()], strategy=strategy)
    assert "'8-mixed' (Foreign)" in str(error) and "'bf16-mixed'" in str(error)


def test_scaled_lbfgs():
    """One of its steps computes the loss several times, and cannot be left out afterwards."""

    class Quasi(Prepared):
        def __init__(self):
            super().__init__()
            self.optimizer = torch.optim.LBFGS(self.parameters())

    module = Quasi()
    state = state_of(module)
    with quiet(), pytest.raises(Exception, match=r"LBFGS.*'bf16-mixed'"):
        make_trainer(plugins=[ORTPrecision("16-mixed")]).fit(module, curve())
    assert_same_state(state, state_of(module), 0)
    assert module.steps == 0, "training had begun"


def test_precision_for_another_strategy():
    assert_refused(r"strategy='ort'", plugins=[ORTPrecision("bf16-mixed")], strategy="auto")


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "TensorrtExecutionProvider", "NoSuchProvider"])
def test_provider_that_is_not_there(provider):
    available = onnxruntime.get_available_providers()
    if provider in available:
        pytest.skip(f"this ONNX Runtime has {provider}")
    with pytest.raises(Exception, match=provider) as error:
        ORTStrategy(providers=[provider])
    assert all(name in str(error.value) for name in available)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"on_unsupported": "ignore"}, "on_unsupported"),
        ({"placement": "eager"}, "placement='eager'.*'torch', 'torch-channels-last' or 'inductor'"),
        ({"providers": []}, "providers"),
        ({"providers": "CPUExecutionProvider"}, "providers"),
        ({"providers": ["CPUExecutionProvider"], "provider_options": [{}, {}]}, "provider_options"),
        ({"provider_options": {"CUDAExecutionProvider": {}}}, "provider_options|CUDAExecutionProvider"),
        ({"session_options": {"no_such_option": 1}}, "no_such_option"),
        ({"session_options": []}, r"session_options=\[\] \(a list\): expected an onnxruntime.SessionOptions"),
        (
            {"session_options": {"intra_op_num_threads": None}},
            r"session_options\['intra_op_num_threads'\]=None: expected",
        ),
        ({"session_options": {"intra_op_num_threads": -1}}, r"session_options\['intra_op_num_threads'\]=-1: expected"),
        ({"session_options": {"enable_mem_pattern": "yes"}}, "'enable_mem_pattern'.*expected True or False"),
        (
            {"session_options": {"profile_file_prefix": "/no/such/folder/p"}},
            "'profile_file_prefix'.*folder does not exist",
        ),
        ({"session_options": {"add_session_config_entry": 1}}, "has no 'add_session_config_entry'"),
        (
            {"session_options": {"session.intra_op_thread_affinities": "q", "intra_op_num_threads": 2}},
            "session_options.*refused by ONNX Runtime",
        ),
        (
            {"providers": ["CPUExecutionProvider"], "provider_options": {"CPUExecutionProvider": {"threads": 1}}},
            "provider_options has 'threads' for CPUExecutionProvider",
        ),
        (
            {"providers": ["CPUExecutionProvider"], "provider_options": {"CPUExecutionProvider": {"a": None}}},
            "provider_options of CPUExecutionProvider have 'a': None",
        ),
        ({"providers": [3]}, "providers holds 3"),
        ({"providers": 3}, "providers=3: expected a list"),
        ({"verify": None}, "verify=None: expected True or False"),
        ({"optimizer": ["ort"]}, r"optimizer=\['ort'\]"),
        ({"precision_plugin": "16-mixed"}, "precision='16-mixed'"),
        ({"device": "nowhere"}, "device='nowhere'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_arguments(arguments, match):
    """Wrong arguments are named by the constructor, with the value that was given."""
    with pytest.raises((ValueError, TypeError, RuntimeError, MisconfigurationException), match=match):
        ORTStrategy(**arguments)


class Unsupported(Regressor):
    """An operation that ONNX cannot express: a Fourier transform."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        spectrum = torch.fft.rfft(self.body(x)).abs().square().mean(-1, keepdim=True)
        return torch.nn.functional.mse_loss(self.head(self.body(x)) + spectrum, y)


def test_unsupported_operation_is_refused_on_request():
    """on_unsupported="error" names the operation and the line of the user's file; the weights are untouched."""
    module = Unsupported()
    state = state_of(module)
    with quiet(), pytest.raises(Exception, match="fft") as error:
        make_trainer(ORTStrategy(on_unsupported="error")).fit(module, curve())
    assert "test_refusals.py" in str(error.value)
    assert_same_state(state, state_of(module), 0)


def test_unsupported_operation_runs_in_torch_and_is_reported():
    """By default it trains, with eager's weights, and the report says what ran in torch, why and where."""
    states = []
    for strategy in ("auto", "ort"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, trainer = Unsupported(), make_trainer(strategy)
        with quiet():
            trainer.fit(module, curve())
        states.append(state_of(module))
    assert_same_state(*states)
    in_torch = trainer.strategy.report()["training_step"].in_torch
    assert any("fft" in entry.what + entry.reason for entry in in_torch)
    assert any("test_refusals.py" in entry.source for entry in in_torch)
    assert "fft" in str(trainer.strategy.report())
