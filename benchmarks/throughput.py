"""Tokens/s, model TFLOP/s and memory of this suite's own training runs, one JSON line a run.

    python -m benchmarks.throughput --model_name meta-llama/Llama-3.1-8B --max_seq_length 8192 \\
        --batch_size 1 --use_te --mixed_precision fp8 --repeats 3

It starts train_fp8.py, or train_multi_gpu.py under torchrun for --gpus 2 and more, so what is timed is the
product: loop, optimizer, clipping, loader and all. Any training flag may be added. Without --dataset_name
every row of the data is one full sequence of synthetic text; weights are random and the tokenizer is the
demo's unless --init and --tokenizer_name say otherwise. A record of --results holds

- `tokens_per_second_per_gpu`, without padding; `padded_tokens_per_second_per_gpu`, with it; and
  `useful_tokens_per_second`, without padding, of all GPUs together;
- `model_tflops_per_gpu`: of a second of one GPU, 6 FLOPs for each weight of a GEMM (LM head included,
  embedding not) and each token, plus 6 * layers * heads * head size * the sum of squared sample lengths for
  causal attention; padding and recomputation do not count. Source: PaLM (arXiv:2204.02311), appendix B, with
  the causal half of its second term; `training.tracking.metrics.model_flops` computes it;
- `mfu_bf16` and `mfu_fp8`: the same as a share of the GPU's dense peak;
- `data_wait_share`: the part of a step in which the loop waited for its batch.

Rates are medians over log intervals of at most 8 micro-batches, or of a step that has more, by the wall
clock between two points where the GPU has nothing left to do. The first five steps are warm-up, with the
intervals that they are in, and intervals with profiled steps do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.records.launch import ROOT, launch
from core.redact import redact
from core.settings import nearest
from data.demo import TOKENIZER_DIR, generate
from training.config import Config, build_parser, config_from_dict, load_config_file

RESULTS = ROOT / "benchmarks" / "results" / "throughput.jsonl"
INTERVAL = 8  # micro-batches
COUNTED = 4  # intervals, unless --steps says otherwise
WARMUP = 5  # steps; training.trainer counts no interval that begins earlier
PROFILED_FROM = 9  # as training.profiling has it
# What a measurement needs; a user's own flags may not set these.
FIXED = {
    "eval_samples": 0,
    "eval_interval": 0,
    "save_checkpoints": False,
    "export": False,
    "resume": "none",
}
OWNED = {"max_steps": "use --steps", "profile_steps": "use --profile"}
OWNED |= dict.fromkeys(["log_interval", *FIXED], "leave it out")
DEFAULTS = {"init": "random", "tokenizer_name": "demo"}
SYNTHETIC = "synthetic"
MEANINGLESS = "is emulated, and the speed of emulation says nothing"
# Of a run's summary.json, of its config.json.
SUMMED_UP = (
    *("model_name", "num_layers", "mixed_precision", "use_te", "requested_recipe", "recipe", "sharding_mode"),
    *("model_tflops_per_gpu", "mfu_bf16", "mfu_fp8", "peak_memory_gb", "seconds_to_first_step"),
    *("data_wait_share", "steps", "gpu_name"),
)
CONFIGURED = ("max_seq_length", "batch_size", "gradient_accumulation_steps", "packing")
CONFIGURED += ("moment_dtype", "master_weights")


@dataclass(frozen=True)
class Schedule:
    """Which steps of a run are timed, and which are profiled."""

    interval: int  # steps
    profiled: int  # steps, 0 for none

    @classmethod
    def of(cls, accumulation: int, profile: bool) -> Schedule:
        return cls(max(1, INTERVAL // accumulation), max(1, 3 // accumulation) if profile else 0)

    @property
    def warmup(self) -> int:
        return -(-WARMUP // self.interval) * self.interval

    def steps(self, counted: int) -> int:
        """Steps of a run with that many intervals whose rates count, and with all that is profiled."""
        profiled = set(range(PROFILED_FROM, PROFILED_FROM + self.profiled))
        steps = self.warmup
        while counted or (profiled and steps < max(profiled)):
            counted -= bool(counted) and profiled.isdisjoint(range(steps + 1, steps + self.interval + 1))
            steps += self.interval
        return steps


def main(argv: list[str] | None = None) -> int:
    """Run, record, print; exit code 2 for a bad setting, 1 for a machine that cannot, else the run's."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments, given = parse(argv)
        return measure(arguments, given, shlex.join(["python", "-m", "benchmarks.throughput", *argv]))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def refuse_unwritable(path: Path) -> None:
    """ValueError if nothing can be appended to --results, which is not to show after the measurement."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"--results {path}: cannot be written to ({error.strerror}); name another file"
        ) from None


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The benchmark's own settings, and the training settings that were given. ValueError for bad ones."""
    parser = build_parser("python -m benchmarks.throughput", __doc__.split("\n")[0])
    own = parser.add_argument_group("benchmark")
    own.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of this machine (default: 1)")
    own.add_argument(
        "--steps", type=int, metavar="N", help="steps of a run; default: 40, fewer with accumulation"
    )
    own.add_argument("--repeats", type=int, default=1, metavar="N", help="runs, a record each (default: 1)")
    own.add_argument("--profile", action="store_true", help="add GPU time by kind of kernel to the record")
    own.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default: {RESULTS}")
    own.add_argument("--commit", metavar="TEXT", help="the code's commit, for a tree without .git")
    flags = [option for action in parser._actions for option in action.option_strings]
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(f"unknown flag {unknown[0]}{nearest(unknown[0].split('=')[0], flags)}")
    names = {action.dest for action in own._group_actions}
    given = {name: value for name, value in vars(arguments).items() if name not in {*names, "config"}}
    if arguments.config:
        given = load_config_file(arguments.config) | given
    resolved = config_from_dict(given).to_dict()
    given = {name: resolved[name] for name in given}
    for name in sorted(OWNED.keys() & given.keys()):
        raise ValueError(f"--{name} {given[name]}: the benchmark sets it itself; {OWNED[name]}")
    for name in ("gpus", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: must be 1 or more")
    schedule = Schedule.of(resolved["gradient_accumulation_steps"], arguments.profile)
    if arguments.steps is None:
        arguments.steps = schedule.steps(COUNTED)
    if arguments.steps < (least := schedule.steps(1)):
        profiled = ", nor are those with profiled steps" if arguments.profile else ""
        raise ValueError(
            f"--steps {arguments.steps}: the first {schedule.warmup} are not counted{profiled}; "
            f"give {least} or more"
        )
    return arguments, given


def without_secrets(command: str, commit: str | None) -> str:
    """`command` as it may be recorded; a commit looks like an API key."""
    return " ".join(word if word == commit else redact(word) for word in command.split(" "))


def measure(arguments: argparse.Namespace, given: dict[str, Any], command: str) -> int:
    """All repeats; 0, or the exit code of the run that failed."""
    schedule = Schedule.of(given.get("gradient_accumulation_steps", 1), arguments.profile)
    settings = DEFAULTS | given | FIXED | {"max_steps": arguments.steps, "log_interval": schedule.interval}
    settings |= {"profile_steps": schedule.profiled} if arguments.profile else {}
    synthetic = "dataset_name" not in given
    if synthetic and settings["tokenizer_name"] != "demo":
        raise ValueError(
            f"--tokenizer_name {settings['tokenizer_name']}: synthetic text is made of the demo tokenizer's "
            "words; leave it out, or name real data with --dataset_name"
        )
    cfg = config_from_dict(settings)
    refuse_emulation(cfg)
    refuse_a_cpu_in_the_tables(arguments.results)
    refuse_unwritable(arguments.results)
    about = {"repeats": arguments.repeats, "gpus": arguments.gpus}
    about["command"] = without_secrets(command, arguments.commit)
    about |= {"dataset": SYNTHETIC if synthetic else cfg.data.dataset_name, "settings": given}
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        if synthetic:
            text = Path(name) / "synthetic.txt"
            rows = arguments.steps * cfg.optim.gradient_accumulation_steps * cfg.optim.batch_size
            write_text(text, rows=rows * arguments.gpus, tokens=cfg.data.max_seq_length)
            settings = {"split_name": "train", "data_cache_dir": name} | settings
            settings["dataset_name"] = str(text)
        for number in range(1, arguments.repeats + 1):
            run = Path(cfg.checkpoint.output_dir or name) / f"run-{number}"
            this = config_from_dict(settings | {"output_dir": str(run)})
            outcome = launch(this, gpus=arguments.gpus, log=Path(name) / "log.txt")
            if outcome.code:  # the run has printed why
                return outcome.code
            append(arguments.results, record(run, arguments.commit) | about | {"repeat": number})
    return 0


def refuse_emulation(cfg: Config) -> None:
    """RuntimeError, as far as can be foreseen, for what needs FP8 hardware to mean anything."""
    import torch

    if cfg.model.te_backend == "emulated":
        raise RuntimeError(f"--te_backend emulated: this {MEANINGLESS}; drop it")
    if (cfg.model.use_te or cfg.precision.mixed_precision == "fp8") and not torch.cuda.is_available():
        raise RuntimeError(
            f"--use_te or --mixed_precision fp8 without a CUDA GPU {MEANINGLESS}; take a machine with one"
        )


def refuse_a_cpu_in_the_tables(results: Path) -> None:
    """RuntimeError for a run without a GPU whose record would be among those that tables are made of."""
    import torch

    if results.resolve() == RESULTS.resolve() and not torch.cuda.is_available():
        raise RuntimeError(
            f"--results {results}: the tables are made of this file, and this machine has no CUDA GPU; give "
            "another file"
        )


def write_text(path: Path, *, rows: int, tokens: int) -> None:
    """`rows` lines of the demo set's words at random, each of `tokens` demo tokens, BOS and EOS included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json"))
    special = json.loads((TOKENIZER_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    ends = sum(special.get(name) is not None for name in ("bos_token", "eos_token"))
    text = " ".join(row["problem"] for row in islice(generate("train_1M"), 500))
    words = [f" {word}" for word in re.findall(r"[A-Za-z]+", text)]
    # Words of one token each, so that a line's tokens are counted before it is tokenised.
    single = {word for word in set(words) if len(tokenizer.encode(word, add_special_tokens=False)) == 1}
    words, draw = [word for word in words if word in single], random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            file.write("".join(draw.choices(words, k=tokens - ends)) + "\n")


def record(run: Path, commit: str | None) -> dict[str, Any]:
    """What a finished run's folder says of it; RuntimeError if it ran emulated after all."""
    config, environment, summary = (read(run / f"{name}.json") for name in ("config", "env", "summary"))
    if summary["emulated"]:
        raise RuntimeError(f"{run}: what ran {MEANINGLESS}; it is not recorded")
    git = environment["git"] or {"commit": commit, "dirty": None}
    world_size = summary["world_size"]
    found = {name: summary.get(name) for name in SUMMED_UP} | {name: config[name] for name in CONFIGURED}
    found |= {
        "tokens_per_second_per_gpu": summary["tokens_per_second"] / world_size,
        "padded_tokens_per_second_per_gpu": summary["padded_tokens_per_second"] / world_size,
        "useful_tokens_per_second": summary["tokens_per_second"],
        "versions": environment["versions"] | {"python": environment["python"], "cuda": environment["cuda"]},
        "cudnn": environment["cudnn"],
        "driver": environment["driver"],
        "attention_backend": environment.get("attention_backend"),
        **git,
        "date": environment["date"],
    }
    if config["profile_steps"]:
        profile = read(run / "profile.json")
        found["profile"] = {name: profile[name] for name in ("steps", "step_ms", "kinds")}
    return found


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def append(path: Path, found: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    rate, tflops = found["tokens_per_second_per_gpu"], found["model_tflops_per_gpu"]
    print(f"{rate:,.0f} tokens/s per GPU, {tflops or 0:,.1f} model TFLOP/s; recorded in {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
