"""Options: their schema, what has an effect, and what is refused."""

from __future__ import annotations

import re

import onnxruntime
import pytest
from orttrainer_models import batches, options, trainer

from lightning_ort import ORTTrainerOptions, amp, optim
from lightning_ort.trainer.options import REFUSED, SCHEMA, PropagateCastOpsStrategy

SCHEDULE = optim.lr_scheduler.ConstantWarmupLRScheduler(10)

VALID = [
    {},
    {"batch": None},
    {"batch": {"gradient_accumulation_steps": True}},
    {"device": {"id": "bogus"}},
    {"lr_scheduler": None},
    {"lr_scheduler": SCHEDULE},
    {"mixed_precision": {"enabled": True, "loss_scaler": amp.LossScaler(2.0)}},
    {"utils": {"frozen_weights": [1, 2]}},
    {"provider_options": {"CPUExecutionProvider": {"a": "b"}}},
    {"session_options": onnxruntime.SessionOptions()},
]

INVALID = [
    ({"foo": 1}, "{'foo': ['unknown field']}"),
    ({"batch": {"foo": 1}}, "{'batch': [{'foo': ['unknown field']}]}"),
    (
        {"batch": {"gradient_accumulation_steps": 0}},
        "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}]}",
    ),
    (
        {"batch": {"gradient_accumulation_steps": 1.5}},
        "{'batch': [{'gradient_accumulation_steps': ['must be of integer type']}]}",
    ),
    (
        {"batch": {"gradient_accumulation_steps": "2"}},
        "{'batch': [{'gradient_accumulation_steps': ['must be of integer type']}]}",
    ),
    ({"batch": 3}, "{'batch': ['must be of dict type']}"),
    ({"device": {"id": 0}}, "{'device': [{'id': ['must be of string type']}]}"),
    ({"device": {"mem_limit": -1}}, "{'device': [{'mem_limit': ['min value is 0']}]}"),
    (
        {"distributed": {"deepspeed_zero_optimization": {"stage": 2}}},
        "{'distributed': [{'deepspeed_zero_optimization': [{'stage': ['max value is 1']}]}]}",
    ),
    ({"distributed": {"world_size": 0}}, "{'distributed': [{'world_size': ['min value is 1']}]}"),
    ({"lr_scheduler": 3}, "{'lr_scheduler': ['must be of lr_scheduler type']}"),
    (
        {"mixed_precision": {"loss_scaler": 3}},
        "{'mixed_precision': [{'loss_scaler': ['must be of loss_scaler type']}]}",
    ),
    ({"mixed_precision": {"enabled": 1}}, "{'mixed_precision': [{'enabled': ['must be of boolean type']}]}"),
    ({"utils": {"frozen_weights": "w"}}, "{'utils': [{'frozen_weights': ['must be of list type']}]}"),
    (
        {"_internal_use": {"onnx_opset_version": 11}},
        "{'_internal_use': [{'onnx_opset_version': ['min value is 12']}]}",
    ),
    (
        {"_internal_use": {"onnx_opset_version": 15}},
        "{'_internal_use': [{'onnx_opset_version': ['max value is 14']}]}",
    ),
    (
        {"_internal_use": {"extra_postprocess": 3}},
        "{'_internal_use': [{'extra_postprocess': ['Must be callable or None']}]}",
    ),
    ({"session_options": 3}, "{'session_options': ['must be of session_options type']}"),
    ({"provider_options": [1]}, "{'provider_options': ['must be of dict type']}"),
    (
        {"batch": {"gradient_accumulation_steps": 0}, "foo": 1},
        "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}], 'foo': ['unknown field']}",
    ),
    (
        {"debug": {"graph_save_paths": {"model_with_gradient_graph_path": 3}}},
        "{'debug': [{'graph_save_paths': [{'model_with_gradient_graph_path': ['must be of string type']}]}]}",
    ),
    (
        {"graph_transformer": {"propagate_cast_ops_config": {"strategy": "x"}}},
        "{'graph_transformer': [{'propagate_cast_ops_config': "
        "[{'strategy': ['must be of propagate_cast_ops_strategy type']}]}]}",
    ),
    (
        {"graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_strategy": 1}}},
        "{'graph_transformer': [{'propagate_cast_ops_config': [{'propagate_cast_ops_strategy': ['unknown field']}]}]}",
    ),
]

# a value other than the default for every refused key
REFUSED_VALUES = {
    "pipeline_cut_info_string": "a",
    "sliced_schema": {"a": [1]},
    "sliced_axes": {"a": 1},
    "sliced_tensor_names": ["a"],
    "strategy": PropagateCastOpsStrategy.NONE,
    "level": 2,
    "allow": ["Add"],
    "number_recompute_layers": 1,
}


def nested(path: str, value: object) -> dict:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[return-value]


@pytest.mark.parametrize("given", VALID)
def test_valid_options_are_taken(given):
    ORTTrainerOptions(given)


@pytest.mark.parametrize(("given", "message"), INVALID, ids=[m for _, m in INVALID])
def test_invalid_options_are_named(given, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"Invalid options: {message}") + "$"):
        ORTTrainerOptions(given)


def test_options_must_be_a_dictionary():
    asked = r"^options=.*: expected a dictionary, such as \{'device': \{'id': 'cpu'\}\};"
    with pytest.raises(TypeError, match=f"{asked} .*'NoneType' object is not iterable"):
        ORTTrainerOptions(None)
    with pytest.raises(TypeError, match=f"{asked} .*cannot convert dictionary update sequence element #0 to a sequ"):
        ORTTrainerOptions([1])


def test_defaults():
    found = ORTTrainerOptions()
    assert found.device.id == "cuda" and found.device.mem_limit == 0
    assert found.batch.gradient_accumulation_steps == 1
    assert found.mixed_precision.enabled is False and found.mixed_precision.loss_scaler is None
    assert found.utils.grad_norm_clip is True and found.utils.frozen_weights == []
    assert found._internal_use.onnx_opset_version == 14
    config = found.graph_transformer.propagate_cast_ops_config
    assert config.strategy.name == "FLOOD_FILL" and config.level == 1 and config.allow == []
    assert found.provider_options == {} and found.session_options is None
    assert repr(found).startswith("{'batch': {'gradient_accumulation_steps': 1}, 'device': {'id': 'cuda'")


def test_what_is_given_stays_the_same_object():
    scaler = amp.DynamicLossScaler()
    given = {"lr_scheduler": SCHEDULE, "mixed_precision": {"enabled": True, "loss_scaler": scaler}}
    found = ORTTrainerOptions(given)
    assert found.lr_scheduler is SCHEDULE and found.mixed_precision.loss_scaler is scaler
    assert given == {"lr_scheduler": SCHEDULE, "mixed_precision": {"enabled": True, "loss_scaler": scaler}}


@pytest.mark.parametrize("path", REFUSED)
def test_options_without_effect_are_refused(path):
    key = path.split(".")[-1]
    default = SCHEMA
    for section in path.split("."):
        default = default.get("schema", default)[section]
    value = REFUSED_VALUES.get(key, 2 if default["type"] == "integer" else True)
    with pytest.raises(NotImplementedError, match=re.escape(f"options[{path!r}] = ")):
        trainer(**nested(path, value))


def test_how_several_processes_share_means_nothing_for_one():
    """As in the original; the weights are the same."""
    x, label = batches(count=1)[0]
    shared = {"allreduce_post_accumulation": True, "deepspeed_zero_optimization": {"stage": 1}}
    losses = [[float(t.train_step(x, label)[0]) for _ in range(2)] for t in (trainer(), trainer(distributed=shared))]
    assert losses[0] == losses[1]


def test_default_device_without_cuda_is_the_cpu_with_a_warning(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    from lightning_ort.trainer.device import choose_device

    with pytest.warns(UserWarning, match="training on the CPU"):
        assert choose_device(ORTTrainerOptions()).type == "cpu"
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        choose_device(ORTTrainerOptions({"device": {"id": "cuda:0"}}))
    with pytest.raises(ValueError, match=r"options\['device.id'\] = 'bogus' is no device"):
        choose_device(ORTTrainerOptions({"device": {"id": "bogus"}}))


def test_on_a_gpu_its_provider_comes_before_that_of_the_cpu(monkeypatch):
    from lightning_ort.trainer.device import choose_device, runtime_config

    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [cuda, cpu])
    chosen = ORTTrainerOptions({"device": {"id": "cuda", "mem_limit": 5}, "provider_options": {cpu: {"a": "b"}}})
    device = choose_device(chosen)
    config = runtime_config(chosen, device)

    assert str(device) == "cuda:1"
    assert config.providers == [cuda, cpu]
    assert config.provider_options == {cuda: {"gpu_mem_limit": "5"}, cpu: {"a": "b"}}


def test_each_process_of_a_machine_has_a_gpu(monkeypatch):
    from lightning_ort.trainer.device import choose_device

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])

    def chosen(name: str, local_rank: int) -> str:
        given = {"device": {"id": name}, "distributed": {"local_rank": local_rank}}
        return str(choose_device(ORTTrainerOptions(given)))

    assert [chosen("cuda", 0), chosen("cuda", 3), chosen("cuda:2", 3)] == ["cuda:0", "cuda:3", "cuda:2"]
    message = r"options\['distributed.local_rank'\] = 4, but this machine has 4 CUDA devices"
    with pytest.raises(ValueError, match=message):
        chosen("cuda", 4)


def test_memory_limit_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match=r"options\['device.mem_limit'\] = 5"):
        trainer(device={"id": "cpu", "mem_limit": 5})


def test_session_and_provider_options_reach_the_session():
    from lightning_ort.trainer.device import choose_device, runtime_config

    chosen = options(
        utils={"memory_efficient_gradient": True},
        debug={"deterministic_compute": True},
        provider_options={"CPUExecutionProvider": {"arena_extend_strategy": "kSameAsRequested"}},
    )
    config = runtime_config(chosen, choose_device(chosen))
    assert config.provider_options == {"CPUExecutionProvider": {"arena_extend_strategy": "kSameAsRequested"}}
    made = config.make_session_options()
    assert made.use_deterministic_compute is True and made.enable_cpu_mem_arena is False
    own = onnxruntime.SessionOptions()
    own.intra_op_num_threads = 1
    chosen = options(session_options=own, debug={"deterministic_compute": True})
    made = runtime_config(chosen, choose_device(chosen)).make_session_options()
    assert made is own and made.use_deterministic_compute is True


def test_unknown_provider_is_refused():
    with pytest.raises(ValueError, match="has no NoSuchExecutionProvider"):
        trainer(provider_options={"NoSuchExecutionProvider": {}})
