"""The table of patches: what is replaced comes back, and nothing else in the project replaces anything."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fp8_suite.core.patches import PATCHES, Patch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PATCHES)
def test_every_patch_is_explained_and_tested(name):
    patch = PATCHES[name]
    assert patch.why and patch.during and (ROOT / patch.tested_by).is_file()
    files = [path for folder in ("te_models", "training") for path in (ROOT / folder).rglob("*.py")]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in files), "not used"


def test_originals_return_even_after_an_error(monkeypatch):
    library = SimpleNamespace(function=str)
    monkeypatch.setitem(sys.modules, "a_library", library)
    monkeypatch.setenv("SET", "1")
    monkeypatch.delenv("UNSET", raising=False)
    patch = Patch(("a_library:function", "os.environ:SET", "os.environ:UNSET"), "why", "now", "here")
    before = dict(os.environ)
    with pytest.raises(KeyError), patch.on(lambda original: f"{original} replaced"):
        assert library.function == f"{str} replaced"
        assert (os.environ["SET"], os.environ["UNSET"]) == ("1 replaced", "None replaced")
        raise KeyError
    assert library.function is str and dict(os.environ) == before


def test_modules_that_are_not_imported_are_left_alone():
    patch = Patch(("no_such_library.module:function",), "why", "now", "here", only_imported=True)
    with patch.on(lambda original: None):
        pass
