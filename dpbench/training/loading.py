"""The data of a run, read from where its settings say."""

from __future__ import annotations

from pathlib import Path

import torch

from dpbench.config import RunConfig
from dpbench.data import Splits
from dpbench.data.subset import with_validation
from dpbench.errors import UserError


def load_splits(config: RunConfig, device: torch.device) -> Splits:
    """The splits of a run's data set, on a device; some training samples are set aside where it validates on them.

    Raises:
        UserError: they can't be had from the data root, see `Dataset.load`.
    """
    data = config.data
    try:
        splits = config.dataset.load(Path(data.root), download=data.download)
    except OSError as error:  # no permission, no such device, a name longer than a file system takes
        why = f"can't be read ({error.strerror or error})"
        raise UserError(why, field="data.root", value=data.root) from error
    return with_validation(splits.to(device), config.dataset.validation_size)
