"""Moments in 8 and 16 bits: codes, stochastic rounding, and AdamW on them."""

import pytest
import torch
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.adamw import MasterAdamW
from fp8_suite.training.optim.moments import BLOCK, FIRST, SECOND, decode, encode
from fp8_suite.training.optim.optimizer import LARGEST_BETA2_IN_BF16
from fp8_suite.training.precision.settings import MOMENT_DTYPES

DTYPES = [moments.FORMATS[name].dtype for name in ("fp8", "fp16")]
# Largest relative distance of a value from the nearest code.
ERROR = {torch.uint8: 2**-4, torch.int16: 2**-11}
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["fp8", "fp16"])


def spread(binades: float, *, signed: bool) -> torch.Tensor:
    """Values [8, 256] over this many binades below 1, with rows of quite different magnitude."""
    torch.manual_seed(0)
    values = 2.0 ** (-binades * torch.rand(8, 2 * BLOCK)) * 10.0 ** torch.arange(-28, 28, 7)[:, None]
    return values * torch.randn_like(values).sign() if signed else values


@BOTH
@SIGNED
def test_values_in_range_come_back_to_the_nearest_code(dtype, signed):
    values = spread(14, signed=signed)
    codes, exponents = encode(values, dtype, signed=signed)
    assert codes.dtype == dtype and exponents.dtype == torch.uint8 and exponents.shape == (8, 2)
    decoded = decode(codes, exponents, signed=signed)
    assert ((decoded - values).abs() <= ERROR[dtype] * values.abs()).all()
    again, same = encode(decoded, dtype, signed=signed)
    assert torch.equal(decode(again, same, signed=signed), decoded)
    assert not decode(*encode(torch.zeros(2, BLOCK), dtype, signed=signed), signed=signed).any()


@pytest.mark.parametrize("shape", [(3, 5, 2 * BLOCK), (100,), ()], ids=["matrices", "vector", "scalar"])
@pytest.mark.parametrize("saved", moments.FORMATS)
@pytest.mark.parametrize("now", moments.FORMATS)
def test_a_conversion_in_parts_equals_one_of_the_whole(saved, now, shape, monkeypatch):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    source, at_once, parts = (moments.allocate(values, FIRST, name) for name in (saved, now, now))
    moments.write_(source, FIRST, values)
    moments.write_(at_once, FIRST, moments.read(source, FIRST))
    monkeypatch.setattr(moments, "CONVERTED_AT_ONCE", 4 * BLOCK)  # 2 rows
    moments.convert_(parts, source, FIRST, torch.device("cpu"))
    assert parts.keys() == at_once.keys() and parts[FIRST].any()
    assert all(torch.equal(parts[name], at_once[name]) for name in at_once)


@SIGNED
def test_stochastic_rounding_keeps_the_mean(signed):
    """Also below the range of a first moment, where values become the smallest code or zero."""
    values = spread(20 if signed else 12, signed=signed)
    total = torch.zeros(values.shape, dtype=torch.float64)
    draws = 400
    for draw in range(draws):
        noise = moments.random_bits(values.numel(), torch.tensor(draw))[0].view_as(values)
        total += decode(*encode(values, torch.uint8, signed=signed, noise=noise), signed=signed)
    largest = values.abs().unflatten(-1, (-1, BLOCK)).amax(-1).repeat_interleave(BLOCK, -1)
    # A rounding is off by at most a step: an eighth of the value, or the smallest code.
    step = torch.maximum(values.abs() / 8, largest * 2**-15 * signed)
    assert ((total / draws - values).abs() < 5 * step / 2 / draws**0.5).all()


def test_a_second_moment_below_the_range_is_the_smallest_code():
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0] = 1.0
    decoded = decode(*encode(values, torch.uint8, signed=False), signed=False)
    assert decoded[0, 0] == 1 and (decoded[0, 1:] == 2**-31).all()


def test_the_random_bits_are_uniform_and_independent():
    first, second = moments.random_bits(2**16, torch.tensor(12345))
    bits = torch.stack([(part >> bit) & 1 for part in (first, second) for bit in range(32)]).float()
    assert ((bits.mean(1) - 0.5).abs() < 0.01).all()
    correlation = torch.corrcoef(bits) - torch.eye(64)
    assert correlation.abs().max() < 0.03
    of_next_seed, _ = moments.random_bits(2**16, torch.tensor(12346))
    assert (first == of_next_seed).float().mean() < 0.001


def optimizer(formats: tuple[str, str], *, beta2: float = 0.95, columns: int = 2 * BLOCK):
    weight = torch.nn.Parameter(torch.zeros(4, columns))
    settings = {"lr": 1e-2, "betas": (0.9, beta2), "eps": 1e-8}
    adamw = MasterAdamW([{"params": [weight]}], **settings, master_weights=True, moment_dtypes=formats)
    adamw.initialize_state(weight)
    return weight, adamw


@pytest.mark.parametrize(
    ("kind", "beta2", "left", "tolerance"),
    [
        *(("fp8", 0.999, 0.999**300, 0.03), ("fp16", 0.999, 0.999**300, 0.002), ("bf16", 0.999, 1.0, 0.2)),
        ("bf16", LARGEST_BETA2_IN_BF16, 0.05, 0.2),
    ],
)
def test_the_second_moment_decays_as_beta2_says(kind, beta2, left, tolerance):
    """After 300 steps without gradient; BF16 keeps all with a beta2 above that of the warning."""
    weight, adamw = optimizer((kind, kind), beta2=beta2)
    for step in range(301):
        weight.grad = torch.full_like(weight, float(step == 0))
        adamw.step()
    decayed = moments.read(adamw.state[weight], SECOND).float().mean().item() / (1 - beta2)
    assert decayed == pytest.approx(left, rel=tolerance)


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("fp8", "fp16"), ("fp16", "fp32"), ("bf16", "fp8")])
def test_weights_follow_those_of_fp32_moments(formats):
    (weight, adamw), (expected, plain) = optimizer(formats), optimizer(("fp32", "fp32"))
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.linspace(-3, 1, weight.shape[1])
    for _ in range(50):
        grad = torch.randn(weight.shape, generator=generator) * scale + 0.3 * scale
        weight.grad, expected.grad = grad, grad.clone()
        adamw.step()
        plain.step()
    assert (weight - expected).norm() < 0.1 * expected.norm()
    ratio = weight.mean(0) / expected.mean(0)  # small gradients do not move weights more
    assert ratio.min() > 0.7 and ratio.max() < 1.4


def test_a_step_draws_new_random_bits_and_repeats_after_a_resume():
    def train(steps: int, state=None, done: int = 0) -> dict[str, torch.Tensor]:
        weight, adamw = optimizer(("fp8", "fp8"))
        adamw.steps.fill_(done)
        for name, tensor in (state or {}).items():
            adamw.state[weight][name].copy_(tensor)
        for step in range(done, done + steps):
            weight.grad = torch.linspace(-1, 1, weight.numel()).view_as(weight) * (step + 1)
            adamw.step()
        return {name: tensor.clone() for name, tensor in adamw.state[weight].items()}

    resumed = train(3, train(2), done=2)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in train(5).items())
    assert any(not torch.equal(tensor, train(3, train(2), done=3)[name]) for name, tensor in resumed.items())


def test_parameters_draw_different_random_bits():
    weights = [torch.nn.Parameter(torch.zeros(8, 2 * BLOCK)) for _ in range(2)]
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "master_weights": False}
    adamw = MasterAdamW([{"params": [w]} for w in weights], moment_dtypes=("fp8", "fp8"), **settings)
    gradient = torch.linspace(-1, 1, weights[0].numel()).view_as(weights[0])
    for weight in weights:
        weight.grad = gradient.clone()
    adamw.step()
    for moment in (FIRST, SECOND):
        a, b = (adamw.state[weight][moment] for weight in weights)
        assert 0.2 < (a != b).float().mean() < 0.6  # a third, if the bits are independent
    drawn = [moments.random_bits(4096, seed)[0] for seed in adamw._seeds()]
    assert not set(drawn[0].tolist()) & set(drawn[1].tolist()), "not even at other elements"


def test_vectors_and_odd_rows_keep_fp32_moments():
    assert set(moments.FORMATS) == set(MOMENT_DTYPES)
    for shape in [(256,), (4, 100)]:
        assert moments.allocate(torch.zeros(shape), FIRST, "fp8")[FIRST].dtype == torch.float32
    stored = moments.allocate(torch.zeros(3, 4, 256), FIRST, "fp8")
    assert stored[FIRST].dtype == torch.uint8 and stored[FIRST + moments.EXPONENTS].shape == (3, 4, 4)
