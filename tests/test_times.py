"""How fast a device is found to be, for estimates of what runs take."""

import time

from dpbench.reproduction.times import SPEED_LASTS, Speed, Times


def test_a_measured_speed_is_believed_for_an_hour_by_all_processes(tmp_path, monkeypatch):
    """It may have been measured at a moment when other work had the processor."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    slow, fast, now = Speed(1e9, 1e-2), Speed(8e9, 1e-3), time.time()
    monkeypatch.setattr(Times, "_measured", lambda self: slow)
    assert Times("cpu").speed == slow
    monkeypatch.setattr(Times, "_measured", lambda self: fast)
    monkeypatch.setattr(time, "time", lambda: now + SPEED_LASTS - 60)
    assert Times("cpu").speed == slow
    for moment in (now + SPEED_LASTS + 60, now - SPEED_LASTS):  # a clock that was put back
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        monkeypatch.setattr(Times, "_measured", lambda self: fast)
        assert Times("cpu").speed == fast
        monkeypatch.setattr(Times, "_measured", lambda self: slow)
        assert Times("cpu").speed == fast


def test_the_speed_of_this_machine_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    speed = Times("cpu").speed
    assert speed.flops > 1e6
    assert 0 < speed.overhead < 10
