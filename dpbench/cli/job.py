"""What a launcher carries out for each job, in this process or in another one."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dpbench.cli.console import make_console
from dpbench.config import Job, by_seed, chosen, load
from dpbench.config.schema import register
from dpbench.training.execute import execute


def train_job(composed: DictConfig) -> None:
    """Train the run that Hydra composed, or those of its seeds; how they ended is in their records."""
    register()
    runtime = HydraConfig.get()
    OmegaConf.set_struct(composed, False)
    # The group of a sweep is set by the command, not typed.
    typed = tuple(line for line in runtime.overrides.task if not line.startswith("tracker.group=sweep-"))
    job = Job(typed, load(composed), chosen(runtime.runtime.choices))
    execute(by_seed(job), make_console())
