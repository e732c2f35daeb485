"""Causal language model built from te.TransformerLayer, one class for every family.

B rows, S tokens per row, T = B*S tokens, N sequences, D hidden size, K head size, P positions.

The caller chooses the precision: the same module runs in BF16, or in FP8 under te.autocast. Embedding and
final norm always run in BF16, and so does the LM head unless `fp8_lm_head` is set.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from fp8_suite.core.recipes import LM_HEAD_RECIPE
from fp8_suite.te_models.backend import te_module
from fp8_suite.te_models.families import FAMILIES, head_dim
from fp8_suite.te_models.kernels.loss import TokenLoss, linear_cross_entropy
from fp8_suite.te_models.kernels.loss_fp8 import linear_cross_entropy_fp8
from fp8_suite.te_models.kernels.rope import Rope, fuse_qkv_rope, rope_table
from fp8_suite.te_models.lora.adapters import LayerNormMLP, adapt_te, draw_dropout, freeze_base
from fp8_suite.te_models.lora.settings import GEMMS, projection_names
from fp8_suite.te_models.options import BuildOptions, NativeOptions
from fp8_suite.te_models.parallel.tensor_parallel import Region
from fp8_suite.te_models.recompute.layers import run_recomputed
from fp8_suite.te_models.recompute.offload import ActivationOffload
from fp8_suite.te_models.settings import KEPT, recompute_levels
from fp8_suite.te_models.shape import ModelShape, projections
from fp8_suite.te_models.weights import fuse_qkv
from torch import Tensor, nn


def layer_settings(*, packed: bool) -> dict[str, Any]:
    """Return the arguments of te.TransformerLayer that all families share."""
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": True,
        "self_attn_mask_type": "padding_causal" if packed else "causal",
        "attn_input_format": "thd" if packed else "bshd",
    }


def sequence_arguments(cu_seqlens: Tensor, max_seqlen: int, *, padded: bool) -> dict[str, Any]:
    """Return TE's arguments for a packed batch, whose sequences include padding if `padded`."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", *padded * ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"))
    lengths = dict.fromkeys(names, cu_seqlens) | dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max_seqlen)
    return lengths | {"pad_between_seqs": False}  # else TE compares cu_seqlens on the host, which syncs


class StageLayers(nn.ModuleList):
    """Decoder layers of this rank, by their number in the whole model."""

    def __init__(self, layers: dict[int, nn.Module]):
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        return self._modules[str(number)]


class TECausalLM(nn.Module):
    """Causal LM that returns the summed token loss; built on the meta device, filled by `weights.load_te`.

    A rank of a pipeline has the layers of its stages only: the first rank the embedding too, the last one the
    final norm and the LM head, with a copy of the embedding's weight if that is tied.

    Packed batches use TE's "thd" format, which separates sequences by `cu_seqlens`. Unpacked batches are
    right-padded and use "bshd"; the causal mask keeps tokens from attending to the padding after them.
    """

    def __init__(self, config: Any, options: BuildOptions):
        super().__init__()
        te = te_module(options.te_backend)
        self.config, self.options, self.family = config, options, FAMILIES[config.model_type]
        self.is_native = options.te_backend == "native"
        self.native_options = options.native if self.is_native else NativeOptions()
        self.tensor = options.tensor
        # The kernel reads [B, S, .] and [T, .], tensor parallelism has [S, B, .].
        fuses_qkv_rope = options.kernels.qkv_rope and not self.family.qk_norm and not self.tensor
        self.fuses_qkv_rope = self.is_native and fuses_qkv_rope
        # True in the first micro-batch of a step, False in the others, None outside of a step.
        self.first_micro_batch: bool | None = None
        self.recompute = recompute_levels(options.recompute, config.num_hidden_layers)  # level of each layer
        self.offload = ActivationOffload(options.device) if options.offload_activations else None
        self.stages = options.stages or (range(config.num_hidden_layers),)  # layers of each, on this rank
        self.embeds = self.stages[0].start == 0
        self.has_head = self.stages[-1].stop == config.num_hidden_layers
        factory_kwargs = {"device": "meta", "dtype": options.dtype}
        vocabulary, hidden_size = config.vocab_size, config.hidden_size
        vocabulary //= self.tensor.size if self.tensor else 1
        self.embed_tokens = self.norm = self.lm_head = None
        if self.embeds or (self.has_head and self.tied):  # the LM head's copy, if it is on another rank
            self.embed_tokens = nn.Embedding(vocabulary, hidden_size, **factory_kwargs)
        recipe = self.native_options.weight_recipe
        with te.quantized_model_init(enabled=True, recipe=recipe) if recipe else nullcontext():
            self.layers = StageLayers({i: self._build_layer(i) for stage in self.stages for i in stage})
        if self.has_head:
            self.norm = te.RMSNorm(hidden_size, eps=config.rms_norm_eps, **factory_kwargs)
            self.lm_head = nn.Linear(hidden_size, vocabulary, bias=False, **factory_kwargs)
        if options.lora.enabled:
            self._add_adapters()
        if options.fp8_lm_head and self.has_head:
            self.lm_head.fp8_recipe = LM_HEAD_RECIPE  # read by the coverage table
        self.register_buffer("rope", torch.empty(0), persistent=False)  # [P, 1, 1, K]
        self.register_buffer("rope_table", torch.empty(0), persistent=False)  # [P, K]
        self.tie()
        # By name, parameters of which this rank holds a part.
        self.regions: dict[str, Region] = self.tensor.regions(self) if self.tensor else {}

    def _build_layer(self, index: int) -> nn.Module:
        config, te = self.config, te_module(self.options.te_backend)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size, eps = head_dim(config), config.rms_norm_eps
        factory_kwargs: dict[str, Any] = {"params_dtype": self.options.dtype, "device": "meta"}
        if self.native_options.fuse_gradient_sums:
            factory_kwargs["fuse_wgrad_accumulation"] = True
        settings, column = layer_settings(packed=self.options.packed), {}
        if self.tensor:
            rows = {} if self.options.packed else {"attn_input_format": "sbhd"}
            settings |= rows | self.tensor.linear_arguments | {"set_parallel_mode": True}
            column = self.tensor.linear_arguments | {"parallel_mode": "column"}
        qk_norm = {"qk_norm_type": "RMSNorm", "qk_norm_eps": eps, "qk_norm_before_rope": True}
        layer = te.TransformerLayer(
            config.hidden_size,
            config.intermediate_size,
            heads,
            num_gqa_groups=groups,
            kv_channels=size,
            layernorm_epsilon=eps,
            layer_number=index + 1,
            **settings,
            **(qk_norm if self.family.qk_norm else {}),
            **factory_kwargs,
        )
        if self.family.qkv_bias:
            # TE's `bias` argument adds a bias to every linear layer; only q, k and v have one.
            layer.self_attention.layernorm_qkv = te.LayerNormLinear(
                config.hidden_size,
                (heads + 2 * groups) * size,
                eps=eps,
                normalization="RMSNorm",
                bias=True,
                **column,
                **factory_kwargs,
            )
        if self.fuses_qkv_rope:
            fuse_qkv_rope(layer)
        if context := self.options.context:
            layer.set_context_parallel_group(context.group, context.ranks, context.stream, context.comm_type)
        return layer

    def _add_adapters(self) -> None:
        config, options, te = self.config, self.options, te_module(self.options.te_backend)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        features = {name: out for name, (_, out) in projections(ModelShape.from_hf_config(config)).items()}
        rows = [features[name] for name in GEMMS["qkv"]]
        modules = {  # result of the GEMM: module, order of rows in the weight
            "qkv": (
                "self_attention.layernorm_qkv",
                lambda b: fuse_qkv(*b.split(rows), heads=heads, groups=groups),
            ),
            "output": ("self_attention.proj", lambda b: b),
            "gate_up": ("layernorm_mlp.fc1", lambda b: b),
            "down": ("layernorm_mlp.fc2", lambda b: b),
        }
        names = options.lora.targets(projection_names(len(self.layers)))
        for i, (layer, level) in enumerate(zip(self.layers, self.recompute, strict=True)):
            prefix = f"model.layers.{i}."
            targets = {name.rpartition(".")[2]: name for name in names if name.startswith(prefix)}
            if any(name.startswith(f"{prefix}mlp.") for name in targets.values()):
                factory_kwargs = {"params_dtype": options.dtype, "device": "meta"}
                layer.layernorm_mlp = LayerNormMLP(
                    te,
                    config.hidden_size,
                    config.intermediate_size,
                    eps=config.rms_norm_eps,
                    **factory_kwargs,
                )
            for result, (path, arrange) in modules.items():
                sizes = {name: features[name] for name in GEMMS[result]}
                if targets.keys() & sizes.keys():
                    settings = {"te": te, "in_place": result not in KEPT.get(level, ())}
                    adapt_te(layer, path, sizes, targets, options.lora, arrange=arrange, **settings)
        freeze_base(self)

    @property
    def blocks(self) -> list[nn.Module]:
        """Decoder layers, the units of sharding."""
        return list(self.layers)

    @property
    def tied(self) -> bool:
        """True if the LM head shares the embedding's weight."""
        return self.config.tie_word_embeddings

    @property
    def copies_embedding(self) -> bool:
        """True if the first rank of this one's pipeline has the embedding, and this one a copy of it."""
        return self.embed_tokens is not None and not self.embeds

    def tie(self) -> None:
        if self.tied and self.has_head:
            self.lm_head.weight = self.embed_tokens.weight

    def materialize(self, *, layers: bool = True) -> TECausalLM:
        """Allocate uninitialized parameters (or shards) and compute the RoPE tables.

        Without `layers`, those stay on the meta device; the model must not be sharded.
        """
        for module in (self,) if layers else (self.embed_tokens, self.norm, self.lm_head):
            module.to_empty(device=self.options.device)
        self.tie()  # to_empty() unties
        self.set_max_positions(self.options.max_positions)
        return self

    def set_max_positions(self, positions: int) -> None:
        """Compute the RoPE tables for sequences of up to this many tokens."""
        self.rope = rope_angles(self.config, positions).to(next(self.parameters()).device)
        self.rope_table = rope_table(self.rope)

    def cache_fp8_weights_under_fsdp(self) -> None:
        """Let TE cache the FP8 weights of an FSDP2 model whose weights stay gathered for a whole step.

        By default TE casts FSDP2-sharded weights in every pass, because they may have been resharded.
        """
        if not self.native_options.cache_fp8_weights:
            return
        for number, layer in self.layers.named_children():
            for module in layer.modules():
                if self.recompute[int(number)] == "none" and hasattr(type(module), "is_fsdp2"):
                    module._is_fsdp2 = False  # TE's cached answer to "is this module sharded?"

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **part: Any,
    ) -> TokenLoss | Tensor:
        """Return loss and correct predictions, summed over label tokens.

        `labels` [B, S] int64 are already shifted; -100 means no loss. Other inputs: `hidden_states`. With a
        `stage` other than the last, the result is that of `hidden_states`.
        """
        hidden = self.hidden_states(input_ids, position_ids, cu_seqlens, max_seqlen, **part)
        if part and part["stage"].stop < self.config.num_hidden_layers:
            return hidden
        if self._as_columns(input_ids, cu_seqlens):
            labels = labels.t()
        return self.token_loss(hidden, labels)

    def token_loss(self, hidden: Tensor, labels: Tensor) -> TokenLoss:
        """Return loss and correct predictions of hidden states, summed over labels in the same order."""
        head_loss = linear_cross_entropy_fp8 if self.options.fp8_lm_head else linear_cross_entropy
        if self.tensor:
            return self.tensor.token_loss(hidden, self.lm_head.weight, labels.flatten(), head_loss)
        return head_loss(hidden, self.lm_head.weight, labels.flatten())

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        *,
        stage: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the final norm's output [T, D] for `input_ids` [B, S] int64.

        With `stage`, only the layers of a pipeline's stage run. `hidden` [T, D] is the output of the stage
        before; the result is that of the stage's last layer, after the final norm in the last stage.

        `cu_seqlens` [N+1] int32: sequence boundaries in the T tokens of a packed batch. Positions are derived
        from `cu_seqlens`, or are 0 to S-1 without it; `position_ids` [B, S] int64, if given, must equal them.
        Under context parallelism T and S are of this rank's tokens, and `cu_seqlens` is of whole sequences.
        Under tensor parallelism the result is this rank's part; see `_as_columns` for the order.
        """
        stage = self.stages[0] if stage is None else stage
        as_rows = self._as_rows(input_ids, cu_seqlens)
        hidden = self._first_input(input_ids, cu_seqlens, hidden)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # with a frozen embedding; the first layer then runs as the others
        if self.training and self.options.lora.lora_dropout:
            draw_dropout(self)
        rope: Any = self.rope
        if self.fuses_qkv_rope and position_ids is not None:
            rope = Rope(self.rope_table, position_ids.contiguous())
        arguments: dict[str, Any] = {"rotary_pos_emb": rope}
        if self.options.packed and self.is_native:
            by_row = "sbhd" if self.tensor else "bshd"
            for i in stage:
                self.layers[i].self_attention.qkv_format = by_row if as_rows else "thd"
        if self.options.packed and as_rows:
            arguments["self_attn_mask_type"] = "causal"
        elif self.options.packed:
            hidden = hidden.flatten(0, -2)  # [T, D]
            arguments |= sequence_arguments(cu_seqlens, max_seqlen, padded=self.options.context is not None)
        if self.offload and torch.is_grad_enabled():
            self.offload.begin()
        for i in stage:
            hidden = self._run(self.layers[i], self.recompute[i], hidden, arguments)
        ends = stage.stop == self.config.num_hidden_layers
        return (self.norm(hidden) if ends else hidden).flatten(0, -2)

    def _first_input(self, input_ids: Tensor, cu_seqlens: Tensor | None, received: Tensor | None) -> Tensor:
        """Return the embeddings, or what a pipeline's stage `received` [T, D], in the first layer's shape.

        It is [B, S, D]; under tensor parallelism, of N ranks, [S/N, B, D] or [T/N, D].
        """
        by_column = self._as_columns(input_ids, cu_seqlens)
        if received is None and self.tensor is None:
            return self.embed_tokens(input_ids)
        if received is None:
            tokens = input_ids.t() if by_column else input_ids.flatten()
            return self.tensor.embed(self.embed_tokens, tokens)
        if self.tensor is None:
            return received.view(*input_ids.shape, -1)
        return received.unflatten(0, (-1, len(input_ids))) if by_column else received

    def _as_rows(self, input_ids: Tensor, cu_seqlens: Tensor | None) -> bool:
        """True if native attention reads a packed batch row by row: faster, if each row is one sequence."""
        if self.options.stages and self.recompute != ["none"] * len(self.recompute):
            return False  # other micro-batches may run before a layer is recomputed
        one_per_row = cu_seqlens is not None and len(cu_seqlens) == len(input_ids) + 1
        return self.is_native and one_per_row

    def _as_columns(self, input_ids: Tensor, cu_seqlens: Tensor | None) -> bool:
        """True if layers read [S, B, D]: sequence parallelism splits the first dimension among ranks."""
        by_row = self._as_rows(input_ids, cu_seqlens) or not self.options.packed
        return self.tensor is not None and by_row

    def _run(self, layer: nn.Module, level: str, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        if level != "none" and torch.is_grad_enabled():
            return run_recomputed(
                layer,
                hidden,
                level=level,
                backend=self.options.te_backend,
                checkpoint=te_module(self.options.te_backend).checkpoint,
                reentrant=self.options.reentrant,
                offload=self.offload,
                **arguments,
            )
        if level == "none" and self.native_options.cache_fp8_weights:
            arguments = arguments | {"is_first_microbatch": self.first_micro_batch}
        return layer(hidden, **arguments)


def rope_angles(config: Any, positions: int) -> Tensor:
    """Compute RoPE angles in TE's layout, [P, 1, 1, K] float32, from transformers' inverse frequencies."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rotary.inv_freq.float())  # [P, K/2]
    return torch.cat([angles, angles], dim=-1)[:, None, None, :]  # [P, 1, 1, K]
