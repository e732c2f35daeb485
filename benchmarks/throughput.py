"""Measure tokens/s, model TFLOP/s and memory of training; one JSON line per run.

    python -m benchmarks.throughput --model_name meta-llama/Llama-3.1-8B --max_seq_length 8192 \\
        --batch_size 1 --use_te --mixed_precision fp8 --repeats 3

It runs train_fp8.py, or train_multi_gpu.py for more GPUs than one, so the time includes loader, clipping and
optimizer. Any training flag may be added. By default sequences are full of synthetic text, weights are random
and the tokenizer is the demo's; --dataset_name, --init and --tokenizer_name change that. A record has

- `tokens_per_second_per_gpu` without padding, `padded_tokens_per_second_per_gpu` with padding, and
  `useful_tokens_per_second`, without padding, of all GPUs;
- `model_tflops_per_gpu`: see `te_models.shape.model_flops`; padding and recomputation do not count;
- `mfu_bf16` and `mfu_fp8`: model FLOP/s as a fraction of the GPU's dense peak;
- `data_wait_share`: fraction of the step time spent waiting for data.

Rates are medians over log intervals of 8 micro-batches, or of one step if that has more. Intervals with
warm-up steps (the first five) or profiled steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.launch import ROOT, command_parser, launch, run_command
from fp8_suite.benchmarks.records.runs import RunRecord, read_run
from fp8_suite.benchmarks.records.variants import given_settings, split_flags
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.redact import redact
from fp8_suite.data.demo import TOKENIZER_DIR, read_demo
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.estimate.sizes import with_sizes
from fp8_suite.training.launch import require_inputs

PROG = "python -m benchmarks.throughput"
RESULTS = ROOT / "runs" / "throughput.jsonl"
INTERVAL = 8  # micro-batches per log interval
COUNTED = 4  # measured intervals by default
WARMUP = 5  # steps, as in `training.trainer`
PROFILED_FROM = 9  # first profiled step, as in `training.tracking.profiling`
FIXED = {
    "eval_samples": 0,
    "eval_interval": 0,
    "save_checkpoints": False,
    "export": False,
    "resume": "none",
}
OWNED = ("max_steps", "profile_steps", "log_interval", *FIXED)  # set by this program and its own flags
DEFAULTS = {"init": "random", "tokenizer_name": "demo"}
SUMMARY = (
    *("model_name", "num_layers", "mixed_precision", "use_te", "requested_recipe", "recipe", "sharding_mode"),
    *("model_tflops_per_gpu", "mfu_bf16", "mfu_fp8", "peak_memory_gb", "seconds_to_first_step"),
    *("data_wait_share", "steps", "gpu_name"),
)
CONFIG = (
    *("max_seq_length", "batch_size", "gradient_accumulation_steps", "packing", "moment_dtype"),
    "master_weights",
)


def schedule(accumulation: int, profile: bool) -> tuple[int, int, int]:
    """Return the steps per log interval, the steps to profile, and the first steps that do not count."""
    interval = max(1, INTERVAL // accumulation)
    profiled = max(1, 3 // accumulation) if profile else 0
    last = PROFILED_FROM - 1 + profiled if profile else WARMUP
    return interval, profiled, -(-last // interval) * interval


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags of the benchmark, and the given training settings."""
    parser = command_parser(PROG, __doc__, trains=True)
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of this machine to use (default: 1)"
    )
    steps = "steps per run (default: 40, fewer with gradient accumulation)"
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs to measure (default: 1)")
    parser.add_argument("--profile", action="store_true", help="also record the GPU time by kind of kernel")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="file to append to (default: runs/throughput.jsonl)",
    )
    parser.add_argument("--commit", metavar="TEXT", help="commit to record, where there is no .git")
    arguments, training = split_flags(parser, argv)
    for name in ("gpus", "repeats"):
        if (value := getattr(arguments, name)) < 1:
            raise bad_setting("must be at least 1", **{name: value})
    given = given_settings(training, PROG, OWNED)
    resolved = config_from_dict(given).to_dict()
    return arguments, {name: resolved[name] for name in given}


def measure(argv: list[str]) -> int:
    """Run all repeats. Returns 0, or the exit code of the first failed run."""
    arguments, given = parse(argv)
    optim = with_sizes(config_from_dict(given), arguments.gpus).optim  # `auto` may choose another split
    accumulation = optim.gradient_accumulation_steps
    interval, profiled, uncounted = schedule(accumulation, arguments.profile)
    steps = uncounted + COUNTED * interval if arguments.steps is None else arguments.steps
    if steps < uncounted + interval:
        reason = f"the first {uncounted} steps are not measured; use at least {uncounted + interval}"
        raise bad_setting(reason, steps=steps)
    settings = DEFAULTS | given | FIXED | {"max_steps": steps, "log_interval": interval}
    settings |= {"profile_steps": profiled} if profiled else {}
    synthetic = "dataset_name" not in given
    if synthetic and settings["tokenizer_name"] != "demo":
        reason = "synthetic text needs the demo tokenizer; drop it, or add --dataset_name"
        raise bad_setting(reason, tokenizer_name=settings["tokenizer_name"])
    cfg = config_from_dict(settings)
    require_inputs(cfg)
    refuse_emulation(cfg)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.open("a").close()  # fails before the first run if it cannot be written
    words = [*PROG.split(), *argv]
    about = {
        "repeats": arguments.repeats,
        "gpus": arguments.gpus,
        # Redaction would take the commit hash for a secret.
        "command": shlex.join(word if word == arguments.commit else redact(word) for word in words),
        "dataset": "synthetic" if synthetic else cfg.data.dataset_name,
        "settings": given,
    }
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        if synthetic:
            text = Path(name) / "synthetic.txt"
            rows = steps * accumulation * optim.batch_size * arguments.gpus
            write_text(text, rows=rows, tokens=cfg.data.max_seq_length)
            settings = {"split_name": "train"} | settings
            settings["dataset_name"] = str(text)
            os.environ["HF_DATASETS_CACHE"] = name  # of the runs: nothing of the made-up rows remains
        for number in range(1, arguments.repeats + 1):
            run = Path(cfg.checkpoint.output_dir or name) / f"run-{number}"
            this = config_from_dict(settings | {"output_dir": str(run)})
            outcome = launch(this, gpus=arguments.gpus, log=Path(name) / "log.txt")
            if outcome.code:  # the run has printed the reason
                return outcome.code
            append(arguments.results, record(read_run(run), arguments.commit) | about | {"repeat": number})
    return 0


def refuse_emulation(cfg: Config) -> None:
    """Raise UserError if the run would be emulated."""
    emulated = cfg.model.te_backend == "emulated"
    if not emulated and (cfg.model.use_te or cfg.precision.mixed_precision == "fp8"):
        import torch  # slow to import

        emulated = not torch.cuda.is_available()
    if emulated:
        raise UserError(
            "--te_backend emulated, or --use_te or --mixed_precision fp8 without a CUDA GPU: the run would "
            "be emulated and its speed meaningless; use a machine with a GPU"
        )


def write_text(path: Path, *, rows: int, tokens: int) -> None:
    """Write `rows` lines of random words; each has `tokens` tokens, BOS and EOS included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json"))
    special = json.loads((TOKENIZER_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    ends = sum(special.get(name) is not None for name in ("bos_token", "eos_token"))
    text = " ".join(row["problem"] for row in islice(read_demo("train_1M"), 500))
    words = [f" {word}" for word in re.findall(r"[A-Za-z]+", text)]
    # With words of one token, the number of words is the number of tokens.
    single = {word for word in set(words) if len(tokenizer.encode(word, add_special_tokens=False)) == 1}
    words, draw = [word for word in words if word in single], random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            file.write("".join(draw.choices(words, k=tokens - ends)) + "\n")


def record(run: RunRecord, commit: str | None) -> dict[str, Any]:
    """Return the record of a finished run. UserError if it was emulated."""
    config, environment, summary = run.config, run.environment, run.summary
    if run.emulated:
        raise UserError(f"{run.folder}: the run was emulated, so its speed is meaningless and not recorded")
    found = {name: summary.get(name) for name in SUMMARY} | {name: config[name] for name in CONFIG}
    found |= {
        "tokens_per_second_per_gpu": summary["tokens_per_second"] / summary["world_size"],
        "padded_tokens_per_second_per_gpu": summary["padded_tokens_per_second"] / summary["world_size"],
        "useful_tokens_per_second": summary["tokens_per_second"],
        "versions": environment["versions"] | {name: environment[name] for name in ("python", "cuda")},
        **{name: environment.get(name) for name in ("cudnn", "driver", "attention_backend", "date")},
        **(environment["git"] or {"commit": commit, "dirty": None}),
    }
    if config["profile_steps"]:
        profile = json.loads((run.folder / "profile.json").read_text(encoding="utf-8"))
        found["profile"] = {name: profile[name] for name in ("steps", "step_ms", "kinds")}
    return found


def append(path: Path, found: dict[str, Any]) -> None:
    """Append a record to the results file, and print its rates."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    rate, tflops = found["tokens_per_second_per_gpu"], found["model_tflops_per_gpu"]
    print(f"{rate:,.0f} tokens/s per GPU, {tflops or 0:,.1f} model TFLOP/s; recorded in {path}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the measurement. Exit codes: 0 done, 1 cannot run here, 2 bad setting, or the failed run's."""
    return run_command(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
