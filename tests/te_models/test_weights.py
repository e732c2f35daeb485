"""Weight layouts: exact in both directions, every key used once, ranks read only the rows of their shards."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.te_models import weights
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.decoder import TECausalLM
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.sources import RandomSource, SafetensorsSource, WeightSource, weight_files
from fp8_suite.te_models.spec import ModelSpec, find_model, weight_source
from fp8_suite.te_models.weights import load_te, te_to_hf
from fp8_suite.training.export.write import export_hf
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.children import preload, run_ranks

preload(__name__)
CPU = torch.device("cpu")
ON_CPU = {"dtype": torch.float32, "device": CPU, "packed": False, "max_positions": 64, "seed": 3}
HF_FORM, TE_FORM = (BuildOptions(te_backend=backend, **ON_CPU) for backend in (None, "emulated"))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NEW = "its TE layers have no place for {}; drop --use_te"
LACK = "the weights lack {}; give a complete model"
OTHER = r"{}: \[8, 256\] in the weights, \[512, 256\] by its config.json"
# With four ranks, one has no row of the 5 embeddings, and the 10 rows of fc1 are split unevenly.
TINIER = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 5, "head_dim": 4}
TINIER |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}


def tiny(family: str = "llama", **changes) -> ModelSpec:
    spec = find_model(f"tiny-{family}", init="auto", use_te=True)
    for name, value in changes.items():
        setattr(spec.config, name, value)
    return spec


def heads_of(family: str, *, heads: int = 4, groups: int = 2) -> SimpleNamespace:
    return SimpleNamespace(model_type=family, num_attention_heads=heads, num_key_value_heads=groups)


def te_form(spec: ModelSpec) -> TECausalLM:
    return TECausalLM(spec.config, TE_FORM).materialize()


class Distinct(WeightSource):
    """Source of distinct rows, exact in BF16: zeros and ones would hide a permutation of biases and norms."""

    def __init__(self, shapes: dict[str, torch.Size]):
        self._shapes = shapes
        self._first = dict(zip(shapes, range(0, 10**6, 10**4), strict=False))

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        numbers = torch.arange(start, stop, dtype=torch.float64) + self._first[key]
        numbers = (numbers * 0.6180339887).frac().bfloat16().float()
        width = self._shapes[key][1:]
        return numbers.view(-1, *[1] * len(width)).expand(-1, *width)


def distinct(spec: ModelSpec) -> Distinct:
    return Distinct(weight_source(spec, seed=0, device=CPU).shapes())


def tensors_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    source = weight_source(spec, seed=0, device=CPU)
    return {name: source.get(name) for name in source.shapes()}


def save(folder: Path, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> None:
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / file, metadata={"format": "pt"})


def save_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_qkv_layout_by_hand():
    """4 heads in 2 groups with head size 2; biases are fused as weights, QK norms are only renamed."""
    hf = {name: torch.zeros(1, 1) for name in weights.RENAMED.values()}
    hf |= {f"mlp.{p}_proj.weight": torch.zeros(1, 1) for p in ("gate", "up")}
    rows = {"q": [1.0, 2, 3, 4, 5, 6, 7, 8], "k": [10.0, 11, 20, 21], "v": [100.0, 101, 200, 201]}
    fused = [1, 2, 3, 4, 10, 11, 100, 101, 5, 6, 7, 8, 20, 21, 200, 201]
    hf |= {f"self_attn.{p}_proj.weight": torch.tensor(numbers)[:, None] for p, numbers in rows.items()}
    qwen2 = hf | {f"self_attn.{p}_proj.bias": torch.tensor(numbers) for p, numbers in rows.items()}
    te = weights.layer_to_te(qwen2, heads_of("qwen2"))
    assert te["self_attention.layernorm_qkv.weight"].flatten().tolist() == fused
    assert te["self_attention.layernorm_qkv.bias"].tolist() == fused
    qwen3 = hf | {f"self_attn.{p}_norm.weight": torch.tensor([n, n]) for p, n in {"q": 1.0, "k": 2.0}.items()}
    te = weights.layer_to_te(qwen3, heads_of("qwen3"))
    assert [te[f"self_attention.{p}_norm.weight"].tolist() for p in "qk"] == [[1, 1], [2, 2]]
    assert not any(name.endswith("bias") for name in te)


def test_layer_conversions_use_every_tensor():
    config = heads_of("llama")
    te = {name: p.detach() for name, p in te_form(tiny()).layers[0].named_parameters()}
    hf = weights.layer_to_hf(dict(te), config)
    with pytest.raises(AssertionError, match=r"q_proj\.bias"):
        weights.layer_to_te(hf | {"self_attn.q_proj.bias": torch.zeros(512)}, config)
    assert set(weights.layer_to_te(hf, config)) == set(te) and not hf
    for extra in ("self_attention.layernorm_qkv.bias", "layernorm_mlp.fc1_bias"):
        with pytest.raises(AssertionError, match=extra):
            weights.layer_to_hf(te | {extra: torch.zeros(512)}, config)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_a_te_model_equals_the_loaded_hugging_face_model(family, tied, tmp_path):
    spec = tiny(family, tie_word_embeddings=tied)
    source = distinct(spec)
    tensors = {name: source.get(name) for name in source.shapes()}
    save(tmp_path, tensors)
    model = te_form(spec)
    load_te(model, SafetensorsSource(tmp_path))
    folder = export_hf(tmp_path / "export", te_to_hf(model, list), config=spec.config)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(keys for kind, keys in info.items() if kind.endswith("keys"))
    loaded = dict(model.named_parameters())
    assert loaded.keys() == tensors.keys() and (HEAD in tensors) == (not tied)
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in tensors.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_start_from_the_same_random_weights(family):
    spec = tiny(family)
    model = te_form(spec)
    load_te(model, weight_source(spec, seed=3, device=CPU))
    te, hf = dict(te_to_hf(model, list)), dict(export_tensors(build_model(spec, HF_FORM)))
    assert te.keys() == hf.keys() and all(torch.equal(te[name], hf[name]) for name in te)


def test_random_weights_depend_only_on_seed_and_name_and_fit_bf16():
    shapes = {name: torch.Size([64, 64]) for name in ("a.weight", "b.weight")}
    shapes |= {name: torch.Size([4]) for name in ("n.bias", "n.weight")}
    first, again, of_other_seed = (RandomSource(shapes, seed=s, std=0.02, device=CPU) for s in (0, 0, 1))
    again.get("b.weight")
    weight = first.get("a.weight")
    assert torch.equal(weight, again.get("a.weight"))
    assert torch.equal(weight[7:9], first.rows("a.weight", 7, 9))
    assert not torch.equal(weight, first.get("b.weight"))
    assert not torch.equal(weight, of_other_seed.get("a.weight"))
    assert weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weight.float(), weight.float().bfloat16().float())
    assert not first.get("n.bias").any() and first.get("n.weight").eq(1).all()


@pytest.mark.parametrize(
    ("family", "key", "shape", "message"),
    [
        *((family, "layers.1.self_attn.q_proj.bias", [256], NEW) for family in ("llama", "mistral", "qwen3")),
        ("qwen2", "layers.1.self_attn.o_proj.bias", [256], NEW),
        ("qwen2", "layers.0.self_attn.q_norm.weight", [64], NEW),
        ("llama", "layers.3.mlp.up_proj.weight", [512, 256], NEW),
        ("llama", "layers.1.mlp.up_proj.weight_scale", [], NEW),
        ("llama", "layers.2.mlp.up_proj.weight", None, LACK),
        ("llama", "norm.weight", None, LACK),
        ("qwen2", "layers.2.self_attn.v_proj.bias", None, LACK),
        ("qwen3", "layers.2.self_attn.k_norm.weight", None, LACK),
        ("llama", "layers.1.mlp.up_proj.weight", [8, 256], OTHER),
    ],
)
def test_weights_that_do_not_fit_te_layers_are_refused_before_loading(family, key, shape, message, tmp_path):
    spec, key = tiny(family), f"model.{key}"
    tensors = tensors_of(spec)
    tensors.pop(key, None)
    save(tmp_path, tensors | ({} if shape is None else {key: torch.zeros(shape)}))
    spec.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^--model_name {tmp_path}: {message.format(key)}"):
        find_model(str(tmp_path), init="pretrained", use_te=True)


def test_hugging_face_form_refuses_incomplete_weights(tmp_path):
    spec = tiny()
    spec.config.save_pretrained(tmp_path)
    tensors, norm = tensors_of(spec), "model.norm.weight"
    del tensors[norm]
    for stored, message in (({norm: torch.ones(8)}, f"{norm}: .8. in the weights"), ({}, f"lack {norm}")):
        save(tmp_path, tensors | stored)
        with pytest.raises(UserError, match=message):
            build_model(replace(spec, weights=tmp_path), HF_FORM)


def test_tensors_without_scales_are_refused(tmp_path):
    spec = tiny()
    tensors = tensors_of(spec)
    spec.config.save_pretrained(tmp_path)
    for dtype, name in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save(tmp_path, tensors | {"model.norm.weight": torch.zeros(256).to(dtype)})
        with pytest.raises(UserError, match=rf"model\.norm\.weight is {name}, and .* no quantization_config"):
            find_model(str(tmp_path), init="pretrained", use_te=False)


def test_stored_head_is_tied_only_if_it_is_the_embedding(tmp_path):
    """transformers does not tie two stored tensors that differ, regardless of the configuration."""
    spec = tiny("qwen2")
    tensors = {name: tensor.float() for name, tensor in tensors_of(spec).items()}
    spec.config.save_pretrained(tmp_path)
    for head, tied in ((tensors[EMBEDDING].clone(), True), (tensors[EMBEDDING] + 1, False)):
        save(tmp_path, tensors | {HEAD: head})
        spec = find_model(str(tmp_path), init="pretrained", use_te=True)
        assert spec.config.tie_word_embeddings is tied
        model = build_model(spec, TE_FORM)
        assert torch.equal(model.lm_head.weight, head)
    exported = dict(export_tensors(build_model(spec, HF_FORM)))
    assert torch.equal(exported[HEAD], head)
    export_hf(tmp_path / "export", exported.items(), config=spec.config)


def test_safetensors_in_several_files_are_read_without_old_rope_tables(tmp_path):
    source = distinct(tiny())
    names = sorted(source.shapes())
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    for file in ("a.safetensors", "b.safetensors"):
        save(tmp_path, {name: source.get(name) for name in names if weight_map[name] == file}, file)
    save_index(tmp_path, weight_map)
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save(tmp_path, {table: torch.ones(2)}, "c.safetensors")
    save_index(tmp_path, weight_map | {table: "c.safetensors"})
    read = SafetensorsSource(tmp_path)
    assert read.shapes() == source.shapes()
    assert all(torch.equal(read.get(name), source.get(name)) for name in names)


@pytest.mark.parametrize("use_te", [False, True])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model-1.safetensors", None),
        ("model-1.safetensors", b"half a file"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"[]"),
        ("model.safetensors.index.json", b'{"weights": {}}'),
    ],
)
def test_missing_or_damaged_files_are_named_before_anything_is_loaded(file, content, use_te, tmp_path):
    tiny().config.save_pretrained(tmp_path)
    save_index(tmp_path, {"model.norm.weight": "model-1.safetensors"})
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"--model_name {tmp_path}: {file} cannot be read .*"):
        find_model(str(tmp_path), init="pretrained", use_te=use_te)


def test_single_file_wins_over_the_index_of_an_earlier_save(tmp_path):
    """Saving one file to a folder of shards leaves their index; transformers ignores it too."""
    save(tmp_path, {"model.norm.weight": torch.ones(4)})
    save_index(tmp_path, {"model.norm.weight": "old.safetensors", "gone": "missing.safetensors"})
    assert SafetensorsSource(tmp_path).shapes() == {"model.norm.weight": torch.Size([4])}
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


def test_pickled_weights_are_loaded_by_transformers_and_refused_for_te_layers(tmp_path):
    config = tiny().config
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        find_model(str(tmp_path), init="pretrained", use_te=True)
    spec = find_model(str(tmp_path), init="pretrained", use_te=False)
    built = build_model(spec, replace(HF_FORM, shard=lambda model: None))
    assert torch.equal(dict(export_tensors(built))[EMBEDDING], model.get_parameter(EMBEDDING))


@pytest.mark.parametrize("content", [b"half", pickle.dumps(Path.cwd, protocol=2)], ids=["damaged", "code"])
def test_damaged_or_executable_pickle_is_refused(content, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot load the weights .*; download them again"):
        build_model(replace(tiny(), weights=tmp_path), HF_FORM)


class Counted(WeightSource):
    """Source that counts its reads of each tensor and row."""

    def __init__(self, source: WeightSource):
        self.source = source
        self.reads = {key: torch.zeros(shape[0]) for key, shape in source.shapes().items()}
        self.calls = dict.fromkeys(self.reads, 0)

    def shapes(self) -> dict[str, torch.Size]:
        return self.source.shapes()

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        self.reads[key][start:stop] += 1
        self.calls[key] += 1
        return self.source.rows(key, start, stop)


def load_shards(rank: int, folder: Path) -> None:
    for family, shape in (("qwen3", (4,)), ("qwen2", (2, 2))):
        spec = tiny(family, **TINIER)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
        model, unsharded = TECausalLM(spec.config, TE_FORM), te_form(spec)
        for block in (*model.layers, model):
            fully_shard(block, mesh=mesh)
        model.materialize()
        source = Counted(distinct(spec))
        load_te(model, source)
        load_te(unsharded, source.source)
        expected = dict(te_to_hf(unsharded, list))
        gathered = dict(te_to_hf(model, lambda tensors: [t.full_tensor() for t in tensors]))
        assert gathered.keys() == expected.keys()
        assert all(torch.equal(gathered[key], tensor) for key, tensor in expected.items())
        for key, reads in source.reads.items():
            assert source.calls[key] <= 1 and reads.max() <= 1
            dist.all_reduce(reads)
            copies = shape[0] if len(shape) > 1 else 1
            assert reads.eq(copies).all(), f"{key}: each row is read only by the ranks that hold it"


def test_each_rank_reads_only_the_rows_of_its_shards(tmp_path):
    run_ranks(load_shards, tmp_path, world_size=4)
