"""Weight layouts: exact in both directions, every key used once, shards read once."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from te_models.build import ModelPlan, build_model, export_tensors, plan_model, weight_source, whole
from te_models.families import FAMILIES, head_dim
from te_models.options import BuildOptions
from te_models.presets import PRESETS
from te_models.weights import (
    RENAMED,
    RandomSource,
    SafetensorsSource,
    WeightSource,
    fuse_qkv,
    layer_to_hf,
    layer_to_te,
    load_te,
    split_qkv,
    te_to_hf,
    weight_files,
)
from tests.children import preload, run_ranks
from training.checkpoint.export import export_hf

preload(__name__)
CPU = torch.device("cpu")


def heads_of(family: str, *, heads: int = 4, groups: int = 2) -> SimpleNamespace:
    """What conversions read of a configuration."""
    return SimpleNamespace(model_type=family, num_attention_heads=heads, num_key_value_heads=groups)


LLAMA = heads_of("llama")


def tiny(family: str = "llama", **changes) -> ModelPlan:
    plan = plan_model(f"tiny-{family}", init="auto", use_te=True)
    for name, value in changes.items():
        setattr(plan.config, name, value)
    return plan


class Shell(nn.Module):
    """A TECausalLM's parameters by name, without TE: the conversions see nothing else of it."""

    def __init__(self, config):
        super().__init__()
        hidden, ffn, size = config.hidden_size, config.intermediate_size, head_dim(config)
        self.config, self.tied = config, config.tie_word_embeddings
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        qkv = (heads + 2 * groups) * size
        shapes = {
            "self_attention.layernorm_qkv.layer_norm_weight": (hidden,),
            "self_attention.layernorm_qkv.weight": (qkv, hidden),
            "self_attention.proj.weight": (hidden, heads * size),
            "layernorm_mlp.layer_norm_weight": (hidden,),
            "layernorm_mlp.fc1_weight": (2 * ffn, hidden),
            "layernorm_mlp.fc2_weight": (hidden, ffn),
        }
        if config.model_type == "qwen2":
            shapes["self_attention.layernorm_qkv.bias"] = (qkv,)
        if config.model_type == "qwen3":
            shapes |= {f"self_attention.{p}_norm.weight": (size,) for p in "qk"}
        self.layers = nn.ModuleList(module_of(shapes) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight


def module_of(shapes: dict[str, tuple]) -> nn.Module:
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.full(shape, torch.nan)))
    return root


def test_qkv_layout_by_hand():
    # 4 heads in 2 groups of head size 1: group by group two queries, one key, one value.
    q, k, v = (
        torch.tensor([[1.0], [2], [3], [4]]),
        torch.tensor([[10.0], [20]]),
        torch.tensor([[100.0], [200]]),
    )
    fused = fuse_qkv(q, k, v, heads=4, groups=2)
    assert fused.flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 8), (8, 8, 4), (6, 1, 16), (32, 8, 2)])
def test_qkv_round_trip(heads, groups, size):
    q, k, v = (torch.randn(n * size, 24) for n in (heads, groups, groups))
    parts = split_qkv(fuse_qkv(q, k, v, heads=heads, groups=groups), heads=heads, groups=groups)
    assert all(torch.equal(a, b) for a, b in zip(parts, (q, k, v), strict=True))


class Distinct(WeightSource):
    """Rows of numbers that no other row has: zeros and ones of biases and norms would hide an exchange."""

    def __init__(self, shapes: dict[str, torch.Size]):
        self._shapes = shapes
        self._first = dict(zip(shapes, range(0, 10**6, 10**4), strict=False))

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        numbers = torch.arange(start, stop, dtype=torch.float32) + self._first[key]
        width = self._shapes[key][1:]
        return numbers.view(-1, *[1] * len(width)).expand(-1, *width)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hf_te_hf_is_exact_and_uses_every_key(family, tied):
    plan = tiny(family, tie_word_embeddings=tied)
    source = Distinct(weight_source(plan, seed=3, device=CPU).shapes())
    shell = Shell(plan.config)
    load_te(shell, source)
    back = dict(te_to_hf(shell, whole))
    assert back.keys() == source.shapes().keys()
    assert all(torch.equal(back[name], source.get(name)) for name in back)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_holds_what_was_loaded(family, tmp_path):
    """From a Hugging Face model's own file, through TE's layout, to a file transformers reads back whole."""
    plan = tiny(family)
    source = Distinct(weight_source(plan, seed=3, device=CPU).shapes())
    tensors = {name: source.get(name).contiguous() for name in source.shapes()}
    save_file(tensors, tmp_path / "model.safetensors")
    shell = Shell(plan.config)
    load_te(shell, SafetensorsSource(tmp_path))
    folder = export_hf(tmp_path / "export", te_to_hf(shell, whole), config=plan.config, dtype=torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found for key, found in info.items() if key.endswith("keys"))
    loaded = dict(model.named_parameters())
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_qwen2_biases_and_qwen3_norms_by_hand():
    """4 heads in 2 groups of head size 2: biases are fused as weights are, norms keep their names."""
    hf = {name: torch.zeros(1, 1) for name in RENAMED.values()}
    hf |= {f"mlp.{p}_proj.weight": torch.zeros(1, 1) for p in ("gate", "up")}
    hf |= {f"self_attn.{p}_proj.weight": torch.zeros(n, 1) for p, n in {"q": 8, "k": 4, "v": 4}.items()}
    biases = {"q": [1.0, 2, 3, 4, 5, 6, 7, 8], "k": [10.0, 11, 20, 21], "v": [100.0, 101, 200, 201]}
    qwen2 = hf | {f"self_attn.{p}_proj.bias": torch.tensor(b) for p, b in biases.items()}
    te = layer_to_te(qwen2, heads_of("qwen2"))
    assert te["self_attention.layernorm_qkv.bias"].tolist() == [
        *[1, 2, 3, 4, 10, 11, 100, 101],
        *[5, 6, 7, 8, 20, 21, 200, 201],
    ]
    qwen3 = hf | {f"self_attn.{p}_norm.weight": torch.tensor([n, n]) for p, n in {"q": 1.0, "k": 2.0}.items()}
    te = layer_to_te(qwen3, heads_of("qwen3"))
    assert te["self_attention.q_norm.weight"].tolist() == [1, 1]
    assert te["self_attention.k_norm.weight"].tolist() == [2, 2]
    assert not any(name.endswith("bias") for name in te)


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_and_te_forms_start_from_the_same_weights(family):
    plan = tiny(family)
    hf = build_model(
        plan,
        BuildOptions(te_backend=None, dtype=torch.float32, device=CPU, seed=3, packed=True, max_positions=64),
    )
    shell = Shell(plan.config)
    load_te(shell, weight_source(plan, seed=3, device=CPU))
    te = dict(te_to_hf(shell, whole))
    exported = dict(export_tensors(hf))
    assert te.keys() == exported.keys() and all(torch.equal(te[n], exported[n]) for n in te)


@pytest.mark.parametrize(
    ("family", "add", "drop"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.bias", None),
        ("mistral", "model.layers.1.self_attn.q_proj.bias", None),
        ("qwen3", "model.layers.1.self_attn.k_proj.bias", None),
        ("qwen2", "model.layers.1.self_attn.o_proj.bias", None),
        ("llama", "model.layers.0.self_attn.q_norm.weight", None),
        ("qwen2", "model.layers.0.self_attn.q_norm.weight", None),
        ("llama", "model.extra.weight", None),
        ("llama", "model.layers.1.mlp.up_proj.weight_scale", None),
        ("llama", None, "model.layers.2.mlp.up_proj.weight"),
        ("llama", None, "model.norm.weight"),
        ("qwen2", None, "model.layers.2.self_attn.v_proj.bias"),
        ("qwen3", None, "model.layers.2.self_attn.k_norm.weight"),
    ],
)
def test_load_refuses_foreign_and_missing_keys(family, add, drop):
    plan = tiny(family)
    source = weight_source(plan, seed=0, device=CPU)
    source.name = "a/b"
    if add:
        source._shapes[add] = torch.Size([] if add.endswith("_scale") else [256])
        message = f"weights without a place in its TE form, {add}; drop --use_te"
    else:
        del source._shapes[drop]
        message = f"the weights lack {drop}; give a complete model"
    with pytest.raises(ValueError, match=f"^--model_name a/b: {message}$"):
        load_te(Shell(plan.config), source)


def test_load_refuses_layers_that_the_configuration_lacks():
    plan = tiny()
    source = weight_source(plan, seed=0, device=CPU)
    source._shapes["model.layers.3.mlp.up_proj.weight"] = torch.Size([256])
    with pytest.raises(ValueError, match=r"^--model_name .*4 decoder layers, the configuration 3; give"):
        load_te(Shell(plan.config), source)


def test_a_layer_by_hand():
    """What a round trip cannot tell: which norm is which, and that TE gates with the first half of fc1."""
    sizes = {"q": 4, "k": 2, "v": 2}
    hf = {f"self_attn.{p}_proj.weight": torch.zeros(n, 4) for p, n in sizes.items()}
    hf |= {
        "input_layernorm.weight": torch.tensor([1.0]),
        "post_attention_layernorm.weight": torch.tensor([2.0]),
    }
    hf |= {"self_attn.o_proj.weight": torch.tensor([[3.0]]), "mlp.down_proj.weight": torch.tensor([[4.0]])}
    hf |= {"mlp.gate_proj.weight": torch.tensor([[5.0]]), "mlp.up_proj.weight": torch.tensor([[6.0]])}
    te = layer_to_te(hf, heads_of("llama", heads=2, groups=1))
    del te["self_attention.layernorm_qkv.weight"]
    assert {name: tensor.flatten().tolist() for name, tensor in te.items()} == {
        "self_attention.layernorm_qkv.layer_norm_weight": [1],
        "layernorm_mlp.layer_norm_weight": [2],
        "self_attention.proj.weight": [3],
        "layernorm_mlp.fc2_weight": [4],
        "layernorm_mlp.fc1_weight": [5, 6],
    }


def test_a_tied_head_that_is_stored_twice_is_no_leftover():
    plan = tiny()
    source = weight_source(plan, seed=0, device=CPU)
    source._shapes["lm_head.weight"] = source._shapes["model.embed_tokens.weight"]
    shell = Shell(plan.config)
    load_te(shell, source)
    assert torch.equal(shell.lm_head.weight, source.get("model.embed_tokens.weight"))


def test_incomplete_weights_are_refused_by_the_hugging_face_form(tmp_path):
    plan = tiny()
    plan.config.save_pretrained(tmp_path)
    source = weight_source(plan, seed=0, device=CPU)
    tensors = {name: source.get(name) for name in source.shapes().keys() - {"model.norm.weight"}}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    arguments = {"te_backend": None, "dtype": torch.float32, "device": CPU, "seed": 0, "packed": False}
    with pytest.raises(ValueError, match=r"the weights lack model\.norm\.weight"):
        build_model(ModelPlan("m", plan.config, tmp_path), BuildOptions(max_positions=64, **arguments))


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("model.norm.weight", [8], r"model\.norm\.weight: \[8\] in the weights, \[256\] by its config\.json"),
        (
            "model.layers.1.mlp.up_proj.weight",
            [8, 256],
            r"model\.layers\.1\.mlp\.gate_proj\.weight, .*up_proj\.weight: \[520, 256\] in .*\[1024, 256\]",
        ),
        (
            "model.layers.1.self_attn.k_proj.weight",
            [100, 256],
            r"model\.layers\.1\.self_attn\.k_proj\.weight: \[100, 256\] in .*\[128, 256\] by",
        ),
    ],
)
def test_wrong_shape_is_named(key, shape, message, tmp_path):
    plan = tiny()
    random = weight_source(plan, seed=0, device=CPU)
    tensors = {name: random.get(name) for name in random.shapes()} | {key: torch.zeros(shape)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"^--model_name {tmp_path}: {message}"):
        load_te(Shell(plan.config), SafetensorsSource(tmp_path))


def test_layer_conversion_fails_on_leftovers_both_ways():
    config = tiny().config
    shell = Shell(config)
    te = {name: p.detach() for name, p in shell.layers[0].named_parameters()}
    hf = layer_to_hf(dict(te), LLAMA)
    assert set(layer_to_te(dict(hf), LLAMA)) == set(te)
    biased = te | {"self_attention.layernorm_qkv.bias": torch.zeros(512)}
    with pytest.raises(AssertionError, match=r"layernorm_qkv\.bias"):
        layer_to_hf(biased, LLAMA)
    with pytest.raises(AssertionError, match="fc1_bias"):
        layer_to_hf(te | {"layernorm_mlp.fc1_bias": torch.zeros(4)}, LLAMA)


def test_safetensors_source_reads_shards_and_skips_rope_tables(tmp_path):
    plan = tiny()
    random = weight_source(plan, seed=1, device=CPU)
    names = sorted(random.shapes())
    half = len(names) // 2
    weight_map = {}
    for file, part in (("a.safetensors", names[:half]), ("b.safetensors", names[half:])):
        save_file({name: random.get(name) for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    weight_map["model.layers.0.self_attn.rotary_emb.inv_freq"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shell = Shell(plan.config)
    load_te(shell, SafetensorsSource(tmp_path))
    assert all(torch.equal(t, random.get(name)) for name, t in te_to_hf(shell, whole))
    data = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"b\.safetensors is damaged .*; download it again"):
        SafetensorsSource(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors is missing"):
        SafetensorsSource(tmp_path)


def test_one_whole_file_is_read_and_not_the_index_of_an_older_save(tmp_path):
    """As transformers has it: saving over a folder of shards leaves their index behind."""
    plan = tiny()
    random = weight_source(plan, seed=1, device=CPU)
    save_file({name: random.get(name) for name in random.shapes()}, tmp_path / "model.safetensors")
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "old.safetensors")
    index = {"weight_map": {"model.norm.weight": "old.safetensors", "gone": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = SafetensorsSource(tmp_path)
    assert source.shapes() == random.shapes()
    assert torch.equal(source.get("model.norm.weight"), random.get("model.norm.weight"))
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


def test_a_tensor_that_the_index_names_and_its_file_lacks_is_told(tmp_path):
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged .*lm_head\.weight.*; download it again"):
        SafetensorsSource(tmp_path)


def test_a_head_of_its_own_in_the_files_is_not_tied(tmp_path):
    """Whatever the configuration says: transformers does not tie two tensors that differ."""
    config = AutoConfig.for_model(**PRESETS["tiny-qwen2"])
    model = AutoModelForCausalLM.from_config(config)
    assert config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, tied in ((embedding.clone(), True), (embedding + 1, False)):
        save_file(
            tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        plan = plan_model(str(tmp_path), init="pretrained", use_te=True)
        assert plan.config.tie_word_embeddings is tied
    kwargs = {"te_backend": None, "dtype": torch.float32, "device": CPU, "seed": 0, "packed": False}
    built = build_model(plan, BuildOptions(**kwargs, max_positions=64))
    exported = dict(export_tensors(built))
    assert torch.equal(exported["lm_head.weight"], embedding + 1)
    export_hf(tmp_path / "export", exported.items(), config=plan.config)


def test_pickled_weights_are_left_to_transformers_also_where_they_are_sharded(tmp_path):
    config = AutoConfig.for_model(**PRESETS["tiny-llama"])
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    plan = plan_model(str(tmp_path), init="pretrained", use_te=False)
    kwargs = {"te_backend": None, "dtype": torch.float32, "device": CPU, "seed": 0, "packed": False}
    built = build_model(plan, BuildOptions(**kwargs, max_positions=64, shard=lambda model: None))
    name = "model.embed_tokens.weight"
    assert torch.equal(dict(export_tensors(built))[name], model.get_parameter(name))


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        SafetensorsSource(tmp_path)


def test_a_te_models_files_are_looked_for_before_anything_is_loaded(tmp_path):
    plan_model("tiny-llama", init="auto", use_te=True).config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        plan_model(str(tmp_path), init="pretrained", use_te=True)


@pytest.mark.parametrize("index", ["{", "[]", '{"weights": {}}'])
def test_a_damaged_index_is_named(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged .*; download it again"):
        SafetensorsSource(tmp_path)


def test_random_weights_depend_on_seed_and_name_alone():
    shapes = {"a.weight": torch.Size([64, 64]), "b.weight": torch.Size([64, 64]), "n.bias": torch.Size([4])}
    shapes["n.weight"] = torch.Size([4])
    first, again, other = (RandomSource(shapes, seed=s, std=0.02, device=CPU) for s in (0, 0, 1))
    again.get("b.weight")
    assert torch.equal(first.get("a.weight"), again.get("a.weight"))
    assert not torch.equal(first.get("a.weight"), first.get("b.weight"))
    assert not torch.equal(first.get("a.weight"), other.get("a.weight"))
    assert first.get("a.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert not first.get("n.bias").any() and first.get("n.weight").eq(1).all()


def test_random_weights_are_the_same_in_any_dtype():
    source = RandomSource({"a.weight": torch.Size([64, 64])}, seed=0, std=0.02, device=CPU)
    weight = source.get("a.weight").float()
    assert torch.equal(weight, weight.bfloat16().float())


# Shards

TINIER = {  # 7 embeddings, 8 rows of a norm, 10 of fc1, 16 of q, k and v together
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


class Counted(WeightSource):
    """Counts how often each row is asked for."""

    def __init__(self, source: WeightSource):
        self.source = source
        self.asked = {key: torch.zeros(shape[0]) for key, shape in source.shapes().items()}

    def shapes(self) -> dict[str, torch.Size]:
        return self.source.shapes()

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        self.asked[key][start:stop] += 1
        return self.source.rows(key, start, stop)


def load_shards(rank: int, folder: Path, *, family: str, shape: tuple[int, ...]) -> None:
    plan = tiny(family, **TINIER)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    shell, unsharded = Shell(plan.config), Shell(plan.config)
    for block in shell.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(shell, mesh=mesh)
    source = Counted(Distinct(weight_source(plan, seed=5, device=CPU).shapes()))
    load_te(shell, source)
    load_te(unsharded, source.source)
    expected = dict(te_to_hf(unsharded, whole))
    found = dict(te_to_hf(shell, lambda tensors: [t.full_tensor() for t in tensors]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    for key, own in source.asked.items():
        assert own.max() <= 1
        total = own.clone()
        dist.all_reduce(total)
        copies = shape[0] if len(shape) > 1 else 1
        assert total.eq(copies).all(), f"{key}: each row is read by the rank that holds it"


@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", (2,)), ("qwen2", (3,)), ("qwen3", (5,)), ("llama", (2, 2))],
    ids=["two", "uneven", "one without a row of some", "two copies"],
)
def test_each_rank_reads_the_rows_of_its_own_shards(family, shape, tmp_path):
    run_ranks(partial(load_shards, family=family, shape=shape), tmp_path, world_size=math.prod(shape))
