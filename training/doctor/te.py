"""What the doctor asks of Transformer Engine: cuDNN, its extension, the recipes, and its attention."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from core.errors import UserError, first_line
from core.packages import version
from training.doctor.checks import Finding, pip, python
from training.doctor.te_errors import diagnose, install_te, library, reinstall_te

if TYPE_CHECKING:  # te_models needs packages that may be missing
    from te_models.engine import Backend

MODEL = "meta-llama/Llama-3.1-8B"  # a layer of its dimensions is tried and timed
# Of transformer_engine.pytorch; older releases lack some.
NEEDED = ("autocast", "quantized_model_init", "TransformerLayer", "checkpoint")
FLASH = {"2": "flash-attn", "3": "flash-attn-3", "4": "flash-attn-4"}
FLASH_TRIAL = (32, 8, 128)  # query and key heads of that layer, and their size


def cudnns() -> Iterator[Finding]:
    """The cuDNN in use, and whether two are in memory once TE is loaded."""
    import torch

    from training.precision import te_runtime

    home, number = os.environ.get("CUDNN_HOME"), torch.backends.cudnn.version()
    if number is None:
        yield Finding("fault", "torch loads no cuDNN", library("cudnn"))
        return
    own = te_runtime.torch_cudnn()
    if find_spec("transformer_engine"):
        te_runtime.load_error()
    folders = te_runtime.loaded_cudnns()
    data = {"cudnn": number, "cudnn_home": home, "loaded": [str(folder) for folder in folders]}
    if len(folders) > 1:
        text = (
            f"two cuDNNs are mixed, {' and '.join(map(str, folders))}: attention may run unfused, 4x slower"
        )
        yield Finding("fault", text, f"export CUDNN_HOME={shlex.quote(str(own))}", data)
        return
    name = f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100} of torch, in {own}"
    yield Finding("ok", f"{name}; CUDNN_HOME {home or 'not set'}", data=data)


def te_itself() -> Iterator[Finding]:
    """Whether Transformer Engine is there and loads, and what is wrong by the kind of its error."""
    import torch

    from training.precision import te_runtime

    found = version("transformer_engine")
    if not torch.cuda.is_available():
        text = f"Transformer Engine {found}" if found else "Transformer Engine is not installed"
        yield Finding("ok", f"{text}: without a GPU TE layers run emulated")
        return
    if find_spec("transformer_engine") is None:
        cure = install_te()
        yield Finding(
            "note", f"Transformer Engine is missing, for --use_te (native TE layers and FP8): {cure}", cure
        )
        return
    if error := te_runtime.load_error():
        meaning, cure = diagnose(error)
        text = f"Transformer Engine {found} does not load: {meaning} ({first_line(error)})"
        yield Finding("fault", text, cure, {"transformer_engine": found})
        return
    te = importlib.import_module("transformer_engine.pytorch")
    if lacking := [name for name in NEEDED if not hasattr(te, name)]:
        text = f"Transformer Engine {found} is too old: it has no {', '.join(lacking)}"
        yield Finding("fault", text, reinstall_te())
        return
    yield Finding(
        "ok", f"Transformer Engine {found}, its extension loads", data={"transformer_engine": found}
    )


def recipes() -> Iterator[Finding]:
    """A line per recipe: where it runs here, and the libraries' reasons where it does not."""
    from core.recipes import TE_RECIPES, TORCHAO_RECIPES

    reasons: dict[str, bool] = {}  # why something does not run; True: it should, but raises

    def cell(asked: Callable[[], str | None], yes: str = "yes") -> str:
        try:
            reason, broken = asked(), False
        except Exception as error:
            reason, broken = f"{type(error).__name__}: {first_line(error)}", True
        if reason is None:
            return yes
        reasons.setdefault(reason, broken)
        return f"no [{list(reasons).index(reason) + 1}]"

    for name in ("bf16", *TE_RECIPES):
        native, emulated = (cell(partial(why_not, name, how)) for how in ("native", "emulated"))
        text = f"{name:<18} --use_te: native {native:<7} emulated {emulated}"
        data = {"recipe": name, "native": native == "yes", "emulated": emulated == "yes"}
        yield Finding("ok", text + "   without it: yes" * (name == "bf16"), data=data)
    for name in TORCHAO_RECIPES:
        how = cell(why_not_torchao, "yes" if torch_has_gpu() else "emulated")
        yield Finding("ok", f"{name:<18} without --use_te: {how}", data={"recipe": name, "torchao": how})
    for number, (reason, broken) in enumerate(reasons.items(), 1):
        yield Finding("fault" if broken else "note", f"[{number}] {reason}")


def why_not(name: str, backend: Backend) -> str | None:
    """Why TE layers of this backend do not train in a recipe, or in BF16, here."""
    from te_models.engine import engine
    from training.precision import recipes as precision
    from training.precision import te_runtime

    if backend == "native" and (reason := te_runtime.why_not_te()):
        return reason
    if name == "bf16":
        engine(backend)
        return None
    return precision.why_not(name, backend)


def why_not_torchao() -> str | None:
    """Why torchao's recipes do not train here: it is missing or broken, or this GPU has no FP8."""
    from training.precision.recipes import fp8_gemms_are_emulated
    from training.precision.torchao_fp8 import require_torchao

    try:
        require_torchao()
        fp8_gemms_are_emulated()
    except UserError as error:
        return first_line(error)
    return None


def torch_has_gpu() -> bool:
    return importlib.import_module("torch").cuda.is_available()


def one_layer(
    *, packed: bool, tokens: int, device: str = "cuda", backend: Backend = "native"
) -> tuple[Any, dict[str, Callable[[], None]]]:
    """MODEL with one layer and 2,048 words, with TE's own kernels, and a step of it by precision.

    A step is forward and backward over one sequence of `tokens`, or two when packed, since one is not packed
    at all; FP8 is there if the standard recipe runs.
    """
    import torch

    from core.recipes import FALLBACK_RECIPE
    from te_models.build import build_model, plan_model
    from te_models.options import BuildOptions
    from training.precision.recipes import Precision, build_autocast, make_recipe
    from training.precision.settings import PrecisionConfig

    at, dtype = torch.device(device), torch.bfloat16
    plan = plan_model(MODEL, init="random", use_te=True)
    plan.config.num_hidden_layers, plan.config.vocab_size = 1, 2048
    options = BuildOptions(te_backend=backend, dtype=dtype, device=at, packed=packed, max_positions=tokens)
    model = build_model(plan, options)
    ids = torch.randint(0, 2048, (1, tokens), device=at)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if packed:
        ends = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=at)
        inputs |= {"cu_seqlens": ends, "max_seqlen": tokens}
    precisions = {"bf16": Precision("bf16", "bf16", te_backend=backend)}
    if why_not(FALLBACK_RECIPE, backend) is None:
        recipe = make_recipe(FALLBACK_RECIPE, PrecisionConfig(), backend)
        precisions["fp8"] = Precision(FALLBACK_RECIPE, FALLBACK_RECIPE, recipe=recipe, te_backend=backend)

    def step(precision: Any) -> Callable[[], None]:
        autocast = build_autocast(precision, device=at, parameter_dtype=dtype)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            with autocast():
                loss = model(**inputs).loss
            loss.backward()

        return run

    return model, {name: step(precision) for name, precision in precisions.items()}


def flash_attention() -> Iterator[Finding]:
    """Optional: TE has cuDNN's attention. Version 4 is tried as a run tries it before taking it."""
    from te_models.kernels import flash_attention as flash_attention_4

    found = {number: version(name) for number, name in FLASH.items()}
    said = ", ".join(f"{number}: {installed or 'not installed'}" for number, installed in found.items())
    yield Finding("ok", f"FlashAttention {said} (optional)", data={"flash_attention": found})
    if reason := flash_attention_4.why_not(FLASH_TRIAL[-1]):
        yield Finding("note", f"runs do not take FlashAttention 4: {reason}")
    elif wrong := flash_attention_4.self_test_te(*FLASH_TRIAL, packed=True):
        yield Finding("warn", f"runs do not take FlashAttention 4: {wrong}", pip(flash_attention_4.INSTALL))
    else:
        yield Finding("ok", "FlashAttention 4 computes what it should: runs with BF16 attention take it")


def attention() -> Iterator[Finding]:
    """The backend that attention of a TE layer really gets, packed and not."""
    from training.precision.te_runtime import attention_backend

    for packed in (True, False):
        _, steps = one_layer(packed=packed, tokens=512)
        steps["bf16"]()
        backend, how = attention_backend(), "packed" if packed else "unpacked"
        data = {"packed": packed, "backend": backend}
        if backend == "unfused":
            text = f"attention of {how} sequences runs unfused, about 4x slower and with 5x the memory"
            yield Finding("fault", text, unfused_cure(), data)
        else:
            yield Finding("ok", f"attention of {how} sequences: {backend}", data=data)


def unfused_cure() -> str:
    """By the likeliest cause; TE's own reasons come with its debug output."""
    off = [name for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN") if os.environ.get(name) == "0"]
    if off:
        return f"unset {' '.join(off)}"
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0":
        return "unset NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    return f"NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 {python()} -m training.doctor --no_speed  # prints TE's reasons"
