"""Time of the transfers between GPUs, of data, tensor, context and pipeline parallelism."""

from __future__ import annotations

from typing import NamedTuple

from fp8_suite.core.gpus import Gpu
from fp8_suite.training.estimate.activations import recomputed_attention
from fp8_suite.training.estimate.setup import TrainingSetup

# NCCL reaches 0.75 of NVLink's peak. Overlap hides only 0.3 of the transfer time within a node, because
# transfers share SMs and memory with the kernels (1B ddp, 8B fsdp_grad and fsdp_full on 4 GPUs).
LINK_SHARE, EXPOSED = 0.75, 0.70
# DeepSpeed ZeRO 1 and 2 copy gradients into and out of buckets and all-gather weights after the step, with
# little overlap. Copied bytes per parameter by stage, from 1B and 3B on two and four GPUs.
ZERO_COPIED = {1: 110, 2: 87}
HOP_SECONDS = 10e-6  # latency that each further node adds to a collective; assumed
NETWORK_BANDWIDTH = 50e9  # bytes/s per GPU between nodes, one direction: 400 Gbit/s; assumed


class Exchange(NamedTuple):
    """Communication of one GPU in one step, without the ring factor (n - 1) / n, and its copies."""

    within: float  # bytes within a shard group, or within the job if nothing is sharded
    across: float  # bytes between the replicas of hsdp
    copied: float  # bytes of memory traffic for copies into and out of buffers
    collectives: float  # number of collectives


def exchange(setup: TrainingSetup) -> Exchange:
    """Count the communication of one step: all-gathers of weights and reductions of gradients."""
    model, layers, stage = setup.model, setup.model.shape.num_layers, setup.mode_spec.stage
    if setup.gpus == 1:
        return Exchange(0, 0, _copied_by_one_rank(setup), 0)
    between_replicas = gradient = (4 if setup.reduces_in_fp32 and not stage else 2) * model.trained
    if setup.cfg.sharding.grad_reduce_dtype == "fp8":
        gradient = (1 + 1 / 128) * model.trained  # E4M3, and an exponent per 128 values
    if setup.mode_spec.engine == "ddp":
        return Exchange(2 * gradient, 0, 6 * model.trained, 2 * layers)
    if stage in (1, 2):
        rounds = setup.accumulation if stage == 2 else 1
        copied = ZERO_COPIED[stage] * model.parameters
        return Exchange(rounds * gradient + 2 * model.parameters, 0, copied, 2 * layers)
    gathers = 1 if setup.mode_spec.gathers_once else 2 * setup.accumulation
    weights = 2 * model.parameters - setup.gathers_fp8 * model.gemm_weights
    rounds = setup.accumulation if stage else 1
    across = 2 * between_replicas / setup.shards if setup.mode_spec.in_groups else 0.0
    copied = 4 * gathers * model.parameters + 8 * rounds * model.trained
    return Exchange(gathers * weights + rounds * gradient, across, copied, layers * (gathers + rounds))


def _copied_by_one_rank(setup: TrainingSetup) -> float:
    """Return the bytes of FSDP2's copies over one rank, as of each slice if all ranks are slices of a model.

    From torch 2.11: "gathered" weights are copies, and gradients pass through both buffers of the exchange.
    """
    if not setup.fsdp:
        return 0.0
    gathers = 1 if setup.mode_spec.gathers_once else 2 * setup.accumulation
    sums_in_fp32 = setup.accumulation > 1 and setup.cfg.sharding.grad_reduce_dtype == "fp32"
    gradient = (4 + 4) + (4 + 4) + (4 + 2) if sums_in_fp32 else (2 + 2) + (2 + 2)
    return 4 * gathers * setup.model.parameters + gradient * setup.model.trained


def _ring(data: float, members: int, in_node: int, gpu: Gpu, network: float) -> tuple[float, float, int]:
    """Return the seconds on links and on the network, and the hops, of a ring with `in_node` members a node.

    A ring over n GPUs sends (n - 1) / n of the bytes through every link. Across nodes, the GPUs of a node
    share the traffic over their network cards, and every node adds a hop.
    """
    local, nodes = min(members, in_node), -(-members // in_node)
    links = data * (local - 1) / local / (gpu.link_bandwidth * LINK_SHARE)
    return links, data * (nodes - 1) / nodes / (local * network), nodes - 1


def communication_seconds(setup: TrainingSetup, gpu: Gpu, network: float) -> float:
    """Return the seconds of FSDP's or DDP's transfers in a step, without overlap.

    `network` is bytes/s per GPU in one direction. The slower of links and network limits the transfer.
    """
    sent, per_node = exchange(setup), setup.gpus_per_node
    replicas, replicas_in_node = setup.gpus // setup.shards, max(1, per_node // setup.shards)
    across = 2 * setup.model.shape.num_layers if sent.across else 0
    # (bytes, ring size, ring members per node, collectives) of the rings within and across replicas.
    rings = [
        (sent.within, setup.gpus if setup.shards == 1 else setup.shards, per_node, sent.collectives),
        (sent.across, replicas, replicas_in_node, across),
    ]
    links = wires = hops = 0.0
    for data, members, in_node, collectives in rings:
        on_links, on_network, nodes = _ring(data, members, in_node, gpu, network)
        links += on_links
        wires += on_network
        hops += nodes * collectives
    return max(links, wires) + hops * HOP_SECONDS


def tensor_seconds(setup: TrainingSetup, gpu: Gpu) -> float:
    """Return the seconds of a micro-batch that wait for tensor parallelism's transfers, inside a node.

    With sequence parallelism (arXiv:2205.05198) a layer's forward gathers the inputs of two GEMMs and
    reduce-scatters the outputs of two; backward gathers the gradients of those outputs. GEMMs wait for these.
    Backward also gathers the two inputs again and reduce-scatters their gradients, beside GEMMs. Recomputed
    layers repeat the gathers of forward, and the reduce-scatter of an output projection that runs again. TE
    gathers in FP8 what a GEMM reads in FP8. The LM head has half of a layer's transfers, in BF16.
    """
    s, tp = setup.model.shape, setup.layout.tp
    if tp == 1:
        return 0.0

    def bytes_per_value(gathered: float) -> float:
        return (2 + 2) * gathered + 2 * 2 + EXPOSED * (2 * gathered + 2 * 2)

    gathered = 2.0 - setup.fp8_layer_share * (setup.recipe != "bf16")
    again = (1 - setup.share_of("none")) * 2 * gathered + setup.share_of("layer", "full") * 2
    moved = s.num_layers * (bytes_per_value(gathered) + again) + setup.has_head * bytes_per_value(2.0) / 2
    values = setup.tokens * s.hidden_size * (tp - 1) / tp
    return values * moved / (gpu.link_bandwidth * LINK_SHARE)


def context_seconds(setup: TrainingSetup, gpu: Gpu, network: float, attention: float) -> float:
    """Return the seconds of a micro-batch that wait for context parallelism's transfers.

    By --cp_comm_type. p2p, all_gather: ranks send each other keys and values in forward and again in
    backward, with their gradients; in a ring, beside `attention`, the seconds of its kernels. a2a: ranks
    exchange tokens for heads before attention and back after it, which kernels wait for. TE repeats it in
    every recomputed layer, because what is kept of attention is in the heads' order.
    """
    s, cp, in_node = setup.model.shape, setup.layout.cp, setup.gpus_per_node
    if cp == 1:
        return 0.0
    kind, again = setup.comm_type, recomputed_attention(setup)
    in_bf16 = 2.0 * setup.tokens * s.num_layers * s.head_dim
    pairs = 2 * s.num_kv_heads * in_bf16  # keys and values of this rank's tokens
    links, wires, hops = _ring(cp * pairs * (3 + again), cp, in_node, gpu, network)
    wire = max(links, wires) + hops * HOP_SECONDS * s.num_layers * (3 + again)
    if kind != "a2a":
        return wire if kind == "all_gather" else max(EXPOSED * wire, wire - attention)
    local = min(cp, in_node)
    passes = 3 - setup.share_of("none")
    sent = (2 * s.num_heads * in_bf16 + pairs) * passes
    links = sent * (local - 1) / cp / (gpu.link_bandwidth * LINK_SHARE)
    return max(links, sent * (cp - local) / cp / network)


def pipeline_seconds(setup: TrainingSetup, gpu: Gpu, network: float) -> float:
    """Return the seconds of a micro-batch that wait for activations and gradients between pipeline stages.

    Each rank sends its part of the tokens once per virtual stage and direction, beside other micro-batches.
    """
    layout = setup.layout
    if layout.pp == 1:
        return 0.0
    sent = 2 * layout.virtual * 2.0 * setup.tokens * setup.hidden
    crosses_nodes = setup.gpus >= setup.gpus_per_node  # ranks of a stage are next to each other
    return EXPOSED * sent / (network if crosses_nodes else gpu.link_bandwidth * LINK_SHARE)
