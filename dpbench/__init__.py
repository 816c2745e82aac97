"""Differentially private optimizers through one private step, under one privacy ledger."""

__version__ = "0.1.0"
