"""Imports between folders point one way, and optional libraries load only where they are used."""

import ast
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from fp8_suite.core.packages import ROOT

# A folder may import from those before it. `settings` stands for every settings.py and training/config.py.
LINE = [
    *("core", "settings"),
    *("data/demo", "data/reading", "data"),
    *("te_models/kernels", "te_models/parallel", "te_models/emulation", "te_models/recompute"),
    *("te_models/quantized", "te_models/lora", "te_models"),
    *("training/tracking", "training/optim", "training/parallel", "training/estimate", "training/precision"),
    "training/library",
    *("training/checkpoint", "training/export", "training", "training/doctor"),
    *("benchmarks/records", "benchmarks/launch", "benchmarks/report", "benchmarks/compare"),
    *("benchmarks/evaluate", "benchmarks/plan"),
    *("benchmarks", "benchmarks/saves"),
]
LAZY = {"transformer_engine", "deepspeed", "wandb", "torchao", "nvdlfw_inspect"}
LAZY |= {"accelerate", "peft", "trl", "compressed_tensors", "lm_eval"}
SOURCES = [
    path
    for top in ("core", "data", "te_models", "training", "benchmarks")
    for path in (ROOT / top).rglob("*.py")
    if "results" not in path.parts
]


def folder(path: Path) -> str:
    settings = path.name in ("settings.py", "config.py") and path.parent.name != "core"
    return "settings" if settings else path.parent.relative_to(ROOT).as_posix()


@cache
def imports(path: Path, *, nested: bool = True) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def imported_files(path: Path) -> set[Path]:
    names = [name.removeprefix("fp8_suite.") for name in imports(path)]
    return {file for name in names if (file := ROOT / f"{name.replace('.', '/')}.py").exists()} - {path}


def importers(forbidden: set[str], *, nested: bool) -> list[tuple[str, str]]:
    """Return files that import a package of these names, with what they import."""
    names = [(path, name) for path in SOURCES for name in imports(path, nested=nested)]
    return [(str(path), name) for path, name in names if name.split(".")[0] in forbidden]


def test_imports_point_one_way_and_not_in_a_circle():
    """Neither at the top nor inside functions."""
    for path in SOURCES:
        later = LINE[LINE.index(folder(path)) + 1 :]
        assert [str(file) for file in imported_files(path) if folder(file) in later] == [], path
    TopologicalSorter({path: imported_files(path) for path in SOURCES}).prepare()


def test_no_folder_has_more_than_14_modules():
    modules = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in modules.items() if count > 14}


def test_modules_are_imported_under_the_installed_name():
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} - {"fp8_suite"}
    assert not importers(folders, nested=True)


def test_optional_libraries_load_only_where_they_are_used():
    assert not importers(LAZY, nested=False)
