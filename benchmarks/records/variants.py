"""What a name such as `delayed` or `tensorwise+compile=false` means in settings of a training run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.recipes import TE_RECIPES, TORCHAO_RECIPES
from core.settings import nearest
from training.config import Config, all_settings, build_parser, config_from_dict, load_config_file

# A variant says these itself: another recipe in a recipe's place would be compared under a wrong name.
_TE = {"use_te": True, "fp8_fallback": "error"}
_HF = {"use_te": False, "te_backend": "auto", "fp8_fallback": "error"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": _TE | {"mixed_precision": "bf16", "fp8_scenario": "default"},
    "bf16_hf": _HF | {"mixed_precision": "bf16", "fp8_scenario": "default"},
    **{name: _TE | {"mixed_precision": "fp8", "fp8_scenario": name} for name in TE_RECIPES},
    **{name: _HF | {"mixed_precision": "fp8", "fp8_scenario": name} for name in TORCHAO_RECIPES},
}
DECIDED = ("use_te", "mixed_precision", "fp8_scenario", "fp8_fallback", "output_dir", "resume")
# What a variant may change beside its recipe; the rest is the experiment that all variants share.
OWN = ("te_backend", "gradient_checkpointing", "compile", "batch_size", "gradient_accumulation_steps")
OWN_SECTIONS = ("precision", "sharding")


@dataclass(frozen=True)
class Variant:
    """A named way to train: a recipe of `VARIANTS` and further settings."""

    name: str  # as it was asked for
    settings: dict[str, Any]

    @property
    def uses_te(self) -> bool:
        return self.settings["use_te"]

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.+=-]", "_", self.name)


def parse_variants(words: list[str], *, flag: str = "--variants") -> list[Variant]:
    """Read `bf16,delayed,current+moment_dtype=bf16`; several words are one list.

    A comma before a variant's name separates, so that a setting's value may hold commas of its own. `bf16`
    has TE layers beside a TE recipe or bf16_hf, else Hugging Face layers.
    ValueError for an unknown name or setting, for a setting that all variants must share, for a repetition.
    """
    separator = rf",(?=(?:{'|'.join(VARIANTS)})(?:[+,]|$))"
    names = [name for word in words for name in re.split(separator, word) if name]
    recipes = [name.split("+")[0] for name in names]
    if not names:
        raise ValueError(f"{flag}: names no variant; there are {', '.join(VARIANTS)}")
    te_layers = "bf16_hf" in recipes or any(recipe in TE_RECIPES for recipe in recipes)
    variants = [_parse(name, te_layers, flag) for name in names]
    folders = [variant.folder_name for variant in variants]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise ValueError(f"{flag} {names[i]}: is named twice (or shares its run folder {folder})")
    return variants


def _parse(name: str, te_layers: bool, flag: str) -> Variant:
    recipe, *extras = re.split(r"\+(?=[a-z]\w*(?:=|\+|$))", name)
    if recipe not in VARIANTS:
        hint = nearest(recipe.rpartition(",")[2], VARIANTS)  # only a comma before a variant's name separates
        raise ValueError(f"{flag} {recipe}: unknown variant{hint}; there are {', '.join(VARIANTS)}")
    table = all_settings()
    own = {}
    for extra in extras:
        setting, _, value = extra.partition("=")
        if setting not in table:
            raise ValueError(f"{flag} {name}: unknown setting {setting!r}{nearest(setting, table)}")
        if not _is_own(setting, table):
            raise ValueError(
                f"{flag} {name}: a variant may not change {setting}; its own are "
                f"{', '.join(n for n in table if _is_own(n, table))}"
            )
        own[setting] = value or "true"
    layers = VARIANTS["bf16_hf"] if recipe == "bf16" and not te_layers else VARIANTS[recipe]
    return Variant(name, layers | own)


def _is_own(setting: str, table: dict[str, Any]) -> bool:
    return setting not in DECIDED and (table[setting][0] in OWN_SECTIONS or setting in OWN)


def given_settings(argv: list[str], prog: str) -> dict[str, Any]:
    """The training settings on a command line, those of its --config file included; defaults are left out.

    ValueError for an unknown flag and for one that the variants decide; such a setting in the file is
    overridden by each variant.
    """
    parser = build_parser(prog, "")
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        raise ValueError(f"unknown flag {unknown[0].split('=')[0]}{nearest(unknown[0], flags)}")
    given = vars(known)
    path = given.pop("config")
    for name in DECIDED:
        if name in given:
            raise ValueError(f"--{name} {given[name]}: {prog} decides it for each run; leave it out")
    in_file = load_config_file(path) if path else {}
    return {k: v for k, v in in_file.items() if k not in DECIDED} | given


def resolve(settings: dict[str, Any], folder: Path) -> Config:
    """The whole configuration of one run in `folder`, one of the runs/ of a comparison or sweep.

    On W&B it has the name of its folder, and the group that of the comparison or sweep, unless they are
    given. ValueError for settings that exclude each other.
    """
    names = {"wandb_group": folder.resolve().parents[1].name, "wandb_run_name": folder.name}
    tracking = names if settings.get("use_wandb") else {}
    return config_from_dict(tracking | settings | {"output_dir": str(folder)})
