"""FP8 training of language models. Every module is imported under this name.

In a clone, the packages are the folders beside this one; `pip install .` puts them into it.
"""

from pathlib import Path

if (Path(__file__).parents[1] / "pyproject.toml").exists():
    __path__.append(str(Path(__file__).parents[1]))
