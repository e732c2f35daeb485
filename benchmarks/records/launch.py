"""Launch training runs as subprocesses, forward signals to them, and keep their output.

A separate process per run starts with empty GPU memory, and a crash ends only that run.
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
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.runs import NO_EFFECT, bad_input
from core.cli import OneLineParser
from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_IN_USE, EXIT_INTERRUPTED, UserError
from core.redact import redact
from core.signals import caught
from training.config import Config, changed_settings

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Outcome:
    """Exit code and error of a run."""

    code: int
    folder: Path
    error: str | None = None  # error line that the run printed
    last_line: str = ""

    @property
    def refused(self) -> bool:
        """True if this machine cannot run it: the run reported an error before it created its folder."""
        reported = self.code == EXIT_FAILED and self.error is not None
        return reported and not (self.folder / "config.json").exists()

    @property
    def reason(self) -> str:
        number = -self.code if self.code < 0 else self.code - 128
        if number in set(signal.Signals):
            name = signal.Signals(number).name
            return f"killed by {name}; its log ends with: {self.last_line or 'nothing'}"
        return f"{self.error or self.last_line or 'no output'} (exit code {self.code})"


def run_command(work: Callable[[list[str]], int], argv: list[str] | None) -> int:
    """Run `work` with the command line; print an error as one line and return its exit code."""
    try:
        return work(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as stop:
        print(f"{str(stop) or 'stopped'}; the same command resumes", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", EXIT_BAD_SETTING)


def command_parser(prog: str, description: str, **options: Any) -> OneLineParser:
    """Return a parser for a benchmark's own flags; it does not know training flags."""
    return OneLineParser(prog=prog, allow_abbrev=False, description=description.splitlines()[0], **options)


def folder_flag(text: str) -> Path:
    """Return the folder that a flag names; an empty text, as of an unset variable, is an error."""
    if not text:
        raise argparse.ArgumentTypeError("'': no folder; name one")
    return Path(text).expanduser()


def command(cfg: Config, gpus: int) -> list[str]:
    """Return the command line of a run: train_fp8.py on one GPU (or none), torchrun on more."""
    if gpus == 1:
        start = [sys.executable, "-u", str(ROOT / "train_fp8.py")]
    else:
        torchrun = [sys.executable, "-m", "benchmarks.records.torchrun", "--standalone"]
        start = [*torchrun, f"--nproc_per_node={gpus}", str(ROOT / "train_multi_gpu.py")]
    return start + to_flags(cfg)


def to_flags(cfg: Config) -> list[str]:
    """Return flags for all non-default settings, joined by "=" because a value may start with a dash."""
    default, flags = Config().to_dict(), []
    for name, value in cfg.to_dict().items():
        if value != default[name]:
            switch = f"--{name}" if value is True else f"--no_{name}"
            flags.append(switch if isinstance(value, bool) else f"--{name}={value}")
    return flags


def launch(cfg: Config, *, gpus: int = 1, log: Path) -> Outcome:
    """Run one training script and wait for it; its output goes to `log` and to the terminal.

    The run writes to `log` directly, so it survives the end of this process. SIGINT, SIGTERM and SIGHUP are
    forwarded: the run saves a checkpoint and exits, then this function raises KeyboardInterrupt. UserError if
    another process uses the run folder.
    """
    line, folder, signals = command(cfg, gpus), Path(cfg.checkpoint.output_dir), []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, caught(lambda number, frame: signals.append(number)):
        file.write(f"$ {redact(shlex.join(line))}\n")
        file.flush()
        begin = file.tell()
        # In a separate session the run does not receive Ctrl-C itself; this process forwards it once.
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        output = _follow(process, log, begin, signals).splitlines()
    error = next((x.removeprefix("error: ") for x in reversed(output) if x.startswith("error: ")), None)
    outcome = Outcome(process.returncode, folder, error, next(filter(str.strip, reversed(output)), ""))
    if signals or outcome.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"stopped in {folder.name}")
    if outcome.code == EXIT_IN_USE:
        raise bad_input(f"{folder.name}: {error}; then the same command resumes")
    return outcome


def _follow(process: subprocess.Popen, log: Path, begin: int, signals: list[int]) -> str:
    """Print and return the output in `log` from byte `begin` on; forward new `signals` to the process."""
    text, sent = "", 0
    with log.open(encoding="utf-8", errors="replace", newline="") as file:
        file.seek(begin)
        while True:
            ended = process.poll() is not None
            new = file.read()
            text += new
            with contextlib.suppress(OSError):  # the terminal was closed
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
    """Return the ranks of a torchrun process. Signalled itself, it kills ranks that save for over 30 s."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):  # the process has just ended
            continue
        if parent == pid and os.fsencode(ROOT / "train_multi_gpu.py") in words:
            found.append(int(path.parent.name))
    return found


def is_begun(cfg: Config) -> bool:
    """True if the folder of `cfg` holds this run, begun or finished. UserError if its settings differ.

    Training itself resumes with different sharding, kernels or length, but such runs are not comparable.
    """
    folder = Path(cfg.checkpoint.output_dir)
    saved = folder / "config.json"
    if not saved.exists() or not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return False
    try:
        changed = changed_settings(json.loads(saved.read_text(encoding="utf-8")), cfg, ignore=NO_EFFECT)
    except (ValueError, TypeError) as error:
        raise bad_input(f"{saved}: cannot be read ({error}); remove the folder to run it again") from None
    if changed:
        pairs = ", ".join(f"--{name} {there} there, {here} here" for name, (there, here) in changed.items())
        raise bad_input(
            f"{folder}: holds a run of other settings ({pairs}); give the settings it was started with, or "
            "another --output_dir, or remove the folder to run it again"
        )
    return True


def is_finished(cfg: Config) -> bool:
    """True if the folder of `cfg` holds this run, finished. UserError if its settings differ."""
    return is_begun(cfg) and (Path(cfg.checkpoint.output_dir) / "summary.json").exists()
