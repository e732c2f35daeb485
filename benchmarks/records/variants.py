"""Variants: names such as `delayed` or `tensorwise+compile=false` that stand for training settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.runs import bad_input
from core.errors import bad_setting
from core.recipes import TE_RECIPES, TORCHAO_RECIPES
from core.settings import nearest
from training.config import Config, all_settings, build_parser, config_from_dict, load_config_file

# An unsupported recipe is an error: a fallback would be compared under the wrong name.
_TE = {"use_te": True, "fp8_fallback": "error"}
_HF = {"use_te": False, "te_backend": "auto", "fp8_fallback": "error"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": _TE | {"mixed_precision": "bf16", "fp8_scenario": "default"},
    "bf16_hf": _HF | {"mixed_precision": "bf16", "fp8_scenario": "default"},
    **{name: _TE | {"mixed_precision": "fp8", "fp8_scenario": name} for name in TE_RECIPES},
    **{name: _HF | {"mixed_precision": "fp8", "fp8_scenario": name} for name in TORCHAO_RECIPES},
}
DECIDED = ("use_te", "mixed_precision", "fp8_scenario", "fp8_fallback", "output_dir", "resume")
# Settings that a variant may change. All others are shared by the variants of an experiment.
OWN = ("te_backend", "gradient_checkpointing", "compile", "batch_size", "gradient_accumulation_steps")
OWN_SECTIONS = ("precision", "sharding")


@dataclass(frozen=True)
class Variant:
    """A recipe of `VARIANTS` with additional settings; `name` is the user's text."""

    name: str
    settings: dict[str, Any]

    @property
    def uses_te(self) -> bool:
        return self.settings["use_te"]

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.+=-]", "_", self.name)


def parse_variants(words: list[str], *, flag: str = "--variants") -> list[Variant]:
    """Parse `bf16,delayed,current+moment_dtype=bf16`; several words form one list.

    A comma separates only before a variant's name, because values may contain commas. `bf16` uses TE layers
    if the list has a TE recipe or bf16_hf, else Hugging Face layers. UserError for an unknown or duplicate
    variant, or a setting that variants must share.
    """
    separator = rf",(?=(?:{'|'.join(VARIANTS)})(?:[+,]|$))"
    names = [name for word in words for name in re.split(separator, word) if name]
    recipes = [name.split("+")[0] for name in names]
    te_layers = "bf16_hf" in recipes or any(recipe in TE_RECIPES for recipe in recipes)
    variants = [_parse(name, te_layers, flag) for name in names]
    if not variants:
        raise bad_input(f"{flag}: names no variant; choose from {', '.join(VARIANTS)}")
    if len({variant.folder_name for variant in variants}) < len(variants):
        raise bad_input(f"{flag} {','.join(names)}: names a variant twice, or two that share a run folder")
    return variants


def _parse(name: str, te_layers: bool, flag: str) -> Variant:
    recipe, *extras = re.split(r"\+(?=[a-z]\w*(?:=|\+|$))", name)
    if recipe not in VARIANTS:
        hint = nearest(recipe.rpartition(",")[2], VARIANTS)
        raise bad_input(f"{flag} {recipe}: unknown variant{hint}; choose from {', '.join(VARIANTS)}")
    table = all_settings()
    allowed = [n for n in table if n not in DECIDED and (table[n].section in OWN_SECTIONS or n in OWN)]
    own = {}
    for extra in extras:
        setting, _, value = extra.partition("=")
        if setting not in allowed:
            hint = nearest(setting, allowed) or f", only {', '.join(allowed)}"
            raise bad_input(f"{flag} {name}: a variant may not change {setting}{hint}")
        own[setting] = value or "true"
    layers = VARIANTS["bf16_hf"] if recipe == "bf16" and not te_layers else VARIANTS[recipe]
    return Variant(name, layers | own)


def given_settings(argv: list[str], prog: str, decided: Iterable[str] = DECIDED) -> dict[str, Any]:
    """Return the training settings on a command line and in its --config file, without defaults.

    UserError for an unknown flag, or a flag in `decided`, which the benchmark sets itself. Settings in
    `decided` are ignored in the file.
    """
    given = vars(build_parser(prog, "").parse_args(argv))
    path = given.pop("config")
    for name in decided:
        if name in given:
            raise bad_setting(f"{prog} decides it for each run; leave it out", **{name: given[name]})
    in_file = load_config_file(path) if path else {}
    return {k: v for k, v in in_file.items() if k not in decided} | given


def resolve(settings: dict[str, Any], folder: Path) -> Config:
    """Return the configuration of a run in `folder`, which is DIR/runs/NAME of a comparison or sweep.

    By default, its W&B run name is NAME and its group is the name of DIR.
    """
    names = {"wandb_group": folder.resolve().parents[1].name, "wandb_run_name": folder.name}
    tracking = names if settings.get("use_wandb") else {}
    return config_from_dict(tracking | settings | {"output_dir": str(folder)})
