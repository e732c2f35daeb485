"""All settings of a run: sections of every package, rules across them, and how they are read."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Container
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from core.cli import SWITCHED, OneLineParser, YamlLoader, _no_value, _Switch, yaml_fault
from core.recipes import RECIPES, TE_RECIPES, TORCHAO_RECIPES
from core.settings import _strip_optional, convert, nearest
from data.settings import DataConfig
from te_models.settings import ModelConfig
from training.checkpoint.settings import CheckpointConfig
from training.optim.settings import OptimConfig
from training.parallel.settings import FP8_GATHER_MODES, ShardingConfig, read_deepspeed_config
from training.precision.settings import PrecisionConfig
from training.tracking.settings import LogConfig

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
            mode = self.sharding.mode
            if mode not in FP8_GATHER_MODES:
                raise ValueError(
                    f"--fp8_all_gather --sharding_mode {mode}: use one of {', '.join(FP8_GATHER_MODES)}"
                )
            if self.precision.mixed_precision != "fp8" or not RECIPES[self.recipe].fp8_all_gather:
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


def all_settings() -> dict[str, tuple[str, dataclasses.Field, Any]]:
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
    table = all_settings()
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
        but = [name for name, (_, f, _) in all_settings().items() if f.metadata["resumable"]]
    old, current = Config().to_dict() | old, new.to_dict()
    return {
        name: (old[name], current[name])
        for name in all_settings()
        if name not in but and old[name] != current[name]
    }


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
    for name, (section, f, hint) in all_settings().items():
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
    table = all_settings()
    for name, value in loaded.items():
        if name not in table:
            raise ValueError(f"--config {path}: unknown setting {name!r}{nearest(name, table)}")
        try:
            convert(name, value, table[name][2])
        except ValueError as error:
            raise ValueError(f"--config {path}: {error}") from None
    return loaded
