"""Command line and YAML readers with one-line errors."""

from __future__ import annotations

import argparse
import re
import typing
from typing import Any

import yaml

from core.errors import first_line
from core.settings import _kind

SWITCHED = ("true", "false", "yes", "no", "on", "off", "1", "0")  # what people write after a switch


def _no_value(flag: str, off: str, value: str) -> str:
    return f"{flag} {value}: takes no value; {flag} turns it on, {off} off"


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors, for one line without the usage."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+|\d*\.\d+)([eE][-+]?\d+)?$")  # -1e-5, too

    def error(self, message: str) -> typing.NoReturn:
        message = message.removeprefix("argument ")
        if found := re.match(r"(--\S+)/(--no_\S+): ignored explicit argument '(.*)'", message):
            message = _no_value(*found.groups())
        if found := re.fullmatch(r"(--\S+): invalid (int|float) value: '(.*)'", message):
            flag, kind, value = found.groups()
            message = f"{flag} {value}: must be {_kind({'int': int, 'float': float}[kind])}"
        raise ValueError(message)


class _Switch(argparse.Action):
    """--name turns a setting on, --no_name off, so that flags can win over a YAML file either way."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no_"))


class YamlLoader(yaml.SafeLoader):
    """YAML whose mappings name each key once: the last of two would win, unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        merge = "tag:yaml.org,2002:merge"  # of another mapping, whose keys may be here too
        names = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"{twice!r} stands twice, line {node.start_mark.line + 1} and on")
        return super().construct_mapping(node, deep)

    # Of YAML 1.1's numbers and dates decimal numbers alone: 010 would be 8, 12:30:00 be 45000. 1e-5 is text
    # there, as on a command line: folders of sweeps are named by what is written.
    yaml_implicit_resolvers: typing.ClassVar = {
        first: [
            (tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float", ":timestamp"))
        ]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


WHOLE = r"[-+]?(0|[1-9]\d*)$"
DECIMAL = r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]\d+)?|\.inf)$|\.nan$"
for kind, pattern in (("int", WHOLE), ("float", DECIMAL)):
    YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list("-+.0123456789"))


def yaml_fault(error: Exception) -> str:
    """What is wrong in a YAML file, and in which line."""
    mark = getattr(error, "problem_mark", None)
    return f"{error.problem} (line {mark.line + 1})" if mark else first_line(error)
