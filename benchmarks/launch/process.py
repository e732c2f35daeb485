"""Launch training runs as subprocesses, forward signals to them, and save their output.

Every run has its own process, so it starts with empty GPU memory, and a crash ends only that run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.runs import NO_EFFECT, bad_input, read_values
from fp8_suite.core.errors import EXIT_FAILED, EXIT_IN_USE, EXIT_INTERRUPTED
from fp8_suite.core.packages import ROOT
from fp8_suite.core.redact import redact
from fp8_suite.core.settings import AUTO
from fp8_suite.core.signals import handling_stop_signals
from fp8_suite.training.config import Config, changed_settings, settings_path
from fp8_suite.training.estimate.sizes import global_batch, searched_settings

POLL_SECONDS = 0.1
CHOSEN = ("batch_size", "gradient_accumulation_steps", "recompute")  # a run may choose these


@dataclass(frozen=True)
class Outcome:
    """Exit code, run folder and error of a run."""

    code: int
    folder: Path
    error: str | None = None  # from the last line `error: ...` of its output
    last_line: str = ""

    @property
    def refused(self) -> bool:
        """True if the machine cannot run it: it failed with an error before it created its run folder."""
        reported = self.code == EXIT_FAILED and self.error is not None
        return reported and not settings_path(self.folder).exists()

    @property
    def reason(self) -> str:
        """Reason of the failure, in one line."""
        number = -self.code if self.code < 0 else self.code - 128
        if number in set(signal.Signals):
            name = signal.Signals(number).name
            return f"killed by {name}; last output: {self.last_line or 'none'}"
        return f"{self.error or self.last_line or 'no output'} (exit code {self.code})"


def command(cfg: Config, gpus: int) -> list[str]:
    """Return a run's command line: train_fp8.py for one GPU or the CPU, torchrun for more GPUs."""
    if gpus == 1:
        start = [sys.executable, "-u", str(ROOT / "train_fp8.py")]
    else:
        torchrun = [sys.executable, "-m", "fp8_suite.benchmarks.launch.torchrun", "--standalone"]
        start = [*torchrun, f"--nproc_per_node={gpus}", str(ROOT / "train_multi_gpu.py")]
    return start + to_flags(cfg)


def to_flags(cfg: Config) -> list[str]:
    """Return flags `--name=value` for all non-default settings; a value may start with a dash."""
    default, flags = Config().to_dict(), []
    for name, value in cfg.to_dict().items():
        if value != default[name]:
            switch = f"--{name}" if value is True else f"--no_{name}"
            flags.append(switch if isinstance(value, bool) else f"--{name}={value}")
    return flags


def launch(cfg: Config, *, gpus: int = 1, log: Path) -> Outcome:
    """Run a training script to its end; its output goes to `log` and to the terminal.

    The run writes to `log` itself, so it continues if this process is killed. SIGINT, SIGTERM and SIGHUP are
    forwarded: the run saves a checkpoint and exits, then this function raises KeyboardInterrupt. UserError if
    another process is writing to the run folder.
    """
    line, folder, signals = command(cfg, gpus), Path(cfg.checkpoint.output_dir), []
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", encoding="utf-8") as file,
        handling_stop_signals(lambda number, frame: signals.append(number)),
    ):
        file.write(f"$ {redact(shlex.join(line))}\n")
        file.flush()
        begin = file.tell()
        # A session of its own keeps Ctrl-C from reaching the run twice: `_follow` forwards it.
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        output = _follow(process, log, begin, signals).splitlines()
    error = next((x.removeprefix("error: ") for x in reversed(output) if x.startswith("error: ")), None)
    outcome = Outcome(process.returncode, folder, error, next(filter(str.strip, reversed(output)), ""))
    if signals or outcome.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"interrupted in {folder.name}; run the same command to resume")
    if outcome.code == EXIT_IN_USE:
        raise bad_input(f"{folder.name}: {error}; then run the same command to resume")
    return outcome


def _follow(process: subprocess.Popen, log: Path, begin: int, signals: list[int]) -> str:
    """Print and return what is written to `log` after byte `begin`; forward new `signals` to the process."""
    text, sent = "", 0
    with log.open(encoding="utf-8", errors="replace", newline="") as file:
        file.seek(begin)
        while True:
            ended = process.poll() is not None
            new = file.read()
            text += new
            with contextlib.suppress(OSError):  # the terminal may be closed
                print(new, end="", flush=True)
            if ended:
                return text
            for number in signals[sent:]:
                _send(process, number)
                sent += 1
            time.sleep(POLL_SECONDS)


def _send(process: subprocess.Popen, number: int) -> None:
    for pid in _workers(process.pid) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)


def _workers(pid: int) -> list[int]:
    """Return the PIDs of a torchrun process's ranks, or [].

    Signals go to the ranks, because torchrun itself would kill ranks that take over 30 s to save.
    """
    ranks = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):  # the process may have ended
            continue
        if parent == pid and os.fsencode(ROOT / "train_multi_gpu.py") in words:
            ranks.append(int(path.parent.name))
    return ranks


def is_finished(cfg: Config) -> bool:
    """True if this run has finished. UserError if its folder holds a run with other settings.

    Training would resume with other sharding, kernels or length, but such a run is not comparable.
    """
    folder = Path(cfg.checkpoint.output_dir)
    saved = settings_path(folder)
    if not saved.exists() or not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return False
    old = read_values(saved)
    if changed := changed_settings(old, cfg, ignore=NO_EFFECT | chosen_at_start(old, cfg)):
        pairs = ", ".join(f"--{name} {old}, now {new}" for name, (old, new) in changed.items())
        raise bad_input(
            f"{folder}: holds a run with other settings ({pairs}); use its settings or another --output_dir, "
            "or delete the run folder to start over"
        )
    return (folder / "summary.json").exists()


def chosen_at_start(old: dict[str, Any], cfg: Config) -> set[str]:
    """Return the settings that the run chose itself, so that its recorded values may differ from `cfg`."""
    optim, settings = cfg.optim, cfg.to_dict()
    chosen = {name for name in CHOSEN if settings[name] in (None, AUTO)} | set(searched_settings(cfg))
    total = optim.global_batch_size or optim.batch_ramp
    if optim.batch_size == AUTO and not total:  # accumulation only sets the global batch
        same = old["batch_size"] * old["gradient_accumulation_steps"] == global_batch(cfg, 1)
        chosen = chosen | set(CHOSEN[:2]) if same else chosen - set(CHOSEN[:2])
    return chosen
