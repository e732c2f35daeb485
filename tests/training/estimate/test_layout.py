"""Slices of a model, and the memory and time of tensor, context and pipeline parallelism, by hand."""

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.training.estimate import memory
from fp8_suite.training.estimate.activations import backward_buffers, layer_activations
from fp8_suite.training.estimate.layout import Layout, check_layout, stage_layers
from fp8_suite.training.estimate.setup import TrainingSetup, rank_setups
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.estimate.transfers import (
    EXPOSED,
    LINK_SHARE,
    context_seconds,
    exchange,
    pipeline_seconds,
    tensor_seconds,
)

from tests.training.estimate.setups import SHAPES, setup_of

H100 = GPUS["H100"]
LINK = H100.link_bandwidth * LINK_SHARE
NETWORK = 50e9
TOKEN = 2 * 8192  # bytes of a token's hidden values: Llama 70B


def split(layout: Layout, gpus: int = 64, mode: str = "fsdp_grad", **settings) -> TrainingSetup:
    defaults = {"mixed_precision": "bf16", "batch_size": 1, "gradient_accumulation_steps": 16}
    return setup_of(70.0, mode, gpus, **defaults | layout.flags | settings)


def test_pipeline_ranks_share_the_layers_and_the_first_and_last_have_fewer():
    layers = [stage_layers(126, 16, stage) for stage in range(16)]
    assert layers == [7, *[8] * 14, 7]
    assert [stage_layers(80, 8, stage) for stage in range(8)] == [10] * 8
    assert sum(stage_layers(9, 8, stage) for stage in range(8)) == 9


def test_slices_add_up_to_the_model():
    setup = split(Layout(tp=4, pp=4))
    first, second, last = rank_setups(setup)
    assert (first.gpus, first.gpus_per_node, first.data_ranks, setup.data_ranks) == (4, 2, 4, 4)
    total = 4 * (first.model.parameters + 2 * second.model.parameters + last.model.parameters)
    assert total == pytest.approx(setup.model.parameters, rel=1e-4)
    assert (
        4 * sum(rank.model.gemm_weights for rank in (first, second, second, last)) == setup.model.gemm_weights
    )
    assert [rank.has_head for rank in (first, second, last)] == [False, False, True]
    assert memory.loss_peak(first) == 0 < memory.loss_peak(last)
    state = sum(memory.state(first).values())
    assert state == pytest.approx(12 * first.model.parameters / 4)
    assert memory.resident_state(setup) == pytest.approx(14 * first.model.parameters / 4)


def test_recomputed_layers_are_spread_over_the_stages():
    setup = split(Layout(pp=8), recompute="layer:40")
    assert [rank.recompute for rank in rank_setups(setup)] == [["layer"] * 5 + ["none"] * 5] * 3


@pytest.mark.parametrize(
    ("layout", "micro_batches", "first", "last", "bubble"),
    [
        (Layout(), 4, 1, 1, 0),
        (Layout(pp=4), 16, 4, 1, 3 / 16),
        (Layout(pp=4), 2, 2, 1, 3 / 2),
        # Chunks of half a rank's layers: 4 + 2 x 3 + 1 on the first rank, 4 + 1 on the last.
        (Layout(pp=4, virtual=2), 16, 11 / 2, 5 / 2, 3 / 32),
    ],
)
def test_micro_batches_in_flight_and_the_bubble(layout, micro_batches, first, last, bubble):
    assert layout.in_flight(0, micro_batches) == first
    assert layout.in_flight(layout.pp - 1, micro_batches) == last
    assert layout.bubble(micro_batches) == bubble


def test_activations_per_rank():
    """Per layer: five hidden widths, q, k, v, attention, and three feed-forward widths, in BF16."""
    whole = 8192 * 2 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 3 * 28_672)
    assert layer_activations(split(Layout())) == whole
    (rank,) = rank_setups(split(Layout(tp=8, cp=2)))
    assert layer_activations(rank) == whole / 16
    parts = memory.at_loss(rank_setups(split(Layout(pp=4)))[0])
    assert parts["activations"] == 4 * 20 * whole


def test_tensor_parallelism_waits_for_its_transfers():
    (rank,) = rank_setups(split(Layout(tp=8)))
    # Six transfers of 8,192 tokens block, four overlap; the head has half as many.
    moved = (80 + 0.5) * (6 + 4 * EXPOSED) * 8192 * TOKEN * 7 / 8
    assert tensor_seconds(rank, H100) == pytest.approx(moved / LINK)
    (fp8,) = rank_setups(split(Layout(tp=8), mixed_precision="fp8"))
    assert 0.6 < tensor_seconds(fp8, H100) / tensor_seconds(rank, H100) < 0.75
    assert tensor_seconds(split(Layout()), H100) == 0


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "auto"])
def test_context_parallelism_hides_only_a_ring_behind_attention(kind):
    pairs = 2 * 2 * 1024 * 4096 * 80  # bytes of keys and values of 4,096 tokens
    (rank,) = rank_setups(split(Layout(cp=2), cp_comm_type=kind))
    ring = 3 * pairs / LINK
    exchange = (2 * 2 * 8192 * 4096 * 80 + pairs) / LINK  # q, output, k, v: half of them, there and back
    hidden, shown = {"p2p": (EXPOSED * ring, ring), "all_gather": (ring, ring)}.get(kind, (exchange,) * 2)
    assert context_seconds(rank, H100, NETWORK, attention=10) == pytest.approx(hidden)
    assert context_seconds(rank, H100, NETWORK, attention=0) == pytest.approx(shown)
    (rank,) = rank_setups(split(Layout(cp=2), cp_comm_type=kind, recompute="mlp"))
    assert context_seconds(rank, H100, NETWORK, attention=10) == pytest.approx(
        1.5 * exchange if kind in ("a2a", "auto") else hidden  # attention's result is kept, not its exchange
    )
    # A quarter of the heads; keys and values of 15 of 16 nodes arrive over the cards of two ranks each.
    (rank,) = rank_setups(split(Layout(cp=32, tp=4), gpus=256, max_seq_length=131_072))
    over_network = 3 * 32 * pairs / 4 * 15 / 16 / (2 * NETWORK) + 3 * 15 * 80 * 10e-6
    assert context_seconds(rank, H100, NETWORK, attention=10) == pytest.approx(over_network)


def test_gathered_keys_need_memory_in_backward():
    few, many = (split(Layout(cp=cp), max_seq_length=2**20, cp_comm_type="all_gather") for cp in (2, 64))
    assert backward_buffers(few) == 2 * 2**19 * (3 * 28_672 + 2 * 8192)
    assert backward_buffers(many) == 2 * 2**20 * 4 * 1024


def test_a_pipeline_sends_to_other_nodes_and_idles():
    setup = split(Layout(tp=8, pp=4, virtual=5))
    first = rank_setups(setup)[0]
    sent = 5 * 2 * 8192 * TOKEN / 8
    assert pipeline_seconds(first, H100, NETWORK) == pytest.approx(EXPOSED * sent / NETWORK)
    parts = step_seconds(setup, H100)
    busy = ("linear layers", "attention", "LM head", "norms, SwiGLU, adds", "tensor parallelism")
    total = sum(parts[name] for name in (*busy, "pipeline transfers"))
    assert parts["pipeline bubble"] == pytest.approx(total * 3 / (5 * 16))
    assert parts["LM head"] > 0, "the last stage has as many layers as others, and the head"


@pytest.mark.parametrize(
    ("layout", "flag"),
    [
        (Layout(tp=3), "tensor_parallel_size"),
        (Layout(tp=16), "tensor_parallel_size"),
        (Layout(cp=3), "context_parallel_size"),
        (Layout(pp=128), "pipeline_parallel_size"),
        (Layout(pp=8, virtual=3), "virtual_stages"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(layout, flag):
    check_layout(Layout(cp=2, tp=8, pp=8, virtual=5), SHAPES[70.0], 8, 8192)
    with pytest.raises(UserError) as error:
        check_layout(layout, SHAPES[70.0], 8, 8192)
    assert error.value.flags == {flag}


def test_one_rank_of_fsdp_copies_its_weights_to_gather_them():
    one, two = (rank_setups(split(Layout(tp=8, pp=8), gpus, "fsdp_full"))[0] for gpus in (64, 128))
    model = one.model
    assert two.model == model
    # Forward and backward of 16 micro-batches copy BF16 weights. FP32 sums are copied twice and cast.
    assert exchange(one).copied == (16 * 2 * 4 + 22) * model.parameters
    assert exchange(one)[:2] == (0, 0)
    # No buffer of the last gather is left at the loss; in backward, neither the next block nor buffers.
    gathered = memory.at_loss(one)["gathered, communication"]
    assert gathered == 2 * model.root_weights
    assert memory.at_loss(two)["gathered, communication"] == gathered + 2 * model.block_weights
    in_backward = memory.start_of_backward(one)["gathered, communication"]
    assert in_backward == gathered + 2 * model.block_weights


def test_gathered_activations_of_fp8_have_one_layout():
    whole, half = (
        setup_of(70.0, gpus=tp, mixed_precision="fp8", fp8_scenario="delayed", tensor_parallel_size=tp)
        for tp in (1, 2)
    )
    half = rank_setups(half)[0]
    assert layer_activations(half) == (layer_activations(whole) - 8192 * half.tokens) / 2
