"""Models to evaluate: exports of runs, other exports, models of the hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.runs import bad_input, find_runs, read_run
from fp8_suite.te_models.presets import require_model
from fp8_suite.training.config import Config, all_settings, config_from_dict

# Settings of the data that may be given.
DATA = ("dataset_name", "split_name", "eval_split", "eval_samples", "dataset_text_field", "system_prompt")
DATA += ("max_seq_length", "tokenizer_name", "trust_remote_code")
OTHER_ROWS = {"dataset_name", "split_name", "eval_split"}  # with these, it is not a run's held-out rows


@dataclass(frozen=True)
class Target:
    """A model to evaluate on the data of `cfg`."""

    path: str
    cfg: Config
    held_out: bool = False  # True if it is evaluated on the rows that a run held out
    run: Path | None = None  # the run that exported it
    export: str = ""  # name of its export


def find_targets(names: list[str], given: dict[str, Any]) -> list[Target]:
    """Return the models on the data of their runs, with the `given` settings, or else of the first run.

    UserError for what is no model, for a run without export, and for runs on different data.
    """
    targets: list[Target] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir() and not (path / "config.json").exists():
            targets += [target for run in find_runs(path) for target in _exports(run, given)]
        else:
            require_model(name, "pretrained")
            targets.append(Target(str(path) if path.exists() else name, Config()))
    of_runs = [target for target in targets if target.run]
    first = of_runs[0] if of_runs else Target("", config_from_dict(given))
    for target in of_runs:
        here, there = _choosing_rows(first), _choosing_rows(target)
        if names := [name for name in here if here[name] != there.get(name)]:
            flags = ", ".join(f"--{name}" for name in names)
            way = "evaluate each alone, or give the same data to both"
            raise bad_input(f"{first.run} and {target.run} have different data ({flags}); {way}")
    return [t if t.run else replace(t, cfg=first.cfg, held_out=first.held_out) for t in targets]


def _choosing_rows(target: Target) -> dict[str, Any]:
    """Return the settings that choose and tokenize the evaluated rows."""
    data = target.cfg.data
    unread = {n for n, s in all_settings().items() if s.field.metadata["resumable"]}
    unread |= {"split_name"} if data.eval_split else set()
    unread |= {"num_of_samples"} if data.eval_split or not target.held_out else set()
    return {name: value for name, value in vars(data).items() if name not in unread}


def _exports(run: Path, given: dict[str, Any]) -> list[Target]:
    """Return a run's exports. UserError if it has none."""
    table, record = all_settings(), read_run(run)
    exports = sorted(file.parent for file in run.glob("export*/config.json"))
    if not exports:
        way = f"python train_fp8.py --config {run}/settings.json --output_dir {run} --export"
        raise bad_input(f"{run}: has no export; make it: {way}")
    names = [name for name in table if table[name].section == "data"]
    names += ["seed", "trust_remote_code", "max_steps"]  # a stream needs max_steps
    cfg = config_from_dict({name: record.setting(name) for name in names} | given)
    held_out = not OTHER_ROWS & given.keys()
    return [Target(str(export), cfg, held_out, run, export.name) for export in exports]
