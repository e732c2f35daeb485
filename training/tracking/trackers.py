"""Where a run's numbers go: metrics.jsonl always, W&B and TensorBoard on request, and the terminal.

metrics.jsonl is the record that reports read. JSON has no non-finite numbers, so they are written as the
strings "NaN", "Infinity" and "-Infinity", which float() reads.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from core.files import explaining_write_errors, replace_file
from core.packages import ROOT, versions
from core.redact import redact, redacted
from training.tracking.metrics import METRICS
from training.tracking.settings import LogConfig

Metrics = dict[str, float | int | str]


class Writer(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def summary(self, values: dict[str, Any]) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class Tracker:
    """What the trainer logs to. Without a record it writes nothing, as on every rank but 0.

    `mirrors` are services that must not cost a run: the first failure of one is reported and drops it.
    """

    def __init__(self, record: Writer | None = None, mirrors: dict[str, Writer] | None = None) -> None:
        self._record = record
        self._mirrors = mirrors or {}

    def log(self, step: int, metrics: Metrics) -> None:
        """Record `metrics` at optimizer step `step`. RuntimeError when metrics.jsonl cannot be written."""
        self._write("log", step, metrics)

    def summary(self, values: dict[str, Any]) -> None:
        """Write the run's final numbers: summary.json and the W&B summary."""
        self._write("summary", values)

    def finish(self, exit_code: int = 0) -> None:
        """Close all writers; `exit_code` other than 0 marks the W&B run as failed. Safe to call twice."""
        self._write("finish", exit_code)
        self._record, self._mirrors = None, {}

    def give_up(self, exit_code: int) -> None:
        """`finish` within seconds, for a run that failed: it holds its GPUs, and maybe other ranks."""
        closing = threading.Thread(target=self.finish, args=(exit_code,), daemon=True)
        closing.start()
        closing.join(FAILED_UPLOAD_SECONDS)

    def _write(self, method: str, *args: Any) -> None:
        if self._record is None:
            return
        getattr(self._record, method)(*args)
        for name, mirror in list(self._mirrors.items()):
            try:
                getattr(mirror, method)(*args)
            except Exception as error:
                del self._mirrors[name]
                _warn_dropped(name, error)


def _warn_dropped(name: str, error: Exception) -> None:
    rule = "!" * 100
    reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))
    text = f"WARNING: {name} failed and is off from here on. The run goes on; metrics.jsonl has everything."
    tqdm.write(f"{rule}\n{text}\n{reason}\n{rule}", file=sys.stderr)


def follows_a_finished_run(run_folder: Path, resume_step: int | None) -> bool:
    """Whether a run begins in a folder that holds another's end, and does not go on from it."""
    return resume_step is None and (run_folder / "summary.json").exists()


def build_tracker(
    cfg: LogConfig,
    run_folder: Path,
    *,
    config: dict[str, Any],
    tags: list[str],
    resume_step: int | None,
    evaluates_again: bool = False,
    enabled: bool = True,
) -> Tracker:
    """Open the run's writers; `enabled` is False on every rank but 0, whose tracker writes nothing.

    `config` and `tags` go to W&B. `resume_step` is the step of the checkpoint that the run continues from,
    None if there is none: later lines of the folder's metrics.jsonl move to metrics.discarded.jsonl, and with
    `evaluates_again` that step's evaluation does.
    RuntimeError when a requested service is not installed; one that fails is reported and left out.
    """
    if not enabled:
        return Tracker()
    if cfg.use_wandb:
        _require_package("--use_wandb", "wandb", "wandb", "init")
    if cfg.log_dir:
        flag = f"--log_dir {cfg.log_dir}"
        _require_package(flag, "tensorboard", "torch.utils.tensorboard", "SummaryWriter")
    new = follows_a_finished_run(run_folder, resume_step)
    purge_step = resume_step + 1 if resume_step is not None else None
    if resume_step is None and (run_folder / "metrics.jsonl").exists():
        purge_step = 0  # what an earlier start logged; without one, other runs may log to the same folder
    record = MetricsFile(run_folder, resume_step, evaluates_again=evaluates_again)
    builders = {  # finished in this order; W&B may be given up
        "TensorBoard": (cfg.log_dir, lambda: TensorBoardWriter(cfg.log_dir, purge_step)),
        "W&B": (cfg.use_wandb, lambda: WandbWriter(cfg, run_folder, config, tags, new)),
    }
    mirrors: dict[str, Writer] = {}
    for name, (wanted, build) in builders.items():
        if wanted:
            try:
                mirrors[name] = build()
            except Exception as error:
                _warn_dropped(name, error)
    return Tracker(record, mirrors)


def _require_package(flag: str, package: str, module: str, attribute: str) -> None:
    try:
        # A stray folder of the package's name imports too (W&B makes one), so the attribute is asked for.
        getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{flag}: {package} is not usable ({error}); run: pip install {package}") from None


class MetricsFile:
    """metrics.jsonl (one object a line: step, time in Unix seconds, metrics) and summary.json."""

    def __init__(self, run_folder: Path, resume_step: int | None, *, evaluates_again: bool = False) -> None:
        self._path = run_folder / "metrics.jsonl"
        self._summary_path = run_folder / "summary.json"
        with explaining_write_errors(self._path):
            run_folder.mkdir(parents=True, exist_ok=True)
            _discard_after(self._path, -1 if resume_step is None else resume_step, evaluation=evaluates_again)
        if self._summary_path.exists():
            # It sums up an earlier part of the run, and would pass for this one's if this one crashed.
            self._summary_path.replace(run_folder / "summary.previous.json")
        self._file = self._path.open("ab", buffering=0)

    def log(self, step: int, metrics: Metrics) -> None:
        line = to_json({"step": step, "time": round(time.time(), 3), **metrics}) + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        with explaining_write_errors(self._path):
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(end)  # half a line would spoil the next one
                raise

    def summary(self, values: dict[str, Any]) -> None:
        with explaining_write_errors(self._summary_path):
            replace_file(self._summary_path, to_json(values, indent=2) + b"\n")

    def finish(self, exit_code: int) -> None:
        self._file.close()


def _complete_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """(line, parsed line) for each whole line; a process killed while writing leaves half a line."""
    complete = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            complete.append((line + b"\n", record))
    return complete


def _discard_after(path: Path, step: int, *, evaluation: bool = False) -> None:
    """Move the lines after `step` to metrics.discarded.jsonl; killed half-way, no line is lost.

    With `evaluation` that of `step` goes, too.
    """
    if not path.exists():
        return
    kept, moved = [], []
    for line, record in _complete_lines(path):
        again = evaluation and record["step"] == step and "eval/loss" in record
        (moved if again or record["step"] > step else kept).append(line)
    if moved:
        discarded = path.with_name("metrics.discarded.jsonl")
        earlier = [line for line, _ in _complete_lines(discarded)] if discarded.exists() else []
        replace_file(discarded, b"".join(earlier + moved))
    if (whole := b"".join(kept)) != path.read_bytes():
        replace_file(path, whole)


def to_json(value: dict[str, Any], indent: int | None = None) -> bytes:
    """Strict JSON, which has no word for NaN and infinities: they become strings."""
    return json.dumps(_without_non_finite(value), indent=indent, allow_nan=False).encode()


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_non_finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# At its end a run waits this long for uploads; the rest stays on disk for `wandb sync`.
UPLOAD_SECONDS = 300.0
ANSWER_SECONDS = 10.0  # for its server
START_SECONDS = 120.0  # for `wandb.init`, which tries for hours where a server fails after the first answer
FAILED_UPLOAD_SECONDS = 5.0  # if it failed; below the watchdog's GRACE_SECONDS


def within(seconds: float, start: Callable[[], Any]) -> Any:
    """What `start` returns, in a thread that is left behind with a TimeoutError if it takes longer."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(start())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    wait([done], seconds)
    if not done.done():
        raise TimeoutError(f"it has not started within {seconds:g} s")
    return done.result()


def wandb_id(folder: Path, *, new: bool = False, name: str = "wandb_id.txt") -> tuple[str, bool]:
    """The id of the W&B run that belongs to `folder`, and whether it had one; `new`: another, from now on."""
    file = folder / name
    known = file.read_text().strip() if file.exists() and not new else ""
    run_id = known or secrets.token_hex(4)
    if not known:
        replace_file(file, f"{run_id}\n".encode())
    return run_id, bool(known)


class WandbWriter:
    """A W&B run; its id stays in the run folder (wandb_id.txt), so it goes on until the run is finished."""

    def __init__(
        self,
        cfg: LogConfig,
        run_folder: Path,
        config: dict[str, Any],
        tags: list[str],
        new: bool,
    ) -> None:
        run_id, resumed = wandb_id(run_folder, new=new)
        own_tags = [tag.strip() for tag in (cfg.wandb_tags or "").split(",") if tag.strip()]
        self._run = start_wandb(
            cfg,
            run_folder,
            name=cfg.wandb_run_name or run_folder.resolve().name,
            id=run_id,
            resume="allow" if resumed else None,
            tags=[*own_tags, *tags],
            config=redacted(config),
        )
        # Steps repeat after a resume, and W&B drops what is logged at its own step again.
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"train/step": step, **metrics})

    def summary(self, values: dict[str, Any]) -> None:
        self._run.summary.update(values)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def start_wandb(cfg: LogConfig, folder: Path, **options: Any) -> Any:
    """A W&B run that writes into `folder`; `options` are `wandb.init`'s. Any error if it does not start.

    The terminal's output and the command line, with tokens in them, are not uploaded.
    """
    import wandb

    start = partial(
        wandb.init,
        project=cfg.wandb_project,
        group=cfg.wandb_group,
        mode=mode_within_reach(cfg, folder),  # None: WANDB_MODE, else online
        dir=str(folder),
        settings=wandb.Settings(
            console="off", x_disable_meta=True, finish_timeout=UPLOAD_SECONDS, finish_timeout_raises=True
        ),
        **options,
    )
    return within(START_SECONDS, start)


def mode_within_reach(cfg: LogConfig, folder: Path) -> str | None:
    """--wandb_mode, or offline in `folder`, and said, where a server is wanted and does not answer.

    `wandb.init` would try again for hours. What it asks is asked for, as a front page may outlive the rest.
    """
    import requests  # wandb's own client library, so proxies and certificates are found alike
    import wandb

    settings = wandb.setup().settings
    if (cfg.wandb_mode or settings.mode) != "online":
        return cfg.wandb_mode
    url = settings.base_url
    try:
        status = requests.post(
            f"{url}/graphql", json={"query": "{__typename}"}, timeout=ANSWER_SECONDS
        ).status_code
        wrong = f"is out of order (HTTP {status})" if status >= 500 else ""
    except requests.RequestException as error:
        wrong = f"does not answer ({type(error).__name__})"
    if not wrong:
        return cfg.wandb_mode
    tqdm.write(
        f"WARNING: W&B: {url} {wrong}, so this is kept in {folder / 'wandb'}; `wandb sync` uploads it",
        file=sys.stderr,
    )
    return "offline"


class TensorBoardWriter:
    """TensorBoard event files; those of earlier starts from `purge_step` on are hidden."""

    def __init__(self, log_dir: str, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir, purge_step=purge_step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def summary(self, values: dict[str, Any]) -> None:
        self._writer.add_text("summary", "\n".join(f"    {key}: {value}" for key, value in values.items()))

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def progress_texts(metrics: Metrics) -> list[str]:
    """Format the metrics that a progress line shows."""
    shown = []
    for name, metric in METRICS.items():
        emulated = name.replace("perf/", "emulated/")
        if metric.terminal and name in metrics:
            shown.append(metric.terminal.format(metrics[name]))
        elif metric.terminal and emulated in metrics:
            shown.append(f"{metric.terminal.format(metrics[emulated])} (emulated)")
    return shown


class Display:
    """A progress bar on a terminal, otherwise one line per update that brings metrics."""

    def __init__(self, total_steps: int, initial: int, enabled: bool = True) -> None:
        """`initial` is the step that a resumed run starts from."""
        self._total, self._initial, self._enabled = total_steps, initial, enabled
        self._started = time.monotonic()
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=initial, unit="step", dynamic_ncols=True)

    def update(self, step: int, metrics: Metrics) -> None:
        """Show that `step` steps are done; `metrics` may be empty."""
        if not self._enabled:
            return
        shown = progress_texts(metrics)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            if shown:
                self._bar.set_postfix_str(", ".join(shown))
        elif shown:
            print(" | ".join([f"step {step}/{self._total}", *shown, *self._time_left(step)]), flush=True)

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        if self._enabled:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int) -> list[str]:
        if step <= self._initial:
            return []
        seconds = (time.monotonic() - self._started) / (step - self._initial) * (self._total - step)
        return [f"left {timedelta(seconds=round(seconds))}"]


# Of the environment variables those that change what is computed, how fast, or in how much memory.
VARIABLES = ("CUBLAS", "CUDA_", "CUDNN_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")


def describe_environment() -> dict[str, Any]:
    """What the run runs on, for env.json: memory in GB (1e9 bytes), None for what it lacks."""
    import torch

    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    smi = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(redact(argument) for argument in sys.argv),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "variables": {n: redact(v) for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES)},
        "gpu_name": gpus[0].name if gpus else None,
        "gpu_count": len(gpus),
        "gpus": [{"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
        "driver": (_output(smi.split()) or "").split("\n")[0] or None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions(),
        "git": git_state(ROOT),
    }


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where `root` is no checkout of its own."""
    top = _output(["git", "-C", str(root), "rev-parse", "--show-toplevel"])
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    # Unpacked inside somebody else's repository, the commit would be theirs.
    if not top or not commit or Path(top).resolve() != root:
        return None
    changes = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "dirty": changes != ""}


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
