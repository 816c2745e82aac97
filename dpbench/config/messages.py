"""Hydra's and OmegaConf's errors as one sentence that names the setting, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpbench.config.files import options_with
from dpbench.config.registry import SCHEMAS
from dpbench.config.schema import RunConfig
from dpbench.errors import UserError
from dpbench.wording import is_decimal

GROUPS = {*SCHEMAS, "algo"}
OF_A_RUN = {field.name for field in dataclasses.fields(RunConfig)}
NUMBER, WHOLE, FLAG = "a number", "a whole number", "true or false"
KINDS = {"Float": NUMBER, "float": NUMBER, "Integer": WHOLE, "int": WHOLE, "Boolean": FLAG, "bool": FLAG}

# What is called otherwise elsewhere, by its name here.
CALLED_HERE = {
    "algorithm": "algo",
    "batch": "batch_size",
    "clip_norm": "threshold.norm",
    "cuda": "device",
    "gpu": "device",
    "learning_rate": "optim.lr",
    "max_grad_norm": "threshold.norm",
    "max_steps": "epochs, of which the steps follow",
    "norm": "threshold.norm",
    "num_epochs": "epochs",
    "optimizer": "optim",
    "sigma": "privacy.noise_multiplier",
    "steps": "epochs, of which the steps follow",
    "target_epsilon": "eps",
    "target_eps": "eps",
    "wandb": "tracker.mode",
}
# Settings that are several in one, and a group that may be meant.
OF_SEVERAL = {"data": "dataset", "evaluation": None, "checkpoint": None}

# How errors begin that come of a file.
IN_FILE = re.compile(r"In '(?P<option>\w+(/\w+)+)': (\w+ raised while composing config:\n)?")

# How errors begin about a value that was taken from another setting.
REFERRED = re.compile(r"While dereferencing interpolation '[^']*': ")

# What belongs where OmegaConf's errors begin so.
SHAPES = {
    r"Invalid value assigned: \w+ is not a ListConfig": "a list",
    r"Cannot merge DictConfig with ListConfig": "a list",
    r"Cannot convert '\w+' to string": "one text",
    r"Cannot assign \w+ to Dict\[": "a value for each name, such as {sgd: 1}",
}


def explain(error: Exception, overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> UserError:
    """The sentence for an error raised while composing or resolving.

    Args:
        error: what Hydra or OmegaConf raised.
        overrides: what the user typed.
        config_dirs: further folders that were searched for options.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, MissingConfigException):
        return _no_such_option(str(error), config_dirs)
    if isinstance(error, RecursionError):
        return UserError(
            "a YAML file has itself among its defaults; to change an option, name it there and set the rest"
        )
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    text = str(cause)
    option = None
    if match := IN_FILE.match(text):
        option, text = match["option"], text[match.end() :]
    text = REFERRED.sub("", text, count=1)
    for sentence in (_wrong_choice, _wrong_file, _wrong_reference, _no_value, _wrong_type, _wrong_shape):
        if (said := sentence(text, overrides, option)) is not None:
            return said
    return _in_its_words(text, overrides, option)


def _in_its_words(text: str, overrides: Sequence[str], option: str | None) -> UserError:
    """What the error says, about the setting that it names behind that, if it does."""
    said = f"{option}.yaml: {_first_line(text)}" if option else _first_line(text)
    key = re.search(r"full_key: (?P<key>[^\s[]+)", text)
    if key is None or option:
        return UserError(said)
    typed = [line.partition("=")[2] for line in overrides if line.partition("=")[0] == key["key"]]
    return UserError(said, field=key["key"], value=typed[-1]) if typed else UserError(f"{key['key']}: {said}")


def _wrong_choice(text: str, overrides: Sequence[str], option: str | None) -> UserError | None:
    """Something else where the name of an option belongs."""
    if "Config group override must be a string" in text:
        typed = (line for line in overrides if line.partition("=")[0] in GROUPS and _is_no_name(line.partition("=")[2]))
        return UserError(f"{', '.join(typed)}: expected the name of one of its options")
    if match := re.match(r"Could not override '(?P<group>[^'@]+)'\. No match in the defaults list", text):
        close = most_like(match["group"], sorted(GROUPS))
        hint = f"; did you mean {close}?" if close else ""
        return UserError(f"{option}.yaml: there is no group {match['group']} to override{hint}")
    if re.match(r"Invalid type assigned: \w+ is not a subclass of ", text) and option is None:
        for key, value in (line.split("=", 1) for line in overrides if line.partition("=")[0] in OF_SEVERAL):
            names = [f"{key}.{field.name}" for field in dataclasses.fields(_several(key))]
            hint = f"; did you mean {OF_SEVERAL[key]}?" if OF_SEVERAL[key] else ""
            return UserError(f"it is several settings: {', '.join(names)}{hint}", field=key, value=value)
    if match := re.match(r"Multiple values for (?P<group>\w+)\. .*'override \w+: (?P<name>[^']*)'", text):
        return _to_override(option, match["group"], match["name"])
    if match := re.match(r"Merge error: \w+ is not a subclass of (?P<stage>\w+)\. value: (?P<value>.*)", text):
        group = next(
            (g for g, kinds in SCHEMAS.items() if match["stage"] in {k.__name__ for k in kinds.values()}), None
        )
        if group is not None:
            return _to_override(option, group, match["value"])
    return None


def _several(key: str) -> type:
    """The class of a setting of `OF_SEVERAL`."""
    kind = get_type_hints(RunConfig)[key]
    assert isinstance(kind, type)
    return kind


def _to_override(option: str | None, group: str, name: str) -> UserError:
    where = f"{option}.yaml" if option else "a YAML file"
    return UserError(f"{where}: {group}={name} is chosen in its defaults, by the line - override /{group}: {name}")


def _wrong_file(text: str, overrides: Sequence[str], option: str | None) -> UserError | None:
    """What a file says of the run where it belongs to a group, or that the run does not have."""
    lacks = _lacks_package(option)
    if match := re.search(r"Key '\w+' not in '(?P<schema>\w+)'\s+full_key: (?P<key>\S+)", text):
        group, _, rest = match["key"].partition(".")
        typed = [line.partition("=")[2] for line in overrides if line.startswith(f"{group}=")]
        if typed and rest.partition(".")[0] == group:  # where a schema was chosen by it, that is the file at fault
            return _lacks_package(f"{group}/{typed[0]}")
        if option and option.startswith(f"{group}/") and rest.partition(".")[0] in OF_A_RUN:
            return lacks
        return _set_by_a_file(match["key"], match["schema"])
    if option and re.match(r"Could not override '\S+@(algo|dataset)\.", text):
        return lacks
    if option and (match := re.match(r"Could not override '(algo|dataset)/(?P<group>\w+)@(?P=group)'", text)):
        group = match["group"]
        return UserError(f"{option}.yaml: {group} is overridden under its name from the top, - override /{group}: ...")
    if option and (match := re.match(r"Invalid type assigned: \w+ is not a subclass of Dict.*value: (?P<v>.*)", text)):
        return UserError(f"{option}.yaml: expected lines such as key: value, not {match['v']}")
    return None


def _lacks_package(option: str | None) -> UserError:
    return UserError(f"{option}.yaml lacks the line # @package _global_ at its beginning")


def _wrong_reference(text: str, overrides: Sequence[str], option: str | None) -> UserError | None:
    """A setting that takes its value from one that is not there."""
    match = re.search(r"Interpolation key '(?P<source>[^']+)' not found\s+full_key: (?P<key>\S+)", text)
    if match is None:
        return None
    source, key = match["source"], match["key"]
    if source.startswith("model."):
        model = next((line.partition("=")[2] for line in overrides if line.startswith("model=")), None)
        needs = "a data set of texts needs a text model, such as text_small, or a class that extends "
        needs += f"dpbench.models.TextModel, which has {source}"
        return UserError(needs, field=None if model is None else "model", value=model)
    return UserError(f"{key}: it takes its value from {source}, which nothing sets; set one of the two")


def _no_value(text: str, overrides: Sequence[str], option: str | None) -> UserError | None:
    """Null, or nothing, where a value belongs."""
    missing = r"(Structured config of type `\w+` has m|M)issing mandatory value: \S+\s+full_key: (?P<key>\S+)"
    if match := re.match(missing, text):
        return UserError("expected a value", field=match["key"], value="???")
    null = r"Incompatible value 'None' for field of type '|Invalid type assigned: NoneType is not a subclass of "
    match = re.match(rf"field '(?P<field>\S+)' is not Optional|({null})(?P<kind>\w+)", text)
    if match is None:
        return None
    known = re.search(r"full_key: (?P<key>\S+)", text)
    owner = re.search(r"object_type=(?P<owner>\w+)", text)
    field = known["key"] if known else match["field"]
    kind = match["kind"] or (_type_of(owner["owner"], field.rpartition(".")[2]) if owner else None)
    return UserError(f"expected {KINDS.get(kind or '', 'a value')}", field=field)


def _type_of(owner: str, name: str) -> str | None:
    """The type of a field of the schema or stage that has this class name, as it is written."""
    classes = [RunConfig, *(kind for kinds in SCHEMAS.values() for kind in kinds.values())]
    fields = (field for kind in classes if kind.__name__ == owner for field in dataclasses.fields(kind))
    return next((str(field.type) for field in fields if field.name == name), None)


def unknown_setting(error: Exception, overrides: Sequence[str]) -> str | None:
    """The override at fault if the error says that its key does not exist."""
    match = re.match(r"Could not override '(?P<key>[^']+)'", str(error))
    if match is None:
        return None
    return next((line for line in overrides if line.split("=")[0] == match["key"]), None)


def no_such_setting(line: str, composed: DictConfig) -> UserError:
    """The sentence for an override of a key that does not exist, from the config composed without it."""
    key, _, value = line.partition("=")
    parent, _, name = key.rpartition(".")
    while parent and OmegaConf.select(composed, parent) is None:  # there is no such setting either
        parent, _, name = parent.rpartition(".")
    below = key.removeprefix(f"{parent}.").removeprefix(name)
    node = OmegaConf.select(composed, parent) if parent else composed
    known = [str(k) for k in node if k not in ("hydra", "name", "_target_")] if isinstance(node, DictConfig) else []
    group = parent.replace(".", "/")
    choice = composed.hydra.runtime.choices.get(group)
    here = f"{group}={choice}" if choice else parent or "a run"
    meant = _meant(name, parent, known, composed)
    if meant in GROUPS or meant in OF_SEVERAL:
        meant = f"{meant}{below}"
    hint = f"; did you mean {meant}?" if meant else ""
    if name not in CALLED_HERE and (others := options_with(name, group)):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        hint = f"; it is a setting of {', '.join(f'{group}={other}' for other in others[:3])}{more}"
    return UserError(f"no such setting; {here} has {', '.join(sorted(known)) or 'none'}{hint}", field=key, value=value)


def _meant(name: str, parent: str, known: Sequence[str], composed: DictConfig) -> str | None:
    """The setting that is most likely meant by a name that there is not, the surest guess first; None for none."""
    if name in CALLED_HERE:
        return CALLED_HERE[name]
    if not parent and (of_group := _of_a_group(name, composed)):
        return of_group
    if name in OF_A_RUN:  # not of this group
        return name
    if close := most_like(name, known):
        return f"{parent}.{close}" if parent else close
    return _of_a_group(name, composed) or CALLED_HERE.get(most_like(name, list(CALLED_HERE)) or "")


def _set_by_a_file(key: str, schema: str) -> UserError:
    if schema != RunConfig.__name__:
        return UserError(f"{key}: a YAML file sets it, but {schema} has no such setting")
    close = most_like(key, [field.name for field in dataclasses.fields(RunConfig)])
    hint = f"; did you mean {close}?" if close else ""
    return UserError(f"{key}: a YAML file sets it, but a run has no such setting{hint}")


def most_like(name: str, known: Sequence[str]) -> str | None:
    """What is most like a name among those that are known: one that it begins with, such as eps of epsilon, first."""
    begun = [one for one in known if len(one) > 2 and name.lower().startswith(one)]
    close = difflib.get_close_matches(name.lower(), known, 1)
    return next(iter([*begun, *close]), None)


def _of_a_group(name: str, composed: DictConfig) -> str | None:
    """The setting of a stage or another group that has this name, the algorithm's own one first; None for none."""
    nodes = {group: composed[group] for group in ("algo", *composed) if group in composed and group != "hydra"}
    return next((f"{g}.{name}" for g, node in nodes.items() if isinstance(node, DictConfig) and name in node), None)


def _no_such_option(text: str, config_dirs: Sequence[Path]) -> UserError:
    match = re.search(r"Could not find '(?P<group>.+)/(?P<option>[^']*)'", text)
    if match is None:
        return UserError(_first_line(text))
    group, name = match["group"].rpartition("/")[2], match["option"]
    if group in SCHEMAS and match["group"].startswith("schema/"):
        known, file = list(SCHEMAS[group]), IN_FILE.match(text)
        close = most_like(name, known)
        hint = f"; did you mean {close}?" if close else ""
        where = f"{file['option']}.yaml: " if file else ""
        return UserError(
            f"{where}/schema/{group}: {name}: expected one of {', '.join(known)}, or <module>.<Class>{hint}"
        )
    if group in GROUPS and "/" in match["group"] and (file := IN_FILE.match(text)):
        return _to_override(file["option"], group, name)
    listed = re.search(r"Available options in '[^']+':\n(?P<options>(\t.+\n?)+)", text)
    options = [line.strip() for line in listed["options"].splitlines()] if listed else []
    close = most_like(name, options)
    hint = "; options of your own need -cd FOLDER" if group in GROUPS and not config_dirs else ""
    hint += f"; did you mean {close}?" if close else ""
    return UserError(f"expected one of {', '.join(options)}{hint}", field=match["group"], value=name)


def _wrong_type(text: str, overrides: Sequence[str], option: str | None) -> UserError | None:
    match = re.search(r"Value '(?P<value>.*)' of type '\w+' could not be converted to (?P<kind>\w+)", text)
    match = match or re.search(r"Value '(?P<value>.*)' is not a valid (?P<kind>bool)\b", text)
    if match is None:
        return None
    key = re.search(r"full_key: (?P<key>\S+)", text)
    field = key["key"] if key else None
    if below := next((line for line in overrides if line.startswith(f"{field}.")), None):
        return UserError(f"{below}: {field} is one value, which has no settings of its own")
    return UserError(f"expected {KINDS.get(match['kind'], match['kind'])}", field=field, value=match["value"])


def _wrong_shape(text: str, overrides: Sequence[str], option: str | None) -> UserError | None:
    """A list, a mapping or one value where another of these belongs."""
    allowed = next((words for start, words in SHAPES.items() if re.match(start, text)), None)
    key = re.search(r"full_key: (?P<key>[^\s[]+)", text)
    if allowed is None or key is None:
        return None
    value = next((line.partition("=")[2] for line in overrides if line.partition("=")[0] == key["key"]), None)
    plain = value is not None and re.fullmatch(r"[\w.+-]+", value)
    hint = f", such as [{value if plain else 1}]" if allowed == "a list" else ""
    return UserError(f"expected {allowed}{hint}", field=key["key"], value=value)


def _is_no_name(text: str) -> bool:
    return text.lower() in ("null", "true", "false") or is_decimal(text)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "the configuration can't be read"
