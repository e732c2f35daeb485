"""README and docs: links resolve, and flags exist."""

import re

import pytest

from core.packages import ROOT
from training.config import all_settings

CURRENT = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*CURRENT, ROOT / "CHANGELOG.md"]  # which names removed flags
TORCHRUN = {"nproc_per_node", "nnodes", "max_restarts", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}
OTHERS = {"config", "help", "flag", "no", "compile_model", "no_compile_model"}


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    links = re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_flags_exist(page):
    programs = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "training/doctor").glob("*.py")]
    own = {flag for path in programs for flag in re.findall(r'"(?:--)?([a-z0-9_]+)"', path.read_text())}
    settings = set(all_settings())
    known = settings | {f"no_{name}" for name in settings} | own | TORCHRUN | OTHERS
    assert set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]*)", page.read_text(encoding="utf-8"))) <= known
