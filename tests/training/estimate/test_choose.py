"""Mode, optimizer and sizes as training chooses them on its GPUs."""

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.benchmarks.plan.layouts import best_layouts
from fp8_suite.core.errors import UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import find_model
from fp8_suite.training import prepare, resolve
from fp8_suite.training.checkpoint.run_folder import write_config
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate import advice, choose
from fp8_suite.training.estimate.layout import Layout
from fp8_suite.training.parallel.settings import AXES
from fp8_suite.training.parallel.watchdog import Watchdog
from fp8_suite.training.precision.checks import check_part

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
    assert chosen(3e9, **known).needed is None
    only_evaluates = chosen(3e9, **settings, **AUTO, max_steps=0).chosen.cfg.optim
    assert (only_evaluates.batch_size, only_evaluates.gradient_accumulation_steps) == (8, 1)


def test_a_state_too_large_for_the_gpu_is_refused_unless_the_run_only_evaluates():
    with pytest.raises(UserError, match=r"^--model_name tiny-qwen3: on one GPU: .* a smaller model"):
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


SIZES = dict.fromkeys(AXES.values(), "auto")


def layout_settings(size, length=8192, batch=64, **more):
    model = {"model_name": f"meta-llama/Llama-3.1-{size}", "init": "random", "max_seq_length": length}
    sizes = {"batch_size": "auto", "recompute": "auto", "global_batch_size": batch} | SIZES
    return config_from_dict(model | {"use_te": True, "mixed_precision": "fp8"} | sizes | more)


@pytest.fixture
def on_gpus(monkeypatch):
    """Return a function that chooses a layout on this number of H200s."""

    def choose_on(gpus, cfg, free=1e9 * GPUS["H200"].memory_gb):
        monkeypatch.setattr(choose, "dist", SimpleNamespace(is_initialized=lambda: True))
        monkeypatch.setattr(choose.ranks, "world_size", lambda: gpus)
        monkeypatch.setattr(choose.ranks, "local_rank_and_size", lambda: (0, 8))
        spec = find_model(cfg.model.model_name, init="random", use_te=True)
        check = partial(check_part, shape=ModelShape.from_hf_config(spec.config), gpus_per_node=8)
        return choose.choose_layout(cfg, spec, CUDA, "delayed", int(free), check)

    return choose_on


@pytest.mark.parametrize(
    ("size", "length", "batch", "gpus"),
    [("8B", 131_072, 8, 8), ("70B", 8192, 256, 16)],
)
def test_training_chooses_the_layout_that_the_planner_finds(size, length, batch, gpus, on_gpus, capsys):
    cfg = layout_settings(size, length, batch)
    chosen = on_gpus(gpus, cfg)
    plan = best_layouts(cfg, GPUS["H200"], gpus=gpus)[0]
    layout = Layout(**chosen.sharding.layout)
    assert (layout, chosen.sharding.sharding_mode) == (plan.setup.layout, plan.setup.mode)
    printed = capsys.readouterr().out
    assert layout.flags and f"{1e3 * plan.step:,.0f} ms per step" in printed
    assert replace(chosen, sharding=cfg.sharding) == cfg, "sizes of micro-batches are chosen later"
    spec = find_model(chosen.model.model_name, init="random", use_te=True)
    sizing = choose.choose_sizing(chosen, spec, CUDA, "delayed", int(1e9 * GPUS["H200"].memory_gb))
    assert sizing.fits and f"{sizing.needed / 1e9:.1f} of" in printed


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"size": "405B"}, "model_name"),  # the state is too large
        ({"size": "8B", "length": 131_072, "batch_size": 8, "recompute": "none"}, "context_parallel_size"),
        ({"size": "8B", "batch": None}, "context_parallel_size"),
        ({"size": "8B", "precision_map": "layers.0=bf16"}, "context_parallel_size"),
    ],
)
def test_a_layout_that_cannot_be_chosen_is_an_error(settings, flag, on_gpus):
    with pytest.raises(UserError) as refused:
        on_gpus(8, layout_settings(**settings))
    assert flag in refused.value.flags


def test_without_gpus_sizes_are_one_and_a_resumed_run_keeps_its_own(tmp_path, monkeypatch):
    flags = {"model_name": "tiny-llama", "use_te": True, "te_backend": "emulated"} | SIZES
    cfg = config_from_dict(flags | {"output_dir": str(tmp_path)})
    with ExitStack() as cleanup:
        *_, sizing = prepare._decide(cfg, torch.device("cpu"), Watchdog(1.0), cleanup)
    assert sizing.chosen.cfg.sharding.layout == {"cp": 1, "tp": 1, "pp": 1, "virtual": 1}
    (tmp_path / "env.json").write_text(json.dumps({"world_size": 4}))
    saved = replace(cfg.sharding, context_parallel_size=2, tensor_parallel_size=1, pipeline_parallel_size=2)
    write_config(replace(cfg, sharding=replace(saved, virtual_stages=2)), tmp_path)
    assert not resolve._saved_layout(cfg), "a search on another number of ranks"
    monkeypatch.setattr(resolve.ranks, "world_size", lambda: 4)
    assert replace(cfg.sharding, **resolve._saved_layout(cfg)) == replace(saved, virtual_stages=2)
    assert not resolve._saved_layout(replace(cfg, sharding=replace(cfg.sharding, tensor_parallel_size=2)))
