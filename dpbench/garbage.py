"""Python's search for unreachable objects, put off while many are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No search meanwhile: it takes a fifth of the time that importing large libraries does, a third of a plan's."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
