"""Which precision and recipe run here, and why another cannot. `core.recipes` describes the recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from core.recipes import FALLBACK_RECIPE, LM_HEAD_RECIPE, RECIPES, TE_RECIPES
from te_models.engine import Backend, engine, recipes
from training.config import Config
from training.precision.settings import PrecisionConfig
from training.precision.te_runtime import why_not_te


@dataclass(frozen=True)
class Precision:
    """What was asked for and what runs; both stand in env.json, the W&B config and summary.json.

    `requested` and `effective` are "bf16", "fp32", or the name of a recipe of TE (RECIPES) or torchao.
    """

    requested: str
    effective: str
    fallback_reason: str | None = None
    recipe: Any = None  # the TE recipe; None outside FP8 and without TE
    te_backend: Backend | None = None  # None without --use_te
    emulated: bool = False  # TE's layers or FP8's GEMMs are: right losses, meaningless speed
    # With precision by layer (`precision_map`), else empty:
    by_module: dict[str, str] = field(default_factory=dict)  # every TE module: its recipe's name or "bf16"
    recipes: dict[str, Any] = field(default_factory=dict)  # the TE recipe of each name
    map_fallbacks: dict[str, str] = field(default_factory=dict)  # recipe that cannot run here: why

    @property
    def in_use(self) -> set[str]:
        """The recipes that modules run in."""
        return set(self.by_module.values()) - {"bf16"} if self.by_module else {self.effective}

    def describe(self) -> str:
        """The recipe, or all that modules run in where it goes by layer."""
        by_layer = ", ".join(sorted(set(self.by_module.values())))
        return f"by layer ({by_layer})" if self.by_module else self.effective

    @property
    def in_attention(self) -> set[str]:
        """The recipes in use whose --fp8_attention is on where attention runs in them."""
        if not self.by_module:
            return self.in_use
        return {r for name, r in self.by_module.items() if "self_attention" in name} & FP8_ATTENTION

    @property
    def token_multiple(self) -> int:
        """Tokens of a micro-batch must be a multiple of this; 8 keeps BF16 GEMMs aligned."""
        return max((RECIPES[name].token_multiple for name in self.in_use), default=8) if self.fp8 else 8

    @property
    def fp8(self) -> bool:
        return self.effective in RECIPES

    def in_short(self) -> dict[str, Any]:
        """What all ranks must share; reasons name a rank's own GPU."""
        recipes = {"recipe": self.effective, "recipes in use": sorted(self.in_use)}
        return recipes | {"te_backend": self.te_backend, "emulated": self.emulated}

    def as_dict(self) -> dict[str, Any]:
        return {
            "requested_recipe": self.requested,
            "recipe": self.effective,
            "fallback_reason": self.fallback_reason,
            "te_backend": self.te_backend,
            "emulated": self.emulated,
            "map_fallbacks": self.map_fallbacks,
        }


def resolve_precision(cfg: Config) -> Precision:
    """Decide what runs, before any weight is read. RuntimeError names what cannot run here and what can."""
    mixed = cfg.precision.mixed_precision
    backend = resolve_backend(cfg)
    if mixed != "fp8":
        return Precision(mixed, mixed, te_backend=backend, emulated=backend == "emulated")
    if backend is None:
        return Precision(cfg.recipe, cfg.recipe, emulated=fp8_gemms_are_emulated())
    if cfg.precision.fp8_attention and backend == "emulated":
        raise _not_emulated(cfg, "--fp8_attention", "compute attention in BF16 only")
    name, reason = usable(cfg.recipe, f"--fp8_scenario {cfg.precision.fp8_scenario}", cfg, backend)
    recipe = make_recipe(name, cfg.precision, backend)
    return Precision(cfg.recipe, name, reason, recipe, backend, backend == "emulated")


def _not_emulated(cfg: Config, flag: str, reason: str) -> ValueError | RuntimeError:
    """A bad setting where emulated layers were asked for; else it is the machine that cannot run it."""
    kind = ValueError if cfg.model.te_backend == "emulated" else RuntimeError
    return kind(f"{flag}: emulated TE layers {reason}; drop it, or use TE's on a GPU")


def usable(requested: str, flag: str, cfg: Config, backend: Backend) -> tuple[str, str | None]:
    """The recipe that runs where `flag` asks for `requested`, and why if it is another one.

    RuntimeError where --fp8_fallback allows no other, or there is none.
    """
    reason = why_not(requested, backend)
    if reason is None:
        return requested, None
    able = ", ".join(name for name in TE_RECIPES if why_not(name, backend) is None)
    message = (
        f"{flag} cannot run here: {reason}. This machine runs: {able or 'none; use --mixed_precision bf16'}"
    )
    if RECIPES[requested].may_fall_back and backend == "native":
        message += f"; with --te_backend emulated, to study losses: {requested}"
    if (
        not RECIPES[requested].may_fall_back
        or cfg.precision.fp8_fallback == "error"
        or why_not(FALLBACK_RECIPE, backend)
    ):
        raise RuntimeError(message)
    return FALLBACK_RECIPE, message


def resolve_backend(cfg: Config) -> Backend | None:
    """Which TE layers --use_te means here; RuntimeError where those asked for cannot run."""
    if not cfg.model.use_te:
        return None
    asked = cfg.model.te_backend
    if asked == "emulated" or (asked == "auto" and not torch.cuda.is_available()):
        return "emulated"
    if reason := why_not_te():
        raise RuntimeError(
            f"--use_te --te_backend {asked} cannot run here: {reason}. `python -m training.doctor` checks "
            "the installation; --te_backend emulated runs the same numerics, slowly; without --use_te the "
            "Hugging Face model runs"
        )
    return "native"


def fp8_gemms_are_emulated() -> bool:
    """Whether torchao must compute FP8 GEMMs in higher precision: no GPU. RuntimeError on one without FP8."""
    if not torch.cuda.is_available():
        return True
    if torch.cuda.get_device_capability() < (8, 9):
        raise RuntimeError(
            f"--mixed_precision fp8 cannot run here: FP8 GEMMs need compute capability 8.9 "
            f"({torch.cuda.get_device_name()}: {'.'.join(map(str, torch.cuda.get_device_capability()))}); "
            "use --mixed_precision bf16"
        )
    return False


def make_recipe(name: str, cfg: PrecisionConfig, backend: Backend = "native") -> Any:
    te = recipes(backend)
    recipe = RECIPES[name].make(cfg, te)
    if cfg.fp8_fast_accumulation and name in READ_BY["fp8_fast_accumulation"] and backend == "native":
        for gemm in ("fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            setattr(recipe, gemm, te.MMParams(use_split_accumulator=False))
    return recipe


def recipe_name(recipe: Any) -> str:
    """The name in RECIPES of a TE recipe, native or emulated."""
    return next(name for name, spec in RECIPES.items() if spec.te_class == type(recipe).__name__)


def why_not(name: str, backend: Backend = "native") -> str | None:
    """Why a recipe cannot run on this machine, in the library's own words, or None."""
    if backend == "native" and (reason := why_not_te()):
        return reason
    available, reason = getattr(engine(backend), RECIPES[name].probe)(return_reason=True)
    if available:
        return None
    reason = reason.strip().rstrip(".")
    if backend == "emulated":
        return reason
    major, minor = torch.cuda.get_device_capability()
    return f"{reason} (this GPU: {torch.cuda.get_device_name()}, {major}.{minor})"


def check_sizes(precision: Precision, model_name: str, sizes: dict[str, int]) -> None:
    """ValueError naming the sizes whose GEMMs the recipe's kernels cannot run."""
    if precision.recipe is not None:
        refuse_odd_sizes(precision.effective, model_name, sizes)


def refuse_odd_sizes(recipe: str, model_name: str, sizes: dict[str, int]) -> None:
    if odd := odd_sizes(recipe, sizes):
        multiple = RECIPES[recipe].feature_multiple
        raise ValueError(
            f"--fp8_scenario {recipe} --model_name {model_name}: {', '.join(odd)} not a multiple of "
            f"{multiple}, which its FP8 GEMMs need; use another recipe or --mixed_precision bf16"
        )


def odd_sizes(recipe: str, sizes: dict[str, int]) -> list[str]:
    multiple = RECIPES[recipe].feature_multiple
    return [f"{name} {size}" for name, size in sizes.items() if size % multiple]


# Settings, and the recipes that read them.
READ_BY: dict[str, set[str]] = {}
for _name, _spec in RECIPES.items():
    for _setting in _spec.settings:
        READ_BY.setdefault(_setting, set()).add(_name)
FP8_ATTENTION = READ_BY["fp8_attention"]


def _asked_for(cfg: Config, names: Iterable[str]) -> dict[str, Any]:
    """Those of the precision's settings that are not as by default, and their values."""
    default = PrecisionConfig()
    values = {name: getattr(cfg.precision, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name} {value}"


def unread(cfg: Config, precision: Precision) -> str | None:
    """Of a run that is not in FP8, the settings of FP8 recipes that were asked for all the same."""
    given = _asked_for(cfg, () if precision.fp8 else ("fp8_scenario", *READ_BY))
    if not given:
        return None
    flags = ", ".join(_flag(name, value) for name, value in given.items())
    return f"{flags}: not read in {precision.effective}; FP8 needs --mixed_precision fp8"


def refuse_unread(cfg: Config, recipes: set[str]) -> None:
    """ValueError for a setting of FP8 recipes that none of these reads."""
    for name, value in _asked_for(cfg, READ_BY).items():
        if not recipes & READ_BY[name]:
            raise ValueError(
                f"{_flag(name, value)}: is read under {' and '.join(sorted(READ_BY[name]))} scaling, "
                f"not under {', '.join(sorted(recipes))}; drop it"
            )


def check_settings(cfg: Config, precision: Precision) -> None:
    """ValueError for a setting of FP8 recipes that those of an FP8 run do not read.

    RuntimeError, or ValueError for layers that were asked for, where they cannot do what it says.
    """
    if precision.fp8:
        refuse_unread(cfg, precision.in_use)
    if cfg.precision.fp8_fp32_scales and "block" in precision.in_use and precision.te_backend == "native":
        major, minor = torch.cuda.get_device_capability()
        if major > 9:
            raise RuntimeError(
                f"--fp8_fp32_scales --fp8_scenario block: on this GPU (compute capability {major}.{minor}) "
                "TE runs block scaling in MXFP8's GEMMs, whose scales are powers of two; drop it"
            )
    if cfg.precision.fp8_fast_accumulation and precision.fp8 and precision.te_backend == "emulated":
        raise _not_emulated(cfg, "--fp8_fast_accumulation", "have no such choice")


def check_lm_head(cfg: Config, precision: Precision, sizes: dict[str, int], *, plain: bool) -> None:
    """ValueError where --fp8_lm_head cannot run; `plain`: logits are one GEMM and nothing else."""
    if not precision.fp8:
        raise ValueError(
            f"--fp8_lm_head: this run is in {precision.effective}; drop it, or add --mixed_precision fp8"
        )
    if not plain:
        raise ValueError(
            f"--fp8_lm_head: {cfg.model.model_name} does more to its logits than one GEMM; drop it"
        )
    refuse_odd_head(cfg.model.model_name, sizes)


def refuse_odd_head(model_name: str, sizes: dict[str, int]) -> None:
    if odd := odd_sizes(LM_HEAD_RECIPE, sizes):
        raise ValueError(
            f"--fp8_lm_head --model_name {model_name}: {', '.join(odd)} not a multiple of "
            f"{RECIPES[LM_HEAD_RECIPE].feature_multiple} as FP8 GEMMs need it; drop it"
        )


def check_fp8_attention(cfg: Config, precision: Precision, head_size: int) -> None:
    """RuntimeError with what FP8 attention lacks on GPUs before Blackwell (the conditions of TE 2.20)."""
    if not cfg.precision.fp8_attention or precision.recipe is None:
        return
    if torch.cuda.get_device_capability() >= (10, 0):
        return
    reasons, cudnn = [], torch.backends.cudnn.version()
    where = "" if precision.by_module else "--fp8_scenario "
    for name in sorted(precision.in_attention):
        if RECIPES[name].fp8_attention_before_blackwell:
            continue
        reasons.append(f"{where}{name}: only delayed scaling has it before Blackwell")
    if head_size != 128:
        reasons.append(f"head size {head_size}: only 128 has it before Blackwell")
    if cfg.data.packing and cudnn < 92300:
        reasons.append(f"--packing needs cuDNN 9.23.0, this is {cudnn}: add --no_packing")
    if cfg.optim.deterministic and cudnn < 91900:
        reasons.append(f"--deterministic needs cuDNN 9.19.0, this is {cudnn}: drop it")
    if reasons:
        raise RuntimeError(f"--fp8_attention cannot run here: {'; '.join(reasons)}; or drop --fp8_attention")


def build_autocast(
    precision: Precision, *, device: torch.device, parameter_dtype: torch.dtype
) -> Callable[[], AbstractContextManager]:
    """The context that every forward runs in; backward stays outside."""
    contexts: list[Callable[[], AbstractContextManager]] = []
    if precision.effective != "fp32" and parameter_dtype == torch.float32:
        contexts.append(lambda: torch.autocast(device.type, dtype=torch.bfloat16))
    if precision.recipe is not None:
        te = engine(precision.te_backend)
        contexts.append(lambda: te.autocast(enabled=True, recipe=precision.recipe))
    if len(contexts) < 2:
        return contexts[0] if contexts else nullcontext

    def both() -> AbstractContextManager:
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context())
        return stack

    return both
