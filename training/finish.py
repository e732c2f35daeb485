"""End of a run: export, summary.json, sample answers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import first_line
from fp8_suite.core.readers import read_record
from fp8_suite.data.build import Loaders
from fp8_suite.data.chat import turn_end
from fp8_suite.te_models.build import export_tensors
from fp8_suite.te_models.lora.merge import Adapters, gather_adapters, merged, peft_config, peft_tensors
from fp8_suite.te_models.quantized.forms import FORMS, Quantizer
from fp8_suite.te_models.spec import base_tensors
from fp8_suite.training.assembly import Assembly
from fp8_suite.training.checkpoint.settings import EXPORT_FOLDERS
from fp8_suite.training.export.generate import generate_answers, generation_config, tokenizer_round_trips
from fp8_suite.training.export.loss import load_export, model_loss
from fp8_suite.training.export.write import NamedTensors, export_adapter, export_hf
from fp8_suite.training.observers import Observers
from fp8_suite.training.optim import moments
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.pipeline import tensors_of_all_stages
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.precision.precision_map import bf16_linears, inner_autocast
from fp8_suite.training.prepare import PreparedRun
from fp8_suite.training.step import evaluate
from fp8_suite.training.tracking.metrics import summary_name, tail_mean
from fp8_suite.training.tracking.tracker import amend_summary, train_losses
from fp8_suite.training.trainer import Trainer


def export(prepared: PreparedRun, assembly: Assembly) -> None:
    """Export the model in Hugging Face format, once for each --export_dtype. Collective."""
    strategy, watchdog = prepared.strategy, prepared.watchdog
    watchdog.beat("exporting")
    strategy.reshard(assembly.model)

    def gather(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        watchdog.beat("exporting")
        weights = []
        for parameter in parameters:
            weight = optim.weight_of(assembly.optimizer, parameter)
            if weight is not parameter:  # may be in host memory, where NCCL cannot gather
                weight = moments.with_layout(local(weight).to(strategy.device), weight)
            weights.append(weight)
        return strategy.gather(weights)

    adapters = gather_adapters(assembly.model, gather)
    for dtype, name in prepared.cfg.export_folders.items():
        quantizer = None
        if dtype == "fp8":
            kept = bf16_linears(assembly.model, prepared.resolved.precision)
            at_random = _at_random(prepared, adapters)
            quantizer = Quantizer(FORMS["block"], kept, at_random, prepared.cfg.optim.seed)
        tensors = export_tensors(assembly.model, gather)
        if strategy.topology.pp > 1:
            tensors = tensors_of_all_stages(tensors, strategy.topology, strategy.device)
        if adapters:
            tensors = _merged(prepared, tensors, adapters)
        folder = ranks.iterate_on_rank0(tensors, partial(_write, prepared, name=name, quantizer=quantizer))
        print_rank0(f"exported to {folder}")
        if quantizer:
            print_rank0(quantizer.describe())
    if adapters:
        print_rank0(f"adapter for peft: {ranks.run_on_rank0(lambda: _write_adapter(prepared, adapters))}")
        if prepared.resolved.model.weights is None:
            print_rank0(f"WARNING: its base, the random weights of this run, is in no file; use {folder}")


def warn_of_earlier_exports(prepared: PreparedRun, step: int) -> None:
    """Name exports that this launch, which trained up to `step`, did not replace."""
    if prepared.resume is None or prepared.resume.step == step:
        return
    for dtype, name in EXPORT_FOLDERS.items():
        folder = prepared.folder / name
        if dtype not in prepared.cfg.export_folders and (folder / "config.json").exists():
            print_rank0(f"WARNING: {folder} has weights of an earlier step; delete it, or export it again")


def _write(prepared: PreparedRun, tensors: NamedTensors, name: str, quantizer: Quantizer | None) -> Path:
    """Write one export, and warn if its tokenizer is another one."""
    spec, tokenizer = prepared.resolved.model, prepared.tokenizer
    folder = export_hf(
        prepared.folder / name,
        tensors,
        config=spec.config,
        tokenizer=tokenizer,
        generation_config=generation_config(
            spec,
            tokenizer,
            turn_end=turn_end(tokenizer),
            own_tokenizer=prepared.cfg.model.tokenizer_name is None,
        ),
        trust_remote_code=spec.trust_remote_code,
        code_folder=spec.weights,
        quantizer=quantizer,
    )
    if not tokenizer_round_trips(folder, tokenizer, trust_remote_code=spec.trust_remote_code):
        origin = tokenizer.name_or_path
        print_rank0(f"WARNING: AutoTokenizer loads another tokenizer from {folder}; load that of {origin}")
    return folder


def _merged(prepared: PreparedRun, tensors: NamedTensors, adapters: Adapters) -> NamedTensors:
    """Return the model's tensors with merged adapters, for rank 0.

    Frozen FP8 weights are rounded; in their place are those that they were quantized from, read again.
    """
    if prepared.cfg.precision.fp8_weights:
        if prepared.strategy.topology.rank != 0:  # reading files is no collective
            return iter(())
        spec, device = prepared.resolved.model, prepared.strategy.device
        tensors = base_tensors(spec, seed=prepared.cfg.optim.seed, device=device)
    return merged(tensors, adapters, prepared.cfg.lora.scaling)


def _at_random(prepared: PreparedRun, adapters: Adapters) -> frozenset[str]:
    """Return the weights to round at random in an FP8 export, so that small updates survive.

    Rounded to nearest, most of these weights would be what they were in the checkpoint. What `block` trained
    is rounded as in training, and frozen weights to nearest.
    """
    on_one_grid, precision = prepared.resolved.model.on_one_grid, prepared.resolved.precision
    if adapters:
        return on_one_grid & {f"{layer}.weight" for layer in adapters}
    in_blocks = precision.in_use == {"block"} and not prepared.cfg.precision.fp8_fp32_scales
    return frozenset() if in_blocks else on_one_grid


def _write_adapter(prepared: PreparedRun, adapters: Adapters) -> Path:
    spec = prepared.resolved.model
    layers = spec.config.get_text_config().num_hidden_layers
    config = peft_config(adapters, prepared.cfg.lora, base=spec.name, layers=layers)
    return export_adapter(prepared.folder / "adapter", peft_tensors(adapters), config)


def evaluate_in_bf16(prepared: PreparedRun, trainer: Trainer) -> dict[str, float]:
    """Return the BF16 loss of weights that TE layers trained in FP8, if they are exported in FP8. Collective.

    Empty without evaluation data, if a signal stops it, and for models with parts that are always in FP8.
    """
    cfg, precision, stack = prepared.cfg, prepared.resolved.precision, trainer.stack
    always_fp8 = cfg.precision.fp8_weights, cfg.precision.fp8_lm_head, cfg.sharding.fp8_all_gather
    wanted = precision.te_recipe is not None and "fp8" in cfg.export_folders
    if not wanted or trainer.loaders.eval is None or any((*always_fp8, precision.by_module)):
        return {}

    @contextmanager
    def autocast() -> Iterator[None]:
        with stack.autocast(), inner_autocast(precision, None, stack.strategy.topology.stage_group):
            yield

    metrics = evaluate(
        replace(stack, autocast=autocast), trainer.loaders.eval, stop_requested=lambda: trainer.stop.requested
    )
    if metrics is None:
        return {}
    print_rank0(f"final weights in BF16: eval loss {metrics['eval/loss']:.4f}")
    return {"eval_loss_bf16": metrics["eval/loss"]}


def evaluate_exports(prepared: PreparedRun, loaders: Loaders) -> None:
    """Add the losses of exports to summary.json, if one is in FP8. On one rank, after training."""
    folders, summary = prepared.cfg.export_folders, read_record(prepared.folder / "summary.json")
    if "fp8" not in folders or loaders.eval is None or "export_loss_fp8" in summary:
        return
    spec, device, losses = prepared.resolved.model, prepared.strategy.device, {}
    load = partial(load_export, device=device, trust_remote_code=spec.trust_remote_code)
    for dtype, name in folders.items():
        gc.collect()  # models before this one may be part of reference cycles
        try:
            loss = model_loss(load(prepared.folder / name), loaders.eval, spec, device)
        except torch.OutOfMemoryError as error:
            print(f"WARNING: {name} is not evaluated: {first_line(error)}")
            continue
        losses[f"export_loss_{dtype}"] = loss
        print(f"{name}: eval loss {loss:.4f} in transformers, from its files")
    amend_summary(prepared.folder, losses)


def summarize(prepared: PreparedRun, trainer: Trainer, observers: Observers) -> dict[str, Any]:
    """Return summary.json: totals over all launches, rates of the last launch with steps. Collective."""
    with observers.wall_time.phase("evaluation"):
        in_bf16 = evaluate_in_bf16(prepared, trainer)
    observers.wall_time.count()
    cfg, strategy, progress = prepared.cfg, prepared.strategy, trainer.progress
    timed = progress.step and not prepared.resolved.precision.emulated
    rates = observers.wall_time.rates(progress.real_tokens) if timed else {}
    losses = ranks.run_on_rank0(lambda: train_losses(prepared.folder))
    needed = prepared.sizing.needed
    return {
        "model_name": cfg.model.model_name,
        "dequantized_weights": prepared.resolved.model.dequantized,
        "mixed_precision": cfg.precision.mixed_precision,
        "use_te": cfg.model.use_te,
        **prepared.resolved.precision.as_dict(),
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "overflow_steps": progress.overflow_steps,
        "trainable_parameters": prepared.sizing.chosen.model.adapters or None,
        "tokens": progress.real_tokens,
        "label_tokens": progress.label_tokens,
        **{summary_name(name): value for name, value in trainer.batches.metrics(progress.step).items()},
        "train_loss": losses[-1] if losses else None,
        "train_loss_tail_mean": tail_mean(losses) if losses else None,
        **trainer.results(),
        **in_bf16,
        "best_eval_loss": progress.best_eval_loss,
        "runtime_seconds": progress.wall_seconds,
        "train_seconds": progress.train_seconds,
        "wall_seconds_by_kind": progress.seconds_by_kind,
        **{summary_name(name): rate for name, rate in rates.items()},
        "peak_memory_gb": None,
        **{summary_name(name): value for name, value in trainer.read_memory().items()},
        "predicted_memory_gb": needed and needed / 1e9,
        "num_layers": getattr(prepared.resolved.model.config.get_text_config(), "num_hidden_layers", None),
        "gpu_name": observers.environment.get("gpu_name"),
        "gpus": prepared.gpus,
        "world_size": strategy.topology.world_size,
        "sharding_mode": strategy.mode,
        "nodes": strategy.topology.nodes,
        "gpu_hours": progress.gpu_seconds / 3600,
        "node_hours": progress.node_seconds / 3600,
        "seconds_to_first_step": observers.environment.get("seconds_to_first_step"),
    }


def generate_samples(prepared: PreparedRun, prompts: list[Any]) -> None:
    """Generate answers to --generate_samples evaluation prompts with the exported model, on one rank."""
    prompts = prompts[: prepared.cfg.checkpoint.generate_samples]
    export = next((prepared.folder / name for name in prepared.cfg.export_folders.values()), None)
    if not prompts or not (export and export.exists()):
        return
    trusts_code, device = prepared.resolved.model.trust_remote_code, prepared.strategy.device
    try:
        text = generate_answers(export, prompts, prepared.tokenizer, device, trust_remote_code=trusts_code)
        (prepared.folder / "samples.txt").write_text(text, encoding="utf-8")
    except Exception as error:  # must not fail a finished run
        print_rank0(f"WARNING: --generate_samples: no answers ({type(error).__name__}: {first_line(error)})")
        return
    print_rank0(f"\nsamples from the exported model:\n\n{text}")
