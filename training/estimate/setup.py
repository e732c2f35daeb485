"""Inputs of the memory and time models: settings, model size, optimizer, sharding mode, GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fp8_suite.core.recipes import costs_of
from fp8_suite.te_models.lora.settings import GEMMS, LoraConfig, projection_names
from fp8_suite.te_models.settings import recompute_levels
from fp8_suite.te_models.shape import ModelShape, matmul_parameters, projections
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.layout import Layout, stage_layers
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.parallel.settings import MODES, ModeSpec

if TYPE_CHECKING:  # imports torch
    from fp8_suite.training.optim.optimizer import OptimizerSpec


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters, and the dimensions that determine activations and gathered weights."""

    parameters: int
    shape: ModelShape | None = None  # None: only weights, gradients and optimizer state can be counted
    tied: bool = False
    qk_norm: bool = False
    adapters: int = 0  # parameters of LoRA adapters, which then train alone, in addition to `parameters`
    adapted: Mapping[str, int] = field(default_factory=dict)  # number of layers by adapted projection

    @property
    def trained(self) -> int:
        """Number of parameters that have gradients, masters and moments."""
        return self.adapters or self.parameters

    @property
    def gemm_weights(self) -> int:
        """Number of weights in the decoder's linear layers, which FP8 recipes cast."""
        return matmul_parameters(self.shape) - self.head_weights

    @property
    def head_weights(self) -> int:
        """Number of weights in the LM head."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def root_weights(self) -> int:
        """Number of weights in embedding, LM head and final norm, which FSDP gathers as one group."""
        return self.head_weights * (1 if self.tied else 2) + self.shape.hidden_size

    @property
    def block_weights(self) -> float:
        """Number of weights in one decoder layer."""
        return (self.parameters - self.root_weights) / self.shape.num_layers

    def gradients(self, weights: float) -> float:
        """Return how many gradients a group of weights has. Those of a layer's adapters are negligible."""
        return 0 if self.adapters else weights


def with_adapters(model: ModelSize, lora: LoraConfig) -> ModelSize:
    """Return the size of a model of a known family with these adapters. UserError for wrong targets."""
    if not lora.enabled:
        return model
    sizes = projections(model.shape)
    names = lora.targets(projection_names(model.shape.num_layers))
    adapted = Counter(name.rpartition(".")[2] for name in names)
    adapters = lora.lora_rank * sum(number * sum(sizes[name]) for name, number in adapted.items())
    return replace(model, adapters=adapters, adapted=adapted)


@dataclass(frozen=True)
class TrainingSetup:
    """Inputs of the memory and time models: settings, model size, optimizer, sharding mode and GPUs.

    Of one rank under tensor or pipeline parallelism (`rank_setups`), `model` is the slice that it
    holds, and `gpus` are the ranks that hold the same slice.
    """

    cfg: Config
    model: ModelSize
    optimizer: OptimizerSpec
    mode: str
    gpus: int
    gpus_per_node: int
    effective: str | None = None  # precision that runs; None: the requested one
    stage: int = 0  # pipeline stage of a slice
    model_layers: int | None = None  # layers of the whole model, if `model` is a slice

    @property
    def layout(self) -> Layout:
        return Layout(**self.cfg.sharding.layout)

    @property
    def mode_spec(self) -> ModeSpec:
        return MODES[self.mode]

    @property
    def shards(self) -> int:
        """Number of parts of the optimizer state, one per GPU; 1 if every GPU has all of it."""
        if self.mode_spec.in_groups:
            return self.cfg.sharding.shard_size(self.gpus, self.gpus_per_node)
        return self.gpus if self.mode_spec.engine in ("fsdp", "zero") else 1

    @property
    def fsdp(self) -> bool:
        """True if FSDP2 shards the model."""
        return self.mode_spec.engine == "fsdp"

    @property
    def caches_by_stream(self) -> bool:
        """True if FSDP2 allocates on streams of its own, whose cached memory others get only by a flush."""
        return self.fsdp and self.gpus > 1

    @property
    def exchanges_sums(self) -> bool:
        """True for DDP with FP32 sums of micro-batches: ranks exchange those, after the last micro-batch."""
        in_fp32 = self.cfg.sharding.grad_reduce_dtype == "fp32"
        return self.mode_spec.engine == "ddp" and in_fp32 and self.accumulation > 1

    @property
    def reduces_in_fp32(self) -> bool:
        """True if gradients are sent in FP32: not between ranks of one node, which exchange BF16 and sum it.

        They do so without sums of micro-batches and copies of the shards (`FSDP.shard`, DDP's hook).
        """
        sums = self.exchanges_sums or (self.fsdp and self.accumulation > 1)
        has_copies = self.mode_spec.in_groups and self.shards < self.gpus
        exchanges_bf16 = self.nodes == 1 and not sums and not has_copies
        return self.cfg.sharding.grad_reduce_dtype == "fp32" and not exchanges_bf16

    @property
    def fuses_gradient_sums(self) -> bool:
        """True if TE's wgrad GEMMs add to the sums of micro-batches (`training.optim.accumulation`)."""
        if self.accumulation == 1 or not self.cfg.model.use_te or self.cfg.lora.enabled:
            return False
        if self.fsdp:
            return not self.gathers_fp8
        in_buckets = self.mode_spec.engine == "ddp" and self.layout.pp == 1 and not self.exchanges_sums
        return self.optimizer.kind == "fused_adamw" and not in_buckets

    @property
    def accumulates_in_zero1(self) -> bool:
        """True for ZeRO 1 with accumulation: DeepSpeed then keeps unsharded FP32 gradients on every GPU."""
        return self.mode_spec.stage == 1 and self.accumulation > 1

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one GPU."""
        return self.cfg.optim.batch_size * self.cfg.data.max_seq_length // self.layout.cp

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that train on different sequences."""
        slices = 1 if self.model_layers else self.layout.slices
        return self.gpus // (self.layout.cp * slices)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step on all GPUs. Ranks of tensor and pipeline parallelism train on the same."""
        optim, length = self.cfg.optim, self.cfg.data.max_seq_length
        return optim.batch_size * length * self.accumulation * self.data_ranks

    @property
    def comm_type(self) -> str | None:
        """How the ranks of a sequence attend (TE's `cp_comm_type`), or None without context parallelism."""
        if self.layout.cp == 1:
            return None
        from fp8_suite.training.parallel.context_parallel import comm_type  # here because it imports torch

        shape = self.model.shape if self.model_layers else self.model.shape.part(self.layout.tp)
        return comm_type(self.cfg.sharding, shape, "native")

    @property
    def hidden(self) -> float:
        """Hidden values of a token per rank; sequence parallelism splits the tokens between layers' GEMMs."""
        return self.model.shape.hidden_size / self.layout.tp

    @property
    def gathers_rows(self) -> bool:
        """True if tensor parallelism gathers FP8 inputs of GEMMs in one layout, which backward transposes."""
        return self.layout.tp > 1 and costs_of(self.recipe).gathers_rows

    @property
    def has_head(self) -> bool:
        """True if this rank computes the loss."""
        return self.stage == self.layout.pp - 1 or self.model_layers is None

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations are kept when this rank's backward begins."""
        return self.layout.in_flight(self.stage, self.accumulation)

    @property
    def accumulation(self) -> int:
        """Micro-batches per step, at the end of a ramp."""
        return self.cfg.optim.gradient_accumulation_steps

    @property
    def batches(self) -> BatchSchedule:
        return BatchSchedule.of(self.cfg, self.data_ranks)

    @property
    def recompute(self) -> list[str]:
        """Level of recomputation of each decoder layer. Pipeline stages have the same share of each level."""
        layers = self.model.shape.num_layers
        levels = recompute_levels(self.cfg.model.recomputation, self.model_layers or layers)
        return [levels[i * len(levels) // layers] for i in range(layers)] if self.model_layers else levels

    def share_of(self, *levels: str) -> float:
        """Return the fraction of the decoder layers that are recomputed at one of these levels."""
        return sum(level in levels for level in self.recompute) / self.model.shape.num_layers

    @property
    def adapted_gemms(self) -> list[tuple[float, int, int]]:
        """Share of the layers with adapters, input and output features of each GEMM, in a layer's order."""
        sizes, gemms = projections(self.model.shape), []
        for names in GEMMS.values():
            share = max(self.model.adapted.get(name, 0) for name in names) / self.model.shape.num_layers
            gemms.append((share, sizes[names[0]][0], sum(sizes[name][1] for name in names)))
        return gemms

    @property
    def recipe(self) -> str:
        """Recipe that runs, or "bf16"."""
        requested = self.cfg.requested_recipe if self.cfg.precision.mixed_precision == "fp8" else "bf16"
        return self.effective or requested

    @property
    def fp8_layer_share(self) -> float:
        """Fraction of the decoder layers that run in the FP8 recipe."""
        settings = self.cfg.precision
        in_bf16 = settings.bf16_first_layers + settings.bf16_last_layers
        return 1 - in_bf16 / (self.model_layers or self.model.shape.num_layers)

    @property
    def gathers_fp8(self) -> bool:
        """True if FSDP all-gathers weights in FP8."""
        return self.cfg.sharding.fp8_all_gather and self.fsdp

    @property
    def fp8_share(self) -> float:
        """Fraction of the parameters that are FP8 weights."""
        held = self.optimizer.holds_fp8_weights
        return self.model.gemm_weights / self.model.parameters if held else 0.0

    @property
    def state_on_gpu(self) -> str:
        """Name of the training state that GPUs hold."""
        return "weights and gradients" if self.optimizer.offload else "weights, gradients and optimizer state"

    @property
    def offloaded_state(self) -> float:
        """Bytes per parameter of the state that --offload_optimizer streams from host memory."""
        optimizer = self.optimizer
        state = optimizer.master_bytes + optimizer.moment_bytes + 2 * self.fp8_share
        return state if optimizer.offload else 0.0

    @property
    def caches_fp8_weights(self) -> bool:
        """True if layers that are not recomputed cast their weights to FP8 once per step."""
        gathered = self.mode_spec.engine in ("none", "ddp") or self.mode_spec.gathers_once
        casts = self.cfg.model.use_te and not self.optimizer.holds_fp8_weights
        return casts and gathered and self.accumulation > 1

    @property
    def keeps_fp8_weights(self) -> bool:
        """True if layers that are not recomputed keep FP8 copies of their weights from forward to backward.

        Under FSDP2 TE casts the weights again in backward, unless the copies are cached.
        """
        kept = not self.fsdp or self.caches_fp8_weights
        return self.cfg.model.use_te and kept and not self.optimizer.holds_fp8_weights


def rank_setups(setup: TrainingSetup) -> list[TrainingSetup]:
    """Return the setups of the ranks that may need most memory or time: first, second and last stage.

    A rank is predicted as one of a smaller model: of a pipeline stage's layers, with 1/tp of the heads, of
    the feed-forward size and of the vocabulary. The ranks that hold the same slice share its state as the
    GPUs of that model, and context parallelism splits their sequences.
    """
    if setup.layout.slices == 1 or setup.model_layers:  # nothing to split, or split already
        return [setup]
    stages = sorted({0, min(1, setup.layout.pp - 1), setup.layout.pp - 1})
    return [_rank_setup(setup, stage) for stage in stages]


def _rank_setup(setup: TrainingSetup, stage: int) -> TrainingSetup:
    model, shape, layout = setup.model, setup.model.shape, setup.layout
    part = replace(shape.part(layout.tp), num_layers=stage_layers(shape.num_layers, layout.pp, stage))
    if stage not in (0, layout.pp - 1):
        part = replace(part, vocab_size=0)
    # A stage has one of embedding and LM head, as if they were tied.
    size = replace(model, shape=part, tied=model.tied or layout.pp > 1)
    layers = int(part.num_layers * model.block_weights / layout.tp)
    return replace(
        setup,
        model=replace(size, parameters=size.root_weights + layers),
        gpus=setup.gpus // layout.slices,
        gpus_per_node=max(1, setup.gpus_per_node // layout.tp),
        stage=stage,
        model_layers=shape.num_layers,
    )
