"""Checks of cuDNN, Transformer Engine, and of every recipe by training a layer in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from fp8_suite.core.errors import UserError, first_line
from fp8_suite.core.packages import version
from fp8_suite.core.recipes import RECIPES, TE_RECIPES, TORCHAO_RECIPES
from fp8_suite.te_models.backend import Backend
from fp8_suite.te_models.build import build_model, find_model
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.training.doctor.machine import Finding, nvcc_cuda, this_pip
from fp8_suite.training.precision import fp8_inspect, recipes, te_runtime, torchao_fp8
from fp8_suite.training.precision.recipes import Precision
from fp8_suite.training.precision.settings import PrecisionConfig
from torch import Tensor

MODEL, TOKENS = "tiny-llama", 128
TE_PARTS = ("transformer_engine", "transformer_engine_torch")
TE_PARTS += ("transformer_engine_cu12", "transformer_engine_cu13")  # of another CUDA than torch's: an error


def check_cudnn() -> Iterator[Finding]:
    """Report the cuDNN in use; a fault if loading Transformer Engine adds a second one."""
    if not torch.cuda.is_available():
        return
    own, number = te_runtime.torch_cudnn(), torch.backends.cudnn.version()
    te_runtime.why_not_te()
    folders = [str(folder) for folder in te_runtime.loaded_cudnns()]
    if len(folders) > 1:
        text = f"two cuDNNs are mixed, {' and '.join(folders)}: attention may run unfused, 4x slower"
        yield Finding("fault", text, f"export CUDNN_HOME={own}", data={"loaded": folders})
    else:
        yield Finding("ok", f"cuDNN {number} of torch, in {own}", data={"loaded": folders})


def check_te() -> Iterator[Finding]:
    """Report whether Transformer Engine loads, else the cause and the install command."""
    found, reason = version("transformer_engine"), te_runtime.why_not_te()
    if reason is None:
        yield Finding("ok", f"Transformer Engine {found} loads")
        if not version("nvdlfw-inspect"):
            text = "nvdlfw-inspect is missing, optional: --fp8_stats_interval needs it"
            yield Finding("note", text, install=this_pip(fp8_inspect.INSTALL))
    elif not torch.cuda.is_available():
        yield Finding("ok", f"Transformer Engine {found or 'is not installed'}: TE layers run emulated")
    elif found is None:
        text = "Transformer Engine is not installed; native TE layers (--use_te) need it"
        yield Finding("note", text, install=install_te())
    else:
        text = f"Transformer Engine {found} does not load: {first_line(te_runtime.load_error())}"
        yield Finding("fault", text, install_te())


def install_te() -> str:
    """Return the command that reinstalls all parts of TE and compiles its extension."""
    command = f"pip install setuptools wheel ninja && {te_runtime.INSTALL_TE}"
    if parts := [part for part in TE_PARTS if version(part)]:  # pip's cache may hold one for another torch
        command = f"pip uninstall -y {' '.join(parts)} && {command} --no-cache-dir"
    cuda = torch.version.cuda or ""
    if nvcc_cuda().split(".")[0] == cuda.split(".")[0]:
        return this_pip(command)
    toolkit = f"sudo apt-get install -y cuda-toolkit-{cuda.replace('.', '-')}"  # nvcc of torch's CUDA
    return f"{toolkit} && export CUDA_HOME=/usr/local/cuda-{cuda} && {this_pip(command)}"


def train_layer(recipe: str, backend: Backend | None) -> Tensor:
    """Return the loss of one layer of MODEL after forward and backward.

    `backend` None builds Hugging Face layers; recipe "bf16" runs without FP8.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = find_model(MODEL, init="random", use_te=backend is not None)
    spec.config.num_hidden_layers = 1
    convert = te_recipe = None
    if recipe in TE_RECIPES:
        te_recipe = recipes.make_recipe(recipe, PrecisionConfig(), backend)
    elif recipe in TORCHAO_RECIPES:
        emulated = device.type == "cpu"
        convert = partial(torchao_fp8.convert, recipe_of=lambda name: recipe, emulated=emulated)
    options = BuildOptions(
        te_backend=backend,
        device=device,
        dtype=torch.bfloat16,
        packed=False,
        max_positions=TOKENS,
        convert=convert,
    )
    model = build_model(spec, options)
    precision = Precision(recipe, recipe, recipe=te_recipe, te_backend=backend)
    ids = torch.randint(0, spec.config.vocab_size, (1, TOKENS), device=device)
    with recipes.build_autocast(precision, device=device, parameter_dtype=torch.bfloat16)():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def check_recipes() -> Iterator[Finding]:
    """Train a small layer in every recipe, with native TE, emulated TE or Hugging Face layers."""
    reasons: dict[str, bool] = {}  # reason -> True if the recipe should run
    for name in ("bf16", *RECIPES):
        text, data = f"{name:<18}", {"recipe": name}
        backends = [] if name in TORCHAO_RECIPES else ["native", "emulated"]
        for backend in backends if name in TE_RECIPES else [*backends, None]:
            reason, broken = try_recipe(name, backend)
            if reason:
                reasons.setdefault(reason, broken)
            label = backend or "without --use_te"
            data[label] = reason is None
            text += f" {label}: {f'no [{list(reasons).index(reason) + 1}]' if reason else 'yes':<7}"
        yield Finding("ok", text.rstrip(), data=data)
    for number, (reason, broken) in enumerate(reasons.items(), 1):
        yield Finding("fault" if broken else "note", f"[{number}] {reason}")


def try_recipe(name: str, backend: Backend | None) -> tuple[str | None, bool]:
    """Train a layer in a recipe, or in BF16; return why it does not run, and True if it should."""
    try:
        reason = te_runtime.why_not_te() if backend == "native" else None
        if name in TE_RECIPES:
            reason = recipes.why_not(name, backend)
        elif name in TORCHAO_RECIPES:
            torchao_fp8.require_torchao()
            recipes.fp8_gemms_are_emulated()
        if reason:
            return reason, False
        loss = train_layer(name, backend)
        return (None, False) if loss.isfinite() else (f"{name}, {backend} layers: the loss is {loss}", True)
    except UserError as error:
        return first_line(error), False
    except Exception as error:
        return f"{name}, {backend} layers: {type(error).__name__}: {first_line(error)}", True
