"""Delayed scaling of the emulated layers: values and updates of scales, recomputation, ranks."""

import pytest
import torch
import torch.distributed as dist
from fp8_suite.te_models import emulation as te
from fp8_suite.te_models.decoder import layer_settings
from fp8_suite.te_models.emulation import recipes
from fp8_suite.te_models.emulation.casts import E4M3, E5M2
from fp8_suite.te_models.emulation.scaling import next_scales
from fp8_suite.training.precision.scaling import scaling_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.children import preload, run_ranks
from tests.training.parallel.jobs import same_bits

preload(__name__)
HIDDEN, FFN, HEADS, GROUPS = 64, 128, 4, 2
INF = float("inf")
FP8_MAX = {"scaling_fwd": 448.0, "scaling_bwd": 57344.0}


def layer(attention: str = "bshd", **options) -> te.TransformerLayer:
    torch.manual_seed(0)
    return te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=GROUPS,
        kv_channels=HIDDEN // HEADS,
        layernorm_epsilon=1e-5,
        **layer_settings(packed=attention == "thd"),
        **{"params_dtype": torch.bfloat16} | options,
    )


def rope(positions: int = 64) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 100.0 ** -torch.arange(0, 1, 2 / 16))
    return torch.cat([angles, angles], dim=-1)[:, None, None]


def inputs(seed: int, *, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 32, HIDDEN, generator=generator) * scale
    return x.bfloat16().requires_grad_()


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in scaling_state(module).items()}


class ByHand:
    """Reference of delayed scaling for one tensor in plain Python: a window of amaxes and their scale."""

    def __init__(self, steps: int, limit: float):
        self.steps, self.limit = steps, limit
        self.window: list[float] = []
        self.scale = 1.0

    def step(self, tensor: torch.Tensor) -> None:
        # One of `steps` rows is being recorded; the oldest amax still counts in the step that drops it.
        amax = tensor.detach().abs().max().item()
        self.window = [*self.window, amax][-self.steps :]
        self.scale = torch.tensor(self.limit).div(torch.tensor(max(self.window))).item()

    @property
    def history(self) -> list[float]:
        kept = self.window[-(self.steps - 1) :] if self.steps > 1 else []
        return [0.0] * (self.steps - len(kept)) + kept


@pytest.mark.parametrize("length", [1, 3])
def test_scales_match_a_hand_calculation(length):
    """Inputs and gradients of the linear layer grow and shrink, and its weight grows in each step."""
    recipe = recipes.DelayedScaling(amax_history_len=length)
    linear = te.Linear(32, 16, params_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    hand = [ByHand(length, limit) for limit in (448.0, 448.0, 57344.0)]
    for factor in (1.0, 4.0, 2.0, 0.5, 0.25, 8.0):
        x = (torch.randn(32, 32, generator=generator) * factor).bfloat16().requires_grad_()
        grad = (torch.randn(32, 16, generator=generator) / factor).bfloat16()
        with te.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.backward(grad)
        x_q, w_q = (fp8(t, one.scale, E4M3) for t, one in zip((x, linear.weight), hand, strict=False))
        g_q = fp8(grad, hand[2].scale, E5M2)
        close(y, x_q @ w_q.T)
        close(x.grad, g_q @ w_q)
        close(linear.weight.grad, g_q.T @ x_q)
        for one, tensor in zip(hand, (x, linear.weight, grad), strict=True):
            one.step(tensor)
        forward, backward = linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]
        assert forward.scale.tolist() == [hand[0].scale, hand[1].scale, 1.0]
        assert backward.scale.tolist() == [hand[2].scale, 1.0]
        assert forward.amax_history.T[:2].tolist() == [hand[0].history, hand[1].history]
        assert backward.amax_history[:, 0].tolist() == hand[2].history
        with torch.no_grad():
            linear.weight.mul_(1.5)
        linear.weight.grad = None


def fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """float64 values of a cast with `scale`, by torch's cast."""
    limit = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-limit, limit).to(dtype).double() / scale


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5 * expected.abs().max().item())


def test_with_fsdp2_backward_casts_the_weight_with_its_new_scale():
    linear = te.Linear(32, 16, params_dtype=torch.bfloat16)
    linear.fsdp2 = True
    x = inputs(0).detach().flatten(0, -2)[:, :32].requires_grad_()
    with te.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=2)):
        y = linear(x)
    grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    y.backward(grad)
    state, amax = linear.fp8_meta["scaling_fwd"], linear.weight.detach().abs().max().float()
    assert state.scale[1] == torch.tensor(448.0) / amax and state.amax_history[:, 1].tolist() == [amax, amax]
    close(x.grad, fp8(grad, 1.0, E5M2) @ fp8(linear.weight, state.scale[1].item(), E4M3))


def test_scales_of_unused_and_extreme_amaxes():
    history = torch.tensor([[0.0, 0, 0, 0, 0], [8, 8, 8, 8, 8], [2, 2, 2, 2, 2]])
    scale = torch.full((5,), 3.0)
    amax = torch.tensor([4.0, 0.0, INF, 1e-45, 16.0])
    rolled, scales = next_scales(history, amax, scale, limit=448.0)
    # An unused tensor and an infinite amax keep their scale; otherwise the oldest amax, 8, still counts.
    assert scales.tolist() == [56.0, 3.0, 3.0, 56.0, 28.0]
    assert rolled.T[:2].tolist() == [[0.0, 2.0, 4.0], [0.0, 8.0, 2.0]]
    rolled, scales = next_scales(history[:1], amax, scale, limit=448.0)
    assert scales.tolist() == [112.0, 3.0, 3.0, torch.finfo(torch.float32).max, 28.0] and not rolled.any()


def test_state_has_tes_names_and_shapes():
    """TE 2.20 has three tensors per GEMM forward and two backward; attention counts as three GEMMs."""
    module = layer()
    assert scaling_state(module) == {}
    with te.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=5)):
        module(inputs(0), rotary_pos_emb=rope())
    gemms = {"self_attention.layernorm_qkv": 1, "self_attention.core_attention": 3}
    gemms |= {"self_attention.proj": 1, "layernorm_mlp": 2}
    expected = {}
    for name, count in gemms.items():
        for direction, tensors in (("scaling_fwd", 3 * count), ("scaling_bwd", 2 * count)):
            expected[f"{name}.{direction}.scale"] = (tensors,)
            expected[f"{name}.{direction}.amax_history"] = (5, tensors)
    state = scaling_state(module)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    # Column 2 of a GEMM is its output, which is not quantized; attention has unused state.
    assert state["self_attention.proj.scaling_fwd.amax_history"][:, 2].count_nonzero() == 0
    assert state["self_attention.core_attention.scaling_fwd.scale"].tolist() == [1.0] * 9
    # Changing the recipe drops the state.
    with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
        module(inputs(0), rotary_pos_emb=rope())
    assert scaling_state(module) == {}


def test_mlp_state_has_tes_order():
    """Input and weight: fc1 0 and 1, fc2 3 and 4. Gradients of outputs: fc1 0, fc2 2."""
    mlp = te.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16)
    with torch.no_grad():
        mlp.fc1_weight[3, 5], mlp.fc2_weight[5, 3] = 2.0, -3.0
    x, recipe = inputs(0), recipes.DelayedScaling(amax_history_len=2)
    with te.autocast(enabled=True, recipe=recipe):
        y = mlp(x)
    grad = inputs(1).detach()
    y.backward(grad)
    forward, backward = (mlp.fp8_meta[name].amax_history[-1] for name in FP8_MAX)
    normed = x.float() / x.float().square().mean(-1, keepdim=True).add(1e-5).sqrt()
    assert forward[0].item() == pytest.approx(normed.abs().max().item(), rel=1e-6)
    assert forward[[1, 4]].tolist() == [2.0, 3.0] and forward[[2, 5]].tolist() == [0.0, 0.0]
    assert backward[2] == grad.abs().max() and backward[[1, 3]].tolist() == [0.0, 0.0]
    assert forward[3] > 0 and backward[0] > 0


def test_outermost_training_autocast_updates_the_scales():
    recipe, module = recipes.DelayedScaling(amax_history_len=4), layer()
    with te.autocast(enabled=True, recipe=recipe):
        with te.autocast(enabled=True, recipe=recipe):
            module(inputs(0), rotary_pos_emb=rope())
        inside = state_of(module)
        assert inside["self_attention.proj.scaling_fwd.amax_history"][0, 0] > 0
        assert inside["self_attention.proj.scaling_fwd.scale"].tolist() == [1.0] * 3
        with te.autocast(enabled=False):
            module.layernorm_mlp(inputs(0, scale=100.0))
            assert not module.layernorm_mlp.fp8
        assert same_bits(state_of(module), inside)
    moved = state_of(module)
    assert moved["self_attention.proj.scaling_fwd.amax_history"][0, 0] == 0
    assert moved["self_attention.proj.scaling_fwd.scale"][0] > 1
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        module(inputs(0, scale=50.0), rotary_pos_emb=rope())
    noted = state_of(module)
    assert all(torch.equal(moved[name], noted[name]) for name in moved if name.endswith("scale"))
    assert noted["self_attention.proj.scaling_fwd.amax_history"][0, 0] > 0  # the caller restores it


RECIPES = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(amax_history_len=3),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "block_fp32": recipes.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": recipes.MXFP8BlockScaling(),
}


def shared_amaxes(rank: int, folder) -> None:
    """Run on two ranks with different inputs; rank 1 has larger ones."""
    for mode in ("plain", "reentrant", "fsdp"):
        module = layer(params_dtype=torch.float32)
        if mode == "fsdp":
            dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
            fully_shard(module, mp_policy=policy)
        recipe = recipes.DelayedScaling(amax_history_len=4)
        for step in range(3):
            x = inputs(10 * step + rank, scale=1.0 + 7 * rank)
            with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=True, recipe=recipe):
                y = te.checkpoint(module, x, use_reentrant=mode == "reentrant", rotary_pos_emb=rope())
            y.float().square().mean().backward()
        state, states = state_of(module), [None, None]
        dist.all_gather_object(states, state)
        assert same_bits(*states)
        attention = state["self_attention.layernorm_qkv.scaling_fwd.scale"]
        assert torch.isfinite(attention).all() and attention[0] > 1
        # The gradient of fc2's output is 2 y / n; both ranks record the larger amax.
        amax = state["layernorm_mlp.scaling_bwd.amax_history"][-1, 2]
        largest = torch.tensor(2 * y.float().abs().max().item() / y.numel()).bfloat16().float()
        of_both = largest.clone()
        dist.all_reduce(of_both, dist.ReduceOp.MAX)
        assert amax == of_both and (rank == 0) == (largest < of_both)
        assert module.layernorm_mlp.fsdp2 == (mode == "fsdp")
    gradient = module.layernorm_mlp.fc2_weight.grad.to_local()
    assert gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.norm() > 0


def test_ranks_share_the_largest_amax(tmp_path):
    run_ranks(shared_amaxes, tmp_path)
