"""Everything that training needs, made of a run's configuration and of its newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dpbench.config import RunConfig
from dpbench.data import Splits
from dpbench.devices import choose_device, describe, prepare_device
from dpbench.models import PretrainedModel
from dpbench.models.pretrained import weights_digest
from dpbench.privacy import Ledger
from dpbench.tracking import RunRecord
from dpbench.tracking.provenance import gone_on, provenance
from dpbench.tracking.reading import Recorded
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.budget import Budget, budget, noise_in_words, open_ledger
from dpbench.training.following import join
from dpbench.training.keeping import Found, Keeper
from dpbench.training.leases import device_of_this_process
from dpbench.training.loading import load_splits
from dpbench.training.loop import Progress
from dpbench.training.padding import require_padding_unread
from dpbench.training.resume import Training
from dpbench.training.team import Team


class Prepared(NamedTuple):
    """Everything that training needs.

    Attributes:
        training: the run, at its beginning or where it goes on.
        splits: data.
        spends: the budget.
        origin: what provenance.json holds.
        found: in the checkpoint that it goes on from; None at its beginning.
    """

    training: Training
    splits: Splits
    spends: Budget
    origin: dict[str, Any]
    found: Found | None


def prepare(
    config: RunConfig,
    record: RunRecord,
    splits: Splits | None,
    *,
    team: Team,
    keeper: Keeper,
    say: Callable[[str], object],
) -> Prepared:
    """Make everything that training needs.

    Args:
        config: of the run.
        record: of the run.
        splits: data, if they are not to be loaded.
        team: that trains the run.
        keeper: of its checkpoints.
        say: told in one line what the run spends, and on what device; nothing where there are data already.

    Raises:
        UserError: the run can't be had as it is asked for.
    """
    alone = team.size == 1
    device = device_of_this_process(config.device) if alone else team.device(choose_device(config.device))
    prepare_device(device)
    spends = budget(config)

    def assembled(multiplier: float | None) -> tuple[Assembly, Ledger]:
        multiplier = spends.noise_multiplier if multiplier is None else multiplier
        ledger = open_ledger(config, multiplier, spends.published_eps)
        return assemble(config, device, multiplier, ledger), ledger

    unused = [assembled(None)]  # before any data are read
    whole = load_splits(config, device) if splits is None else splits
    require_padding_unread(lambda: assembled(None)[0].step.gradients, whole.train)
    if splits is None:
        splits = team.shares(whole)
        processes = "" if alone else f", {team.size} processes"
        aside = config.dataset.validation_size
        unseen = f"; {aside:,} training samples set aside for validation, which eps does not protect" if aside else ""
        say(f"  {noise_in_words(config, spends)}{unseen}; {describe(device)}{processes}")

    def begin(multiplier: float | None) -> Training:
        parts, ledger = unused.pop() if unused else assembled(multiplier)
        join(team, parts, config)
        return Training(parts, ledger, Progress.start(config, splits, team), [])

    training, found = keeper.resume(begin)
    origin = {
        **provenance(device),
        "micro_batch": training.parts.micro_batch,
        "channels_last": config.channels_last,
        "processes": team.size,
    }
    if isinstance(config.model, PretrainedModel) and config.model.pretrained is not None:
        origin["weights"] = weights_digest(config.model.pretrained)  # the hash of the run has their name alone
    if found is not None:
        first = dict(Recorded.read(record.folder).provenance)
        first.pop("wall_seconds", None)
        origin = gone_on(first, training.parts.step.steps, origin)
    return Prepared(training, splits, spends, origin, found)
