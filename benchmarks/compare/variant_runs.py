"""Runs of a comparison: every variant with the first seed, then with further ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.launch.grid import GridRun, require_all_inputs, run_config
from fp8_suite.benchmarks.launch.variants import Variant
from fp8_suite.benchmarks.records.runs import bad_input, read_run
from fp8_suite.core.errors import bad_setting, counted
from fp8_suite.core.settings import convert
from fp8_suite.training.estimate.sizes import global_batch, with_data_ranks

# Defaults of the runs; training flags on the command line override them.
DEFAULTS: dict[str, Any] = {
    "eval_at_start": True,  # shows whether all runs start from the same weights
    "eval_interval": 0,
    "log_interval": 1,  # gaps average logged losses
    "keep_last": 1,
}


@dataclass(frozen=True, kw_only=True)
class VariantRun(GridRun):
    """One variant with one seed; `baseline` is the name of the run to compare it with."""

    variant: str
    baseline: str | None = None  # None for the reference

    @property
    def first(self) -> bool:
        """True if it has the first seed."""
        return self.name == self.variant


def build_runs(
    variants: list[Variant],
    common: dict[str, Any],
    folder: Path,
    *,
    gpus: int = 1,
    paired_seeds: int = 0,
    noise_seeds: int = 0,
) -> list[VariantRun]:
    """Return the runs, the reference first. UserError without a reference, or for conflicting settings.

    `paired_seeds` further seeds repeat every variant, `noise_seeds` the reference. A run and its baseline
    always have the same seed.
    """
    by_name = {variant.name: variant for variant in variants}
    baselines = {name: _baseline(variant, by_name) for name, variant in by_name.items()}
    reference = next(name for name in baselines if baselines[name] is None)
    names = [reference, *(name for name in by_name if name != reference)]

    def build(name: str, seed: int | None = None) -> VariantRun:
        suffix, change = ("", {}) if seed is None else (f"-seed{seed}", {"seed": seed})
        samples = convert("generate_samples", common.get("generate_samples", 0), int)
        export = {"export": bool(samples) or "export_dtype" in common}
        settings = DEFAULTS | export | common | by_name[name].settings | change
        run_folder = folder / "runs" / f"{by_name[name].folder_name}{suffix}"
        cfg = run_config(name, settings, gpus, run_folder)
        baseline = baselines[name] and baselines[name] + suffix
        return VariantRun(name=name + suffix, cfg=cfg, gpus=gpus, variant=name, baseline=baseline)

    runs = [build(name) for name in names]
    next_seed = runs[0].cfg.optim.seed + 1
    for index in range(max(paired_seeds, noise_seeds)):
        repeated = names if index < paired_seeds else [reference]
        runs += [build(name, next_seed + index) for name in repeated]
    return runs


def _baseline(variant: Variant, by_name: dict[str, Variant]) -> str | None:
    """Return the BF16 variant with the variant's layers, else the other one; None for the reference."""
    if variant.name == "bf16" or (variant.name == "bf16_hf" and "bf16" not in by_name):
        return None
    order = ("bf16", "bf16_hf")
    preferred = order if variant.settings["use_te"] or variant.name == "bf16_hf" else order[::-1]
    baseline = next((name for name in preferred if name in by_name), None)
    if baseline is None:
        names = ",".join(by_name)
        raise bad_setting("needs bf16 or bf16_hf, without settings, as the reference", variants=names)
    return baseline


def check_before_start(runs: list[VariantRun]) -> None:
    """Raise UserError if results would be incomparable, or if a run lacks its model or data."""
    reference = runs[0]
    batch = global_batch(*with_data_ranks(reference.cfg, reference.gpus))
    for run in runs:
        if (size := global_batch(*with_data_ranks(run.cfg, run.gpus))) != batch:
            reason = f"--batch_size x --gradient_accumulation_steps x ranks is {size} and {batch}"
            way_out = "choose equal products, or --global_batch_size"
            raise bad_input(f"{run.name} and {reference.name} cannot be compared: {reason}; {way_out}")
        if (run.folder / "env.json").exists() and (ranks := read_run(run.folder).ranks) != run.gpus:
            reason = f"{run.folder} holds a run on {counted(ranks, 'GPU')}; use as many"
            raise bad_setting(f"{reason}, or another folder", gpus=run.gpus)
    require_all_inputs(runs)
