"""How fast a device is found to be, for estimates of what runs take."""

import time

import pytest

from dpbench.reproduction.times import PASSES, SPEED_LASTS, Speed, Times


def test_a_measured_speed_is_believed_for_an_hour_by_all_processes(tmp_path, monkeypatch):
    """It may have been measured at a moment when other work had the processor."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    slow, fast, now = Speed(1e9, 1e-2), Speed(8e9, 1e-3), time.time()
    monkeypatch.setattr(Times, "_measured", lambda self: slow)
    assert Times("cpu").speed == slow
    monkeypatch.setattr(Times, "_measured", lambda self: fast)
    monkeypatch.setattr(time, "time", lambda: now + SPEED_LASTS - 60)
    assert Times("cpu").speed == slow
    # The second by a clock that was put back.
    for moment, found, other in ((now + SPEED_LASTS + 60, fast, slow), (now - SPEED_LASTS, slow, fast)):
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        monkeypatch.setattr(Times, "_measured", lambda self, found=found: found)
        assert Times("cpu").speed == found
        monkeypatch.setattr(Times, "_measured", lambda self, other=other: other)
        assert Times("cpu").speed == found


def test_the_speed_of_a_device_is_that_of_arithmetic_beside_the_overhead(tmp_path, monkeypatch):
    """Of a small step, which is all overhead, and a large one."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    seconds = {64: 0.5, 128: 2.0}
    monkeypatch.setattr("dpbench.training.estimate.seconds_of_step", lambda config, size: seconds[size])
    monkeypatch.setattr("dpbench.reproduction.times.forward_flops", lambda facts: 1e6)
    assert Times("cpu").speed == Speed(pytest.approx(PASSES * 128 * 1e6 / 1.5), 0.5)


def test_the_speed_of_this_machine_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    speed = Times("cpu").speed
    assert speed.flops > 1e6
    assert 0 < speed.overhead < 10
