"""A page for each algorithm, written from its configuration, its stages and what only a person can say of it."""

from dpbench.methods.pages import generated, write

__all__ = ["generated", "write"]
