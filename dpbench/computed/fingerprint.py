"""What a computed artefact is made of, in one number: if that has not changed, neither have its numbers."""

from __future__ import annotations

from importlib.metadata import version

from dpbench.claims import Artefact
from dpbench.config import conf_folder
from dpbench.sources import digest_of, sources_of

# Packages whose numerics enter.
PACKAGES = ("numpy", "scipy", "torch", "dp-accounting", "opacus")


def fingerprint(artefact: Artefact, module: str) -> str:
    """Digest of all that enters a computed artefact.

    That is the source of the module and of all of this program that it imports, directly or not; the configurations;
    the files of the paper's artefacts; and the versions of the libraries.

    Args:
        artefact: what is computed.
        module: that computes it, by its dotted name.
    """
    conf = conf_folder()
    files = sources_of(module) | {path for path in conf.rglob("*.yaml") if conf / "paper" not in path.parents}
    files |= set((conf / "paper" / artefact.paper).glob("*.yaml"))
    return digest_of(files, [version(package) for package in PACKAGES])[:24]
