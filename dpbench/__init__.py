"""Differentially private optimizers through one private step, under one privacy ledger."""

import os

# What is fetched or sent is what was asked for: without this huggingface_hub asks its server for something of its own
# even where all files are here.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
