"""From overrides to a checked, typed configuration, and its identity."""

from dpbench.config.compose import (
    Job,
    by_seed,
    chosen,
    compose_each,
    compose_jobs,
    in_grammar,
    load,
    quoted,
)
from dpbench.config.files import conf_folder
from dpbench.config.identity import config_hash, identity, resolved
from dpbench.config.schema import RunConfig
from dpbench.config.searches import require_same_releases

__all__ = [
    "Job",
    "RunConfig",
    "by_seed",
    "chosen",
    "compose_each",
    "compose_jobs",
    "conf_folder",
    "config_hash",
    "identity",
    "in_grammar",
    "load",
    "quoted",
    "require_same_releases",
    "resolved",
]
