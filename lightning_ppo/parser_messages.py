"""What jsonargparse finds wrong with a setting, in one line: the key, its value, and what would fit."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_CLASS_PROBLEM = re.compile(
    r"""(?:Problem\ with\ given\ class_path\ '(?P<given>[^']+)':      # a class that is built now
        | expects\ a\ function\ or\ a\ callable\ class:)              # or later, with more arguments
        (?P<cause>.*)""",
    re.DOTALL | re.VERBOSE,
)

_WITHOUT_CLASS = {"torch.optim.Optimizer": "AdamW", "Union": "lightning_ppo.schedulers.LinearWarmupDecay"}
"""What jsonargparse takes for the class of an optimizer or a schedule when only its arguments were given."""


def one_line(message: str) -> str:
    r"""Shorten a message of jsonargparse to one line.

    Of several types that a value might have had, the one that its class was found for is the one that was meant.

    Example:
        >>> one_line('Parser key "model.ppo.gamma":\n  Expected a <class \'float\'>. Got value: x')
        'model.ppo.gamma=x does not fit; give float'
    """
    text = re.sub(r"<class '([^']+)'>", r"\1", message).replace("NoneType", "null")
    return " ".join(_shorten(text.replace("typing.", "").replace("collections.abc.", "")).split())


def unknown_setting(key: str, settings: Iterable[str]) -> str:
    """Say that there is no such setting, and which may be meant.

    Args:
        key: What was given, with its sections.
        settings: The keys that there are.
    """
    name = key.rpartition(".")[2]
    section = key.removesuffix(name)
    keys = sorted(settings)
    # most mistakes leave out the sections, or misspell the last name
    found = [other for other in keys if other.rpartition(".")[2] == name]
    if not found:
        names = [other.removeprefix(section) for other in keys if other.rpartition(".")[0] == section[:-1]]
        found = [section + near for near in get_close_matches(name, names, 2, 0.7)]
    hint = f"did you mean {' or '.join(found)}?" if 0 < len(found) < 4 else "--help of a subcommand lists all"
    return f"{key} is no setting; {hint}"


def unknown_argument(name: str, arguments: Iterable[str]) -> str:
    """Say that a class has no such argument, and which may be meant.

    Args:
        name: What was given.
        arguments: Names of the arguments that there are.
    """
    # not jsonargparse's own, such as `callbacks+` or `optimizer.help`
    names = sorted(filter(str.isidentifier, arguments))
    found = get_close_matches(name, names, 2, 0.7)
    hint = f"did you mean {' or '.join(found)}?" if found else f"it has {', '.join(names) or 'none'}"
    return f"{name} is no argument of it; {hint}"


def _shorten(text: str) -> str:
    head = re.match(r'\s*Parser key "([^"]+)":(.*)', text, re.DOTALL)
    if head is None:
        missing = re.match(r"\s*the following arguments are required: (.*)", text)
        if missing is None:
            return text
        # a subcommand is no part of a key
        names = [re.sub(r"^(?:fit|validate|predict)\.", "", name) for name in missing[1].split(", ")]
        return f"{', '.join(names)} {'is missing; give it' if len(names) == 1 else 'are missing; give them'}"
    key, rest = head[1], head[2]
    no_file = re.match(r"\s*(File does not exist|Path is not a file): '(.*)'", rest)
    if no_file:
        why = "does not exist" if no_file[1] == "File does not exist" else "is no file"
        return f"{key}={no_file[2]} {why}; give the path of a YAML file"
    section = re.search(rf"""Parser key "{re.escape(key)}": Unable to load config "(.*)"\s*\Z""", rest, re.DOTALL)
    if section:
        return f"{key}={section[1]} does not fit; give its settings one by one as {key}.NAME, or a file of them"
    # a nested message has values of its own, which come first
    value = re.search(r"(?:.*\bGiven|\bGot) value: (.*)\Z", rest, re.DOTALL)
    problem = _CLASS_PROBLEM.search(rest)
    if value and problem:
        name = problem["given"] or _class_path(rest) or value[1]
        if example := _WITHOUT_CLASS.get(name):
            return f"{key} has arguments, but no class; give {key}={example} too, or another one"
        return f"{key}={name} does not fit; {_cause(problem['cause'])}"
    # an import path would do for a class, too, but is never what was meant
    expected = re.findall(r"Expected an? (?!path but|dot import)(.+?)(?:\. Got value|$)", rest, re.MULTILINE)
    if value and expected:
        options = [re.sub(r"Literal\[(.*)\]", r"one of \1", option) for option in expected]
        return f"{key}={value[1]} does not fit; give {' or '.join(options)}"
    return f"{key}: {rest}"


def _cause(text: str) -> str:
    """What is wrong inside a class: what one of its arguments was told, or one line."""
    if re.match(r'\s*Parser key "', text):
        # up to the first end of a nested message; what follows repeats the values around it
        inner = re.match(r".*?(?:Given|Got) value: .*?(?=\. Got value: Namespace|\n|\Z)", text, re.DOTALL)
        return _shorten(inner[0] if inner else text)
    line = text.strip().partition("\n")[0]
    return _shorten(line.partition(". Got value: Namespace")[0])


def _class_path(text: str) -> str | None:
    found = re.search(r"class_path='([^']+)'", text)
    return found[1] if found else None
