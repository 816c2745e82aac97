"""Attacks on the real private step that bound from below how much it reveals: `python -m dpbench.audit`."""
