"""Mistakes in arguments and configurations, in three lines: what is wrong, what was expected, what to do."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "COMMANDS",
    "Mistake",
    "missing_checkpoint",
    "of_parser",
    "of_trainer",
    "shows_tracebacks",
    "unknown_command",
]

COMMANDS = {
    "fit": "train",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "predict",
    "examine": "say before a training what of it will run in ONNX Runtime, what not and why",
    "bench": "say which strategy is the fastest for a model and its data, and from which step on it pays",
    "doctor": "say what is wrong with the installation, and how to mend it",
    "cache": "show what is kept for later runs, or clear it",
    "new": "write a project to start from into a new folder",
}
"""Name to what it is for; LightningCLI executes those up to ``bench``."""

_PROGRAM = "lightning-ort"
# of Trainer.fit and others, instead of a path
_CHECKPOINTS = ("best", "last", "hpc", "registry")
_LONGEST = 400


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What somebody has written that cannot be done.

    Attributes:
        wrong: what it is, with its value.
        expected: instead of it.
        remedy: what to do.
    """

    wrong: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        wrong, expected, remedy = (_one_line(part) for part in (self.wrong, self.expected, self.remedy))
        return f"wrong:    {wrong}\nexpected: {expected}\nto do:    {remedy}"


def shows_tracebacks() -> bool:
    """Whether the user wants the exception itself, which jsonargparse has a variable for."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false", "no")


def unknown_command(name: str) -> Mistake:
    """A word that is none of :data:`COMMANDS`."""
    near = difflib.get_close_matches(name, COMMANDS, 1)
    remedy = f"{_PROGRAM} {near[0]}, if that was meant; " if near else ""
    return Mistake(f"{name} is no command", f"one of {', '.join(COMMANDS)}", f"{remedy}{_PROGRAM} --help explains them")


def missing_checkpoint(path: Any) -> Mistake | None:
    """``None`` where there is a file, or what Lightning finds a checkpoint by without one."""
    name = str(path)
    if path is None or name.partition(":")[0] in _CHECKPOINTS or "://" in name or os.path.exists(name):
        return None
    return Mistake(
        f"ckpt_path is {name!r}, and there is no such file in {os.getcwd()}",
        "the path of a checkpoint, or last",
        "correct the path, or leave it out",
    )


def of_trainer(error: Exception, options: Mapping[str, Any]) -> Mistake:
    """What a Trainer, or one of the objects it is given, has refused.

    Args:
        error: raised by the constructor.
        options: of the Trainer.
    """
    text = next((reason for reason in _errors(str(error)) if not reason.startswith("Expected a")), str(error))
    words = re.findall(r"`(\w+)`|\b(\w+)=|\b(?=\w*_)(\w+)\b", text)
    named = [name for found in words for name in found if name in options]
    if not named:  # it may have the value instead
        said = {*re.findall(r"\w+", text)} - {"auto"}
        named = [name for name, value in options.items() if isinstance(value, str) and value in said]
    wrong = "; ".join(f"trainer.{name} is {options[name]!r}" for name in dict.fromkeys(named))
    if text.startswith("You selected an invalid strategy name"):  # and names some of Lightning's own
        text = "ort, or another name or object of a strategy, such as auto or ddp"
    return Mistake(
        wrong or "an option of the trainer is refused",
        text or type(error).__name__,
        "correct it in the configuration or on the command line; JSONARGPARSE_DEBUG=true shows where it was refused",
    )


def of_parser(parser: argparse.ArgumentParser, message: str) -> Mistake:
    """What jsonargparse says, in the words of who has written the configuration.

    Args:
        parser: of the command, which refuses something.
        message: of it.
    """
    return next(filter(None, (reading(parser, message) for reading in _READINGS)), None) or Mistake(
        message, "arguments and configurations as in the help", f"{_command(parser)} --help lists the options"
    )


def _command(parser: argparse.ArgumentParser) -> str:
    return re.sub(r" \[.*?\]", "", parser.prog)


def _missing_option(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    found = re.fullmatch(r"the following arguments are required: (.*)", message)
    if found is None:
        return None
    names = [name.partition(".")[2] or name for name in found[1].split(", ")]
    return Mistake(
        f"there is no {' and no '.join(names)}",
        f"{' and '.join(names)} in the configuration, or as --{names[0]}=...",
        f"{_PROGRAM} fit --config config.yaml; {_PROGRAM} new my_project writes a project that has one",
    )


def _unknown_option(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    found = re.match(r"unrecognized arguments: (?P<argument>\S+)", message) or re.match(
        r"(?:Subcommand '(?P<command>\w+)' does not accept option|Option) '(?P<argument>[^']*)'", message
    )
    if found is None:
        return None
    given = found["argument"].partition("=")[0]
    subcommand = found.groupdict().get("command")
    command = f"{_PROGRAM} {subcommand}" if subcommand else _command(parser)
    options = [action.dest for action in parser._actions if action.option_strings]
    near = difflib.get_close_matches(given.lstrip("-"), options, 1)
    return Mistake(
        f"{given} is no option of {command}",
        f"{near[0]}, if that was meant" if near else "an option of the command, by its full name",
        f"{command} --help lists the options",
    )


def _missing_file(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    found = re.match(r"Parser key \"([^\"]+)\": (.*): '(.*)'", message)
    if found is None:
        return None
    key, why, path = found.groups()
    expected = "a configuration in YAML or JSON" if key == "config" else "a file that can be read"
    return Mistake(f"--{key}={path}: {why[:1].lower()}{why[1:]}", expected, "correct the path")


def _broken_file(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    found = re.match(r"(?:Problems parsing config|Unexpected config): (.*)", message, re.DOTALL)
    return found and Mistake(
        f"the configuration cannot be read: {found[1]}",
        "YAML or JSON with keys such as trainer, model and data",
        "correct that line",
    )


def _missing_value(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    found = re.fullmatch(r"argument (.*?): expected (.*)", message)
    return found and Mistake(f"{found[1]} has no value", found[2], f"write {found[1]}=..., or leave it out")


def _wrong_command(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    found = re.match(r"argument subcommand: invalid choice: '(.*?)'", message)
    return found and unknown_command(found[1])


def _wrong_class(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    """A class that is not there, or whose arguments are others."""
    key = re.match(r'Parser key "([^"]+)":', message)
    problems = list(
        re.finditer(r"^( *)- Problem with given class_path '(.*?)':\n((?:\1 .*\n?|\n)*)", message, re.MULTILINE)
    )
    if key is None or not problems:
        return None
    # what could stand there and has not been written is tried too, as if it had been
    tried = set(re.findall(r"<class '(?:[\w.]*\.)?(\w+)'>", message))
    problem = ([p for p in problems if p[2].rpartition(".")[2] not in tried] or problems)[-1]
    path, why = problem[2], textwrap.dedent(problem[3]).strip()
    if "- Problem with given class_path" in why:  # of an argument that is a class as well
        return _wrong_class(parser, why)
    unknown = re.match(r"Option '(.*?)' is not accepted", why)
    if unknown:
        arguments = _arguments(path)
        near = difflib.get_close_matches(unknown[1], arguments, 1)
        return Mistake(
            f"{path} has no argument {unknown[1]}",
            f"{near[0]}, if that was meant"
            if near
            else f"one of {', '.join(arguments)}"
            if arguments
            else "no arguments",
            f"correct it below {key[1]} in the configuration, or --{key[1]}.{unknown[1]} on the command line",
        )
    value = _wrong_value(parser, why)
    if value is not None:
        return Mistake(
            f"{key[1]}.{value.wrong}, for {path}",
            value.expected,
            value.remedy.replace("correct ", f"correct {key[1]}.", 1),
        )
    return Mistake(
        f"{key[1]} is {path}: {why}",
        "the path of a class that Python can import, as in package.module.Class",
        f"correct {key[1]}, or call the command in the folder that has the package",
    )


def _wrong_value(parser: argparse.ArgumentParser, message: str) -> Mistake | None:
    key = re.match(r'Parser key "([^"]+)":', message)
    if key is None:
        return None
    types = re.search(r"^ *Subtypes: \[(.*)\]$", message, re.MULTILINE)
    given = re.search(r"Given value: (.*)", message, re.DOTALL) if types else re.search(r"Got value: (.*)", message)
    value = "" if given is None else f" is {given[1].strip()}"
    unknown = re.search(r"Expected a dot import path string: (.*)", message)
    if types and re.search(r"<class '(int|float)'>", types[1]):  # a number was meant
        unknown = None
    if unknown:
        value = f" is {unknown[1]}, which is no class that is known by its name alone"
    single = re.search(r"Expected an? (.*?)\. Got value", message)
    expected = " or ".join(dict.fromkeys(_words(types[1] if types else single[1] if single else "")))
    if unknown:
        expected += ", others than Lightning's and this package's with their path, as in package.module.Class"
    remedy = f"correct {key[1]} in the configuration or on the command line"
    return Mistake(f"{key[1]}{value}", expected or message, remedy)


_READINGS = (
    _missing_option, _unknown_option, _missing_file, _broken_file, _missing_value, _wrong_command, _wrong_class,
    _wrong_value,
)  # fmt: skip


def _errors(message: str) -> list[str]:
    """What each type of a union says about a value."""
    return re.findall(r"^ +- (.*)$", message, re.MULTILINE)


def _arguments(path: str) -> list[str]:
    try:
        return [n for n in inspect.signature(pkgutil.resolve_name(path)).parameters if n not in ("args", "kwargs")]
    except (AttributeError, ImportError, TypeError, ValueError):  # made by what has no signature
        return []


def _words(types: str) -> Iterator[str]:
    """Types for readers: of ``<class 'int'>, <class 'NoneType'>``, first ``int``, then ``null``."""
    short = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", types)
    for part in _split(short):
        literal = re.fullmatch(r"typing\.Literal\[(.*)\]", part)
        if literal:
            yield from (word.strip("'") for word in _split(literal[1]))
        else:
            yield re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", part).replace("NoneType", "null").replace("Literal", "")


def _split(text: str) -> list[str]:
    """Parts between commas that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
