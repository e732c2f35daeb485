"""Install every folder of the clone under one name. The rest is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("benchmarks", "core", "data", "ds_configs", "te_models", "training")
packages = find_namespace_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
setup(
    packages=["fp8_suite", *(f"fp8_suite.{name}" for name in packages)],
    package_dir={f"fp8_suite.{name}": name for name in FOLDERS},
)
