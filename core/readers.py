"""Readers of JSON and YAML files. What is wrong with a file is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from fp8_suite.core.errors import UserError, first_line


class UnreadableFile(UserError):
    """A file that cannot be read: missing, not UTF-8, not valid, empty, or with another content."""

    reason: str  # without the path, for errors that name a flag


def unreadable(path: Path, reason: str) -> UnreadableFile:
    error = UnreadableFile(f"{path}: {reason}")
    error.reason = reason
    return error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. UnreadableFile otherwise."""
    try:
        content = parse_json(_read_text(path))
    except ValueError as error:
        raise unreadable(path, str(error)) from None
    if not isinstance(content, dict):
        raise unreadable(path, f"must hold an object, but holds {type(content).__name__}")
    return content


def parse_json(text: str | bytes) -> Any:
    """Return a JSON text's content. ValueError with one line if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {first_line(error)}" if text.strip() else "is empty") from None


def read_record(path: Path) -> dict[str, Any]:
    """Read an optional JSON object; {} if it is missing or damaged."""
    try:
        return read_json(path)
    except UnreadableFile:
        return {}


def read_yaml(path: Path) -> Any:
    """Return a YAML file's content, None if it is empty. UnreadableFile if it is not valid."""
    text = _read_text(path)
    if path.suffix == ".json":
        text = text.expandtabs()  # YAML allows no tabs
    try:
        return yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        fault = f"{error.problem} (line {mark.line + 1})" if mark else first_line(error)
        raise unreadable(path, f"not valid YAML: {fault}") from None


def _read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte-order mark if there is one."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise unreadable(path, f"not UTF-8: {error}") from None


class YamlLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        merge = "tag:yaml.org,2002:merge"  # merged keys may be overridden
        names = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"duplicate key {twice!r} (mapping in line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)
