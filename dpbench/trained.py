"""The model of a recorded run, to be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from dpbench.config.recorded import recorded_stage
from dpbench.data import Dataset
from dpbench.errors import UserError
from dpbench.models import Model, PretrainedModel
from dpbench.tracking.reading import DamageError, read_settings
from dpbench.tracking.record import MODEL


class Trained(NamedTuple):
    """A model and what it was trained on.

    Attributes:
        model: with the weights of the last evaluation, on the CPU, in evaluation mode; maps inputs to logits.
        dataset: settings of the data set.
        root: data root of the run, where tokenizers are looked for.
    """

    model: nn.Module
    dataset: Dataset
    root: Path

    def inputs(self, samples: Any) -> Tensor:
        """Inputs of the model, made as those that it was trained on.

        Args:
            samples: images, bytes (B, C, H, W); rows, numbers (B, F); or a list of texts, or of pairs of texts.

        Raises:
            UserError: the samples are not such as the data set has.
        """
        if len(samples) == 0:
            raise UserError("has samples, of which none is given", field="dataset", value=self.dataset.name)
        return self.dataset.inputs(samples, self.root)


def load_trained(record: str | Path) -> Trained:
    """The model of a run that was recorded with ``keep_model=true``.

    Args:
        record: folder of the run, ``<results_dir>/runs/<hash>/<seed>``. Classes of one's own have to be importable.

    Raises:
        UserError: there is no such record or no model in it, or a file of it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(record)
    try:
        settings = read_settings(folder / "config.yaml")
        if settings is None:
            seeds = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
            hint = f"; it has those of the seeds {', '.join(seeds)}, such as {folder / seeds[0]}" if seeds else ""
            raise UserError(f"{folder}: no record of a run, which has a config.yaml{hint}")
        dataset = recorded_stage("dataset", settings["dataset"])
        stage = recorded_stage("model", settings["model"])
        root = Path(settings["data"]["root"])
    except (DamageError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.yaml'}: {error}") from error
    assert isinstance(dataset, Dataset)
    assert isinstance(stage, Model)
    try:
        weights = load_file(folder / MODEL)
        stage.check(dataset)
        if isinstance(stage, PretrainedModel):  # the record has all of its weights, and those it began with may be gone
            stage = replace(stage, pretrained=None)
        model = stage.build(dataset)
        model.load_state_dict(weights)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: the run kept no model; keep_model=true force=true trains it again") from error
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / MODEL}: can't be read as the weights of this model ({error})") from error
    return Trained(model.eval(), dataset, root)
