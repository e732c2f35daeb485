"""Every knob of the suite, once: a field here is a flag, a YAML key, a line of --help and of config.json.

Nothing heavy is imported, so `--help` answers at once. `parse_config` merges defaults, a YAML file and
flags (flags win); the resolved `Config` is frozen and travels unchanged through the whole run.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from collections.abc import Container
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from training.errors import first_line
from training.packages import ROOT

# FP8 recipes with --use_te, and without it; the first of each is the default.
TE_RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
PATHS = ("output_dir", "log_dir", "data_cache_dir", "weights_cache_dir", "model_name", "tokenizer_name")
SYSTEM_PROMPT = "Solve the math problem step by step. Put your final answer in \\boxed{}."


def knob(default: Any, help: str, *, free: bool = False, least: int | None = None) -> Any:
    """One setting, of which `least` is the least value.

    `free` settings may change when a run is resumed; the others define the run.
    """
    return field(default=default, metadata={"help": help, "free": free, "least": least})


def require(condition: bool, flag: str, value: Any, reason: str) -> None:
    if not condition:
        raise ValueError(f"--{flag} {value}: {reason}")


class Section:
    """Settings that belong together. ValueError for one below its least value."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata["least"]
            if None not in (value, least):
                require(value >= least, f.name, value, f"must be {least} or more")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """model"""

    model_name: str = knob(
        "tiny-llama",
        "hub id, local folder, or preset (see te_models/presets.py); RUN/export is a run's trained model, to "
        "evaluate or to go on from",
    )
    init: Literal["auto", "pretrained", "random"] = knob(
        "auto",
        "weights: read them, or draw them from the model's dimensions; auto draws for tiny-* presets only",
    )
    tokenizer_name: str | None = knob(
        None, "hub id, local folder, or `demo`; default: the model's own (tiny-* presets: demo)"
    )
    use_te: bool = knob(False, "build the decoder from te.TransformerLayer (Transformer Engine)")
    te_backend: Literal["auto", "native", "emulated"] = knob(
        "auto",
        "TE layers of --use_te: native runs them (needs CUDA), emulated computes the same numerics in plain "
        "PyTorch, slowly, anywhere; auto is native, or emulated on a machine without a GPU",
    )
    gradient_checkpointing: bool = knob(
        False, "recompute each layer's activations in backward to save memory", free=True
    )
    compile: bool | None = knob(
        None,
        "torch.compile each decoder layer of a Hugging Face model; default: on a GPU, not under DeepSpeed",
        free=True,
    )
    flash_attention: bool = knob(
        True,
        "attention by FlashAttention 4 where it is installed, on Hopper; else cuDNN's and torch's",
        free=True,
    )
    fused_residuals: bool = knob(
        True, "TE's norms add up gradients of residual connections in their own kernel", free=True
    )
    weights_cache_dir: str | None = knob(
        None, "folder for downloaded weights; default: the Hugging Face cache", free=True
    )
    trust_remote_code: bool = knob(False, "run Python code that a model's repository brings")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """precision"""

    mixed_precision: Literal["bf16", "fp8", "fp32"] = knob("bf16", "compute precision")
    fp8_scenario: Literal[("default", *TE_RECIPES, *TORCHAO_RECIPES)] = knob(
        "default",
        "scaling recipe under --mixed_precision fp8; with --use_te delayed (its default) to nvfp4, without "
        "it torchao's tensorwise (its default) to rowwise_with_gw_hp",
    )
    bf16_first_layers: int = knob(0, "keep this many decoder layers at the start in BF16", least=0)
    bf16_last_layers: int = knob(0, "keep this many decoder layers at the end in BF16", least=0)
    precision_map: str | None = knob(
        None,
        "precision by module, PATTERN=RECIPE,...: part of a name in the coverage table, with "
        "* for any part, and a recipe or bf16 (layers.*.self_attention=bf16,layers.*.layernorm_mlp=current)",
    )
    fp8_fallback: Literal["warn", "error"] = knob(
        "warn", "when this GPU or TE cannot run mxfp8 or nvfp4: use the default recipe and warn, or stop"
    )
    fp8_format: Literal["hybrid", "e4m3"] = knob(
        "hybrid", "hybrid: E4M3 forward, E5M2 backward; e4m3: both E4M3"
    )
    fp8_margin: int = knob(0, "delayed scaling: keep this many powers of two of head room", least=0)
    fp8_amax_history_len: int = knob(1024, "delayed scaling: micro-batches of amax history", least=1)
    fp8_amax_compute_algo: Literal["max", "most_recent"] = knob(
        "max", "delayed scaling: amax taken from the history"
    )
    fp8_fast_accumulation: bool = knob(
        False,
        "backward's FP8 GEMMs add up with fewer bits, as forward's always do: faster on Hopper (delayed and "
        "current scaling)",
    )
    fp8_fp32_scales: bool = knob(
        False, "block and rowwise scaling: any FP32 number is a scale, not powers of two alone (Hopper)"
    )
    fp8_lm_head: bool = knob(
        False, "the LM head's GEMMs in FP8 too, under any FP8 recipe of the layers (docs/precision.md)"
    )
    fp8_attention: bool = knob(False, "attention in FP8 too (TE fp8_dpa; delayed and current scaling)")
    master_weights: Literal["fp32", "none"] = knob(
        "fp32", "FP32 master weights; none keeps BF16 alone and loses small updates (docs/precision.md)"
    )
    moment_dtype: Literal["fp32", "bf16"] = knob(
        "fp32", "dtype of Adam's two moments; bf16 saves 4 bytes a parameter"
    )
    fp8_weight_cache: bool = knob(
        True,
        "cast TE's weights once a step, not once a micro-batch (one GPU, ddp, fsdp_grad; no recomputation)",
        free=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_attention and self.fp8_scenario not in ("default", "delayed", "current"):
            raise ValueError(
                f"--fp8_attention: TE's FP8 attention runs under delayed and current scaling, not "
                f"--fp8_scenario {self.fp8_scenario}; drop one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """data"""

    dataset_name: str = knob(
        "demo",
        "hub id, local folder, data file (.jsonl .json .parquet .csv .tsv .txt), or `demo`; of a hub id "
        "or folder with several configurations `NAME:CONFIGURATION`",
    )
    split_name: str = knob("train_1M", "split to train on")
    eval_split: str | None = knob(None, "split to evaluate on; default: a held-out part of --split_name")
    eval_samples: int = knob(
        1000,
        "evaluation samples at most; a held-out part (but of a stream) never exceeds 10 % of the data",
        least=0,
    )
    num_of_samples: int | None = knob(None, "use only this many training rows; default: all", least=1)
    dataset_messages_field: str | None = knob(None, "column of whole chats; default: found by name")
    dataset_text_field: str | None = knob(
        None, "column of plain text to continue; default: chat or prompt columns, found by name"
    )
    dataset_prompt_field: str | None = knob(None, "column of the prompt; default: found by name")
    dataset_completion_field: str | None = knob(None, "column of the answer; default: found by name")
    system_prompt: str = knob(
        SYSTEM_PROMPT,
        "system message; the default begins prompts of a column `problem` alone, another all prompt/answer "
        "data and whole chats that have none, '' nothing",
    )
    train_on_prompt: bool = knob(False, "put loss on the prompt too, not on the answer alone")
    max_seq_length: int = knob(1024, "tokens per sequence at most", least=2)
    packing: bool = knob(True, "fill sequences with several samples that do not attend to each other")
    overlong: Literal["drop", "truncate"] = knob(
        "drop",
        "samples over --max_seq_length: leave out or cut, counted either way (plain text is split instead)",
    )
    streaming: bool = knob(
        False, "read the data set as a stream (needs --max_steps), for sets larger than the disk"
    )
    num_proc: int | None = knob(
        None, "processes for tokenisation; default: one per core, at most 16", free=True, least=1
    )
    num_workers: int = knob(2, "loader worker processes; 0 loads in the training process", free=True, least=0)
    data_cache_dir: str | None = knob(
        None,
        "folder for data as they were read and tokenised; default: the Hugging Face cache of data sets "
        "(what is downloaded is in HF_HUB_CACHE)",
        free=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset_prompt_field is None) != (self.dataset_completion_field is None):
            raise ValueError("--dataset_prompt_field and --dataset_completion_field go together; give both")
        given = [
            f"--{name}"
            for name in ("dataset_messages_field", "dataset_text_field", "dataset_prompt_field")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one")

    def check_length(self, positions: int | None) -> None:
        """ValueError if a sequence may be longer than a model has positions (None: it has no limit)."""
        if positions is not None and self.max_seq_length > positions:
            raise ValueError(
                f"--max_seq_length {self.max_seq_length}: --model_name has {positions} positions; lower it"
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """optimizer and schedule"""

    batch_size: int = knob(8, "sequences per micro-batch and device", least=1)
    eval_batch_size: int | None = knob(
        None, "sequences per evaluation batch and device; default: --batch_size", free=True, least=1
    )
    gradient_accumulation_steps: int = knob(1, "micro-batches per optimizer step", least=1)
    num_epochs: int = knob(1, "passes over the training data", free=True, least=1)
    max_steps: int | None = knob(
        None,
        "stop after this many optimizer steps, over all starts; 0 only evaluates; default: --num_epochs",
        free=True,
        least=0,
    )
    learning_rate: float = knob(1e-5, "peak learning rate")
    lr_scheduler: Literal["cosine", "linear", "constant"] = knob("cosine", "shape after warm-up")
    min_lr_ratio: float = knob(0.0, "final learning rate as a share of the peak")
    num_warmup_steps: int | None = knob(None, "warm-up steps; default: --warmup_ratio of all steps", least=0)
    warmup_ratio: float = knob(0.03, "share of all steps that warm up")
    weight_decay: float = knob(0.01, "AdamW weight decay, on all weights but norms and biases", least=0)
    adam_beta1: float = knob(0.9, "AdamW beta1")
    adam_beta2: float = knob(0.95, "AdamW beta2")
    adam_epsilon: float = knob(1e-8, "AdamW epsilon")
    max_grad_norm: float = knob(
        1.0, "clip the global gradient norm to this; 0 measures it without clipping", least=0
    )
    max_skipped_steps: int = knob(
        5, "stop after this many steps in a row with a non-finite loss or gradient", free=True, least=1
    )
    seed: int = knob(42, "seed of weights, shuffling and held-out part")
    deterministic: bool = knob(
        False,
        "bitwise repeatable kernels, where they exist; slow for packed attention in TE (docs/precision.md)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be between 0 and 2**32 - 1")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "must be positive")
        for name in ("min_lr_ratio", "warmup_ratio"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be between 0 and 1")
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "must be at least 0 and below 1")
        require(self.adam_epsilon > 0, "adam_epsilon", self.adam_epsilon, "must be positive")


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Section):
    """many GPUs (train_multi_gpu.py)"""

    sharding_mode: Literal[
        "auto",
        "ddp",
        "fsdp_full",
        "fsdp_grad",
        "fsdp_offload",
        "hsdp",
        "deepspeed",
        "ds_zero1",
        "ds_zero2",
        "ds_zero3",
        "ds_zero3_offload",
    ] = knob(
        "auto",
        "ddp: a whole model on every GPU; fsdp_full: weights sharded, gathered layer by layer (ZeRO-3); "
        "fsdp_grad: gathered once a batch (ZeRO-2); fsdp_offload: sharded, kept on the CPU; hsdp: sharded "
        "within --hsdp_shard_size ranks, replicated across; deepspeed: as --deepspeed_config says, ds_*: "
        "short names for ds_configs/*.json; auto: by memory, and says why",
        free=True,
    )
    deepspeed_config: str | None = knob(
        None, "DeepSpeed JSON of --sharding_mode deepspeed, with sharding settings only", free=True
    )
    cpu_offload: bool = knob(False, "keep weights and optimizer on the CPU: fsdp_offload", free=True)
    hsdp_shard_size: int | None = knob(
        None, "hsdp: ranks that share one copy of the model; default: the ranks of a node", free=True, least=1
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = knob(
        "fp32",
        "dtype in which gradients are summed over ranks, and over micro-batches (but in ddp: bf16, and "
        "DeepSpeed: fp32)",
    )
    fp8_all_gather: bool = knob(
        False, "gather GEMM weights in FP8 (FSDP modes; --fp8_scenario current, without --use_te tensorwise)"
    )
    empty_cache_freq: int = knob(
        0,
        "steps between calls of torch.cuda.empty_cache, against fragmentation; 0 for none",
        free=True,
        least=0,
    )
    timeout_minutes: float = knob(
        30.0, "end the job when a rank makes no progress for this long, and name it", free=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size, minutes = self.hsdp_shard_size, self.timeout_minutes
        require(0 < minutes <= 10_080, "timeout_minutes", minutes, "must be above 0, at most a week (10080)")
        if size is not None and self.sharding_mode != "hsdp":
            raise ValueError(
                f"--hsdp_shard_size {size} --sharding_mode {self.sharding_mode}: it is for hsdp alone"
            )
        if (self.sharding_mode == "deepspeed") != (self.deepspeed_config is not None):
            raise ValueError(
                f"--sharding_mode {self.sharding_mode} --deepspeed_config {self.deepspeed_config}: "
                "--sharding_mode deepspeed and a --deepspeed_config go together (ds_configs/zero2.json, say)"
            )
        if self.cpu_offload and self.sharding_mode not in ("auto", "fsdp_full", "fsdp_offload"):
            raise ValueError(
                f"--cpu_offload --sharding_mode {self.sharding_mode}: offload is fsdp_offload; leave out "
                "--sharding_mode, or use --sharding_mode ds_zero3_offload"
            )

    @property
    def mode(self) -> str:
        return "fsdp_offload" if self.cpu_offload else self.sharding_mode


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """run folder and checkpoints"""

    output_dir: str | None = knob(
        None, "run folder; a run's own goes on with it; default: runs/<model>-<precision>-<time>", free=True
    )
    save_checkpoints: bool = knob(
        True, "write checkpoints at all; without them a stopped run is lost (for benchmarks)", free=True
    )
    save_interval: int = knob(
        500, "steps between checkpoints; 0 saves at the end and on a signal only", free=True, least=0
    )
    keep_last: int = knob(5, "checkpoints kept, beside the best by evaluation loss", free=True, least=1)
    resume: str = knob(
        "auto",
        "auto: continue from --output_dir's latest checkpoint if any; a run's folder or a checkpoint's, to "
        "start from once: given again, with the same --output_dir, it goes on from what came of it; or none, "
        "for a new --output_dir",
        free=True,
    )
    export: bool = knob(True, "write a Hugging Face model (BF16 safetensors) at the end", free=True)
    generate_samples: int = knob(
        0, "at the end, answer this many evaluation prompts with the exported model", free=True, least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generate_samples and not self.export:
            raise ValueError("--generate_samples reads the exported model; drop --no_export")


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """evaluation and logging"""

    eval_interval: int = knob(
        500, "steps between evaluations; 0 evaluates at the end only", free=True, least=0
    )
    eval_at_start: bool = knob(False, "evaluate before the first step too", free=True)
    log_interval: int = knob(10, "steps between log lines", free=True, least=1)
    fp8_stats_interval: int = knob(
        0,
        "steps between FP8 tensor statistics (underflow, overflow, scale, amax); 0 for none",
        free=True,
        least=0,
    )
    profile_steps: int = knob(
        0,
        "profile this many steps from the ninth on: GPU time by kind of kernel (profile.json, and a trace)",
        free=True,
        least=0,
    )
    log_dir: str | None = knob(None, "write TensorBoard logs to this folder", free=True)
    use_wandb: bool = knob(False, "log to Weights & Biases", free=True)
    wandb_project: str = knob("llm-fp8", "W&B project", free=True)
    wandb_run_name: str | None = knob(None, "W&B run name; default: the run folder's name", free=True)
    wandb_mode: Literal["online", "offline", "disabled"] | None = knob(
        None, "W&B mode; default: WANDB_MODE, else online", free=True
    )
    wandb_tags: str | None = knob(None, "W&B tags, separated by commas", free=True)
    wandb_group: str | None = knob(None, "W&B group of runs to be compared", free=True)

    def unread(self) -> str | None:
        """W&B's settings that were asked for in a run that does not log there."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("wandb_")}
        asked = [f"--{name} {value}" for name, value in given.items() if value != getattr(LogConfig, name)]
        if self.use_wandb or not asked:
            return None
        return f"{', '.join(asked)}: not read without --use_wandb"


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "sharding": ShardingConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The resolved settings of one run, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.data.streaming and self.optim.max_steps is None:
            raise ValueError(
                "--streaming: the length of a stream is unknown, so the schedule needs --max_steps"
            )
        if self.data.eval_samples == 0 and self.needs_evaluation:
            raise ValueError(
                "--eval_samples 0: --generate_samples and --max_steps 0 need evaluation samples; give some"
            )
        if self.optim.max_steps == 0 and self.checkpoint.generate_samples:
            raise ValueError("--max_steps 0 --generate_samples: nothing is exported to answer with; drop one")
        if self.precision.mixed_precision == "fp32" and self.model.use_te:
            raise ValueError(
                "--mixed_precision fp32 with --use_te: TE layers run in bf16 or fp8; drop one of the two"
            )
        if self.sharding.fp8_all_gather:
            mode, one_scale = self.sharding.mode, "current" if self.model.use_te else "tensorwise"
            if mode not in ("fsdp_full", "fsdp_grad", "hsdp"):
                raise ValueError(
                    f"--fp8_all_gather --sharding_mode {mode}: it is for fsdp_full, fsdp_grad and hsdp"
                )
            if self.precision.mixed_precision != "fp8" or self.recipe != one_scale:
                raise ValueError(
                    "--fp8_all_gather: weights are scaled by their own largest value, one for all shards, so "
                    "it needs --mixed_precision fp8 and --fp8_scenario current with --use_te, tensorwise "
                    f"without it (here {self.precision.mixed_precision}, {self.precision.fp8_scenario})"
                )
            if self.precision.master_weights != "fp32":
                raise ValueError("--fp8_all_gather --master_weights none: FP8 weights need FP32 masters")
        self._check_backend()

    @property
    def needs_evaluation(self) -> bool:
        """Whether the settings ask for what only evaluation samples can give."""
        return bool(self.checkpoint.generate_samples) or self.optim.max_steps == 0

    @property
    def recipe(self) -> str:
        """The FP8 recipe that --fp8_scenario asks for; `default` goes by whose layers they are."""
        scenario, own = self.precision.fp8_scenario, TE_RECIPES if self.model.use_te else TORCHAO_RECIPES
        return own[0] if scenario == "default" else scenario

    def _check_backend(self) -> None:
        """What --use_te decides: recipes, compilation."""
        if self.model.use_te and self.model.compile:
            raise ValueError(
                "--compile with --use_te: TE layers are fused kernels that torch.compile breaks up "
                "(and delayed scaling refuses it); drop one of the two"
            )
        if self.model.te_backend != "auto" and not self.model.use_te:
            raise ValueError(f"--te_backend {self.model.te_backend}: it is for --use_te; add that or drop it")
        scenario, use_te = self.precision.fp8_scenario, self.model.use_te
        own = TE_RECIPES if use_te else TORCHAO_RECIPES
        if self.precision.mixed_precision == "fp8" and scenario not in ("default", *own):
            how, instead = ("with", "drop") if use_te else ("without", "add")
            raise ValueError(
                f"--fp8_scenario {scenario} {how} --use_te: the recipes {how} it are {', '.join(own)}; "
                f"choose one of them, or {instead} --use_te"
            )

    def to_dict(self) -> dict[str, Any]:
        """All settings, flat, by flag name; `config_from_dict` is the inverse."""
        return {f.name: getattr(getattr(self, s), f.name) for s, cls in SECTIONS.items() for f in fields(cls)}


def knobs() -> dict[str, tuple[str, dataclasses.Field, Any]]:
    """Flag name -> (section, field, resolved type), over all sections."""
    found: dict[str, tuple[str, dataclasses.Field, Any]] = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        for f in fields(cls):
            assert f.name not in found, f"{f.name} stands in two sections"
            found[f.name] = (section, f, hints[f.name])
    return found


def config_from_dict(values: dict[str, Any]) -> Config:
    """Build a Config from flat {flag: value}; values may be strings. ValueError names the flag."""
    table = knobs()
    sections: dict[str, dict[str, Any]] = {s: {} for s in SECTIONS}
    for name, value in values.items():
        if name not in table:
            raise ValueError(f"unknown setting {name!r}{nearest(name, table)}")
        section, _, hint = table[name]
        sections[section][name] = convert(name, value, hint)
    return Config(**{s: SECTIONS[s](**v) for s, v in sections.items()})


def changed_settings(
    old: dict[str, Any], new: Config, *, but: Container[str] | None = None
) -> dict[str, tuple[Any, Any]]:
    """{flag: (old, new)} of the settings that differ, `but` some: by default those marked free.

    A run recorded before there was a setting had its default.
    """
    if but is None:
        but = [name for name, (_, f, _) in knobs().items() if f.metadata["free"]]
    old, current = Config().to_dict() | old, new.to_dict()
    return {
        name: (old[name], current[name]) for name in knobs() if name not in but and old[name] != current[name]
    }


def nearest(name: Any, candidates: Any) -> str:
    """A question for an error's end: the candidate with these initials (lr), or the one most alike."""
    name = str(name)
    words = {c: c.lstrip("-").split("_") for c in candidates}
    close = [c for c, found in words.items() if "".join(w[:1] for w in found) == name.lstrip("-") != ""]
    close += difflib.get_close_matches(name, list(words), n=1, cutoff=0.7)  # --model is that near
    return f"; did you mean {close[0]!r}?" if close else ""


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (types.UnionType, typing.Union):
        inner = [a for a in get_args(hint) if a is not type(None)]
        return inner[0], True
    return hint, False


def convert(name: str, value: Any, hint: Any) -> Any:
    """Give a flag's or YAML key's value its field's type (YAML reads 1e-5 as a string)."""
    hint, optional = _strip_optional(hint)
    if name in PATHS and isinstance(value, str):
        value = os.path.expanduser(value)  # which shells do not do after `=`
    if value is None or (optional and isinstance(value, str) and value.lower() in ("none", "null")):
        if optional:
            return None
        raise ValueError(f"--{name} needs a value")
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            raise ValueError(
                f"--{name} {value}: not one of {', '.join(choices)}{nearest(str(value), choices)}"
            )
        return value
    if hint is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise ValueError(f"--{name} {value}: must be true or false")
    if isinstance(value, bool | list | dict):
        raise ValueError(f"--{name} {value}: must be {_kind(hint)}")
    if hint is int and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE]\+?\d+", value):
        value = float(value)  # 1e6 steps
    if hint is int and isinstance(value, float) and not value.is_integer():  # NaN and infinity are not, too
        raise ValueError(f"--{name} {value}: must be a whole number")
    try:
        converted = hint(value)
    except (ValueError, OverflowError):
        raise ValueError(f"--{name} {value}: must be {_kind(hint)}") from None
    if hint is float and not math.isfinite(converted):
        raise ValueError(f"--{name} {value}: must be a finite number")
    return converted


def _kind(hint: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text"}[hint]


SWITCHED = ("true", "false", "yes", "no", "on", "off", "1", "0")  # what people write after a switch


def _no_value(flag: str, off: str, value: str) -> str:
    return f"{flag} {value}: takes no value; {flag} turns it on, {off} off"


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors, for one line without the usage."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+|\d*\.\d+)([eE][-+]?\d+)?$")  # -1e-5, too

    def error(self, message: str) -> typing.NoReturn:
        message = message.removeprefix("argument ")
        if found := re.match(r"(--\S+)/(--no_\S+): ignored explicit argument '(.*)'", message):
            message = _no_value(*found.groups())
        if found := re.fullmatch(r"(--\S+): invalid (int|float) value: '(.*)'", message):
            flag, kind, value = found.groups()
            message = f"{flag} {value}: must be {_kind({'int': int, 'float': float}[kind])}"
        raise ValueError(message)


class _Switch(argparse.Action):
    """--name turns a setting on, --no_name off, so that flags can win over a YAML file either way."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no_"))


ALSO_CALLED = {"compile": "compile_model"}  # setting -> another name of its flag


def build_parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file with any of these settings; flags win"
    )
    groups = {s: parser.add_argument_group(cls.__doc__) for s, cls in SECTIONS.items()}
    for name, (section, f, hint) in knobs().items():
        inner, _ = _strip_optional(hint)
        text = f.metadata["help"].replace("%", "%%")
        if f.default is not None and inner is not bool:
            text += f" (default: {str(f.default)!r})" if " " in str(f.default) else f" (default: {f.default})"
        if inner is bool:
            text += "" if f.default is None else f" (default: {'on' if f.default else 'off'})"
            names = [n for n in (name, ALSO_CALLED.get(name)) if n]
            options = [f"--{no}{n}" for n in names for no in ("", "no_")]
            groups[section].add_argument(
                *options, dest=name, action=_Switch, default=argparse.SUPPRESS, help=text
            )
        else:
            choices = get_args(inner) if get_origin(inner) is Literal else None
            metavar = "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X"}.get(inner, "TEXT")
            groups[section].add_argument(f"--{name}", metavar=metavar, default=argparse.SUPPRESS, help=text)
    return parser


def parse_config(argv: list[str], *, prog: str, description: str) -> Config:
    """Command line -> Config. ValueError for anything a user got wrong; SystemExit(0) after --help."""
    parser = build_parser(prog, description)
    flags = [option for action in parser._actions for option in action.option_strings]
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        before = argv[argv.index(unknown[0]) - 1].removeprefix("--no_").removeprefix("--")
        if flag.lower() in SWITCHED and f"--no_{before}" in flags:
            raise ValueError(_no_value(f"--{before}", f"--no_{before}", flag))
        what = "unknown flag" if flag.startswith("-") else "unexpected argument"
        raise ValueError(f"{what} {flag}{nearest(flag, flags)}")
    values = vars(given)
    path = values.pop("config")
    in_file = load_config_file(path) if path else {}
    try:
        cfg = config_from_dict({**in_file, **values})
        if cfg.sharding.deepspeed_config:  # on one device, too, where nothing else reads it
            read_deepspeed_config(cfg.sharding.deepspeed_config)
        return cfg
    except ValueError as error:
        if refused_by(error) & in_file.keys() - values.keys():
            raise ValueError(f"--config {path}: {error}") from None
        raise


def refused_by(error: ValueError) -> set[str]:
    """The settings that an error is about; what comes after its colon may name others as a way out."""
    return set(re.findall(r"--(?:no_)?(\w+)", str(error).partition(": ")[0]))


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """A JSON file, relative to the working directory or to this repository. ValueError if it is none."""
    where = f"--deepspeed_config {path}"
    candidates = [Path(path).expanduser(), ROOT / path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        ours = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("ds_configs/*.json"))
        raise ValueError(f"{where}: no such file; ds_configs/ has {', '.join(ours)}")
    try:
        loaded = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: cannot be read as JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{where}: must hold one JSON object, holds {type(loaded).__name__}")
    return loaded


class YamlLoader(yaml.SafeLoader):
    """YAML whose mappings name each key once: the last of two would win, unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        merge = "tag:yaml.org,2002:merge"  # of another mapping, whose keys may be here too
        names = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"{twice!r} stands twice, line {node.start_mark.line + 1} and on")
        return super().construct_mapping(node, deep)

    # Of YAML 1.1's numbers and dates decimal numbers alone: 010 would be 8, 12:30:00 be 45000. 1e-5 is text
    # there, as on a command line: folders of sweeps are named by what is written.
    yaml_implicit_resolvers: typing.ClassVar = {
        first: [
            (tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float", ":timestamp"))
        ]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


WHOLE = r"[-+]?(0|[1-9]\d*)$"
DECIMAL = r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]\d+)?|\.inf)$|\.nan$"
for kind, pattern in (("int", WHOLE), ("float", DECIMAL)):
    YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list("-+.0123456789"))


def yaml_fault(error: Exception) -> str:
    """What is wrong in a YAML file, and in which line."""
    mark = getattr(error, "problem_mark", None)
    return f"{error.problem} (line {mark.line + 1})" if mark else first_line(error)


def load_config_file(path: str) -> dict[str, Any]:
    """Read flat settings from a YAML file or a run's config.json."""
    try:
        loaded = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), YamlLoader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not valid YAML: {yaml_fault(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ValueError(f"--config {path}: must hold `setting: value` lines")
    table = knobs()
    for name, value in loaded.items():
        if name not in table:
            raise ValueError(f"--config {path}: unknown setting {name!r}{nearest(name, table)}")
        try:
            convert(name, value, table[name][2])
        except ValueError as error:
            raise ValueError(f"--config {path}: {error}") from None
    return loaded
