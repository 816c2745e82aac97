"""From overrides to a checked, typed configuration, and its identity.

| module | subject |
|---|---|
| `schema`, `privacy` | all settings of a run, typed and checked one by one |
| `registry` | which classes the options of YAML files are |
| `rules` | numbers that follow from settings |
| `combinations`, `searches` | which settings go together; what the runs of a search have in common |
| `own`, `promises` | stages from outside the package; what eps takes for granted of them |
| `files` | the YAML files of options |
| `compose`, `unread` | the jobs of a command line; settings that nothing reads |
| `messages` | errors of Hydra and OmegaConf in a sentence |
| `identity`, `recorded` | the hash of a run; the same from its config.yaml |
"""

from dpbench.config.compose import (
    Job,
    by_seed,
    chosen,
    compose_each,
    compose_jobs,
    in_grammar,
    load,
    names_apart,
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
    "names_apart",
    "quoted",
    "require_same_releases",
    "resolved",
]
