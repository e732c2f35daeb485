"""Launch training scripts as processes: settings in, exit code out, signals forwarded, output kept.

Every run has a process of its own: it finds the GPU empty, and a crash ends only that run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.runs import NO_EFFECT, bad_input
from core.cli import OneLineParser
from core.errors import (
    EXIT_BAD_SETTING,
    EXIT_FAILED,
    EXIT_IN_USE,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    UserError,
    bad_setting,
)
from core.redact import redact
from core.signals import caught
from training.config import Config, changed_settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """End of a run."""

    code: int
    folder: Path
    error: str | None  # its error line
    stopped: bool = False  # by a signal; the same command resumes
    last_line: str = ""

    @property
    def refused(self) -> bool:
        """True if this machine cannot run it: it ended with an error before it opened its folder."""
        failed = self.code == EXIT_FAILED and self.error is not None and not self.stopped
        return failed and not (self.folder / "config.json").exists()

    @property
    def in_use(self) -> bool:
        return self.code == EXIT_IN_USE

    @property
    def out_of_memory(self) -> bool:
        return self.code == EXIT_OUT_OF_MEMORY

    @property
    def reason(self) -> str:
        number = -self.code if self.code < 0 else self.code - 128
        if number in set(signal.Signals):
            return (
                f"killed by {signal.Signals(number).name}; its log ends with: {self.last_line or 'nothing'}"
            )
        return f"{self.error or self.last_line or 'no output'} (exit code {self.code})"


def run_command(work: Callable[[list[str]], int], argv: list[str] | None) -> int:
    """Run `work` on the command line. Errors become one line and an exit code."""
    try:
        return work(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while nothing trains; `launch` forwards it to a run
        print("stopped; the same command resumes", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING


def command_parser(prog: str, description: str, **options: Any) -> OneLineParser:
    """Return the parser of a benchmark's own flags; training flags stay unknown to it."""
    return OneLineParser(prog=prog, allow_abbrev=False, description=description.splitlines()[0], **options)


def folder_flag(text: str) -> Path:
    """Return the folder that a flag names; an empty text, as of an unset variable, is an error."""
    if not text:
        raise argparse.ArgumentTypeError("'': no folder; name one")
    return Path(text).expanduser()


def make_folder(path: Path) -> None:
    """Make --output_dir. UserError if that fails or nothing can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise bad_setting(f"{error.strerror}; choose a folder you can write to", output_dir=path) from None


def command(cfg: Config, gpus: int) -> list[str]:
    """Return the command line of a run: train_fp8.py on one GPU (or none), torchrun on more."""
    if gpus == 1:
        start = [sys.executable, "-u", str(ROOT / "train_fp8.py")]
    else:
        torchrun = [sys.executable, "-m", "benchmarks.records.torchrun", "--standalone"]
        start = [*torchrun, f"--nproc_per_node={gpus}", str(ROOT / "train_multi_gpu.py")]
    return start + to_flags(cfg)


def to_flags(cfg: Config) -> list[str]:
    """Return the flags that differ from the defaults."""
    default = Config().to_dict()
    return [flag(name, value) for name, value in cfg.to_dict().items() if value != default[name]]


def flag(name: str, value: Any) -> str:
    """Return a setting as a flag; with "=", since a value may start with a dash."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name}={value}"


def launch(cfg: Config, *, gpus: int = 1, log: Path) -> Outcome:
    """Run one training script to its end in its --output_dir; its output goes to `log` and the terminal.

    SIGINT, SIGTERM and SIGHUP are forwarded, so the run saves a checkpoint. The run writes its log
    itself, and survives this process.
    """
    line, last, error = command(cfg, gpus), "", None
    log.parent.mkdir(parents=True, exist_ok=True)
    received: list[int] = []
    early: list[int] = []
    started: list[subprocess.Popen] = []

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        if started:
            _send(started[0], number)
        else:
            early.append(number)

    with log.open("a", encoding="utf-8") as file, caught(forward):
        file.write(f"$ {redact(shlex.join(line))}\n")
        file.flush()
        begin = file.tell()
        # The run has its own session: a terminal's Ctrl-C reaches only this process, which forwards it.
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        started.append(process)
        for number in early:
            _send(process, number)
        for text in _lines(log, begin, process):
            with contextlib.suppress(OSError):  # the terminal is gone
                print(text, end="", flush=True)
            last = text.strip() or last
            if text.startswith("error: "):
                error = text.strip().removeprefix("error: ")
        code = process.wait()
    stopped = bool(received) or code == EXIT_INTERRUPTED
    return Outcome(code, Path(cfg.checkpoint.output_dir), error, stopped, last)


def _lines(log: Path, begin: int, process: subprocess.Popen) -> Iterator[str]:
    """Yield the lines that a process writes to its log after the byte `begin`, until it has ended."""
    with log.open(encoding="utf-8", errors="replace", newline="") as file:
        file.seek(begin)
        text, ended = "", False
        while True:
            text += file.readline()
            if text.endswith("\n") or (text and ended):
                yield text
                text = ""
            elif ended:
                return
            else:
                ended = process.poll() is not None
                if not ended:
                    time.sleep(0.1)


def _send(process: subprocess.Popen, number: int) -> None:
    for pid in _workers(process.pid) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)


def _workers(pid: int) -> list[int]:
    """Return the ranks under torchrun, which would kill them 30 seconds after a signal, saved or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):  # it has just ended
            continue
        if parent == pid and os.fsencode(ROOT / "train_multi_gpu.py") in words:
            found.append(int(path.parent.name))
    return found


def is_begun(cfg: Config) -> bool:
    """True if the run folder of `cfg` holds this run, begun or finished. UserError for other settings.

    A training script would resume with other sharding, kernels or length; such runs are not comparable.
    """
    folder = Path(cfg.checkpoint.output_dir)
    saved = folder / "config.json"
    if not saved.exists() or not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return False
    try:
        changed = changed_settings(json.loads(saved.read_text(encoding="utf-8")), cfg, ignore=NO_EFFECT)
    except (OSError, ValueError, TypeError) as error:
        raise bad_input(f"{saved}: cannot be read ({error}); remove the folder to run it again") from None
    if changed:
        differences = ", ".join(
            f"--{name} {there} there, {here} here" for name, (there, here) in changed.items()
        )
        raise bad_input(
            f"{folder}: holds a run of other settings ({differences}); give the settings it was started "
            "with, or another --output_dir, or remove the folder to run it again"
        )
    return True


def is_finished(cfg: Config) -> bool:
    """True if the run folder of `cfg` holds this run's summary. UserError for a run of other settings."""
    return is_begun(cfg) and (Path(cfg.checkpoint.output_dir) / "summary.json").exists()


def refuse_in_use(name: str, outcome: Outcome) -> None:
    """Raise UserError if another process is writing to the run's folder."""
    if outcome.in_use:
        raise bad_input(f"{name}: {outcome.error}; then the same command resumes")


def count_gpus() -> int:
    """Return the number of GPUs of this machine that a process may use."""
    import torch  # takes seconds, and is needed only for sweeps over several GPUs

    return torch.cuda.device_count()
