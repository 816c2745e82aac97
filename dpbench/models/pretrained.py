"""Weights that a model begins with: from a file, a folder, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dpbench.errors import UserError
from dpbench.files import names_weights_file

FILES = ("model.safetensors", "pytorch_model.bin")

Weights = dict[str, Tensor]


class OtherModelError(Exception):
    """Weights are another model's; in words that go on from "these are weights of another model"."""


def load_pretrained(
    net: nn.Module, source: str, *, head: str | tuple[str, ...] = (), adapt: Callable[[Weights], Weights] = lambda w: w
) -> None:
    """Load all weights but those of the head, which stays as it was initialised for the data set's classes.

    Args:
        net: the model.
        source: a file of weights, a folder that holds one, the id of a hub repository, or the name of one of timm's.
        head: how the names of the head's parameters begin; nothing where the head is among the weights.
        adapt: gives the weights the names and shapes of the model's; raises `OtherModelError`, or whatever it runs
            into, where they are of none that it knows.

    Raises:
        UserError: there are no such weights, or they are another model's.
    """
    found = _read(weights_file(source), source)
    try:
        weights = {name: value for name, value in adapt(found).items() if not name.startswith(head)}
    except OtherModelError as error:
        raise _other_model(source, str(error)) from error
    except (KeyError, IndexError, ValueError, RuntimeError) as error:  # of timm's reshaping, too
        said = " ".join(str(error).split())
        raise _other_model(source, f"they are laid out otherwise ({type(error).__name__}: {said})") from error
    own = net.state_dict()
    for name, value in own.items():
        if name.startswith(head):
            weights[name] = value
        elif name not in weights:
            raise _other_model(source, f"they lack {name}")
        elif weights[name].shape != value.shape:
            shapes = f"{tuple(weights[name].shape)}, not {tuple(value.shape)}"
            raise _other_model(source, f"{name} has shape {shapes}")
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise _other_model(source, f"they have {unknown[0]} besides")
    net.load_state_dict(weights)


def train_only(net: nn.Module, trains: Callable[[str], bool]) -> None:
    """Freeze the parameters whose name does not say that they are trained."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(trains(name))


def weights_file(source: str) -> Path:
    """The file that a source names, fetched from the hub or found in its cache where it is no path.

    Raises:
        UserError: there is none.
    """
    path = _local(source)
    if path is None:
        return _from_hub(source)
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise _error(
            source,
            "there is no such file or folder; name one, or a Hugging Face repository (owner/name) or a timm model to "
            "fetch its weights from the hub",
        )
    found = _in_folder(path)
    if found is None:
        raise _error(source, f"the folder holds no {' or '.join(FILES)}")
    return found


def weights_digest(source: str) -> str:
    """SHA-256 of the file that a source names, in hexadecimal digits.

    Raises:
        UserError: there is none.
    """
    with weights_file(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_here(source: str) -> bool:
    """Whether `weights_file` would find them without a network; reads no weights."""
    path = _local(source)
    if path is not None:
        return os.path.isfile(path) or _in_folder(path) is not None
    repository = hub_repository(source)
    try:
        return _cached(repository) is not None
    except ValueError:  # no name of a repository
        return False


def _local(source: str) -> Path | None:
    """The path that a source is, whether or not something is there; None for a name on the hub."""
    path = Path(source).expanduser()
    # os.path, for pathlib raises where a name is longer than a file system takes.
    return path if names_weights_file(source) or os.path.exists(path) else None


def _in_folder(path: Path) -> Path | None:
    """The weights in a folder; None without any."""
    return next((path / name for name in FILES if os.path.isfile(path / name)), None)


def hub_repository(source: str) -> str:
    """The hub's repository of a source; timm's own ones are named after its models and what they were trained on."""
    if "/" in source:
        return source.removeprefix("hf-hub:")
    if "." not in source:  # of which training, timm knows
        from timm.models import get_pretrained_cfg

        preferred = get_pretrained_cfg(source)
        if preferred is not None and preferred.hf_hub_id:
            return str(preferred.hf_hub_id)
    return f"timm/{source}"


def _cached(repository: str) -> Path | None:
    """Weights in the hub's cache; None without any. Raises `ValueError` where there can be no such repository."""
    import huggingface_hub

    found = (huggingface_hub.try_to_load_from_cache(repository, name) for name in FILES)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def _from_hub(source: str) -> Path:
    """Weights in the hub's cache as they are, which takes no network, or else from the hub."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository = hub_repository(source)
    verbosity = huggingface_hub.logging.get_verbosity()
    huggingface_hub.logging.set_verbosity(logging.ERROR)  # it tells of each attempt
    reason = ""
    try:
        if (cached := _cached(repository)) is not None:
            return cached
        for name in FILES:
            try:
                return Path(huggingface_hub.hf_hub_download(repository, name))
            except LocalEntryNotFoundError:
                reason = "not in its cache, and it does not answer"
                break
            except EntryNotFoundError:
                reason = f"it holds no {' or '.join(FILES)}"
    except Exception as error:  # no such repository, no name of one, or whatever the network and the disk run into
        reason = type(error).__name__
    finally:
        huggingface_hub.logging.set_verbosity(verbosity)
    raise _error(
        source,
        f"no such file or folder, and {repository} can't be fetched from the Hugging Face hub ({reason}); download its "
        f"{FILES[0]} where there is a network and set model.pretrained to that file, or to null for random weights",
    )


def _read(file: Path, source: str) -> Weights:
    from timm.models import load_state_dict

    try:
        # Tensors and names alone: a pickle could have code run.
        weights = load_state_dict(str(file), weights_only=True)
    except Exception as error:  # the readers raise whatever the parsing of a damaged file runs into
        raise _error(source, f"{file.name} can't be read as weights ({type(error).__name__}); fetch it anew") from error
    if not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise _error(source, f"{file.name} holds more than named weights; save the model's state_dict alone")
    return weights


def _other_model(source: str, why: str) -> UserError:
    return _error(source, f"these are weights of another model: {why}")


def _error(source: str, message: str) -> UserError:
    return UserError(message, field="model.pretrained", value=source)
