"""The first seconds of a command, in which Python imports libraries."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
NOTICE = b"\ninterrupted; nothing was begun\n"


@contextmanager
def starting() -> Iterator[None]:
    """An interruption meanwhile ends the process at once: an exception would leave libraries half imported."""
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, NOTICE)  # print may not be called here
    os._exit(INTERRUPTED)
