"""Choice of sharding mode, optimizer and sizes, the same on every rank, before any weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError, as_flag, bad_setting
from fp8_suite.core.gpus import REFERENCE_GPU, planned_gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.lora.settings import LoraConfig
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import ModelSpec, count_parameters, linear_sizes
from fp8_suite.training.config import Config, refused_by_zero_3
from fp8_suite.training.estimate import advice, sizes
from fp8_suite.training.estimate.layout import check_pipeline
from fp8_suite.training.estimate.modes import make_setup
from fp8_suite.training.estimate.search import LayoutSearch
from fp8_suite.training.estimate.setup import ModelSize
from fp8_suite.training.estimate.sizes import UNCOMPILED, Sizing, compiles_layers
from fp8_suite.training.optim.optimizer import moment_warning
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.engines import build_strategy
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.strategies import Strategy


def choose_strategy(
    cfg: Config, model: ModelSpec, device: torch.device, effective: str
) -> tuple[Strategy, Sizing]:
    """Choose and build the strategy; choose optimizer and micro-batch, the same on every rank. Collective.

    `effective` is the precision that runs, also after a fallback. Applies --memory_limit_gb.
    UserError if the training state, or a step with `auto`, cannot fit.
    """
    free = ranks.run_on_all_ranks(lambda: free_memory(cfg, device))
    usable = min(free) if device.type == "cuda" else None
    ranks.run_on_rank0(lambda: sizes.check_number_of_ranks(cfg, cfg.sharding.data_ranks(ranks.world_size())))
    sizing = ranks.run_on_rank0(lambda: choose_sizing(cfg, model, device, effective, usable))
    chosen = sizing.chosen
    layers = getattr(model.config, "num_hidden_layers", 1)
    ranks.run_on_rank0(lambda: check_pipeline(chosen.layout, layers, chosen.batches.micro_batches(0)))
    strategy = build_strategy(chosen.mode, device, chosen.cfg)
    ranks.run_on_all_ranks(lambda: check_recomputation(chosen.cfg, strategy))
    if cfg.optim.max_steps != 0:
        ranks.run_on_all_ranks(lambda: advice.refuse_small_host(sizing))
    if sizing.is_choice:
        print_rank0(sizing.describe())
    beta2 = moment_warning(chosen.optimizer, cfg.optim.adam_beta2)
    for text in filter(None, [advice.warning(sizing), beta2]):
        print_rank0(text)
    return strategy, sizing


def free_memory(cfg: Config, device: torch.device) -> int | None:
    """Apply --memory_limit_gb. Return the bytes that this rank can allocate on its GPU; None without one."""
    limit = cfg.sharding.memory_limit_gb
    if device.type != "cuda":
        return None
    available, total = torch.cuda.mem_get_info(device)
    available += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if limit is None:
        return available
    if limit * 1e9 > total:
        raise bad_setting(f"the GPU has {total / 1e9:.1f} GB; give less, or drop it", memory_limit_gb=limit)
    torch.cuda.set_per_process_memory_fraction(limit * 1e9 / total, device)
    return min(available, int(limit * 1e9))


def choose_sizing(
    cfg: Config, model: ModelSpec, device: torch.device, effective: str, free: int | None
) -> Sizing:
    """Choose mode, optimizer and sizes on GPUs with `free` bytes (None: no GPU).

    UserError if the state or the values of `auto` do not fit, or if `auto` needs an unknown prediction.
    """
    mode = _fixed_mode(cfg)
    unknown = _why_unpredicted(cfg, model, mode or "fsdp_full")
    # Counting parameters builds the model on the meta device, where remote code may fail.
    uncounted = model.trust_remote_code and not model.is_known_family and mode is not None
    size = ModelSize(0) if uncounted else _size_of(model, cfg.lora)
    gpus = ranks.world_size(), ranks.local_rank_and_size()[1]
    request, reason = make_setup(
        cfg, size, mode or AUTO, *gpus, free, effective=effective, predicted=not unknown
    )
    if reason:
        print_rank0(f"--sharding_mode auto: {request.mode} ({reason})")
    if free is None or cfg.optim.max_steps == 0:
        return sizes.unpredicted_sizes(request, free)
    if not unknown:
        gpu = planned_gpu(torch.cuda.get_device_name(device)) or REFERENCE_GPU
        sizing = sizes.choose_sizes(request, free, gpu)
    elif names := sizes.auto_settings(cfg):
        raise _unpredicted(names, unknown)
    else:
        sizing = sizes.unpredicted_sizes(request, free)
    advice.refuse_misfit(sizing)
    return sizing


def choose_layout(
    cfg: Config,
    model: ModelSpec,
    device: torch.device,
    effective: str,
    free: int,
    check: Callable[[Config], None],
) -> Config:
    """Return the settings of the fastest layout that fits, in place of `auto` for parallel sizes and mode.

    `check` raises UserError for sizes that the model cannot run with. Call on rank 0.
    UserError if no layout fits, or if a step cannot be predicted.
    """
    mode, names = cfg.sharding.sharding_mode, sizes.auto_sizes(cfg)
    if unknown := _why_unpredicted(cfg, model, "fsdp_full" if mode == AUTO else mode):
        raise _unpredicted(names, unknown)
    gpu = planned_gpu(torch.cuda.get_device_name(device)) or REFERENCE_GPU
    gpus, per_node = ranks.world_size(), ranks.local_rank_and_size()[1]
    size = _size_of(model, cfg.lora)
    search = LayoutSearch(size, gpus, per_node, gpu, free, names, check, effective=effective)
    if not (fastest := search.fastest(cfg)):
        # UserError with a way out, unless a micro-batch is given that only other layouts can run.
        if cfg.optim.batch_size == AUTO or next(search.setups(cfg), None) is None:
            choose_sizing(sizes.without_auto_sizes(cfg), model, device, effective, free)
        raise search.misfit()
    chosen = fastest[0].chosen
    values = dict.fromkeys(names, 1) | chosen.layout.flags | {"sharding_mode": chosen.mode}
    flags = " ".join(as_flag(*setting) for setting in values.items())
    predicted = f"{1e3 * search.seconds(chosen):,.0f} ms per step, {sizes.gb(fastest[0].needed, free)}"
    print_rank0(f"layout: {flags}; predicted {predicted}")
    return replace(cfg, sharding=chosen.cfg.sharding)


def _unpredicted(names: Iterable[str], unknown: str) -> UserError:
    reason = f"the memory of a step is unknown ({unknown}); give a value"
    return bad_setting(reason, **dict.fromkeys(names, AUTO))


def _fixed_mode(cfg: Config) -> str | None:
    """Return the mode that launch and settings decide, or None if it is to be chosen."""
    mode = cfg.sharding.sharding_mode
    if not dist.is_initialized():
        if mode != AUTO:
            gather = " --fp8_all_gather" if cfg.sharding.fp8_all_gather else ""
            print_rank0(
                f"--sharding_mode {mode}{gather} ignored: one device, nothing to shard; launch "
                "train_multi_gpu.py with torchrun"
            )
        return "single"
    return None if mode == AUTO else mode


def _size_of(model: ModelSpec, lora: LoraConfig) -> ModelSize:
    text_config, family = model.config.get_text_config(), FAMILIES.get(model.family)
    size = ModelSize(
        count_parameters(model),
        ModelShape.from_hf_config(model.config),
        tied=bool(getattr(text_config, "tie_word_embeddings", False)),
        qk_norm=family is not None and family.qk_norm,
    )
    if model.is_known_family or not lora.enabled:
        return size
    sizes = linear_sizes(model)
    return replace(size, adapters=lora.lora_rank * sum(map(sizes.get, lora.targets(list(sizes)))))


def _why_unpredicted(cfg: Config, model: ModelSpec, mode: str) -> str | None:
    """Return why the memory model does not cover a step, or None."""
    if not model.is_known_family:
        return f"model type {model.family} is not covered"
    if not cfg.model.use_te and not compiles_layers(cfg, mode, on_gpu=True):
        return UNCOMPILED
    if (rule := sizes.why_unpredicted(cfg, mode)) is None:
        return None
    settings, reason = rule
    return f"{' '.join(as_flag(*setting) for setting in settings.items())}: {reason}"


def check_recomputation(cfg: Config, strategy: Strategy) -> None:
    """Raise UserError for recomputation that the device or the strategy cannot run."""
    if cfg.model.offload_activations and strategy.device.type != "cuda":
        raise bad_setting("without a GPU, activations are in host memory; drop it", offload_activations=True)
    for name, reason in refused_by_zero_3(cfg.model) if strategy.reentrant else ():
        raise bad_setting(reason, **{name: getattr(cfg.model, name)})
