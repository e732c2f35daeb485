"""Wrapper of a transformers model with the same interface as the TE model.

B rows, S tokens per row, T = B*S tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError, bad_setting
from fp8_suite.core.patches import PARAMETERS_ON_META
from fp8_suite.core.recipes import LM_HEAD_RECIPE
from fp8_suite.te_models.kernels.loss import IGNORE, TokenLoss, linear_cross_entropy, logits_cross_entropy
from fp8_suite.te_models.kernels.loss_fp8 import linear_cross_entropy_fp8
from fp8_suite.te_models.kernels.packed_attention import install_packed_attention, sequence_boundaries
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
        self.uses_all_parameters = self.plain_head = known_family
        self.fp8_lm_head = False
        # Reason that transformers' own attention runs; None if `packed_attention` runs.
        self.attention_fallback: str | None = None
        self._enable_recomputation(recompute, reentrant)

    def _enable_recomputation(self, recompute: str, reentrant: bool) -> None:
        """Recompute whole layers (`layer`, `full`) or MLPs (`mlp`) through torch's checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        name, levels = type(self.model).__name__, recompute_levels(recompute, len(self.blocks))
        whole = [level in ("layer", "full") for level in levels]
        if "mlp" in levels and not self.plain_head:
            raise bad_setting(f"the MLP of {name} is unknown; choose layer", recompute=recompute)
        if any(whole) and not self.model.supports_gradient_checkpointing:
            reason = f"{name} does not support activation checkpointing; drop it"
            raise bad_setting(reason, recompute=recompute)
        if any(whole) and reentrant and self.has_router_loss:
            raise bad_setting(
                f"under DeepSpeed ZeRO-3 (such as ds_zero3), the router of {name} would get no gradient from "
                "its load-balancing loss (output_router_logits in its config.json); drop it, or use "
                "--sharding_mode fsdp_full",
                recompute=recompute,
            )
        if any(whole):
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for block, level, is_whole in zip(self.blocks, levels, whole, strict=True):
            if any(whole) and not is_whole:
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
        return self.model.config._attn_implementation if reason is None else f"transformers' own ({reason})"

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
        if not self.plain_head:
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
            raise UserError(
                f"--model_name: the load-balancing loss of {type(self.model).__name__}'s router is "
                f"unavailable ({reason}); set output_router_logits to false in its config.json",
                flags=("model_name",),
                exit_code=EXIT_BAD_SETTING,
            )
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


SAMPLE, PERMUTED_SAMPLE = (1, 2, 3, 4, 5, 6, 7, 8), (3, 1, 4, 2, 8, 5, 6, 7)


def refuse_dependent_samples(
    model: HFCausalLM, name: str, *, packed: bool, max_length: int, sharded: bool = False
) -> None:
    """Raise UserError if a sample's loss depends on other samples or on padding. Collective if `sharded`.

    Some models silently attend to later tokens, or ignore boundaries or positions of packed samples.
    `max_length` is the length of a row. The check runs in high precision, because per-tensor FP8 scales
    depend on all samples.
    """
    kind = type(model.model).__name__
    if packed and (reason := why_not_packed(model.model.config.get_text_config(), max_length)):
        raise bad_setting(f"{kind}: in rows of {max_length} tokens {reason}; add --no_packing", packing=True)
    with high_precision_linears(model):
        if _first_half_sees_second(model, name, sharded):
            raise bad_setting(f"{kind} attends to later tokens; use a causal language model", model_name=name)
        if not packed:
            return
        if _second_half_sees_first(model, name, sharded):
            raise bad_setting(f"{kind} lets packed samples see each other; add --no_packing", packing=True)
        if _ignores_positions(model):
            reason = f"{kind} ignores that positions start at 0 in each packed sample"
            raise bad_setting(f"{reason}; add --no_packing", packing=True)


def why_not_packed(config: Any, length: int) -> str | None:
    """Return why transformers treats samples in a row of `length` tokens otherwise than alone, or None."""

    def exceeded(owner: Any, name: str) -> bool:
        limit = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        return limit is not None and limit < length

    if exceeded(config, "attention_chunk_size"):
        return "it cuts rows, not samples, into chunks of attention (attention_chunk_size)"
    if getattr(config, "attn_temperature_tuning", False) and exceeded(config, "floor_scale"):
        return "it scales attention by the position in the row, not in the sample (attn_temperature_tuning)"
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        is_dynamic = rope.get("rope_type") == "dynamic" and exceeded(config, "max_position_embeddings")
        is_long = rope.get("rope_type") == "longrope" and exceeded(rope, "original_max_position_embeddings")
        if is_dynamic or is_long:
            return f"its {rope['rope_type']} RoPE depends on the longest sample of a batch"
    return None


def _first_half_sees_second(model: HFCausalLM, name: str, sharded: bool) -> bool:
    def loss(second: tuple) -> Tensor:
        return _loss_of_half(model, SAMPLE, second, scored=0, packed=False)

    return _depends_on(model, loss, slice(8, 16), name, sharded)


def _second_half_sees_first(model: HFCausalLM, name: str, sharded: bool) -> bool:
    def loss(first: tuple) -> Tensor:
        return _loss_of_half(model, first, SAMPLE, scored=1)

    return _depends_on(model, loss, slice(0, 8), name, sharded)


@torch.no_grad()
def _ignores_positions(model: HFCausalLM) -> bool:
    """True if positions have no effect, as in a model that counts tokens from the start of the row."""
    losses = [_loss_of_half(model, SAMPLE, SAMPLE, scored=1, stride=stride) for stride in (1, 3)]
    return bool(losses[0] == losses[1])


def _loss_of_half(
    model: HFCausalLM, first: tuple, second: tuple, *, scored: int, packed: bool = True, stride: int = 1
) -> Tensor:
    """Return the loss of the first (0) or second (1) half of a row [1, 16]: one sample, or two if packed."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*first, *second]], device=device)
    labels = torch.full((1, 16), IGNORE, device=device)
    labels[0, 8 * scored : 8 * scored + 7] = torch.arange(1, 8, device=device)
    if not packed:
        return model(ids, labels, torch.arange(16, device=device)[None]).loss
    positions = stride * torch.arange(8, device=device).repeat(2)[None]  # [1, 16]
    return model(ids, labels, positions, torch.tensor([0, 8, 16], dtype=torch.int32, device=device), 8).loss


def _depends_on(
    model: HFCausalLM, loss_of_half: Callable[[tuple], Tensor], other: slice, name: str, sharded: bool
) -> bool:
    """True if the loss of one half of a row depends on the tokens of the `other` half.

    Permuting the other half must not change the loss. The permutation includes both ends, because a short
    convolution may reach no further. A mixture of experts may only round differently, so a changed loss is
    confirmed by its gradient with respect to the other half.
    """
    with torch.no_grad():
        loss, permuted = loss_of_half(SAMPLE), loss_of_half(PERMUTED_SAMPLE)
    if not torch.isfinite(loss):
        raise bad_setting(
            f"its loss is {loss.item()}, so its weights or config.json are damaged; download it again",
            model_name=name,
        )
    changed = (loss != permuted).int()
    if sharded:  # the backward pass below is collective
        dist.all_reduce(changed, dist.ReduceOp.MAX)
    if not changed:
        return False
    embedded: list[Tensor] = []

    def detach(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    try:
        embedding = model.model.get_input_embeddings()
    except NotImplementedError:  # custom code without this method: a changed loss is enough
        return True
    with embedding.register_forward_hook(detach):
        (gradient,) = torch.autograd.grad(loss_of_half(SAMPLE), embedded)  # [1, 16, D]
    return bool(gradient[:, other].any())


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
    """Allocate uninitialized storage for parameters on the meta device, and tie weights again."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    model.tie_weights()


def hf_state(model: HFCausalLM, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their Hugging Face names, tied weights once."""
    parameters, tied = dict(model.model.named_parameters()), tied_names(model.model)
    for name, tensor in model.model.state_dict().items():
        if name not in tied:
            yield name, gather([parameters[name]])[0] if name in parameters else tensor
