"""Recomputation of TE's decoder layers in backward; results of expensive kernels are kept from forward.

A recomputed layer keeps its input and, by level, results that are slow to compute for their size. Backward
runs the layer again with the FP8 scales of the first pass; there the kept results replace their kernels. No
level changes a loss or a gradient, except that recomputed layers do not cache FP8 weights over the
micro-batches of a step.

T tokens, D hidden size, H query heads, G key/value groups, K head size, F feed-forward size. Per token, a
layer keeps its input (D values in BF16) and:

- cheap  results of the QKV, output and gate/up projections and of attention, (2H + 2G) K + D + 2F values;
         recomputes norms, RoPE, SwiGLU and FP8 casts
- mlp    the same without gate/up, (2H + 2G) K + D values; also recomputes that projection
- layer  attention's result, H K values; also recomputes the QKV and output projections
- full   nothing; also recomputes attention

The down projection never runs again: backward does not need its result.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fp8_suite.core.patches import EMULATED_GEMMS, TE_ATTENTION, TE_GEMMS
from fp8_suite.te_models.recompute.checkpoint import checkpoint_te
from fp8_suite.te_models.recompute.offload import ActivationOffload
from fp8_suite.te_models.settings import KEPT
from torch import Tensor, nn

# Results of the GEMMs of a layer's modules, in the order in which a module's forward pass runs them. With
# adapters the MLP is two modules.
GEMMS = {
    "self_attention.layernorm_qkv": ("qkv",),
    "self_attention.proj": ("output",),
    "layernorm_mlp": ("gate_up", "down"),
    "layernorm_mlp.fc1": ("gate_up",),
    "layernorm_mlp.fc2": ("down",),
}


def run_recomputed(
    layer: nn.Module,
    hidden: Tensor,
    *,
    level: str,
    backend: str,
    checkpoint: Callable,
    reentrant: bool = False,
    offload: ActivationOffload | None = None,
    **arguments: Any,
) -> Tensor:
    """Run a TE layer on `hidden` [T, D] or [B, S, D] so that backward recomputes it at `level`.

    `checkpoint` is that of the backend, "native" or "emulated"; native layers need it only if `reentrant`:
    then nothing but the input is kept. `offload` moves what the layer keeps to the host; it needs
    `reentrant=False`.
    """
    # In a reentrant first pass autograd is off, and kernels omit results that only backward needs.
    kept = _Results(() if reentrant else KEPT[level], backend)

    def run(hidden: Tensor, **arguments: Any) -> Tensor:
        with kept.next_pass(layer):
            return layer(hidden, **arguments)

    if backend == "native" and not reentrant:
        checkpoint = functools.partial(checkpoint_te, layer)
    else:
        checkpoint = functools.partial(checkpoint, use_reentrant=reentrant)
    if offload is None:
        return checkpoint(run, hidden, **arguments)
    inputs = [hidden]

    def run_offloaded(**arguments: Any) -> Tensor:
        if not inputs:
            hidden, kept.results = offload.load(stored)
            return run(hidden.requires_grad_(), **arguments)
        return run(inputs.pop(), **arguments)

    output = checkpoint(run_offloaded, **arguments)
    stored = offload.store((hidden, kept.results))
    kept.results = {}
    return output


class _Results:
    """Results of one layer's kernels, from its forward pass to its recomputation.

    The key of a result is its name and the number of the call in its pass, so a module may run several times.
    """

    def __init__(self, names: tuple[str, ...], backend: str):
        self.names, self.backend = names, backend
        self.results: dict[tuple[str, int], Any] = {}
        self.passes = 0

    @contextmanager
    def next_pass(self, layer: nn.Module) -> Iterator[None]:
        """Store results in the first pass; use each of them once in the second."""
        self.passes += 1
        call = self._record if self.passes == 1 else self._replay
        gemms: Iterator[str] = iter(())  # of the module that runs
        calls: Counter[str] = Counter()

        def enter(names: tuple[str, ...], *_: Any) -> None:
            nonlocal gemms
            gemms = iter(names)

        def wrap(kernel: Callable, name: Callable[[], str | None]) -> Callable:
            """Return a function with `kernel`'s attributes, such as compiled code, that keeps its result."""

            @functools.wraps(kernel)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                if (result := name()) is None:  # not a GEMM of a module in GEMMS
                    return kernel(*args, **kwargs)
                calls[result] += 1
                return call((result, calls[result]), kernel, *args, **kwargs)

            return replacement

        with ExitStack() as stack:
            for path, module in layer.named_modules():
                if path in GEMMS:
                    hook = functools.partial(enter, GEMMS[path])
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            is_native = self.backend == "native"
            patch = TE_GEMMS if is_native else EMULATED_GEMMS
            stack.enter_context(patch.on(lambda kernel: wrap(kernel, lambda: next(gemms, None))))
            if is_native:
                stack.enter_context(TE_ATTENTION.on(lambda kernel: wrap(kernel, lambda: "attention")))
            yield
        assert self.passes == 1 or not self.results, f"recomputation did not use {list(self.results)}"

    def _record(self, key: tuple[str, int], kernel: Callable, *args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if key[0] == "down":
            self.results[key] = _map(_allocation, result)
        elif key[0] in self.names and _is_plain(result):
            self.results[key] = _map(Tensor.detach, result)
        return result

    def _replay(self, key: tuple[str, int], kernel: Callable, *args: Any, **kwargs: Any) -> Any:
        if key not in self.results:
            return kernel(*args, **kwargs)
        result = self.results.pop(key)
        return _map(lambda allocate: allocate(), result, functools.partial) if key[0] == "down" else result


def _allocation(result: Tensor) -> functools.partial:
    """Return a function that allocates a tensor like this one, with any values."""
    return functools.partial(torch.empty, result.shape, dtype=result.dtype, device=result.device)


def _map(function: Callable, result: Any, kind: type = Tensor) -> Any:
    """Apply `function` to the values of this kind in a result, which may be a tuple or list, also nested.

    PyTree would add 0.3 ms of CPU time per layer, which delays launches of small models.
    """
    if isinstance(result, (tuple, list)):
        return type(result)([_map(function, part, kind) for part in result])
    return function(result) if isinstance(result, kind) else result


def _is_plain(result: Any) -> bool:
    """True if no tensor is quantized: TE may free the data of a quantized tensor after its use."""
    if isinstance(result, (tuple, list)):
        return all(map(_is_plain, result))
    return result is None or type(result) in (Tensor, nn.Parameter)
