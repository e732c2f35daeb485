"""Load layers of Llama 3.1 70B in shards, from files; started by torchrun.

Usage: sharded_load.py FOLDER. Compares each rank's peak memory with the size of the model, because no rank
may hold the full model at any time.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import find_model, weight_source
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.engines import build_strategy
from safetensors.torch import save_file

NAME = "meta-llama/Llama-3.1-70B"


def main() -> None:
    folder, device = Path(sys.argv[1]), ranks.join(5.0)
    cfg = config_from_dict({"sharding_mode": "fsdp_full", "model_name": NAME, "use_te": True})
    strategy = build_strategy("fsdp_full", device, cfg)
    dtypes = {"parameter_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}

    def shard(model: torch.nn.Module) -> None:
        strategy.shard(model, **dtypes)

    spec = find_model(NAME, init="random", use_te=True)
    meta_build(spec, options_on(device, shard))

    spec.config.num_hidden_layers, spec.config.vocab_size = 2, 2048
    if ranks.rank() == 0:
        write_files(folder, spec, device)
    ranks.gather(None)  # barrier: wait until the files are written
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build_model(replace(spec, weights=folder), options_on(device, shard))
    peak = torch.cuda.max_memory_allocated()
    size = 2 * sum(p.numel() for p in model.parameters())
    assert peak < 1.2 * size / ranks.world_size(), (peak, size)

    source = weight_source(spec, seed=0, device=device)
    up = source.get("model.layers.1.mlp.up_proj.weight").bfloat16()
    key = source.get("model.layers.1.self_attn.k_proj.weight").bfloat16()
    layer = model.layers[1]
    (fc1,) = strategy.gather([layer.layernorm_mlp.fc1_weight])
    (qkv,) = strategy.gather([layer.self_attention.layernorm_qkv.weight])
    assert torch.equal(fc1.chunk(2)[1], up)
    groups = spec.config.num_key_value_heads
    rows = qkv.view(groups, -1, 128, qkv.shape[1])  # [G, R+2, K, D]
    assert torch.equal(rows[:, -2].flatten(0, 1), key)
    if ranks.rank() == 0:
        print(f"peak {peak / 1e9:.2f} GB per rank of {size / 1e9:.2f} GB")
    ranks.leave(lambda: None)


def options_on(device: torch.device, shard) -> BuildOptions:
    options = {"dtype": torch.bfloat16, "packed": True, "max_positions": 128, "shard": shard}
    return BuildOptions(te_backend="native", device=device, **options)


def meta_build(spec, options: BuildOptions) -> None:
    """Shard all 80 layers on the meta device without allocating memory."""
    from fp8_suite.te_models.decoder import TECausalLM

    model = TECausalLM(spec.config, options)
    options.shard(model)
    assert sum(p.numel() for p in model.parameters()) > 70e9
    assert all(p.to_local().is_meta for p in model.parameters())
    assert torch.cuda.max_memory_allocated() < 1e9


def write_files(folder: Path, spec, device: torch.device) -> None:
    """Save one file per layer, as large models are published."""
    source = weight_source(spec, seed=0, device=device)
    files: dict[str, list[str]] = {}
    for key in source.shapes():
        part = key.split(".")[2] if ".layers." in key else "rest"
        files.setdefault(f"model-{part}.safetensors", []).append(key)
    for file, keys in files.items():
        save_file({key: source.get(key).bfloat16().contiguous() for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
