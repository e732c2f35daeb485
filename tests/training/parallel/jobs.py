"""Start whole runs on several ranks over gloo on the CPU, and read their output, for tests."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  (imported by every run)
from fp8_suite.core.errors import EXIT_BAD_SETTING
from fp8_suite.training import run
from fp8_suite.training.checkpoint.manifest import verify
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.parallel.ranks import TORCHRUN
from safetensors.torch import load_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from fp8_suite.train_multi_gpu import join_torchrun
from tests.children import forked

get_checkpoint_conversion_mapping("llama")  # its first call builds a table, which every export needs
HERE = platform.node()
# 37 sequences; in the epoch's last step, of one sequence, the second rank has none.
SMALL = (
    "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 6 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --log_interval 1 --eval_interval 3 --deterministic --mixed_precision fp32"
)
LIMIT = 300.0  # seconds, for a loaded machine
Patch = Callable[[int], None]  # change in a rank before it starts
children = ExitStack()  # what a test started; it closes it


def wait_until(condition: Callable[[], bool], job) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline and job.alive(), job.printed()
        time.sleep(0.02)


@dataclass
class Job:
    """The ranks of a run, and their output."""

    folder: Path
    output: Path
    ranks: list[BaseProcess]
    store: dist.TCPStore | None  # of ranks that have no torchrun

    def wait(self) -> list[int]:
        """Return the exit codes."""
        deadline = time.monotonic() + LIMIT
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        assert None not in codes, f"exit codes {codes}\n{self.printed()}"
        return codes

    def alive(self) -> bool:
        return self.ranks[0].is_alive()

    def printed(self) -> str:
        return "".join(path.read_text() for path in sorted(self.output.iterdir()))

    def errors(self) -> list[str]:
        return [line for line in self.printed().splitlines() if "error: " in line]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: last_logged(self.folder) >= step, self)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.printed(), self)


def redirect(output: Path) -> None:
    """Append stdout and stderr of this process to a file."""
    for number in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)


def one_rank(argv: list[str], environment: dict[str, str], output: Path, patch: Patch | None) -> None:
    """Run a training command with a launcher's environment, in a process that has imported everything."""
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    redirect(output)
    if patch:
        patch(int(environment.get("RANK", 0)))
    sys.argv = ["train_multi_gpu.py", *argv]
    code = run.main(argv, description="test", start=join_torchrun)
    sys.stdout.flush()
    os._exit(code)


def start(
    folder: Path, flags: str = "", *, ranks: int = 2, nodes: int = 1, patch: Patch | None = None
) -> Job:
    """Start a run on `ranks` ranks with torchrun's environment; one rank runs without it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = [*shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)]
    output = folder.with_name(f"{folder.name}.output.{time.monotonic_ns()}")
    output.mkdir(parents=True)
    processes = []
    for rank in range(ranks):
        environment = {}
        if ranks > 1:
            local = ranks // nodes
            values = (rank, ranks, rank % local, local, "127.0.0.1", store.port)
            environment = {name: str(value) for name, value in zip(TORCHRUN, values, strict=True)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": str(nodes)}
        child = forked(one_rank, argv, environment, output / f"rank{rank}", patch)
        processes.append(children.enter_context(child))
    return Job(folder, output, processes, store)


def train(folder: Path, flags: str = "", *, ranks: int = 2, **options) -> Job:
    job = start(folder, flags, ranks=ranks, **options)
    assert job.wait() == [0] * ranks, job.printed()
    assert "FutureWarning" not in job.printed()
    return job


def curve(folder: Path, name: str = "train/loss") -> dict[int, float]:
    """Return a metric by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def rest(folder: Path, step: int, name: str = "train/loss") -> dict[int, float]:
    """Return a metric after this step."""
    return {at: value for at, value in curve(folder, name).items() if at > step}


def last_logged(folder: Path) -> int:
    return max(curve(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def record(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def summary(folder: Path) -> dict:
    return record(folder, "summary.json")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def saved(folder: Path, step: int, parts: tuple = ("model/", "optimizer/")) -> dict[str, torch.Tensor]:
    """Return whole weights and optimizer state of a checkpoint, or its `parts`."""
    path = checkpoint(folder, step)
    kinds = json.loads((path / "manifest.json").read_text())["manifest"]["tensors"]
    tensors = {
        key: torch.empty(kind["shape"], dtype=getattr(torch, kind["dtype"].removeprefix("torch.")))
        for key, kind in kinds.items()
        if key.startswith(parts)
    }
    Checkpoints(folder / "checkpoints", keep_last=1).load(path, tensors)
    return tensors


def last_checkpoint(folder: Path) -> str:
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=5)
    verify(checkpoints.latest())
    return checkpoints.latest().name


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())


def refused(job: Job) -> str:
    """Return the error line of a job that cannot start."""
    assert job.wait() == [EXIT_BAD_SETTING] * len(job.ranks), job.printed()
    assert "Traceback" not in job.printed()
    (error,) = job.errors()
    return error


def delay(owner: type, name: str, seconds: float, message: str = "") -> None:
    """Make a method or function print `message` and take `seconds` longer."""
    original = getattr(owner, name)

    def slower(*args, **kwargs):
        print(message, flush=True)
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slower)
