"""Wrapper of a transformers model with the same interface as the TE model.

B rows, S tokens per row, T = B*S tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.patches import PARAMETERS_ON_META
from fp8_suite.core.recipes import LM_HEAD_RECIPE
from fp8_suite.te_models.kernels.loss import IGNORE, TokenLoss, linear_cross_entropy, logits_cross_entropy
from fp8_suite.te_models.kernels.loss_fp8 import linear_cross_entropy_fp8
from fp8_suite.te_models.kernels.packed_attention import (
    ATTENTION_NAME,
    install_packed_attention,
    sequence_boundaries,
)
from fp8_suite.te_models.lora.adapters import is_adapter
from fp8_suite.te_models.settings import recompute_levels
from fp8_suite.te_models.spec import tied_names
from fp8_suite.te_models.weights import Gather
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Recompilation limit per layer: training and evaluation, full and last batches, packed or not.
COMPILED_VARIANTS = 64


class HFCausalLM(nn.Module):
    """Wrapper of an AutoModelForCausalLM that returns the summed token loss, as `TECausalLM.forward`.

    Packed samples are separated by `packed_attention` if `choose_attention` can install it, otherwise by
    transformers, from `position_ids` that restart.

    In a `known_family`, logits are `lm_head(hidden)` and all parameters get a gradient from any text. Other
    models keep their own head, because they may scale or cap logits; they may also have parameters that text
    does not reach, such as an image encoder.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        known_family: bool = False,
        recompute: str = "none",
        reentrant: bool = False,
    ):
        super().__init__()
        self.model = model
        self.known_family = self.uses_all_parameters = known_family
        self.fp8_lm_head = False
        # Reason that transformers' own attention runs; None if `packed_attention` runs.
        self.attention_fallback: str | None = None
        self._enable_recomputation(recompute, reentrant)

    def _enable_recomputation(self, recompute: str, reentrant: bool) -> None:
        """Recompute whole layers (`layer`, `full`) or MLPs (`mlp`) through torch's checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        name, levels = type(self.model).__name__, recompute_levels(recompute, len(self.blocks))
        recomputes_all = [level in ("layer", "full") for level in levels]
        if "mlp" in levels and not self.known_family:
            raise bad_setting(f"the MLP of {name} is unknown; choose layer", recompute=recompute)
        if any(recomputes_all) and reentrant and self.has_router_loss:
            raise bad_setting(
                f"under DeepSpeed ZeRO-3 (such as ds_zero3), the router of {name} would get no gradient from "
                "its load-balancing loss (output_router_logits in its config.json); drop it, or use "
                "--sharding_mode fsdp_full",
                recompute=recompute,
            )
        if any(recomputes_all):
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for block, level, is_whole in zip(self.blocks, levels, recomputes_all, strict=True):
            if any(recomputes_all) and not is_whole:
                if not isinstance(block, GradientCheckpointingLayer):
                    reason = f"{name} recomputes all of its layers or none; give no numbers"
                    raise bad_setting(reason, recompute=recompute)
                block.gradient_checkpointing = False
            if level == "mlp":
                block.mlp.forward = partial(_recomputed, block.mlp.forward, reentrant)

    @property
    def blocks(self) -> list[nn.Module]:
        """Decoder layers: the longest ModuleList that is not nested in another, as lists of experts are.

        Image encoders, which may have more layers, lie outside of the decoder.
        """
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList)]
        nested = {id(m) for outer in lists for layer in outer for m in layer.modules()}
        return list(max((m for m in lists if id(m) not in nested), key=len, default=[]))

    @property
    def attention(self) -> str:
        """Name of the attention in use, for the run's records."""
        reason = self.attention_fallback
        return ATTENTION_NAME if reason is None else f"transformers' own ({reason})"

    @property
    def has_router_loss(self) -> bool:
        """True if the configuration enables the load-balancing loss of a mixture of experts."""
        return getattr(self.model.config, "output_router_logits", False)

    def choose_attention(self, device: torch.device, dtype: torch.dtype, *, flash_4: bool = False) -> None:
        """Install `packed_attention` if the model supports it; call after loading. `dtype`: attention's."""
        with high_precision_linears(self):
            arguments = self.model, self, device, dtype
            self.attention_fallback = install_packed_attention(*arguments, flash_4=flash_4)

    def use_fp8_lm_head(self) -> None:
        """Run the LM head's GEMMs in FP8, see `loss_fp8`."""
        self.fp8_lm_head = True
        self.model.get_output_embeddings().fp8_recipe = LM_HEAD_RECIPE  # read by the coverage table

    def compile_blocks(self, **options: Any) -> None:
        """Compile each decoder layer's forward with these options of torch.compile.

        Compiling `forward` instead of the module keeps hooks (FSDP's all-gather) and recomputation outside
        the graph. Layers of one kind then share a graph, and recomputation in backward reuses it.
        """
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, COMPILED_VARIANTS)
        for block in self.blocks:
            block.forward = torch.compile(block.forward, **options)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> TokenLoss:
        """Return loss and correct predictions, summed over label tokens; inputs: `data.collate.Batch`."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        # Plain causal attention is faster, and correct if each row is one sequence.
        several = cu_seqlens is not None and len(cu_seqlens) > len(input_ids) + 1  # sequences in some row
        if self.attention_fallback is None and several:
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # one graph for any number of samples
            inputs |= sequence_boundaries(cu_seqlens, max_seqlen)
        if not self.known_family:
            output = self.model(**inputs)
            result = logits_cross_entropy(output.logits.flatten(0, 1), labels.flatten())
            return self._add_router_loss(result, output, labels) if self.training else result
        hidden = self.model.get_decoder()(**inputs).last_hidden_state.flatten(0, 1)  # [T, D]
        head = self.model.get_output_embeddings()
        head_loss = linear_cross_entropy_fp8 if self.fp8_lm_head else linear_cross_entropy
        return head_loss(hidden, head.weight, labels.flatten())

    def _add_router_loss(self, result: TokenLoss, output: Any, labels: Tensor) -> TokenLoss:
        """Add the load-balancing loss of a mixture of experts, times the number of label tokens.

        The loss is a sum over label tokens.
        """
        balance = getattr(output, "aux_loss", None)
        weight = router_loss_weight(self.model)
        if weight == 0 or (balance is None and not self.has_router_loss):
            return result
        if weight is None or not isinstance(balance, Tensor):
            reason = "its config.json has no router_aux_loss_coef" if weight is None else "it returns none"
            reason = f"the load-balancing loss of its router is unavailable ({reason})"
            way = "set output_router_logits to false in its config.json"
            raise bad_setting(f"{reason}; {way}", model_name=type(self.model).__name__)
        return result._replace(loss=result.loss + weight * (labels != IGNORE).sum() * balance)


def _recomputed(forward: Callable, reentrant: bool, hidden: Tensor) -> Tensor:
    """Run `forward`; in training, run it again in backward instead of keeping its activations."""
    if not torch.is_grad_enabled():
        return forward(hidden)
    return checkpoint(forward, hidden, use_reentrant=reentrant)


def router_loss_weight(model: nn.Module) -> float | None:
    """Return the coefficient of the router's loss, from the model or else its configuration, or None."""
    names = ("router_aux_loss_coef", "aux_loss_coef")
    weights = (getattr(owner, name, None) for owner in (model, model.config) for name in names)
    return next((weight for weight in weights if weight is not None), None)


@contextmanager
def high_precision_linears(model: nn.Module) -> Iterator[None]:
    """Run FP8 linear layers in high precision inside this context."""
    fp8_linears = [m for m in model.modules() if hasattr(m, "fp8_recipe")]
    for module in fp8_linears:
        module.forward = partial(_plain_linear, module)
    try:
        yield
    finally:
        for module in fp8_linears:
            del module.forward


def _plain_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    weight = module.weight
    if hasattr(weight, "to_original_precision"):  # FP8 all-gather
        weight = weight.to_original_precision()
    return F.linear(hidden, weight, module.bias)


def parameters_on_meta() -> AbstractContextManager[None]:
    """Create parameters on the meta device, but buffers with storage: weight files do not contain them."""

    def on_meta(register: Callable) -> Callable:
        def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta:
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            register(module, name, parameter)

        return register_on_meta

    return PARAMETERS_ON_META.on(on_meta)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized storage for parameters on the meta device, move buffers, and tie weights."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    model.tie_weights()


def hf_state(model: HFCausalLM, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their Hugging Face names, tied weights once, without adapters."""
    parameters, tied = dict(model.model.named_parameters()), tied_names(model.model)
    for name, tensor in model.model.state_dict().items():
        if name not in tied and not is_adapter(name):
            yield name, gather([parameters[name]])[0] if name in parameters else tensor
