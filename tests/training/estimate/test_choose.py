"""Mode, optimizer and sizes as training chooses them on its GPUs."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.core.errors import UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.te_models.spec import find_model
from fp8_suite.training import prepare
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import advice, choose
from fp8_suite.training.parallel.watchdog import Watchdog

AUTO = {"batch_size": "auto"}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")


def chosen(free, model="tiny-qwen3", effective="delayed", **settings):
    cfg = config_from_dict({"model_name": model, "use_te": True, "mixed_precision": "fp8"} | settings)
    spec = find_model(model, init="auto", use_te=True)
    return choose.choose_sizing(cfg, spec, torch.device("cuda"), effective, free)


def test_training_plans_with_the_size_of_its_model():
    sizing = chosen(3e9, batch_size="auto", recompute="auto", global_batch_size=48)
    size = read_model("tiny-qwen3").size
    assert sizing.chosen.model == size and sizing.chosen.gpus == 1 and sizing.fits
    assert f"{sizing.needed / 1e9:.1f} of 3.0 GB" in sizing.describe()
    assert sizing.gpu == advice.resized(sizing, {"moment_dtype": "fp8"}).gpu == GPUS["H200"]
    with pytest.raises(UserError) as refused:
        chosen(2.1e9, batch_size="auto", recompute="auto", global_batch_size=48)
    assert refused.value.flags == {"batch_size", "recompute"}
    assert not chosen(2.1e9, batch_size=48).fits, "what is given is not refused"


@pytest.mark.parametrize("requested", ["mxfp8", "nvfp4"])
def test_a_recipe_that_falls_back_is_predicted_as_the_one_that_runs(requested):
    settings = {"batch_size": 8, "fp8_scenario": requested}
    expected, sizing = chosen(3e9, batch_size=8), chosen(3e9, **settings)
    assert sizing.needed == expected.needed != chosen(3e9, **settings, effective=requested).needed
    assert advice.resized(sizing, {"moment_dtype": "fp8"}).chosen.recipe == "delayed"


def test_training_plans_with_the_recipe_that_it_falls_back_to():
    flags = {"model_name": "tiny-llama", "use_te": True, "te_backend": "emulated", "mixed_precision": "fp8"}
    cfg = config_from_dict(flags | {"fp8_scenario": "nvfp4"})  # not emulated
    with ExitStack() as cleanup:
        resolved, *_, sizing = prepare._decide(cfg, torch.device("cpu"), Watchdog(1.0), cleanup)
    assert (resolved.precision.requested, sizing.chosen.recipe) == ("nvfp4", "delayed")


@pytest.mark.parametrize(
    "settings",
    [
        {"precision_map": "layers.0=bf16"},
        {"use_te": False, "compile": False},
        {"te_backend": "emulated", "recompute": "auto"},
    ],
)
def test_auto_is_refused_where_memory_is_unknown(settings):
    with pytest.raises(UserError) as refused:
        chosen(3e9, **settings, **AUTO)
    assert refused.value.flags == {"batch_size"} | settings.keys() & {"recompute"}
    known = {name: value for name, value in settings.items() if name != "recompute"}
    assert chosen(3e9, **known).predicted_gb is None
    only_evaluates = chosen(3e9, **settings, **AUTO, max_steps=0).chosen.cfg.optim
    assert (only_evaluates.batch_size, only_evaluates.gradient_accumulation_steps) == (8, 1)


def test_a_state_too_large_for_the_gpu_is_refused_unless_the_run_only_evaluates():
    with pytest.raises(UserError, match=r"^--model_name tiny-qwen3: on one GPU: .* use a smaller model"):
        chosen(10**6, batch_size=1)
    assert chosen(10**6, batch_size=1, max_steps=0).needed is None


@pytest.mark.parametrize(("held", "mode"), [(0, "fsdp_grad"), (95e9, "fsdp_full")])
def test_mode_and_sizes_share_the_memory_that_is_free(held, mode, monkeypatch):
    """Another process holds memory of the GPU: its total alone would choose fsdp_grad."""
    total = 150.1e9
    monkeypatch.setattr(choose, "dist", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(choose.ranks, "world_size", lambda: 8)
    monkeypatch.setattr(choose.ranks, "local_rank_and_size", lambda: (0, 8))
    for name, value in {"mem_get_info": (total - held, total), "memory_reserved": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    cfg = {"model_name": "meta-llama/Llama-3.1-8B", "use_te": True, "init": "random", "recompute": "auto"}
    cfg = config_from_dict(cfg | {"batch_size": "auto", "mixed_precision": "bf16"})
    free = choose.free_memory(cfg, CUDA)
    spec = find_model(cfg.model.model_name, init="random", use_te=True)
    sizing = choose.choose_sizing(cfg, spec, CUDA, "bf16", free)
    assert (sizing.chosen.mode, sizing.free) == (mode, total - held) and sizing.fits


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"recompute": "full", "offload_activations": True}, "cpu", "offload_activations: without a GPU"),
        ({"recompute": "full", "offload_activations": True}, "cuda", "offload_activations: not possible"),
        ({"recompute": "mlp:1"}, "cuda", "--recompute mlp:1: DeepSpeed ZeRO-3 recomputes all of a layer"),
    ],
)
def test_recomputation_that_cannot_run_is_refused_before_the_data_is_read(settings, device, message):
    strategy = SimpleNamespace(device=torch.device(device), reentrant=True)
    with pytest.raises(UserError, match=message):
        choose.check_recomputation(config_from_dict({"use_te": True, **settings}), strategy)
