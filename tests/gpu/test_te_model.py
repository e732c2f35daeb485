"""TE layers against Hugging Face layers with the same weights, and FP8 recipes against BF16."""

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.recipes import TE_RECIPES
from fp8_suite.te_models import decoder, hugging_face
from fp8_suite.te_models.build import export_tensors
from fp8_suite.te_models.kernels import rope
from fp8_suite.te_models.kernels.loss import linear_cross_entropy
from fp8_suite.training.precision.coverage import coverage
from fp8_suite.training.precision.recipes import Precision, build_autocast, make_recipe, why_not
from fp8_suite.training.precision.scaling import frozen_scaling, scaling_state
from fp8_suite.training.precision.settings import PrecisionConfig
from fp8_suite.training.precision.te_runtime import attention_backend

from tests.gpu.models import DEVICE, batch, build, perturbed, spec

pytestmark = pytest.mark.gpu
# Other families, with tied or untied embeddings.
OTHERS = [("qwen2", True), ("qwen2", False), ("qwen3", True), ("mistral", False)]
PADDED, PACKED = [[256], [200], [131]], [[100, 60, 96], [256], [31, 200]]


def logits_of(model, inputs, monkeypatch) -> tuple[torch.Tensor, float]:
    """Float32 logits [T, V] at label positions, computed from the LM head's input, and the mean loss."""
    seen = []

    def spy(hidden, weight, labels, **how):
        seen.append((hidden @ weight.T).float()[labels != -100])
        return linear_cross_entropy(hidden, weight, labels, **how)

    for module in (decoder, hugging_face):
        monkeypatch.setattr(module, "linear_cross_entropy", spy)
    with torch.no_grad():
        loss = model(**inputs).loss / (inputs["labels"] != -100).sum()
    return seen[0], loss.item()


def compare_logits(model_spec, packed, monkeypatch, *, cosine) -> None:
    """Compare logits of both forms; `cosine` is the smallest allowed cosine similarity of a token."""
    inputs = batch(PACKED if packed else PADDED, packed=packed)
    reference, reference_loss = logits_of(build(model_spec, use_te=False, packed=packed), inputs, monkeypatch)
    logits, loss = logits_of(build(model_spec, use_te=True, packed=packed), inputs, monkeypatch)
    assert abs(loss - reference_loss) < 5e-3
    divergence = F.kl_div(
        logits.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert divergence.max() < 5e-3 and divergence.mean() < 1e-3
    actual = F.cosine_similarity(logits, reference, dim=-1)
    assert actual.min() >= cosine


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("scaled_rope", [False, True], ids=["rope", "llama3-rope"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_te_matches_hugging_face(tied, scaled_rope, packed, monkeypatch):
    compare_logits(spec(tied=tied, scaled_rope=scaled_rope), packed, monkeypatch, cosine=0.9999)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("family", "tied"), OTHERS)
def test_families_match_hugging_face(family, tied, packed, monkeypatch, tmp_path):
    """Random biases and norms increase BF16's error: Hugging Face's BF16 has cosine 0.9998 to FP32."""
    model_spec = perturbed(spec(family=family, tied=tied, layers=2), tmp_path)
    compare_logits(model_spec, packed, monkeypatch, cosine=0.9995)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("family", "tied"), OTHERS)
def test_gradients_of_families_match_hugging_face(family, tied, packed, tmp_path):
    model_spec = perturbed(spec(family=family, tied=tied, layers=2), tmp_path)
    inputs = batch(PACKED if packed else PADDED, packed=packed)

    def gradients(use_te):
        model = build(model_spec, use_te=use_te, packed=packed)
        loss = model(**inputs).loss / (inputs["labels"] != -100).sum()
        loss.backward()
        return dict(export_tensors(model, lambda weights: [w.grad.float() for w in weights]))

    expected, actual = gradients(False), gradients(True)
    assert actual.keys() == expected.keys()
    errors = {name: (actual[name] - grad).norm() / grad.norm() for name, grad in expected.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] < 0.15, (worst, errors[worst])


def step(model, inputs, autocast):
    with autocast():
        loss = model(**inputs).loss
    loss = loss / (inputs["labels"] != -100).sum()
    loss.backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


def fp8(name):
    if reason := why_not(name):
        pytest.skip(reason)
    precision = Precision(name, name, te_recipe=make_recipe(name, PrecisionConfig()), te_backend="native")
    return build_autocast(precision, device=DEVICE, parameter_dtype=torch.bfloat16)


def bf16():
    return build_autocast(Precision("bf16", "bf16"), device=DEVICE, parameter_dtype=torch.bfloat16)


def compare_with_bf16(model_spec, name, packed) -> None:
    autocast = fp8(name)
    # Eight rows of 256 tokens, a multiple that every recipe supports.
    inputs = batch([[256]] * 8 if not packed else [[100, 156]] * 8, packed=packed)
    model = build(model_spec, use_te=True, packed=packed)
    reference, reference_grads = step(model, inputs, bf16())
    if name == "delayed":
        step(model, inputs, autocast)  # calibrate delayed scaling, as in a run
    loss, grads = step(model, inputs, autocast)
    assert abs(loss - reference) / reference < 0.01
    for key, grad in grads.items():
        error = (grad - reference_grads[key]).norm() / reference_grads[key].norm()
        assert error < 0.35, f"{key}: relative error {error:.3f}"
    actual = coverage(model)
    assert actual.fp8_modules == 3 * model_spec.config.num_hidden_layers  # qkv, proj, mlp
    head = next(row for row in actual.rows if row.modules == "lm_head")
    assert head.precision == "bf16" and actual.fp8_gemm_share == pytest.approx(1 - head.gemm_share)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", TE_RECIPES)
def test_recipe_is_close_to_bf16(name, packed):
    compare_with_bf16(spec(), name, packed)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "delayed"),
        ("qwen2", "current"),
        ("qwen2", "block"),
        ("qwen3", "current"),
        ("mistral", "block"),
    ],
)
def test_recipes_of_families_are_close_to_bf16(family, name, tmp_path):
    """Biases are tested in each recipe of Hopper, other families in one recipe."""
    compare_with_bf16(perturbed(spec(family=family, layers=2), tmp_path), name, packed=True)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_fp8_gemms_run_on_the_gpu(name):
    """Check the profiler's kernels, since the coverage table only reads TE's flags."""
    autocast = fp8(name)
    inputs = batch([[256]] * 8, packed=False)
    model = build(spec(), use_te=True, packed=False)
    step(model, inputs, autocast)

    def kernels(context):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(model, inputs, context)
            torch.cuda.synchronize()
        names = [event.name.lower() for event in profile.events()]
        return [n for n in names if "e4m3" in n or "e5m2" in n or "qmma" in n or "fp8" in n]

    ran, idle = kernels(autocast), kernels(bf16())
    print(name, len(ran), sorted(set(ran))[:5])
    assert len(ran) >= 3 * 4 * 3 and not idle


@pytest.mark.parametrize("name", [None, "delayed", "current"])
def test_packed_samples_do_not_see_each_other(name):
    autocast = fp8(name) if name else bf16()
    model_spec = spec()
    apart = build(model_spec, use_te=True, packed=False)
    together = build(model_spec, use_te=True, packed=True)
    one = batch([[128], [128], [128], [128]], packed=False)
    row = {"input_ids": one["input_ids"].view(1, -1), "labels": one["labels"].view(1, -1)}
    row |= {"cu_seqlens": torch.arange(0, 513, 128, dtype=torch.int32, device=DEVICE), "max_seqlen": 512}
    for _ in range(2):  # the first pass calibrates delayed scaling
        alone, packed = step(apart, one, autocast)[0], step(together, row, autocast)[0]
    tolerance = 2e-3 if name else 2e-4
    assert packed == pytest.approx(alone, rel=tolerance)
    changed = dict(row, input_ids=row["input_ids"].clone())
    changed["input_ids"][:, :128] = 7
    labels = row["labels"].clone()
    labels[:, :128] = -100
    with torch.no_grad(), bf16()():
        base = together(**dict(row, labels=labels)).loss
        assert together(**dict(changed, labels=labels)).loss == base


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", [None, "delayed"])
def test_batches_of_single_and_packed_sequences_alternate(name, recompute):
    """Rows of one sequence use plain causal attention; the next batch is packed again."""
    autocast = fp8(name) if name else bf16()
    models = {packed: build(spec(), use_te=True, packed=packed) for packed in (True, False)}
    mixed = build(spec(), use_te=True, packed=True, recompute="layer" if recompute else "none")
    for seed, lengths in enumerate([[256], [100, 156], [256], [100, 156]]):
        packed = len(lengths) > 1
        loss, grads = step(mixed, batch([lengths] * 8, packed=True, seed=seed), autocast)
        assert {layer.self_attention.qkv_format for layer in mixed.layers} == {"thd" if packed else "bshd"}
        expected, wanted = step(models[packed], batch([lengths] * 8, packed=packed, seed=seed), autocast)
        assert loss == pytest.approx(expected, rel=1e-3)
        for key, grad in wanted.items():
            # In FP8 a different last bit may become a full step, and each model has its own scales.
            assert name or (grads[key] - grad).norm() / grad.norm() < 1e-2, key


def test_the_self_test_of_rope_fails_for_a_wrong_kernel(monkeypatch):
    from fp8_suite.te_models.kernels import rope_triton

    assert rope.self_test(32, 8, 128) is None and rope.self_test(14, 2, 64) is None
    split = rope_triton.SplitQKVRope.forward
    doubled = staticmethod(lambda *args: tuple(part * 2 for part in split(*args)))
    monkeypatch.setattr(rope_triton.SplitQKVRope, "forward", doubled)
    assert rope.self_test(6, 2, 48) == "the query differs from the reference"


@pytest.mark.parametrize("lengths", [[256], [100, 156]], ids=["rows", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_fused_qkv_rope_matches_te(family, lengths):
    """Without positions TE applies its own RoPE; some cosines differ in the last bit."""
    model = build(spec(family=family), use_te=True, packed=True)
    inputs = batch([lengths] * 8, packed=True)
    loss, grads = step(model, inputs, bf16())
    expected, wanted = step(model, inputs | {"position_ids": None}, bf16())
    assert loss == pytest.approx(expected, rel=1e-5)
    for key, grad in wanted.items():
        assert (grads[key] - grad).norm() / grad.norm() < 1e-2, key


def test_evaluation_keeps_the_scaling_state():
    autocast = fp8("delayed")
    model = build(spec(), use_te=True, packed=True)
    step(model, batch(PACKED, packed=True), autocast)
    before = {name: t.clone() for name, t in scaling_state(model).items()}
    assert before
    with frozen_scaling(model), torch.no_grad(), autocast():
        model(**batch(PACKED, packed=True, seed=9))
        moved = any(not torch.equal(before[name], t) for name, t in scaling_state(model).items())
    after = scaling_state(model)
    assert moved and all(torch.equal(before[name], after[name]) for name in before)


def test_attention_backend_is_reported_and_fused():
    model = build(spec(), use_te=True, packed=True)
    step(model, batch(PACKED, packed=True), bf16())
    assert attention_backend() in ("fused", "flash")


def test_unfused_attention_is_detected(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    model = build(spec(layers=1), use_te=True, packed=False)
    step(model, batch([[128]], packed=False), bf16())
    assert attention_backend() == "unfused"
