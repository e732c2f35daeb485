"""Command line and YAML readers with one-line errors."""

from __future__ import annotations

import argparse
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError, bad_setting, first_line
from fp8_suite.core.settings import TYPE_NAMES, Setting, nearest, split_hint

SWITCH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")  # often written after a switch


class OneLineParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are a UserError: one line without the usage, with the nearest flag."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+|\d*\.\d+)([eE][-+]?\d+)?$")  # -1e-5, too

    def error(self, message: str) -> typing.NoReturn:
        message = message.removeprefix("argument ")
        if found := re.match(r"(--[^/]+)/(--no_\S+): ignored explicit argument '(.*)'", message):
            raise _takes_no_value(found[1], found[3])
        if found := re.fullmatch(r"(--\S+): invalid (int|float) value: '(.*)'", message):
            message = f"{found[1]} {found[3]}: must be {TYPE_NAMES[found[2]]}"
        raise UserError(message, exit_code=EXIT_BAD_SETTING)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else list(args)
        found, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return found
        flags = [option for action in self._actions for option in action.option_strings]
        word, before = unknown[0].split("=")[0], args[args.index(unknown[0]) - 1].replace("--no_", "--")
        if word.lower() in SWITCH_VALUES and before.replace("--", "--no_") in flags:
            raise _takes_no_value(before, word)
        kind = "unknown flag" if word.startswith("-") else "unexpected argument"
        raise UserError(f"{kind} {word}{nearest(word, flags)}", exit_code=EXIT_BAD_SETTING)


def _takes_no_value(flag: str, value: str) -> UserError:
    name = flag.removeprefix("--")
    return bad_setting(f"takes no value; {flag} turns it on, --no_{name} off", **{name: value})


class Switch(argparse.Action):
    """--name turns a setting on, --no_name off: flags win over a YAML file either way."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no_"))


def add_setting(group: Any, name: str, setting: Setting, aliases: Sequence[str] = ()) -> None:
    """Add a setting's flag, absent from the parsed result unless given, with its default in the help."""
    kind, others = split_hint(setting.type)
    text, default = setting.field.metadata["help"].replace("%", "%%"), setting.field.default
    if default is not None and "default:" not in text:
        shown = {True: "on", False: "off"}[default] if kind is bool else default
        text += f" (default: {shown})"
    common = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        options = [f"--{no}{n}" for n in (name, *aliases) for no in ("", "no_")]
        group.add_argument(*options, action=Switch, **common)
        return
    choices = ",".join(get_args(kind)) if get_origin(kind) is Literal else ""
    metavar = f"{{{choices}}}" if choices else {int: "N", float: "X"}.get(kind, "TEXT")
    group.add_argument(f"--{name}", metavar="|".join([metavar, *filter(None, others)]), **common)


class YamlLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and reads only decimal numbers as numbers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        merge = "tag:yaml.org,2002:merge"  # merged keys may be overridden
        names = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"duplicate key {twice!r} (mapping in line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)

    # YAML 1.1 reads 010 as octal 8 and 12:30:00 as 45000. 1e-5 stays text, as on the command line, because
    # sweeps name folders by it.
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
    """Describe what is wrong in a YAML file, with the line."""
    mark = getattr(error, "problem_mark", None)
    return f"{error.problem} (line {mark.line + 1})" if mark else first_line(error)


def read_yaml_settings(path: str) -> dict[str, Any]:
    """Read the `setting: value` lines of a --config file, or a JSON object."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        if path.endswith(".json"):
            text = text.expandtabs()  # YAML allows no tabs
        loaded = yaml.load(text, YamlLoader)
    except OSError as error:
        raise bad_setting(error.strerror or str(error), config=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad_setting(f"not valid YAML: {yaml_fault(error)}", config=path) from None
    if loaded is not None and not (isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)):
        raise bad_setting("must hold `setting: value` lines", config=path)
    return loaded or {}
