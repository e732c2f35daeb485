"""Who may import whom: read from the sources, so that the layering cannot erode unseen."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("training", "te_models", "data", "benchmarks")
TRAINING_LEAVES = {"precision", "sharding", "optim", "checkpoint", "export", "trackers", "run_folder"}
TRAINING_LEAVES |= {"coverage", "scaling_state", "te_runtime", "precision_map", "fp8_stats", "fp8_inspect"}
TRAINING_LEAVES |= {"torchao_fp8", "profiling", "state"}
TRAINING_LEAVES |= {
    "steps",
    "watchdog",
    "zero",
    "zero_settings",
    "outcome",
    "generate",
    "gradient_sums",
    "auto_mode",
    "early",
}
# These import nothing of ours.
BARE = {"config", "metrics", "fp8_triton", "adamw_triton", "durable_files", "ranks", "cudnn", "__init__"}
BARE |= {"checks", "accumulation", "flash_attention", "errors", "packages", "signals"}
BARE |= {"fp8_counts", "hub", "machine"}
KERNELS = {
    "loss": ("loss_triton", "loss_fp8"),
    "loss_fp8": ("loss", "loss_triton"),
    "loss_triton": ("fp8_triton",),
    "adamw": ("adamw_triton", "accumulation"),
}
# These import nothing else of ours, and any file may import them.
EVERYWHERE = {"training.errors", "training.hub", "training.machine", "training.packages", "training.signals"}
# What these may import beside the configuration.
ALSO = {
    "checkpoint": ("durable_files", "ranks"),
    "export": ("durable_files",),
    "run_folder": ("durable_files", "ranks"),
    "trackers": ("durable_files",),
    "steps": ("run_folder",),
    "profiling": ("durable_files",),
    "sharding": ("ranks", "zero", "gradient_sums", "accumulation", "optim", "adamw"),
    "optim": ("adamw",),
    "watchdog": ("ranks", "outcome"),
    "gradient_sums": ("ranks",),
    "auto_mode": ("ranks",),
    "early": ("trackers",),
    "outcome": ("ranks", "trackers"),
    "precision": ("te_runtime",),
    "te_runtime": ("cudnn", "flash_attention"),
    "coverage": ("precision",),
    "precision_map": ("precision",),
    "fp8_inspect": ("precision", "precision_map", "fp8_counts"),
    "fp8_stats": ("precision", "precision_map", "fp8_counts", "fp8_inspect"),
    "zero": ("sharding", "ranks", "optim", "adamw", "zero_settings"),
    "state": ("adamw", "checkpoint", "optim", "precision", "trainer"),
}
# What the doctor tries out; not the run that it is asked about.
DOCTOR = {"config", "cudnn", "doctor", "flash_attention", "metrics", "precision", "te_runtime", "torchao_fp8"}
# These put a run together, and may import anything of ours.
ANYTHING = {"run", "decision", "memory_plan", "assembly", "kernels"}
ENGINE_USERS = ("precision", "precision_map", "fp8_stats")
LAZY = {"transformer_engine", "deepspeed", "wandb", "torchao", "liger_kernel", "nvdlfw_inspect"}
TE_HOMES = {"training/te_runtime.py", "training/optim.py", "training/precision_map.py"}
TE_HOMES |= {"training/doctor/te.py", "te_models/engine.py", "te_models/fp8_outputs.py"}
TE_HOMES |= {f"te_models/fused_{part}.py" for part in ("norm", "residual", "swiglu")}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            texts = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            found |= {text for text in texts if isinstance(text, str)}
    return found


def ours(path: Path) -> set[str]:
    """Our modules that a file imports, as package or package.module."""
    modules = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in PACKAGES:
            modules.add(".".join(parts[:2]))
    return modules


def is_module(name: str) -> bool:
    """Whether it is one of ours, and no name inside one."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def sources() -> list[Path]:
    found = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return [p for p in found if ROOT / "benchmarks/results" not in p.parents]  # records


def allowed(path: Path) -> set[str] | None:
    """Our modules this file may import, beside its own package for data and te_models; None: any."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "te_models":
        return {"training", "training.loss", "training.loss_triton", "training.fp8_triton"}
    if relative.parts[0] == "data":
        return {"training", "training.config"}
    if relative.parts[0] == "benchmarks":
        leaves = {"training.config", "training.metrics", "training.trackers", "training.durable_files"}
        leaves |= {"training.auto_mode", "training.optim"}  # plans ask what training would do
        return {"training", *leaves, "te_models.presets", "te_models.families", "data.demo"}
    stem = relative.stem
    if relative.parts[1] == "doctor" and stem not in BARE:
        return {"training", "te_models", "te_models.engine", *(f"training.{name}" for name in DOCTOR)}
    if stem in BARE:
        return set()
    if stem in KERNELS:
        return {"training", *(f"training.{name}" for name in KERNELS[stem])}
    if stem in TRAINING_LEAVES:
        te = {"te_models", "te_models.engine"} if stem in ENGINE_USERS else set()
        return te | {"training", "training.config", *(f"training.{name}" for name in ALSO.get(stem, ()))}
    if stem == "trainer":
        return {"training", "training.config", "training.metrics"}
    assert stem in ANYTHING, f"who may {relative} import? Say it here"
    return None


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layering(path):
    may = allowed(path)
    if may is None:
        return
    may = may | {"training"} if ours(path) & EVERYWHERE else may
    package = path.relative_to(ROOT).parts[0]
    strange = {
        name
        for name in ours(path)
        if name not in may | EVERYWHERE
        and name not in {f"training.{n.rsplit('.', 1)[-1]}" for n in may}
        and not (package != "training" and name.split(".")[0] == package)
        and not any(name.startswith(f"{m}.") for m in may if m != "training")
    }
    strange = {name for name in strange if is_module(name)}
    assert not strange, f"{path.relative_to(ROOT)} may not import {sorted(strange)}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_libraries_load_only_where_they_are_used(path):
    roots = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert not roots & LAZY
    uses_te = any(name.startswith("transformer_engine") for name in imports(path))
    assert uses_te == (str(path.relative_to(ROOT)) in TE_HOMES)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("training.run", True),
        ("training.doctor", True),
        ("te_models.emulation", True),
        ("data", True),
        ("training.run.Run", False),
    ],
)
def test_packages_are_modules_too(name, ours):
    assert is_module(name) == ours


def test_the_readers_of_this_file_see_the_packages():
    assert len(sources()) > 15
