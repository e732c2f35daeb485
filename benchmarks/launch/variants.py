"""Variants: short names for training settings, such as `delayed` or `tensorwise+compile=false`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8_suite.benchmarks.records.runs import bad_input
from fp8_suite.core.cli import add_setting
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.recipes import TE_RECIPES, TORCHAO_RECIPES
from fp8_suite.core.settings import nearest
from fp8_suite.training.config import all_settings, load_config_file

# A fallback recipe would be compared under the wrong name, so an unsupported recipe is an error.
_TE = {"use_te": True, "fp8_fallback": "error"}
_HF = {"use_te": False, "te_backend": "auto", "fp8_fallback": "error"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": _TE | {"mixed_precision": "bf16", "fp8_scenario": "default"},
    "bf16_hf": _HF | {"mixed_precision": "bf16", "fp8_scenario": "default"},
    "fp16": _TE | {"mixed_precision": "fp16", "fp8_scenario": "default"},
    "fp16_hf": _HF | {"mixed_precision": "fp16", "fp8_scenario": "default"},
    **{name: _TE | {"mixed_precision": "fp8", "fp8_scenario": name} for name in TE_RECIPES},
    **{name: _HF | {"mixed_precision": "fp8", "fp8_scenario": name} for name in TORCHAO_RECIPES},
}
OWNED = ("use_te", "mixed_precision", "fp8_scenario", "fp8_fallback", "output_dir", "resume")
# Settings and sections that a variant may change. All others are equal in all runs of an experiment.
VARIED = (
    *("te_backend", "gradient_checkpointing", "recompute", "offload_activations", "compile"),
    *("batch_size", "gradient_accumulation_steps"),
)
VARIED_SECTIONS = ("precision", "sharding")


@dataclass(frozen=True)
class Variant:
    """An entry of `VARIANTS` with further settings; `name` is the text on the command line."""

    name: str
    settings: dict[str, Any]

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.+=-]", "_", self.name)


def parse_variants(
    words: list[str], *, flag: str = "--variants", beside: Iterable[str] = ()
) -> list[Variant]:
    """Parse `bf16,delayed,current+moment_dtype=bf16`; several words form one list.

    Values may contain commas, so a comma separates only where a variant's name follows, and
    `moment_dtype=fp8,fp16` is one value. `bf16` uses TE layers if `words` or `beside` has fp16, a TE recipe
    or bf16_hf, else Hugging Face layers. UserError for an unknown or duplicate variant, or for a setting that
    a variant must not change.
    """
    in_moments = r"(?!(?:(?<=moment_dtype=fp8,)|(?<=moment_dtype=\w{4},))fp16(?:[+,]|$))"
    separator = rf",{in_moments}(?=(?:{'|'.join(VARIANTS)})(?:[+,]|$))"
    names = [name for word in words for name in re.split(separator, word) if name]
    recipes = [name.split("+")[0] for name in (*names, *beside)]
    te_layers = "bf16_hf" in recipes or any(recipe in ("fp16", *TE_RECIPES) for recipe in recipes)
    variants = [_parse(name, te_layers, flag) for name in names]
    if not variants:
        raise bad_input(f"{flag}: no variant given; choose from {', '.join(VARIANTS)}")
    if len({variant.folder_name for variant in variants}) < len(variants):
        raise bad_input(f"{flag} {','.join(names)}: two variants have the same name or run folder; drop one")
    return variants


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """Split `delayed+moment_dtype=bf16` or `hsdp+hsdp_shard_size=2` into a value and further settings."""
    value, *extras = re.split(r"\+(?=[a-z]\w*(?:=|\+|$))", text)
    pairs = [extra.partition("=") for extra in extras]
    return value, {name: setting or "true" for name, _, setting in pairs}


def _parse(name: str, te_layers: bool, flag: str) -> Variant:
    recipe, settings = split_settings(name)
    if recipe not in VARIANTS:
        hint = nearest(recipe.rpartition(",")[2], VARIANTS)
        raise bad_input(f"{flag} {recipe}: unknown variant{hint}; choose from {', '.join(VARIANTS)}")
    table = all_settings()
    allowed = [n for n in table if n not in OWNED and (table[n].section in VARIED_SECTIONS or n in VARIED)]
    for setting in settings:
        if setting not in allowed:
            hint = nearest(setting, allowed) or f"; it may change {', '.join(allowed)}"
            raise bad_input(f"{flag} {name}: a variant must not change {setting}{hint}")
    layers = VARIANTS["bf16_hf"] if recipe == "bf16" and not te_layers else VARIANTS[recipe]
    return Variant(name, layers | settings)


def parse_flags(
    parser: argparse.ArgumentParser, argv: list[str], owned: Iterable[str] = OWNED
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return a benchmark's parsed flags, and the training settings of the command line and its --config file.

    The benchmark sets those in `owned` itself: they are a UserError on the command line, and ignored in the
    file.
    """
    own = {action.dest for action in parser._actions}
    hidden = parser.add_argument_group()
    hidden.add_argument("--config")
    names = [name for name in all_settings() if name not in own]
    for name in names:
        add_setting(hidden, name, all_settings()[name])
    for action in hidden._group_actions:
        action.help = argparse.SUPPRESS  # train_fp8.py --help lists them
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    for name in owned:
        if name in given:
            raise bad_setting(f"{parser.prog} sets this for every run; drop it", **{name: given[name]})
    in_file = load_config_file(args.config) if args.config else {}
    return args, {name: value for name, value in in_file.items() if name not in owned} | given
