"""Table of everything that the suite replaces in libraries and in the process's environment.

A replacement is made by `Patch.on`, which restores the original, so a run leaves no trace in its process.
Attributes of single modules of a model, such as `layer.forward`, go with the model and are not in the table.
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
    tested_by: str
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
    tested_by="tests/training/test_kernels.py",
)
FLASH_ATTENTION_4_OFF = Patch(
    ("os.environ:NVTE_FLASH_ATTN_V4",),
    why='"0" keeps TE from using a FlashAttention 4 that has not passed its self-test',
    during=f"{_RUN}; or the process, by `training.library.build`",
    tested_by="tests/training/test_kernels.py",
)
SWIGLU = Patch(
    (f"{_TE}.module.layernorm_mlp:_act_func",),
    why="TE's lookup of activations has no SwiGLU that is fused with its FP8 casts",
    during=_RUN,
    tested_by="tests/gpu/test_fused_swiglu.py",
)
TE_GEMMS = Patch(
    tuple(f"{_TE}.module.{name}:general_gemm" for name in ("layernorm_linear", "linear", "layernorm_mlp")),
    why="results of forward GEMMs that the first pass kept replace the GEMMs of the second",
    during=_RECOMPUTED,
    tested_by="tests/gpu/test_recompute.py",
)
EMULATED_GEMMS = Patch(
    ("fp8_suite.te_models.emulation.gemm:multiply",),
    why="as for TE's GEMMs, in the suite's emulation",
    during=_RECOMPUTED,
    tested_by="tests/te_models/test_recompute.py",
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
    tested_by="tests/gpu/test_recompute.py",
    only_imported=True,
)
PARAMETERS_ON_META = Patch(
    ("torch.nn.Module:register_parameter",),
    why="weight files hold parameters but no buffers: a model is built with buffers and without parameters",
    during="building a Hugging Face model, by `te_models.hugging_face.parameters_on_meta`",
    tested_by="tests/te_models/test_hugging_face.py",
)
PEFT_ON_TE = Patch(
    ("peft.tuners.lora.model:dispatch_transformer_engine",),
    why="peft takes a TE module for a target if only its parameters are, and adds an adapter to its output",
    during="the process, by `training.library.build`",
    tested_by="tests/te_models/test_library.py",
)
BF16_MATMUL_ON_CPU = Patch(
    ("torch.backends.mkldnn.matmul:fp32_precision",),
    why='"bf16" multiplies FP8 and BF16 values, which are exact in BF16, several times as fast',
    during="a GEMM of the emulation, by `te_models.emulation.gemm`",
    tested_by="tests/te_models/test_emulation.py",
)
PATCHES = {name: value for name, value in globals().items() if isinstance(value, Patch)}


@dataclass(frozen=True)
class Change:
    """A change of the process's or a library's state that is not a replaced attribute."""

    what: str
    why: str
    by: str  # FILE:FUNCTION
    tested_by: str
    until: str = "the process ends"


CHANGES = (
    Change(
        "environment: PYTORCH_ALLOC_CONF, unless the user set it",
        "expandable segments lose less memory to fragmentation",
        by="training/launch.py:allow_expandable_segments",
        tested_by="tests/training/test_launch.py",
    ),
    Change(
        "environment: CUDA_MODULE_LOADING, unless the user set it",
        "PyTorch would set it too late, after CUDA is initialized",
        by="core/gpus.py:open_gpu",
        tested_by="tests/training/test_launch.py",
    ),
    Change(
        "environment: CUBLAS_WORKSPACE_CONFIG, NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "--deterministic; cuBLAS and TE read them once, before the first CUDA call",
        by="training/run.py:_seed",
        tested_by="tests/gpu/test_flash_attention.py",
    ),
    Change(
        "environment: CUDNN_HOME, unless the user set it",
        "TE prefers a system cuDNN; beside torch's, attention silently runs unfused",
        by="training/precision/te_runtime.py:point_te_at_torchs_cudnn",
        tested_by="tests/training/doctor/test_doctor.py",
    ),
    Change(
        "environment: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED, FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
        "FlashAttention 4 compiles its kernels once on a machine, not at every start",
        by="te_models/kernels/flash_attention_cache.py:cache_on_disk",
        tested_by="tests/gpu/test_flash_attention.py",
    ),
    Change(
        "environment: DS_ACCELERATOR, unless the user set it",
        "DeepSpeed warns on a machine without a GPU",
        by="training/parallel/zero_settings.py:import_deepspeed",
        tested_by="tests/training/parallel/test_zero.py",
    ),
    Change(
        "environment: TOKENIZERS_PARALLELISM",
        "threads of the tokenizer do not survive a fork",
        by="data/loader.py:init_worker",
        tested_by="tests/data/test_loader.py",
        until="the data worker ends",
    ),
    Change(
        "ATen's CPU kernels of BF16 matrix products",
        "PyTorch multiplies BF16 a hundred times slower than FP32 on CPUs without BF16 instructions",
        by="te_models/kernels/bf16_on_cpu.py:fast_bf16",
        tested_by="tests/te_models/test_bf16_on_cpu.py",
        until="the run ends",
    ),
    Change(
        "torch._dynamo.config.recompile_limit",
        "compiled layers have more variants than its default: training, evaluation, packed or not, ...",
        by="te_models/hugging_face.py:compile_blocks",
        tested_by="tests/te_models/test_hugging_face.py",
    ),
    Change(
        "TE's flag of the first FP8 module",
        "an autocast of a single module resets it, and TE would reduce all backward amaxes again",
        by="training/precision/precision_map.py:inner_autocast",
        tested_by="tests/gpu/test_precision_map.py",
        until="the forward pass ends",
    ),
    Change(
        "filter of warnings: deprecated names in torch.distributed",
        "TE, DeepSpeed and the suite use names that torch 2.13 warns of and torch 2.11 needs",
        by="training/parallel/ranks.py:join",
        tested_by="tests/training/parallel/test_tensor_parallel.py",
    ),
    Change(
        "filter of warnings: torch.distributed is disabled",
        "torch warns of it at every save and load of a single process, also in the thread of a save",
        by="training/checkpoint/store.py:_run_dcp",
        tested_by="tests/training/checkpoint/test_store.py",
    ),
    Change(
        "scikit-learn, and torchao in a run with TE layers, as if not installed",
        "transformers imports them wherever it can, which takes a sixth of the imports' time",
        by="training/launch.py:launch",
        tested_by="tests/training/test_launch.py",
        until="libraries are imported",
    ),
    Change(
        "environment: WANDB_RUN_GROUP, unless the user set it",
        "W&B groups the runs of a comparison or sweep",
        by="benchmarks/records/grid.py:train_all",
        tested_by="tests/benchmarks/test_sweep.py",
    ),
    Change(
        "environment: HF_DATASETS_CACHE",
        "rows made up for a measurement leave nothing in the user's cache",
        by="benchmarks/throughput.py:made_up_rows",
        tested_by="tests/benchmarks/test_throughput.py",
    ),
    Change(
        "a feature in nvdlfw_inspect's registry",
        "--fp8_stats_interval counts the casts of TE's layers",
        by="training/precision/fp8_inspect.py:inspecting",
        tested_by="tests/gpu/test_fp8_stats.py",
        until="the run ends",
    ),
    Change(
        "log filter of TE",
        "advice to install FlashAttention 2, which runs in none of the suite's modes",
        by="training/precision/te_runtime.py:silence_advice",
        tested_by="tests/gpu/test_run.py",
    ),
    Change(
        "log filters of torchao",
        "messages about features that training does not use",
        by="training/precision/torchao_fp8.py:silence_import",
        tested_by="tests/training/precision/test_torchao_fp8.py",
    ),
    Change(
        "log filter and extensions of DeepSpeed",
        "skipped steps are logged by the suite; building an extension takes a minute on a CPU",
        by="training/parallel/zero_settings.py:import_deepspeed",
        tested_by="tests/training/parallel/test_zero.py",
    ),
)
