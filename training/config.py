"""All settings of a run: the sections of every package, the rules across them, and their parser."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from fp8_suite.core.cli import OneLineParser, add_setting
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.readers import UnreadableFile, read_record, read_yaml
from fp8_suite.core.recipes import RECIPES, TE_RECIPES, TORCHAO_RECIPES
from fp8_suite.core.settings import AUTO, Setting, convert, lookup
from fp8_suite.data.settings import DataConfig
from fp8_suite.te_models.lora.settings import LoraConfig
from fp8_suite.te_models.settings import ModelConfig, named_levels
from fp8_suite.training.checkpoint.settings import EXPORT_FOLDERS, CheckpointConfig, parse_save_interval
from fp8_suite.training.optim.settings import DECAY_RATIO, OptimConfig, parse_batch_ramp
from fp8_suite.training.parallel.settings import (
    DEEPSPEED_MODES,
    FSDP_MODES,
    ZERO_3_MODES,
    ShardingConfig,
    axis_rules,
)
from fp8_suite.training.precision.settings import (
    MAP_SETTINGS,
    PrecisionConfig,
    parse_moment_dtype,
    parse_precision_map,
    unread_settings,
)
from fp8_suite.training.tracking.settings import LogConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Resolved settings of one run, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        values = self.to_dict()
        settings = SimpleNamespace(**values, requested_recipe=self.requested_recipe)
        for rule in RULES:
            for names, reason in rule(settings):  # the first conflict
                conflicting = {name: values[name] for name in names.split() if values[name] is not None}
                raise bad_setting(reason, **conflicting)

    @property
    def exports(self) -> bool:
        """True if the run ends with an export. Evaluation only (--max_steps 0) does not."""
        return self.checkpoint.export and self.optim.max_steps != 0

    @property
    def export_folders(self) -> dict[str, str]:
        """Folders of the exports in the run folder, by dtype."""
        dtype = self.checkpoint.export_dtype
        return {k: v for k, v in EXPORT_FOLDERS.items() if self.exports and dtype in (k, "both")}

    @property
    def requested_recipe(self) -> str:
        """FP8 recipe of --fp8_scenario; `default` depends on --use_te."""
        scenario, recipes = self.precision.fp8_scenario, TE_RECIPES if self.model.use_te else TORCHAO_RECIPES
        return recipes[0] if scenario == "default" else scenario

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as a flat {flag: value}; the inverse of `config_from_dict`."""
        return {f.name: getattr(getattr(self, s), f.name) for s, cls in SECTIONS.items() for f in fields(cls)}


SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Config)}


# Rules across sections. Each yields (names of conflicting settings, reason).


def data_rules(s: Any) -> Iterator[tuple[str, str]]:
    parse_save_interval(s.save_interval)  # UserError for one that it cannot parse
    if s.streaming and s.max_steps is None:
        yield "streaming", "a stream's length is unknown; give --max_steps"
    if s.eval_samples == 0 and s.max_steps == 0:
        yield "eval_samples max_steps", "the run would do nothing; give some samples, or steps"
    if s.generate_samples and (s.eval_samples == 0 or s.max_steps == 0 or not s.export):
        reason = "an exported model answers evaluation samples; drop it, or what excludes them"
        yield "generate_samples eval_samples max_steps export", reason
    if s.export_dtype != "bf16" and s.max_steps == 0:
        way_out = "drop the former, or run `python -m training.export.quantize MODEL OUT`"
        yield "export_dtype max_steps", f"a run of 0 steps exports nothing; {way_out}"


def optim_rules(s: Any) -> Iterator[tuple[str, str]]:
    if s.batch_ramp is not None:
        parse_batch_ramp(s.batch_ramp)  # UserError for one that it cannot parse
        if s.global_batch_size is not None:
            yield "batch_ramp global_batch_size", "both set the batch of a step; drop one of the two"
    if s.lr_scheduler != "wsd" and s.decay_ratio != DECAY_RATIO:
        yield "decay_ratio lr_scheduler", "only valid with --lr_scheduler wsd; add that, or drop this"
    if s.lr_scheduler == "wsd" and s.num_warmup_steps is None and s.warmup_ratio + s.decay_ratio > 1:
        yield "warmup_ratio decay_ratio", "are more than the whole run; lower one of the two"


def precision_rules(s: Any) -> Iterator[tuple[str, str]]:
    if s.use_te and s.compile:
        yield "compile use_te", "torch.compile breaks up TE's fused kernels; drop one of the two"
    if s.use_te and s.mixed_precision == "fp32":
        yield "mixed_precision use_te", "TE layers run in bf16, fp8 or fp16; drop one of the two"
    if s.mixed_precision == "fp16":
        yield from _refused_fp16(s)
    if s.te_backend != "auto" and not s.use_te:
        yield "te_backend", "only valid with --use_te; add that or drop this"
    recipes, layers = (TE_RECIPES, "with") if s.use_te else (TORCHAO_RECIPES, "without")
    if s.mixed_precision == "fp8" and s.fp8_scenario not in ("default", *recipes):
        reason = f"the recipes {layers} --use_te are {', '.join(recipes)}; pick one, or add/drop --use_te"
        yield "fp8_scenario", reason
    if s.fp8_lm_head and s.mixed_precision != "fp8":
        yield "fp8_lm_head", f"this run is in {s.mixed_precision}; drop it, or add --mixed_precision fp8"
    by_module = [name for name in MAP_SETTINGS if getattr(s, name)]
    if s.mixed_precision != "fp8" and by_module:
        reason = f"needs --mixed_precision fp8 (here {s.mixed_precision}); choose fp8, or drop it"
        yield " ".join(by_module), reason
    if s.fp8_weights:
        yield from _refused_fp8_weights(s)
    # Both raise UserError for values that they cannot parse.
    parse_precision_map(s.precision_map, use_te=s.use_te)
    parse_moment_dtype(s.moment_dtype)
    # A precision map or a fallback may bring another recipe, which reads the setting.
    if s.mixed_precision == "fp8" and not s.precision_map and not RECIPES[s.requested_recipe].may_fall_back:
        yield from unread_settings(s, {s.requested_recipe})


def _refused_fp16(s: Any) -> Iterator[tuple[str, str]]:
    if s.master_weights != "fp32":
        yield "mixed_precision master_weights", "FP16 needs FP32 master weights; drop one of the two"
    if s.grad_reduce_dtype != "fp32":
        reason = "gradients of FP16 are summed in FP32 only; drop one of the two"
        yield "mixed_precision grad_reduce_dtype", reason
    if s.sharding_mode in DEEPSPEED_MODES:
        reason = "DeepSpeed has a loss scale of its own; choose ddp, fsdp_full, fsdp_grad or hsdp, or bf16"
        yield "mixed_precision sharding_mode", reason


def model_rules(s: Any) -> Iterator[tuple[str, str]]:
    if "cheap" in named_levels(s.recompute) and not s.use_te:
        reason = "without --use_te, torch.compile decides which elementwise operations to recompute"
        yield "recompute", f"{reason}; add --use_te, or choose mlp"
    recomputes = s.gradient_checkpointing or s.recompute != "none"
    if s.offload_activations and s.recompute == AUTO:
        reason = "auto cannot plan offloaded activations; give a level, or drop it"
        yield "recompute offload_activations", reason
    if s.offload_activations and not (s.use_te and recomputes):
        yield "offload_activations", "needs --use_te and recomputed layers, such as --recompute layer"


def lora_rules(s: Any) -> Iterator[tuple[str, str]]:
    if not s.lora_rank:
        for name, default in vars(LoraConfig()).items():
            if getattr(s, name) != default:
                yield name, "there are no adapters without --lora_rank; add that, or drop this"
        return
    if s.sharding_mode in DEEPSPEED_MODES:
        yield "lora_rank sharding_mode", "adapters train under ddp and the fsdp modes; choose one"
    if s.offload_optimizer:
        yield "lora_rank offload_optimizer", "adapters have little optimizer state; drop --offload_optimizer"
    if s.fp8_all_gather:
        yield "lora_rank fp8_all_gather", "frozen weights are gathered in BF16; drop --fp8_all_gather"


def _refused_fp8_weights(s: Any) -> Iterator[tuple[str, str]]:
    kind = "frozen_fp8_weights" if s.lora_rank else "fp8_weights"
    if not (s.use_te and s.mixed_precision == "fp8" and getattr(RECIPES[s.requested_recipe], kind)):
        recipes = " or ".join(name for name, spec in RECIPES.items() if getattr(spec, kind))
        reason = f"needs TE layers in FP8: --use_te --mixed_precision fp8 --fp8_scenario {recipes}"
        yield "fp8_weights use_te mixed_precision fp8_scenario", reason
    if s.sharding_mode not in ("auto", *["ddp"] * bool(s.lora_rank)):
        yield "fp8_weights sharding_mode", "FP8 weights are not sharded; drop one of the two"
    if not (s.offload_optimizer or s.lora_rank):
        yield "fp8_weights", "requires --offload_optimizer; add that, or drop this"
    if s.master_weights != "fp32" and not s.lora_rank:
        yield "fp8_weights master_weights", "FP8 weights need FP32 master weights; drop one of the two"
    if by_module := [name for name in MAP_SETTINGS if getattr(s, name)]:
        yield f"fp8_weights {by_module[0]}", "all linear weights are in FP8; drop one of the two"


def sharding_rules(s: Any) -> Iterator[tuple[str, str]]:
    if s.hsdp_shard_size is not None and s.sharding_mode != "hsdp":
        yield "hsdp_shard_size sharding_mode", "only valid with --sharding_mode hsdp"
    if s.sharding_mode == "deepspeed" and s.deepspeed_config is None:
        yield "sharding_mode", "needs a --deepspeed_config, such as ds_configs/zero2.json"
    if s.sharding_mode != "deepspeed" and s.deepspeed_config is not None:
        yield "deepspeed_config sharding_mode", "only valid with --sharding_mode deepspeed"
    if s.offload_optimizer and s.sharding_mode in DEEPSPEED_MODES:
        reason = "DeepSpeed has its own offload; drop it and use ds_zero3_offload, or use another mode"
        yield "offload_optimizer sharding_mode", reason
    yield from axis_rules(s)
    if s.sharding_mode in ZERO_3_MODES:
        yield from refused_by_zero_3(s)
    if s.grad_reduce_dtype == "fp8" and s.sharding_mode in DEEPSPEED_MODES:
        reason = "DeepSpeed exchanges fp32 or bf16; choose one, or another mode"
        yield "grad_reduce_dtype sharding_mode", reason
    if not s.fp8_all_gather:
        return
    if s.sharding_mode not in FSDP_MODES:
        yield "fp8_all_gather sharding_mode", f"only valid with {', '.join(FSDP_MODES)}; choose one"
    if s.mixed_precision != "fp8" or not RECIPES[s.requested_recipe].fp8_all_gather:
        reason = "needs one scale per weight: --mixed_precision fp8 and --fp8_scenario current (--use_te) "
        reason += "or tensorwise (without)"
        yield "fp8_all_gather mixed_precision fp8_scenario", reason
    if s.master_weights != "fp32":
        yield "fp8_all_gather master_weights", "FP8 weights need FP32 master weights; drop one of the two"


def refused_by_zero_3(s: Any) -> Iterator[tuple[str, str]]:
    """Yield the rules of recomputation under DeepSpeed ZeRO-3, by a mode's name or a file."""
    if s.offload_activations:
        yield "offload_activations", "not possible under DeepSpeed ZeRO-3; drop it"
    if s.use_te and named_levels(s.recompute) & {"cheap", "mlp"}:
        yield "recompute", "DeepSpeed ZeRO-3 recomputes all of a layer; choose layer"


RULES = (model_rules, lora_rules, data_rules, optim_rules, precision_rules, sharding_rules)


def all_settings() -> dict[str, Setting]:
    """Return the settings of all sections by flag name."""
    table: dict[str, Setting] = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        for f in fields(cls):
            assert f.name not in table, f"{f.name} is in two sections"
            table[f.name] = Setting(section, f, hints[f.name])
    return table


def config_from_dict(values: dict[str, Any]) -> Config:
    """Build a Config from a flat {flag: value}; values may be strings. A UserError names the flag."""
    table = all_settings()
    sections: dict[str, dict[str, Any]] = {s: {} for s in SECTIONS}
    for name, value in values.items():
        setting = lookup(name, table)
        sections[setting.section][name] = convert(name, value, setting.type)
    return Config(**{s: SECTIONS[s](**SECTIONS[s].completed(v)) for s, v in sections.items()})


def changed_settings(
    old: dict[str, Any], new: Config, *, ignore: Container[str] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return {flag: (old, new)} of the settings that differ, except `ignore` (default: resumable settings).

    A setting missing from `old` counts as its default: the run predates the setting.
    """
    table = all_settings()
    if ignore is None:
        ignore = [name for name, setting in table.items() if setting.field.metadata["resumable"]]
    old, current = Config().to_dict() | old, new.to_dict()
    return {
        name: (old[name], current[name])
        for name in table
        if name not in ignore and old[name] != current[name]
    }


def build_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with --config and a flag per setting; flags not given are absent from the result."""
    parser = OneLineParser(
        prog=prog,
        description=description,
        usage="%(prog)s [--config FILE] [--FLAG VALUE ...]",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=140),
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file with any of these settings; flags win"
    )
    groups = {s: parser.add_argument_group(cls.__doc__) for s, cls in SECTIONS.items()}
    for name, setting in all_settings().items():
        add_setting(groups[setting.section], name, setting)
    return parser


def parse_config(argv: list[str], *, prog: str, description: str) -> Config:
    """Parse a command line. UserError for an invalid setting; SystemExit(0) after --help."""
    flags = vars(build_parser(prog, description).parse_args(argv))
    path = flags.pop("config")
    in_file = load_config_file(path) if path else {}
    if path and "output_dir" not in flags:
        _refuse_other_folder(Path(path), in_file.get("output_dir"))
    try:
        return config_from_dict(in_file | flags)
    except UserError as error:
        if error.flags & (in_file.keys() - flags.keys()):
            raise bad_setting(str(error), config=path) from None
        raise


def _refuse_other_folder(path: Path, output_dir: str | None) -> None:
    """Raise UserError for settings of a run that was moved: it would start anew in its old `output_dir`."""
    folder = path.expanduser().parent
    if path != settings_path(path.parent) or not output_dir or not (folder / "metrics.jsonl").exists():
        return
    if Path(output_dir).expanduser().resolve() != folder.resolve():
        way_out = f"add --output_dir {folder} to continue its run, or another folder for a new one"
        raise bad_setting(f"is for --output_dir {output_dir}, but lies in {folder}; {way_out}", config=path)


def settings_path(folder: Path) -> Path:
    """Return the file with a run's settings."""
    return folder / "settings.json"


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a run's settings; {} if the file is missing, damaged or not a run's."""
    settings = read_record(settings_path(folder))
    return settings if "gradient_accumulation_steps" in settings else {}


def load_config_file(path: str) -> dict[str, Any]:
    """Read flat settings from a YAML file or a run's settings.json. UserError names the file."""
    try:
        loaded = read_yaml(Path(path).expanduser()) or {}
    except UnreadableFile as error:
        raise bad_setting(error.reason, config=path) from None
    if not isinstance(loaded, dict):
        raise bad_setting("must hold `setting: value` lines", config=path)
    total = loaded.get("global_batch_size") or loaded.get("batch_ramp")
    # A recorded run keeps its global batch on other ranks, and accumulation follows.
    if total and Path(path).name == "settings.json":
        return loaded | {"gradient_accumulation_steps": None}
    return loaded
