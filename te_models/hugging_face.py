"""The model as transformers implements it, behind the same call as the TE model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core.recipes import LM_HEAD_RECIPE
from te_models.loss import IGNORE, TokenLoss, linear_cross_entropy, logits_cross_entropy
from te_models.packed_attention import NAME, sequence_borders, use_packed_attention
from te_models.weights import Gather

# Variants of a layer: training and evaluation, whole and last batches, packed or one sample a row.
COMPILED_VARIANTS = 64


class HFCausalLM(nn.Module):
    """Wraps an AutoModelForCausalLM: token ids in, summed token loss out, as in `TECausalLM.forward`.

    Packed samples are kept apart by `packed_attention` where `choose_attention` found that it can be, else by
    transformers itself, from `position_ids` that restart. `known`: a family whose logits are
    `lm_head(hidden)` and whose parameters all get a gradient of every text. Others may scale or cap their
    logits, and keep their own head, and may hold parameters that text never reaches, as those for images.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        known: bool = False,
        gradient_checkpointing: bool = False,
        reentrant: bool = False,
    ):
        super().__init__()
        self.model = model
        self.plain_head = self.uses_all_parameters = known
        self.fp8_lm_head = False
        self.own_attention: str | None = "not chosen yet"  # why transformers' own attention runs, or None
        if gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ValueError(
                    f"--gradient_checkpointing: {type(model).__name__} does not support it; drop it"
                )
            if reentrant and self.asks_for_balance:
                raise ValueError(
                    "--gradient_checkpointing: under DeepSpeed's stage 3, as in ds_zero3, the router "
                    f"of {type(model).__name__} would get no gradient of its balancing loss, which "
                    "output_router_logits in its config.json asks for; drop it, or take "
                    "--sharding_mode fsdp_full"
                )
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers: the longest ModuleList outside of any other (experts are lists in layers)."""
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        inner = {id(m) for whole in lists for layer in whole for m in layer.modules()}
        return list(max((m for m in lists if id(m) not in inner), key=len, default=[]))

    @property
    def attention(self) -> str:
        """What keeps packed samples apart, for the run's records."""
        return NAME if self.own_attention is None else f"transformers' own ({self.own_attention})"

    @property
    def asks_for_balance(self) -> bool:
        """Whether the configuration of a mixture of experts asks for its router's balancing loss."""
        return getattr(self.model.config, "output_router_logits", False)

    def choose_attention(self, device: torch.device, dtype: torch.dtype) -> None:
        """Find out, with weights in place, which attention runs; `dtype` is the one it computes in."""
        self.own_attention = None  # so that `forward` hands borders on
        with high_precision_linears(self):
            self.own_attention = use_packed_attention(self.model, self, device, dtype)

    def compile_blocks(self, **options: Any) -> None:
        """Compile each decoder layer's forward; `options` of torch.compile.

        The forward, not the call: hooks (FSDP gathers weights in them) and recomputation stay outside. So
        layers of a kind share one graph, and a layer that is run again in backward finds it.
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
        """Summed loss and correct predictions over label tokens; inputs as in `data.Batch`."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        # With as many sequences as rows every row is one, which plain causal attention computes faster.
        if self.own_attention is None and cu_seqlens is not None and len(cu_seqlens) > len(input_ids) + 1:
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # one graph for any number of samples
            inputs |= sequence_borders(cu_seqlens, max_seqlen)
        if not self.plain_head:
            output = self.model(**inputs)
            found = logits_cross_entropy(output.logits.flatten(0, 1), labels.flatten())
            balance = getattr(output, "aux_loss", None)  # of a router
            if not self.training or (balance is None and not self.asks_for_balance):
                return found
            weight = balance_weight(self.model)
            if weight == 0:
                return found
            if weight is None or not isinstance(balance, Tensor):
                lost = "its config.json has no router_aux_loss_coef" if weight is None else "it computes none"
                raise ValueError(
                    f"--model_name: the balancing loss of {type(self.model).__name__}'s router cannot count "
                    f"({lost}); set output_router_logits to false in its config.json"
                )
            return found._replace(loss=found.loss + weight * (labels != IGNORE).sum() * balance)
        hidden = self.model.get_decoder()(**inputs).last_hidden_state.flatten(0, 1)  # [T, D]
        head = self.model.get_output_embeddings()
        if self.fp8_lm_head:
            head.fp8_recipe = LM_HEAD_RECIPE  # for the coverage table
        return linear_cross_entropy(hidden, head.weight, labels.flatten(), fp8=self.fp8_lm_head)


def balance_weight(model: nn.Module) -> float | None:
    """The coefficient of a router's loss; where a model keeps it itself, that is what transformers uses."""
    names = ("router_aux_loss_coef", "aux_loss_coef")
    kept = (getattr(place, name, None) for place in (model, model.config) for name in names)
    return next((weight for weight in kept if weight is not None), None)


def refuse_leaking_packing(model: HFCausalLM, name: str, *, sharded: bool = False) -> None:
    """ValueError if this model lets a packed sample see the one before it. Collective if it is `sharded`.

    Not every implementation keeps to the borders of sequences, and those that do not train on other samples'
    tokens without an error. So tokens of a first sample are exchanged, up to its last, since a convolution
    may see no more of it, and the second one's loss must not notice. Experts then get other numbers of tokens
    and round otherwise: if it does, its gradient tells whether anything of the first sample reached it. In
    high precision: one scale for a whole tensor is a link between samples, too.
    """
    device = next(model.parameters()).device
    positions = torch.arange(8, device=device).repeat(2)[None]  # [1, 16]
    labels = torch.full((1, 16), IGNORE, device=device)
    labels[0, 8:15] = torch.arange(1, 8, device=device)
    borders = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    first, exchanged = [1, 2, 3, 4, 5, 6, 7, 8], [3, 1, 4, 2, 8, 5, 6, 7]

    def loss(tokens: list[int]) -> Tensor:
        packed = torch.tensor([[*tokens, *first]], device=device)
        return model(packed, labels, positions, borders, 8).loss

    with high_precision_linears(model):
        with torch.no_grad():
            one, other = loss(first), loss(exchanged)
        if not torch.isfinite(one):
            raise ValueError(
                f"--model_name {name}: the weights give a loss of {one.item()}; they are damaged"
            )
        changed = (one != other).int()
        if sharded:  # its ranks must go the same way
            dist.all_reduce(changed, dist.ReduceOp.MAX)
        if not changed:
            return
        embedded: list[Tensor] = []

        def cut(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[0]

        try:
            embedding = model.model.get_input_embeddings()
        except NotImplementedError:  # a model's own code: nothing tells a leak from rounding
            leaks = True
        else:
            with embedding.register_forward_hook(cut):
                (gradient,) = torch.autograd.grad(loss(first), embedded)  # [1, 16, D]
            leaks = bool(gradient[:, :8].any())
    if leaks:
        raise ValueError(
            f"--packing: {type(model.model).__name__} lets packed samples see each other; add --no_packing"
        )


@contextmanager
def high_precision_linears(model: nn.Module) -> Iterator[None]:
    """Inside, linear layers that compute in FP8 are plain ones."""
    special = [m for m in model.modules() if hasattr(m, "fp8_recipe")]
    for module in special:
        module.forward = partial(_plain_linear, module)
    try:
        yield
    finally:
        for module in special:
            del module.forward


def _plain_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    weight = module.weight
    if hasattr(weight, "to_original_precision"):  # gathered in FP8
        weight = weight.to_original_precision()
    return F.linear(hidden, weight, module.bias)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without storage, but real buffers, which no weight file brings."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate parameters that are on the meta device, uninitialised, and tie again what that unties."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    model.tie_weights()


def tied_names(model: nn.Module) -> set[str]:
    """Names of parameters that are another one, which is named first."""
    kept = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept


def hf_state(model: HFCausalLM, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """The weights under their Hugging Face names, each tensor once (a tied head is left out)."""
    parameters, tied = dict(model.model.named_parameters()), tied_names(model.model)
    for name, tensor in model.model.state_dict().items():
        if name not in tied:
            yield name, gather([parameters[name]])[0] if name in parameters else tensor
