"""Who may import whom: read from the sources, so that the layering cannot erode unseen."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("training", "te_models", "data", "benchmarks")
# These import nothing else of ours, and any file may import them.
EVERYWHERE = {"training.errors", "training.hub", "training.machine", "training.packages", "training.signals"}
# What each file of training/ imports of ours, modules of training by their names alone. None: these put a run
# together, and may import anything. Who is not listed imports nothing of ours.
IMPORTS = {
    # arithmetic
    "adamw": "accumulation adamw_triton",
    "loss": "loss_fp8 loss_triton",
    "loss_fp8": "loss loss_triton",
    "loss_triton": "fp8_triton",
    # precision
    "te_runtime": "cudnn flash_attention",
    "precision": "config te_models.engine te_runtime",
    "precision_map": "config precision te_models.engine",
    "torchao_fp8": "config",
    "coverage": "precision",
    "fp8_inspect": "config fp8_counts precision precision_map",
    "fp8_stats": "config fp8_counts fp8_inspect precision precision_map te_models.engine",
    # memory, optimizer and ranks
    "optim": "adamw config",
    "auto_mode": "config ranks",
    "gradient_sums": "ranks",
    "sharding": "accumulation adamw config gradient_sums optim ranks zero",
    "zero_settings": "config",
    "zero": "adamw config optim ranks sharding zero_settings",
    "watchdog": "ranks",
    "outcome": "ranks trackers",
    # the loop, and what a run writes
    "trainer": "config metrics",
    "steps": "config run_folder",
    "state": "adamw checkpoint config optim precision trainer",
    "checkpoint": "durable_files ranks",
    "run_folder": "config durable_files ranks",
    "export": "durable_files",
    "trackers": "config durable_files",
    "profiling": "durable_files",
    "early": "config outcome run trackers",
    # what the doctor tries out; not the run that it is asked about
    "doctor/__main__": "doctor",
    "doctor/gpu": "doctor",
    "doctor/screen": "doctor te_runtime",
    "doctor/speed": "doctor metrics",
    "doctor/te": "config cudnn doctor flash_attention precision te_models te_models.engine te_runtime "
    "torchao_fp8",
    "doctor/te_errors": "doctor te_runtime",
    **dict.fromkeys(("run", "decision", "memory_plan", "assembly", "kernels")),
}
# What the files of the other folders may import beside their own.
MAY_IMPORT = {
    "te_models": "loss fp8_triton",
    "data": "config",
    # plans ask what training would do
    "benchmarks": "config metrics trackers durable_files auto_mode optim precision te_models.presets "
    "te_models.families data.demo",
}
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


def whole_names(names: str) -> set[str]:
    return {name if name.split(".")[0] in PACKAGES else f"training.{name}" for name in names.split()}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layering(path):
    package, _, name = str(path.relative_to(ROOT).with_suffix("")).partition("/")
    found = {module for module in ours(path) if is_module(module)} - EVERYWHERE - {"training"}
    if package == "training":
        listed = IMPORTS.get(name, "")
        assert listed is None or found == whole_names(listed), f"what does {path} import? Say it here"
    else:
        strange = {module for module in found if module.split(".")[0] != package}
        assert strange <= whole_names(MAY_IMPORT[package])


def test_every_file_of_the_table_exists():
    assert all((ROOT / "training" / f"{name}.py").exists() for name in IMPORTS)


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
