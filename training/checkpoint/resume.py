"""Resume policy: the checkpoint that a launch resumes from, and the settings that may differ.

- `--resume auto` resumes from the newest checkpoint in --output_dir, or starts from scratch.
- `--resume PATH` starts from that checkpoint. Once this run has saved newer ones, the same command
  resumes from those, so that a requeued job never rolls back twice.
- `--resume none` starts from scratch. It is an error if the folder already holds a run.
- Settings that are not resumable must match the checkpoint, with few exceptions. The batch may be split
  differently; on another number of ranks its size may change too, if a rank's share stays. A run that starts
  from another run's checkpoint may change learning rate, schedule, weight decay and clipping. Moments
  of another --moment_dtype are converted. On one rank, which exchanges no gradients, --grad_reduce_dtype fp8
  is bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.readers import read_record
from fp8_suite.training.checkpoint import index
from fp8_suite.training.checkpoint.index import MANIFEST, Index, step_of
from fp8_suite.training.checkpoint.manifest import read_manifest
from fp8_suite.training.checkpoint.settings import EXPORT_FOLDERS
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.config import (
    Config,
    all_settings,
    changed_settings,
    read_settings,
    settings_path,
)
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.parallel.settings import recorded_data_ranks

# Files that a run writes under names that other programs use too; each export lists its files in NAME.json.
RUN_FILES = ("settings.json", "env.json", "metrics.jsonl", "summary.json", "wall_time.json", "samples.txt")
RUN_FILES += tuple(f"{name}.json" for name in (*EXPORT_FOLDERS.values(), "adapter"))
# Settings that may change if the sequences of a step stay the same, of all ranks or of one.
BATCH_SPLIT_SETTINGS = ("batch_size", "gradient_accumulation_steps", "global_batch_size")
# Settings that may change when starting from another run's checkpoint, e.g. after that run diverged.
RESTART_SETTINGS = (
    *("learning_rate", "lr_scheduler", "min_lr_ratio", "num_warmup_steps", "warmup_ratio", "decay_ratio"),
    *("weight_decay", "max_grad_norm"),
)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from."""

    path: Path
    meta: dict[str, Any]
    same_run: bool  # saved by the run in --output_dir
    rollback: bool  # --resume names this checkpoint, so later steps of this run are discarded

    @property
    def step(self) -> int:
        return self.meta["progress"]["step"]


def find_resume_point(resume: str, checkpoints: Checkpoints) -> ResumePoint | None:
    """Return the checkpoint selected by `--resume`, or None. On one process.

    UserError if there is no checkpoint, or if the folder holds a run that started from another one.
    DamagedCheckpoint if the checkpoint is incomplete or corrupt.
    """
    path = resolve_resume(resume, checkpoints)
    if path is None:
        return None
    same_run = path.resolve().parent == checkpoints.folder.resolve()
    rollback = Path(resume).expanduser().resolve() == path.resolve()
    return ResumePoint(path, checkpoints.read_meta(path), same_run=same_run, rollback=rollback)


def resolve_resume(resume: str, checkpoints: Checkpoints) -> Path | None:
    """Return the step folder selected by `--resume`: auto, none, or a step, checkpoints or run folder."""
    if resume == "none":
        return None
    latest = checkpoints.latest()
    if resume == "auto":
        return latest
    path, folder = Path(resume).expanduser().resolve(), checkpoints.folder.resolve()
    if folder not in (path, *path.parents, path / "checkpoints"):
        if latest and path == _origin(checkpoints.folder.parent):  # this run has saved newer checkpoints
            return latest
        if latest and path.exists():
            reason = f"--output_dir {folder.parent} holds a run that started elsewhere"
            raise bad_setting(f"{reason}; choose another --output_dir", resume=path)
    elif latest and path.parent == folder and _rolled_back_to(path):
        return latest
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if latest := index.latest(folder):
            return latest
    reason = f"no checkpoint there, or one without {MANIFEST}"
    way_out = "give a run folder, or one such as RUN/checkpoints/step_000500"
    raise bad_setting(f"{reason}; {way_out}", resume=resume)


def _origin(folder: Path) -> Path:
    """Return the --resume of the run in `folder`, as a path."""
    return Path(str(read_record(settings_path(folder)).get("resume"))).expanduser().resolve()


# Rollbacks, recorded in index.json


def _rolled_back_to(path: Path) -> bool:
    """True if the run's last rollback was to `path`, so that its latest checkpoint is derived from it."""
    step = step_of(path)
    return step is not None and index.read_index(path.parent).rolled_back_to == step


def roll_back(checkpoints: Checkpoints, path: Path) -> None:
    """Record a rollback to `path`, which becomes the latest checkpoint. Call on rank 0.

    The eval losses of later steps are dropped, because those steps no longer belong to the run.
    """
    step, recorded = read_manifest(path)["step"], index.read_index(checkpoints.folder)
    if path.resolve().parent == checkpoints.folder.resolve() and step in recorded.steps:
        steps = [*(number for number in recorded.steps if number != step), step]
        index.write_index(checkpoints.folder, Index(steps, _losses_until(step, recorded), step))


def eval_losses(path: Path) -> dict[int, float]:
    """Return eval losses by step of the run that saved `path`, up to that step."""
    step = step_of(path)
    return {} if step is None else _losses_until(step, index.read_index(path.parent))


def _losses_until(step: int, recorded: Index) -> dict[int, float]:
    return {number: loss for number, loss in recorded.eval_losses.items() if number <= step}


def forget_evaluations(checkpoints: Checkpoints) -> None:
    """Drop all recorded eval losses (the evaluation data changed). Call on rank 0."""
    recorded = index.read_index(checkpoints.folder)
    if recorded.eval_losses:
        index.write_index(checkpoints.folder, replace(recorded, eval_losses={}))


# Settings


def frozen_base(cfg: Config, digests: dict[str, str]) -> str | None:
    """Return the identity of frozen weights, which checkpoints do not hold; None if all weights train."""
    if not cfg.lora.enabled:
        return None
    return digests.get("weights") or f"random, seed {cfg.optim.seed}"


def check_base(point: ResumePoint, base: str | None) -> None:
    """UserError if adapters of the checkpoint were trained on other frozen weights."""
    if base and point.meta.get("base") not in (None, base):
        raise bad_setting("its adapters were trained on other weights; restore those", resume=point.path)


def check_resume(
    point: ResumePoint, cfg: Config, recipe: str, world_size: int, model_files: dict[str, str] | None = None
) -> str:
    """UserError if the checkpoint was saved with other settings or another effective recipe.

    Folders may have moved: `model_files` are the digests of the model, and the data loader compares tokens.
    Return a notice about permitted changes ('' for none).
    """
    meta = point.meta
    if unknown := sorted(meta["config"].keys() - all_settings().keys()):
        reason = f"saved by another version ({', '.join(unknown)}); resume with that one, or train its export"
        raise bad_setting(reason, resume=point.path)
    saved_ranks, settings = meta["world_size"], cfg.to_dict()
    batch, new_batch = step_batch(meta["config"], saved_ranks), step_batch(settings, world_size)
    allowed, refused = split_changes(
        meta["config"], cfg, saved_ranks, world_size, restarts=not point.same_run
    )
    if meta["recipe"] != recipe:
        if "mixed_precision" not in refused:
            refused["fp8_scenario"] = (meta["recipe"], recipe)
    elif "fp8_scenario" in refused:  # `default` and the recipe that it stands for
        allowed["fp8_scenario"] = refused.pop("fp8_scenario")
    # An evaluation has no position to compare, and of a stream only the first rows are compared.
    compared = cfg.optim.max_steps != 0 and not cfg.data.streaming
    moved = ["dataset_name", "tokenizer_name"] if compared else []
    if model_files and model_files == meta.get("model"):
        moved.append("model_name")
    allowed |= {name: refused.pop(name) for name in moved if name in refused}
    if refused:
        export = f"--resume {point.path} --max_steps {point.step} --export --output_dir NEW"
        way_out = f"use the same settings, or add {export} to them and train from that export"
        fits = batch % (cfg.optim.batch_size * cfg.sharding.data_ranks(world_size)) == 0
        if fits and refused.keys() <= set(BATCH_SPLIT_SETTINGS):
            way_out = f"use the same settings, or --global_batch_size {batch}"
        elif refused.keys() <= set(RESTART_SETTINGS):
            way_out = f"use the same settings, or add --resume {point.path} --output_dir NEW"
        reason = f"saved with other settings ({describe_changes(refused)})"
        raise bad_setting(f"{reason}; {way_out}", resume=point.path)
    notices = [f"--resume {point.path}: settings changed: {describe_changes(allowed)}"] if allowed else []
    if "moment_dtype" in allowed:
        notices.append(f"Adam's moments are converted to {cfg.precision.moment_dtype}")
    if batch != new_batch:
        change = f"a global batch of {batch} sequences; it is {new_batch} on {world_size}"
        warning = f"WARNING: saved on {saved_ranks} ranks with {change}; --global_batch_size {batch} keeps it"
        notices.append(warning)
    return "\n".join(notices)


def split_changes(
    old: dict[str, Any], cfg: Config, old_ranks: int, new_ranks: int, *, restarts: bool = False
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Split the settings that differ from a run's `old` ones into those that may change and others.

    `restarts` if a new run starts from the old one's checkpoint.
    """
    refused = changed_settings(old, cfg)
    permitted = ["moment_dtype", *(RESTART_SETTINGS if restarts else ())]
    # fp8 and bf16 both sum micro-batches in BF16, and one rank exchanges nothing.
    if 1 in (old_ranks, new_ranks) and set(refused.get("grad_reduce_dtype", ())) == {"bf16", "fp8"}:
        permitted.append("grad_reduce_dtype")
    settings, no_global_batch = cfg.to_dict(), None in refused.get("global_batch_size", (None,))
    grows_with_ranks = rank_batch(old) == rank_batch(settings) and no_global_batch
    if step_batch(old, old_ranks) == step_batch(settings, new_ranks) or grows_with_ranks:
        permitted += BATCH_SPLIT_SETTINGS
    allowed = {name: refused.pop(name) for name in permitted if name in refused}
    return allowed, refused


def check_folder(cfg: Config, folder: Path, world_size: int) -> None:
    """UserError if --output_dir holds a run, or files of something else, that this launch would replace.

    Settings of a run with checkpoints are compared by `check_resume`.
    """
    log, has_checkpoints = folder / "metrics.jsonl", bool(index.step_folders(folder / "checkpoints"))
    old = read_settings(folder)
    if not old and not has_checkpoints and (taken := [n for n in RUN_FILES if (folder / n).exists()]):
        raise bad_setting(f"its {taken[0]} is not a run's; choose another folder", output_dir=folder)
    if not has_checkpoints and not (log.is_file() and log.stat().st_size):
        return
    if cfg.checkpoint.resume == "none":
        raise bad_setting("the folder holds a run already; choose another", resume="none", output_dir=folder)
    if has_checkpoints:
        return
    old_ranks = read_record(folder / "env.json").get("world_size", world_size)
    allowed, refused = split_changes(old, cfg, old_ranks, world_size)
    refused |= {name: values for name, values in allowed.items() if name not in BATCH_SPLIT_SETTINGS}
    if refused:
        reason = f"holds another run ({describe_changes(refused)}); choose another folder, or its settings"
        raise bad_setting(reason, output_dir=folder)


def describe_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    shown = {name: ["none" if v is None else v for v in values] for name, values in changed.items()}
    return ", ".join(f"--{name} {old} there, {new} here" for name, (old, new) in shown.items())


def rank_batch(settings: dict[str, Any]) -> int:
    """Return the sequences of one rank per step (at the end of a ramp), of settings without `auto`."""
    return settings["batch_size"] * settings["gradient_accumulation_steps"]


def step_batch(settings: dict[str, Any], world_size: int) -> int:
    """Return the sequences of all ranks per optimizer step, of settings without `auto`."""
    return rank_batch(settings) * recorded_data_ranks(settings, world_size)


def gradient_ratio(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Return how many times as large the gradients within a rank are with `new` settings as with `old` ones.

    `train_step` divides the loss by the tokens of a step per rank. Settings are without `auto`.
    """
    before, now = (rank_batch(s) / s.get("context_parallel_size", 1) for s in (old, new))
    return before / now


# Steps


def count_steps(optim: OptimConfig, batches: BatchSchedule, micro_batches: int | None) -> int:
    """Return the total optimizer steps, given micro-batches per rank and epoch (None for a stream)."""
    if optim.max_steps is not None:
        return optim.max_steps
    assert micro_batches is not None  # Config refuses --streaming without --max_steps
    return batches.steps_after(0, micro_batches, optim.num_epochs)


def count_resumed_steps(
    cfg: Config, batches: BatchSchedule, meta: dict[str, Any], loader: Any, world_size: int
) -> int:
    """Return the total optimizer steps of a resumed run; `loader` is at the checkpoint's position.

    Normally the settings define the total. If the global batch changed, now or at an earlier resume, it is
    the steps done plus ceil(remaining micro-batches / accumulation).
    """
    old, saved, per_epoch = meta["config"], meta["total_steps"], loader.micro_batches_per_epoch
    if step_batch(old, meta["world_size"]) == step_batch(cfg.to_dict(), world_size):
        then = replace(cfg.optim, max_steps=old["max_steps"], num_epochs=old["num_epochs"])
        if saved == count_steps(then, batches, per_epoch):
            return count_steps(cfg.optim, batches, per_epoch)
        if then == cfg.optim:
            return saved
    if cfg.optim.max_steps is not None or per_epoch is None:
        return count_steps(cfg.optim, batches, per_epoch)
    step, epochs_left = meta["progress"]["step"], cfg.optim.num_epochs - loader.state.epoch
    if epochs_left > 0:
        step = batches.steps_after(step, loader.micro_batches_left(), 1)
    return batches.steps_after(step, per_epoch, epochs_left - 1)


def is_finished(point: ResumePoint, cfg: Config, folder: Path, total_steps: int) -> bool:
    """True if the checkpoint is the final one of a run with its summary and exports. On one process.

    UserError if the run already has more steps than requested.
    """
    summarized = _summarized_steps(point, cfg, folder)
    if point.same_run and total_steps <= point.step < (summarized or 0):
        reason = f"this run is finished; for its step {point.step:,} alone, use another --output_dir"
        raise bad_setting(reason, resume=cfg.checkpoint.resume)
    exported = all((folder / name).exists() for name in cfg.export_folders.values())
    complete = summarized == point.step and exported
    if 0 < total_steps < point.step and not complete:
        flag = "num_epochs" if cfg.optim.max_steps is None else "max_steps"
        way_out = "raise it, or evaluate with --max_steps 0 and another --output_dir"
        reason = f"{point.path} has {point.step:,} steps already; {way_out}"
        raise bad_setting(reason, **{flag: getattr(cfg.optim, flag)})
    return point.step >= total_steps and complete


def _summarized_steps(point: ResumePoint, cfg: Config, folder: Path) -> int | None:
    """Return the steps in summary.json; None if it is missing or from a run of another checkpoint."""
    summary, recorded = map(read_record, (folder / "summary.json", settings_path(folder)))
    # Evaluating another run's checkpoint always runs again, even with the same --resume.
    same = recorded.get("resume") == cfg.checkpoint.resume and cfg.optim.max_steps != 0
    return summary.get("steps") if point.same_run or same else None
