"""A causal language model made of te.TransformerLayer, one class for every family.

B batch, S sequence, T = B*S tokens, D hidden size, K head size, V vocabulary.

Precision is not decided here: the same module runs in BF16, or in FP8 under te.autocast. Embedding and final
norm always run in BF16, the LM head too unless `fp8_lm_head` is set.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.recipes import LM_HEAD_RECIPE
from te_models.engine import Backend, NativeOptions, engine
from te_models.families import FAMILIES
from te_models.kernels.fused_residual import add_in_norms
from te_models.kernels.rotation import Rotation, rotate_in_one_pass, rotation_table
from te_models.loss import TokenLoss, linear_cross_entropy


def layer_settings(attention: Literal["thd", "bshd"]) -> dict[str, Any]:
    """What every layer of every family has in common, as arguments of `te.TransformerLayer`."""
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": True,
        "self_attn_mask_type": "padding_causal" if attention == "thd" else "causal",
        "attn_input_format": attention,
    }


class TECausalLM(nn.Module):
    """Token ids in, summed token loss out; built on the meta device, filled by `weights.load_te`.

    `attention` chooses how sequences are told apart: "thd" reads packed batches (`cu_seqlens`), "bshd" reads
    right-padded batches, where the causal mask alone keeps padding out of sight of real tokens, as it does in
    packed batches whose rows are one sequence each. `backend`: whose layers, see `te_models.engine`, where
    `native` is explained, too.
    """

    def __init__(
        self,
        config: Any,
        *,
        backend: Backend,
        attention: Literal["thd", "bshd"],
        dtype: torch.dtype,
        max_positions: int,
        gradient_checkpointing: bool = False,
        reentrant: bool = False,
        weight_recipe: Any = None,
        native: NativeOptions | None = None,
    ):
        super().__init__()
        self.backend, te = backend, engine(backend)
        self.native = native or NativeOptions()
        if backend != "native":
            self.native = NativeOptions(one_pass_rotation=False)
        self.first_micro_batch: bool | None = None  # of a step, or None outside of steps
        self.config, self.family = config, FAMILIES[config.model_type]
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.tied = config.tie_word_embeddings
        self.attention, self.max_positions = attention, max_positions
        self.gradient_checkpointing, self.reentrant = gradient_checkpointing, reentrant
        self.fp8_lm_head = False
        self.rotates_in_one_pass = self.native.one_pass_rotation and not self.family.qk_norm
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device="meta", dtype=dtype)
        quantized = te.quantized_model_init(enabled=True, recipe=weight_recipe) if weight_recipe else None
        with quantized or nullcontext():
            self.layers = nn.ModuleList(self._build_layer(i, dtype) for i in range(config.num_hidden_layers))
        self.norm = te.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device="meta")
        self.lm_head = nn.Linear(
            config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype
        )
        self.register_buffer("rope", torch.empty(0), persistent=False)
        self.register_buffer("rotation", torch.empty(0), persistent=False)
        self.tie()

    def _build_layer(self, index: int, dtype: torch.dtype) -> nn.Module:
        config, te = self.config, engine(self.backend)
        size, eps = head_dim(config), config.rms_norm_eps
        qk_norm = {"qk_norm_type": "RMSNorm", "qk_norm_eps": eps, "qk_norm_before_rope": True}
        sums = {"fuse_wgrad_accumulation": True} if self.native.fuse_gradient_sums else {}
        layer = te.TransformerLayer(
            config.hidden_size,
            config.intermediate_size,
            self.heads,
            num_gqa_groups=self.groups,
            kv_channels=size,
            layernorm_epsilon=eps,
            **layer_settings(self.attention),
            layer_number=index + 1,
            params_dtype=dtype,
            device="meta",
            **(qk_norm if self.family.qk_norm else {}),
            **sums,
        )
        if self.family.qkv_bias:
            # TE's `bias` is for all linears of a layer, and only q, k and v have one.
            layer.self_attention.layernorm_qkv = te.LayerNormLinear(
                config.hidden_size,
                (self.heads + 2 * self.groups) * size,
                eps=eps,
                normalization="RMSNorm",
                bias=True,
                params_dtype=dtype,
                device="meta",
                **sums,
            )
        if self.rotates_in_one_pass:
            rotate_in_one_pass(layer)
        if self.native.residuals_in_norms:
            add_in_norms(layer)
        return layer

    def let_te_keep_fp8_weights(self) -> None:
        """To be called when sharded; with `cache_fp8_weights` they stay whole between micro-batches.

        TE casts what FSDP2 shards anew in every pass, in backward too, as if it had been resharded since.
        """
        if self.native.cache_fp8_weights:
            for module in self.modules():
                if hasattr(type(module), "is_fsdp2"):
                    module._is_fsdp2 = False  # where TE keeps the answer

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, which sharding gathers one by one."""
        return list(self.layers)

    def tie(self) -> None:
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def materialize(self, device: torch.device, parameter_device: torch.device | None = None) -> TECausalLM:
        """Allocate parameters (uninitialised) and RoPE tables; `device` is where forward passes run.

        Sharded parameters are allocated as shards, on the CPU if that is where they stay. Ties what
        `to_empty` unties.
        """
        self.to_empty(device=parameter_device or device)
        self.tie()
        self.rope = rope_angles(self.config, self.max_positions).to(device)
        self.rotation = rotation_table(self.rope)
        return self

    @torch.no_grad()
    def quantize_weights(self) -> dict[str, Tensor]:
        """Turn sharded GEMM weights, already filled, into the FP8 that `weight_recipe` asked for.

        Returns this rank's shards as they were, by name, for master weights: the quantized ones have lost
        bits. Every parameter is a new object afterwards. Collective, since shards share a scale.
        """
        before = {}
        for prefix, module in self.named_modules():
            if not getattr(module, "primary_weights_in_fp8", False):
                continue
            for name, init in module.param_init_meta.items():
                if init.fp8_meta_index is not None:
                    before[f"{prefix}.{name}"] = module.get_parameter(name).to_local().clone()
                # TE quantizes where it initialises, which must leave the values alone here.
                module.param_init_meta[name] = replace(init, init_fn=_keep, get_rng_state_tracker=None)
            module.reset_parameters()
        return before

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> TokenLoss:
        """Summed loss and correct predictions over label tokens.

        `input_ids`, `labels` [B, S] int64, labels already shifted, -100 for no loss; `cu_seqlens` int32 [N+1]
        over the B*S tokens with "thd". Positions follow from `cu_seqlens` (restarting) or from S;
        `position_ids` int64 [B, S], if given, are the same.
        """
        hidden = self.embed_tokens(input_ids)  # [B, S, D]
        in_one_pass = self.rotates_in_one_pass and position_ids is not None
        rotation = Rotation(self.rotation, position_ids.contiguous()) if in_one_pass else self.rope
        arguments: dict[str, Any] = {"rotary_pos_emb": rotation}
        if self.native.cache_fp8_weights:
            arguments["is_first_microbatch"] = self.first_micro_batch
        if self.attention == "thd" and self._one_sequence_a_row(input_ids, cu_seqlens):
            arguments["self_attn_mask_type"] = "causal"
        elif self.attention == "thd":
            hidden = hidden.flatten(0, 1)  # [T, D]
            arguments |= {
                "cu_seqlens_q": cu_seqlens,
                "cu_seqlens_kv": cu_seqlens,
                "max_seqlen_q": max_seqlen,
                "max_seqlen_kv": max_seqlen,
                "pad_between_seqs": False,  # TE would compare cu_seqlens on the host to find out
            }
        for layer in self.layers:
            hidden = self._run(layer, hidden, arguments)
        hidden = self.norm(hidden).flatten(0, -2)  # [T, D]
        if self.fp8_lm_head:
            self.lm_head.fp8_recipe = LM_HEAD_RECIPE  # for the coverage table
        return linear_cross_entropy(hidden, self.lm_head.weight, labels.flatten(), fp8=self.fp8_lm_head)

    def _one_sequence_a_row(self, input_ids: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether plain causal attention, which is faster, serves a packed batch; TE's layers are told."""
        if self.backend != "native" or cu_seqlens is None:
            return False
        plain = len(cu_seqlens) == len(input_ids) + 1
        for layer in self.layers:
            layer.self_attention.qkv_format = "bshd" if plain else "thd"
        return plain

    def _run(self, layer: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return layer(hidden, **arguments)
        # TE's checkpoint replays the first pass's FP8 scales; torch's would quantise with newer ones.
        checkpoint = engine(self.backend).checkpoint
        return checkpoint(layer, hidden, use_reentrant=self.reentrant, **arguments)


def _keep(tensor: Tensor) -> None:
    pass


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_angles(config: Any, positions: int) -> Tensor:
    """Rotary angles as TE takes them, [S, 1, 1, K] float32, from transformers' own inverse frequencies."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rotary.inv_freq.float())  # [S, K/2]
    return torch.cat([angles, angles], dim=-1)[:, None, None, :]  # [S, 1, 1, K]
