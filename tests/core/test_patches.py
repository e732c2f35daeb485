"""The table of patches: what is replaced comes back, and nothing else in the project replaces anything."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
from fp8_suite.core.packages import ROOT
from fp8_suite.core.patches import PATCHES, Patch


@pytest.mark.parametrize("name", PATCHES)
def test_every_patch_is_explained_and_used(name):
    patch = PATCHES[name]
    assert patch.why and patch.during
    files = [path for folder in ("te_models", "training") for path in (ROOT / folder).rglob("*.py")]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in files), "not used"


def test_changes_of_the_process_are_where_the_guide_says_and_all_variables_are_in_it():
    listed = (ROOT / "docs/development.md").read_text()
    rows = re.findall(r"^\| (.*) \| .* \| `(\S+\.py)`, (\w+) \|$", listed, re.MULTILINE)
    assert len(rows) == 17
    for change, path, function in rows:
        text = (ROOT / path).read_text()
        assert f"def {function}(" in text, (path, function)
        assert all(variable in text for variable in re.findall(r"\b[A-Z]+_[A-Z_]+\b", change)), change
    folders = ("benchmarks", "core", "data", "te_models", "training")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for name in re.findall(r'os\.environ(?:\.setdefault\(|\[)"(\w+)"(?:,|\] =)', path.read_text()):
            assert name in listed, (path, name)


def test_originals_return_even_after_an_error(monkeypatch):
    library = SimpleNamespace(function=str)
    monkeypatch.setitem(sys.modules, "a_library", library)
    monkeypatch.setenv("SET", "1")
    monkeypatch.delenv("UNSET", raising=False)
    patch = Patch(("a_library:function", "os.environ:SET", "os.environ:UNSET"), "why", "now")
    before = dict(os.environ)
    with pytest.raises(KeyError), patch.on(lambda original: f"{original} replaced"):
        assert library.function == f"{str} replaced"
        assert (os.environ["SET"], os.environ["UNSET"]) == ("1 replaced", "None replaced")
        raise KeyError
    assert library.function is str and dict(os.environ) == before


def test_modules_that_are_not_imported_are_left_alone():
    patch = Patch(("no_such_library.module:function",), "why", "now", only_imported=True)
    with patch.on(lambda original: None):
        pass
