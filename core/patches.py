"""Table of everything that the suite replaces in libraries and in the process's environment.

A replacement is made by `Patch.on`, which restores the original, so a run leaves no trace in its process.
Attributes of single modules of a model, such as `layer.forward`, go with the model and are not in the table.
Changes of another kind, of environment variables or log filters, are listed in docs/development.md.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """Attributes of libraries, or entries of mappings, that are replaced together."""

    targets: tuple[str, ...]  # OWNER:NAME; the owner is a module, a class or a mapping such as os.environ
    why: str
    during: str  # who turns it on, and for how long
    only_imported: bool = False  # skip modules that this process has not imported

    @contextmanager
    def on(self, replace: Callable[[Any], Any]) -> Iterator[None]:
        """Replace each target by `replace(original)` until exit; None stands for an absent mapping entry."""
        with ExitStack() as stack:
            for owner, name in self._resolved():
                original = _get(owner, name)
                _set(owner, name, replace(original))
                stack.callback(_set, owner, name, original)
            yield

    def _resolved(self) -> Iterator[tuple[Any, str]]:
        for target in self.targets:
            owner, _, name = target.partition(":")
            if not self.only_imported or owner in sys.modules:
                yield sys.modules.get(owner) or pkgutil.resolve_name(owner), name


def _get(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, MutableMapping) else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, MutableMapping):
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value


_TE, _RUN = "transformer_engine.pytorch", "a run, by `training.kernels`"
_RECOMPUTED = "each pass of a recomputed layer, by `te_models.recompute.layers`"

FLASH_ATTENTION_4_ON = Patch(
    ("os.environ:NVTE_FUSED_ATTN", "os.environ:NVTE_FLASH_ATTN_V3"),
    why='"0" makes TE use FlashAttention 4, the fastest attention on Hopper, instead of cuDNN',
    during=f"{_RUN}; or the process, by `training.library.build`",
)
FLASH_ATTENTION_4_OFF = Patch(
    ("os.environ:NVTE_FLASH_ATTN_V4",),
    why='"0" keeps TE from using a FlashAttention 4 that has not passed its self-test',
    during=f"{_RUN}; or the process, by `training.library.build`",
)
SWIGLU = Patch(
    (f"{_TE}.module.layernorm_mlp:_act_func",),
    why="TE's lookup of activations has no SwiGLU that is fused with its FP8 casts",
    during=_RUN,
)
TE_GEMMS = Patch(
    tuple(f"{_TE}.module.{name}:general_gemm" for name in ("layernorm_linear", "linear", "layernorm_mlp")),
    why="results of forward GEMMs that the first pass kept replace the GEMMs of the second",
    during=_RECOMPUTED,
)
EMULATED_GEMMS = Patch(
    ("fp8_suite.te_models.emulation.gemm:multiply",),
    why="as for TE's GEMMs, in the suite's emulation",
    during=_RECOMPUTED,
)
TE_ATTENTION = Patch(
    (
        f"{_TE}.attention.dot_product_attention.backends:fused_attn_fwd",
        "flash_attn.cute.interface:_flash_attn_fwd",
        # Under context parallelism, once or several times in a layer:
        f"{_TE}.attention.dot_product_attention.context_parallel:fused_attn_fwd",
        f"{_TE}.attention.dot_product_attention.backends:_flash_attn_fwd_v4",
    ),
    why="as for TE's GEMMs; attention in other backends runs again",
    during=_RECOMPUTED,
    only_imported=True,
)
FP8_EXCHANGE = Patch(
    tuple(
        f"fp8_suite.training.parallel.gradient_exchange:{name}"
        for name in ("pack_fp8", "sum_fp8", "decode_fp8")
    ),
    why="PyTorch casts gradients to FP8 and back in many passes over memory, a kernel in one",
    during=_RUN,
)
PARAMETERS_ON_META = Patch(
    ("torch.nn.Module:register_parameter",),
    why="weight files hold parameters but no buffers: a model is built with buffers and without parameters",
    during="building a Hugging Face model, by `te_models.hugging_face.parameters_on_meta`",
)
PEFT_ON_TE = Patch(
    ("peft.tuners.lora.model:dispatch_transformer_engine",),
    why="peft takes a TE module for a target if only its parameters are, and adds an adapter to its output",
    during="the process, by `training.library.build`",
)
BF16_MATMUL_ON_CPU = Patch(
    ("torch.backends.mkldnn.matmul:fp32_precision",),
    why='"bf16" multiplies FP8 and BF16 values, which are exact in BF16, several times as fast',
    during="a GEMM of the emulation, by `te_models.emulation.gemm`",
)
PATCHES = {name: value for name, value in globals().items() if isinstance(value, Patch)}
