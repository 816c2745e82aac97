"""Locks on a folder that several processes and machines share, taken over when their holder has gone.

A lock is a file, made exclusively (O_EXCL, which NFS has since version 3). Its first line says who holds it; behind it
is a counter that a thread of the holder moves on. Nobody compares clocks: whoever waits watches, by its own monotonic
clock, whether the content still changes. Where it doesn't for `STALE` seconds, or the holder was a process of this
machine that has ended, the lock may be taken away.

Taking away and releasing both go through a *claim*, a file that is named after the lock's token and made exclusively,
too. Tokens are never used twice, a lock file with a token is only removed under a claim to that token, and under the
claim it is looked at once more: so of several contenders one removes it, and one that comes late finds another token,
or none, and leaves it alone. What is free then goes to the one who makes the new file.

No lock in files protects from a holder who stands still between looking and writing. So a holder looks (`check`)
before each write, and one that has been taken for gone finds another's token and stops.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dpbench.tracking.process import Process

# Seconds between two signs of life, and without one until a holder counts as gone.
BEAT = 5.0
STALE = 60.0
COUNTER = "{:020d}\n"
TOKEN = re.compile("[0-9a-f]{32}")


class LockLostError(RuntimeError):
    """This process no longer holds what it held: another one has taken it for gone."""


class LockRemovedError(LockLostError):
    """Nobody does: somebody has deleted the file, or the process that took this one for gone has ended since."""


@dataclass(frozen=True)
class Seen:
    """A lock file as it was found.

    Attributes:
        content: all of it, which changes as long as its holder lives.
        token: of this holding of the lock; no other one ever has it.
        process: its holder.
        attempt: number of this holder, counting those before it that died with the lock.
        claims: number of the latest claim to it; 0 for none.
    """

    content: bytes
    token: str
    process: Process
    attempt: int
    claims: int


def look(path: Path) -> Seen | None:
    """A lock as it is now; None where there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    who = _holder(content)
    token, attempt = who.get("token", "unwritten"), who.get("attempt", 1)
    numbers = (claim.suffix[1:] for claim in path.parent.glob(f"{path.name}.{token}.*"))
    claims = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return Seen(content, token, Process.read(who), attempt, claims)


def _holder(content: bytes) -> dict[str, Any]:
    """What the holder wrote of itself; nothing where it has not come to writing, or it is none that a lock has."""
    try:
        found = json.loads(content.partition(b"\n")[0])
        return found if TOKEN.fullmatch(found["token"]) and type(found["attempt"]) is int else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def is_held(path: Path) -> bool:
    """Whether there is a lock whose holder has not certainly gone."""
    seen = look(path)
    return seen is not None and not seen.process.gone()


def take_away(path: Path, seen: Seen) -> bool:
    """Remove a lock, if it is still as it was seen; whether this process did.

    Who stands still under the claim for half of what makes a lock stale gives it up.

    Args:
        path: of the lock.
        seen: how it was found; with claims only if they have stood as long as makes a lock stale.
    """
    claim = path.with_name(f"{path.name}.{seen.token}.{seen.claims + 1}")
    began = time.monotonic()
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except (FileExistsError, FileNotFoundError):  # another one is at it, or has been and took the folder along
        return False
    try:
        now = look(path)
        if now is None or now.content != seen.content or time.monotonic() - began > STALE / 2:
            return False
        path.unlink(missing_ok=True)  # missing only if somebody deleted the folder
        for left in range(1, seen.claims + 1):  # by processes that ended in the middle of this
            path.with_name(f"{path.name}.{seen.token}.{left}").unlink(missing_ok=True)
        return True
    finally:
        claim.unlink(missing_ok=True)


class Lock:
    """The right to carry something out; held by one process at a time.

    Attributes:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        """Set up.

        Args:
            path: of its file; the folder is made where it is missing.
        """
        self.path = path
        self._file: int | None = None
        self._token = ""
        self._lost = False
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Whether this object has acquired it and not released it; it may have been lost."""
        return self._file is not None

    def acquire(self) -> bool:
        """Take the lock if it is free, or its holder certainly gone; whether this object holds it now."""
        if self.held:
            return True
        attempt = 1
        while not self._make(attempt):
            seen = look(self.path)
            if seen is not None:
                if seen.claims or not seen.process.gone() or not take_away(self.path, seen):
                    return False
                attempt = seen.attempt + 1
        self._thread = threading.Thread(target=self._live, name=f"lock {self.path}", daemon=True)
        self._thread.start()
        return True

    def _make(self, attempt: int) -> bool:
        token = uuid.uuid4().hex
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except (FileExistsError, FileNotFoundError):  # not found: another one has removed the empty folder
            if any(folder.is_symlink() and not folder.exists() for folder in self.path.parents):
                raise  # a link that leads nowhere does so the next time, too
            return False
        since = time.strftime("%Y-%m-%d %H:%M:%S%z")
        who = {**asdict(Process.this()), "since": since, "attempt": attempt, "token": token}
        header = json.dumps(who) + "\n"
        self._file, self._token, self._at, self._lost = file, token, len(header.encode()), False
        self._ends.clear()
        try:
            self._write((header + COUNTER.format(0)).encode(), 0)
            self.check()  # it stood still before it wrote, and was taken for gone
        except BaseException as error:
            self._forget()
            if isinstance(error, LockLostError):
                return False
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _write(self, content: bytes, at: int) -> None:
        """Write in place, and so that other machines see it: a file that was replaced meanwhile stays as it is."""
        assert self._file is not None
        os.pwrite(self._file, content, at)
        os.fsync(self._file)

    def _live(self) -> None:
        """Give signs of life, and see whether others still count on them."""
        beats = 0
        while not self._ends.wait(BEAT):
            beats += 1
            try:
                self._write(COUNTER.format(beats).encode(), self._at)
                self.check()
            except LockLostError:
                return
            except OSError:  # a disk that is full, a server that is away: the next sign may come through
                continue

    def check(self) -> None:
        """Raise `LockLostError` unless the lock is still this object's, `LockRemovedError` if it is nobody's."""
        try:
            who = _holder(self.path.read_bytes())
        except FileNotFoundError:
            self._lost = True
            raise LockRemovedError(f"its lock was removed while it was under way ({self.path})") from None
        if self._lost or who.get("token") != self._token:
            self._lost = True
            taker = str(Process.read(who)) if "pid" in who else "another process"
            raise LockLostError(f"{taker} took this run over because this process had stopped responding ({self.path})")

    @property
    def lost(self) -> bool:
        """Whether it is known to be lost; costs nothing, and is up to a beat late."""
        return self._lost

    def release(self) -> None:
        """Give the lock back; one that was lost stays with the process that has it."""
        if not self.held:
            return
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # no room for a claim: it is stale soon, or goes with this process
            for _ in range(10):
                seen = look(self.path)
                if seen is None or seen.token != self._token or (not seen.claims and take_away(self.path, seen)):
                    break
                time.sleep(0.01)  # one who takes this process for gone will look once more, and see
        self._forget()

    def _forget(self) -> None:
        assert self._file is not None
        os.close(self._file)
        self._file = self._thread = None


class State(Enum):
    """What can be said of a lock."""

    FREE = "free"
    HELD = "held"
    STALE = "stale"


class Watch:
    """Watches a lock from outside.

    Attributes:
        seen: the lock when it was last looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: Seen | None = None
        self._still = 0.0
        self._looked = 0.0

    def look(self) -> State:
        """How the lock stands; to be asked again and again, for only changes tell."""
        before, looked = self.seen, self._looked
        self.seen, self._looked = look(self.path), time.monotonic()
        if self.seen is None:
            return State.FREE
        if self.seen != before:
            self._still = 0.0
        else:
            self._still += min(self._looked - looked, BEAT)  # who slept is not to take others for gone
        gone = self.seen.process.gone() and not self.seen.claims
        return State.STALE if gone or self._still >= STALE else State.HELD

    def take_away(self) -> bool:
        """Remove a lock that was stale at the last look; whether this process did."""
        return self.seen is not None and take_away(self.path, self.seen)


def outlive(path: Path) -> None:
    """Wait until a lock gives a sign of life or has gone; one that gives none for long enough is taken away."""
    watch = Watch(path)
    state = watch.look()
    first = watch.seen
    while state == State.HELD and watch.seen == first:
        time.sleep(BEAT / 5)
        state = watch.look()
    if state == State.STALE:
        watch.take_away()


def lock_of(folder: Path) -> Path:
    """The lock of the run whose record, or latest attempt, is in a folder."""
    return folder.with_name(f"{folder.name.partition('.')[0]}.lock")
