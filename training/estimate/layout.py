"""Sizes of context, tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import accumulate

from fp8_suite.core.errors import bad_setting, counted
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.parallel.settings import AXES


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes beside data parallelism; ranks count through tp first, then cp, data, pp."""

    cp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1  # pipeline stages per rank; several are interleaved

    @property
    def slices(self) -> int:
        """Number of ranks over which one copy of the weights is split."""
        return self.tp * self.pp

    @property
    def flags(self) -> dict[str, int]:
        """Values other than 1, by flag."""
        values = zip((*AXES.values(), "virtual_stages"), astuple(self), strict=True)
        return {name: value for name, value in values if value > 1}

    def bubble(self, micro_batches: int) -> float:
        """Return the idle time of a rank, in times of its micro-batches (arXiv:2104.04473, section 2.2)."""
        return (self.pp - 1) / (self.virtual * micro_batches)

    def is_filled(self, micro_batches: int) -> bool:
        """True if a step has enough micro-batches for the pipeline's schedule."""
        return micro_batches >= self.pp and (self.virtual == 1 or micro_batches % self.pp == 0)

    def in_flight(self, stage: int, micro_batches: int) -> float:
        """Return the micro-batches whose activations a rank keeps, under (interleaved) 1F1B."""
        later = self.pp - 1 - stage  # ranks after this one
        if self.virtual == 1:
            return min(micro_batches, later + 1)
        stages = (self.virtual - 1) * self.pp + 2 * later + 1
        return min(micro_batches, stages / self.virtual)


SHORTEST_PART = 2048  # tokens of a sequence per rank of context parallelism, for choices and advice


def check_layout(layout: Layout, shape: ModelShape, gpus_per_node: int, length: int) -> None:
    """Raise UserError for sizes that do not divide the model, its sequences or the GPUs of a node."""
    layers, per_rank = shape.num_layers, -(-shape.num_layers // layout.pp)
    splits = (gpus_per_node, shape.num_kv_heads, shape.ffn_hidden_size // 16, shape.vocab_size)
    if any(size % layout.tp for size in splits):
        reason = "must divide the {} GPUs of a node, {} key/value heads, {} x 16 feed-forward features and "
        reason += "the vocabulary of {}; use a divisor"
        raise bad_setting(reason.format(*splits), tensor_parallel_size=layout.tp)
    if layout.cp > 1 and length % (2 * layout.cp):
        reason = f"twice the size must divide the {length} tokens of a sequence; use a divisor"
        raise bad_setting(reason, context_parallel_size=layout.cp)
    if layout.pp > layers:
        reason = f"the model has {layers} layers; use at most as many"
        raise bad_setting(reason, pipeline_parallel_size=layout.pp)
    if per_rank % layout.virtual:
        reason = f"must divide the {counted(per_rank, 'layer')} of a pipeline rank; use a divisor"
        raise bad_setting(reason, virtual_stages=layout.virtual)


def pipeline_stages(layout: Layout, layers: int, rank: int) -> tuple[range, ...]:
    """Return the layers of each stage of a pipeline rank; () without a pipeline."""
    if layout.pp == 1:
        return ()
    total = layout.pp * layout.virtual
    ends = list(accumulate((stage_layers(layers, total, stage) for stage in range(total)), initial=0))
    return tuple(range(ends[stage], ends[stage + 1]) for stage in range(rank, total, layout.pp))


def check_pipeline(layout: Layout, layers: int, micro_batches: int) -> None:
    """Raise UserError if layers, or micro-batches of the first step, are too few for its stages."""
    pp, virtual = layout.pp, layout.virtual
    if layers < pp * virtual:
        raise bad_setting(f"the model has {layers} layers; use at most as many stages", **layout.flags)
    if not layout.is_filled(micro_batches):
        accumulation = max(1, round(micro_batches / pp)) * pp
        reason = f"a step needs {'a multiple of' if virtual > 1 else 'at least'} {pp} micro-batches, and the "
        reason += f"first has {micro_batches}; use --gradient_accumulation_steps {accumulation} (with "
        reason += "--batch_ramp: more tokens), or a smaller --batch_size"
        raise bad_setting(reason, pipeline_parallel_size=pp)


def stage_layers(layers: int, ranks: int, stage: int) -> int:
    """Return the layers of a pipeline rank. The last and the first have fewer if some must: see Llama 3.

    The LM head and the embedding make up for them (arXiv:2407.21783, section 3.3.2).
    """
    most = -(-layers // ranks)
    order = [ranks - 1, 0, *range(ranks - 2, 0, -1)]  # ranks in the order in which they have a layer less
    return most - (order.index(stage) < ranks * most - layers)
