"""Emulated TE layers, vocabulary and checkpoints whose ranks hold parts of them, against one rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fp8_suite.te_models.decoder import layer_settings
from fp8_suite.te_models.emulation import TransformerLayer, autocast
from fp8_suite.te_models.emulation.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8_suite.te_models.kernels import loss_fp8
from fp8_suite.te_models.kernels.loss import IGNORE
from fp8_suite.te_models.kernels.loss_fp8 import cast, linear_cross_entropy_fp8
from fp8_suite.te_models.parallel.tensor_parallel import SPLIT, Region, TensorParallel
from torch import Tensor, nn

from tests.children import preload, run_ranks

preload(__name__)
D, F, H, G, K, S, B = 256, 512, 4, 2, 128, 128, 2
RECIPES = {
    "float32": (None, 1e-5),
    "delayed": (DelayedScaling(amax_history_len=4), 1e-3),  # the same scales
    "current": (Float8CurrentScaling(), 0.1),  # each part of a weight has its own scale
    "block": (Float8BlockScaling(), 1e-3),  # parts are of whole blocks
}


def parts_of(whole: dict[str, Tensor], tensor: TensorParallel) -> dict[str, Tensor]:
    """Return this rank's parts of a layer's parameters."""
    result = {}
    for name, value in whole.items():
        if name in SPLIT:
            dim, stacked = SPLIT[name]
            part = torch.empty([n // tensor.size if i == dim else n for i, n in enumerate(value.shape)])
            region = Region.of(part, dim, stacked, tensor.size, tensor.rank)
            value = region.take_columns(region.take(value))
            assert torch.equal(tensor.gather(value, region), whole[name])
        result[name] = value.clone()
    return result


def build(packed: bool, **options) -> nn.Module:
    settings = layer_settings(packed=packed) | options
    extra = {"num_gqa_groups": G, "kv_channels": K, "layernorm_epsilon": 1e-5, "qk_norm_eps": 1e-6}
    return TransformerLayer(D, F, H, **extra, params_dtype=torch.float32, device="cpu", **settings)


def results(layer: nn.Module, x: Tensor, target: Tensor, recipe, arguments: dict) -> Tensor:
    """Run two steps, as delayed scaling has better scales in the second; return the last output."""
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x, **arguments)
        (out * target).sum().backward()
    return out.detach()


def compare_layers(rank: int, folder: Path, packed: bool) -> None:
    for name in RECIPES:
        compare_layer(rank, name, packed)


def compare_layer(rank: int, name: str, packed: bool) -> None:
    recipe, tolerance = RECIPES[name]
    torch.manual_seed(0)
    tensor = TensorParallel(dist.group.WORLD)
    x, target = torch.randn(2, S, B, D).unbind()
    angles = torch.randn(S, 1, 1, K)
    arguments = {"rotary_pos_emb": angles}
    if packed:
        x, target = x.flatten(0, 1), target.flatten(0, 1)
        arguments["cu_seqlens_q"] = torch.tensor([0, 100, 128, S * B], dtype=torch.int32)
        arguments["rotary_pos_emb"] = torch.randn(S * B, 1, 1, K)
    rows = {} if packed else {"attn_input_format": "sbhd"}
    one = build(packed, **rows)
    for parameter in one.parameters():
        nn.init.normal_(parameter, std=0.05)
    many = build(packed, **rows, set_parallel_mode=True, **tensor.linear_arguments)
    many.load_state_dict(parts_of(one.state_dict(), tensor))
    whole, part = x.clone().requires_grad_(), x.chunk(2)[rank].clone().requires_grad_()
    expected = results(one, whole, target, recipe, arguments)
    out = results(many, part, target.chunk(2)[rank], recipe, arguments)

    def close(actual: Tensor, wanted: Tensor, what: str) -> None:
        error = ((actual - wanted).norm() / wanted.norm()).item()
        assert error < tolerance, f"{name}, {what}: {error:.1e}"

    close(out, expected.chunk(2)[rank], "output")
    close(part.grad, whole.grad.chunk(2)[rank], "gradient of the input")
    gradients = {name: parameter.grad for name, parameter in many.named_parameters()}
    tensor.sum_gradients([grad for name, grad in gradients.items() if name not in SPLIT])
    wanted = parts_of({name: parameter.grad for name, parameter in one.named_parameters()}, tensor)
    for key, gradient in gradients.items():
        close(gradient, wanted[key], key)
    if name == "delayed":
        for module, reference in zip(many.modules(), one.modules(), strict=True):
            for direction, state in getattr(reference, "fp8_meta", {}).items():
                if direction != "recipe":
                    torch.testing.assert_close(
                        module.fp8_meta[direction].scale, state.scale, rtol=1e-3, atol=0
                    )


@pytest.mark.parametrize("packed", [True, False])
def test_ranks_that_share_a_layer_compute_what_one_does(packed, tmp_path):
    run_ranks(compare_layers, tmp_path, packed)


def compare_fp8_heads(rank: int, folder: Path) -> None:
    loss_fp8.CHUNK_BYTES, loss_fp8.TOKENS_PER_GEMM = 1, 256  # several chunks, and several GEMMs of wgrad
    torch.manual_seed(0)
    tensor, vocabulary, tokens = TensorParallel(dist.group.WORLD), 96, 300
    weight = (torch.randn(vocabulary, D) / 16).bfloat16()
    weight[vocabulary // 2 :] *= 1.5  # parts with different amaxes
    hidden = torch.randn(tokens, D).bfloat16()
    labels = torch.randint(vocabulary, (tokens,))
    labels[::3] = IGNORE
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    expected = linear_cross_entropy_fp8(*leaves, labels)
    wanted = [grad.chunk(2)[rank] for grad in torch.autograd.grad(expected.loss, leaves)]
    parts = [leaf.detach().chunk(2)[rank].clone().requires_grad_() for leaf in leaves]
    actual = tensor.token_loss(*parts, labels, linear_cross_entropy_fp8)
    gradients = torch.autograd.grad(actual.loss, parts)
    torch.testing.assert_close(actual.loss, expected.loss)
    assert actual.correct == expected.correct > 0
    for gradient, reference in zip(gradients, wanted, strict=True):
        error = (gradient - reference).norm() / reference.norm()
        assert error < 5e-3, f"{error:.1e}"  # a rounding to BF16
    whole = cast(weight.detach())
    assert torch.equal(cast(parts[1].detach(), group=tensor.group).rows, whole.rows.chunk(2)[rank])


def test_ranks_that_share_an_fp8_head_have_the_loss_and_gradients_of_one(tmp_path):
    run_ranks(compare_fp8_heads, tmp_path)


@pytest.mark.parametrize(("dim", "stacked"), [(0, 1), (0, 2), (1, 1)])
def test_the_pieces_of_all_ranks_are_the_whole(dim, stacked):
    size, whole = 3, torch.arange(24 * 6).view(24, 6)
    joined, parts = torch.full_like(whole, -1), []
    for rank in range(size):
        shape = torch.empty([n // size if i == dim else n for i, n in enumerate(whole.shape)])
        region = Region.of(shape, dim, stacked, size, rank)
        parts.append(region.take_columns(region.take(whole)))
        for start, stop in ((0, 3), (3, 8), (8, 24)):  # shards of the part
            for rows, first in region.pieces(start, min(stop, len(shape))):
                piece, column = parts[-1][rows], region.first_column
                joined[first : first + len(piece), column : column + piece.shape[1]] = piece
    assert torch.equal(joined, whole) and torch.equal(region.join(parts), whole)
