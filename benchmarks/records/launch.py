"""Start training scripts as processes: settings in, exit code out, signals passed on, output kept.

One process per run, so that a run finds the GPU as empty as the one before, and a crash ends one run.
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.runs import INDIFFERENT
from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_INTERRUPTED
from core.redact import redact
from core.signals import stop_signals
from training.config import Config, changed_settings

ROOT = Path(__file__).resolve().parents[2]
IN_USE = "another run is writing to it"  # as training.run_folder says it


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    folder: Path
    error: str  # its line of error, else the last line that it printed
    stopped: bool  # a signal came: what is unfinished goes on with the same command
    told: bool = True  # that line was one of error: it ended by itself, and was not killed

    @property
    def refused(self) -> bool:
        """Whether this machine cannot run it: it ended by itself before it took its folder."""
        ended = self.code == EXIT_FAILED and not self.stopped and self.told
        return ended and not (self.folder / "config.json").exists()

    @property
    def in_use(self) -> bool:
        """Whether another process is at work in its folder."""
        return self.code != 0 and IN_USE in self.error

    @property
    def out_of_memory(self) -> bool:
        return self.code != 0 and "out of memory" in self.error.lower()

    @property
    def reason(self) -> str:
        if self.code < 0 and not self.told:
            return f"it was killed by {signal.Signals(-self.code).name}; its log ends with: {self.error}"
        return f"{self.error or 'it printed nothing'} (exit code {self.code})"


def run_command(work: Callable[[list[str]], int], argv: list[str] | None) -> int:
    """`work` on the command line: its exit code, 2 where a setting is wrong, EXIT_INTERRUPTED if stopped."""
    try:
        return work(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while nothing trains; `launch` passes it on to a run
        print("stopped; to go on: the same command", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING


def folder_flag(text: str) -> Path:
    """The type of a flag that takes a folder: an empty text, as of an unset variable, is none."""
    if not text:
        raise argparse.ArgumentTypeError("'': no folder; name one")
    return Path(text).expanduser()


def make_folder(path: Path) -> None:
    """ValueError where --output_dir cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--output_dir {path}: {error.strerror}; choose a folder you can write to") from None


def command(cfg: Config, gpus: int) -> list[str]:
    """The command line of a run: train_fp8.py on one GPU (or none), torchrun on more."""
    if gpus == 1:
        start = [sys.executable, "-u", str(ROOT / "train_fp8.py")]
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start = [*torchrun, f"--nproc_per_node={gpus}", str(ROOT / "train_multi_gpu.py")]
    return start + to_flags(cfg)


def to_flags(cfg: Config) -> list[str]:
    """The flags that differ from the defaults."""
    default = Config().to_dict()
    return [flag(name, value) for name, value in cfg.to_dict().items() if value != default[name]]


def flag(name: str, value: Any) -> str:
    """A setting as a command line has it; with "=", since a value may start with a dash."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name}={value}"


def launch(cfg: Config, *, gpus: int = 1, log: Path) -> Outcome:
    """Run one training script to its end in its --output_dir; its output goes to `log` and the terminal.

    SIGINT, SIGTERM and SIGHUP are passed on and waited for, so that the run saves a checkpoint. The run
    writes the log itself, and goes on if this process dies.
    """
    line, last, error = command(cfg, gpus), "", None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, _Relay() as relay:
        file.write(f"$ {redact(shlex.join(line))}\n")
        file.flush()
        begin = file.tell()
        # A session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        relay.attach(process)
        for text in _lines_of(log, begin, process):
            with contextlib.suppress(OSError):  # a terminal that is gone
                print(text, end="", flush=True)
            last = text.strip() or last
            if text.startswith("error: "):
                error = text.strip().removeprefix("error: ")
        code = process.wait()
    stopped = bool(relay.came) or code == EXIT_INTERRUPTED
    return Outcome(code, Path(cfg.checkpoint.output_dir), error or last, stopped, told=error is not None)


def _lines_of(log: Path, begin: int, process: subprocess.Popen) -> Iterator[str]:
    """What a process writes into its log from the byte `begin` on, line by line, until it has ended."""
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


class _Relay:
    """Passes this process's SIGINT, SIGTERM and SIGHUP on to a run; `came` are those that came."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self._process: subprocess.Popen | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Relay:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other
            self._before = {n: signal.signal(n, self._pass_on) for n in stop_signals()}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, process: subprocess.Popen) -> None:
        self._process = process
        for number in self.came:  # between the handlers and the start
            self._send(number)

    def _pass_on(self, number: int, frame: Any) -> None:
        self.came.append(number)
        if self._process is not None:
            self._send(number)

    def _send(self, number: int) -> None:
        for pid in _workers(self._process.pid) or [self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)


def _workers(pid: int) -> list[int]:
    """The ranks under torchrun, which would kill them 30 seconds after a signal of its own, saved or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
        if parent == pid and os.fsencode(ROOT / "train_multi_gpu.py") in words:
            found.append(int(path.parent.name))
    return found


def is_begun(cfg: Config) -> bool:
    """Whether the run folder of `cfg` holds this run, begun or finished; ValueError for another run's.

    A training script would go on with other sharding or kernels, or to another length; here such runs would
    stand beside others as if they were the same.
    """
    folder = Path(cfg.checkpoint.output_dir)
    saved = folder / "config.json"
    kept = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    if not (kept and saved.exists()):
        return False
    try:
        old = json.loads(saved.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError) as error:
        raise ValueError(f"{saved}: cannot be read ({error}); remove the folder to run it again") from None
    if changed := changed_settings(old, cfg, but=INDIFFERENT):
        differences = ", ".join(f"--{name} {a} there, {b} here" for name, (a, b) in changed.items())
        raise ValueError(
            f"{folder}: holds a run of other settings ({differences}); give the settings it was started "
            "with, or another --output_dir, or remove the folder to run it again"
        )
    return True


def is_finished(cfg: Config) -> bool:
    """Whether the run folder of `cfg` holds this run's end; ValueError for another run's."""
    return is_begun(cfg) and (Path(cfg.checkpoint.output_dir) / "summary.json").exists()


def count_gpus() -> int:
    """GPUs of this machine that a process may use."""
    import torch  # seconds, and only where several GPUs are asked for

    return torch.cuda.device_count()
