"""Clips and averages that the papers compare with, against their formulas."""

import json
import math

import numpy as np
import pytest
import torch
from cli import only_record, read, run
from helpers import composed

from dpbench.averaging import Averaging, ExponentialAveraging
from dpbench.clip import AutomaticClip, PSAClip
from dpbench.errors import UserError


@pytest.mark.parametrize("r", [0.1, 0.01, 1e-3])
def test_psac_has_the_printed_weights(r):
    """dc_sgd.md, appendix A: C at norm 0, peak C/(2 sqrt r - r) at sqrt r - r, C/norm far out, norm below C."""
    peak = math.sqrt(r) - r
    norms = torch.tensor([[0.0, 0.5, peak, 1e6]], dtype=torch.float64)
    found = PSAClip(regulariser=r).factors(norms, 2.0)[0]
    want = [2.0, 2 / (0.5 + r / (0.5 + r)), 2 / (2 * math.sqrt(r) - r), 2e-6]
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)
    around = torch.tensor([[0.9 * peak, 1.1 * peak]], dtype=torch.float64)
    assert (PSAClip(regulariser=r).factors(around, 2.0) < found[2]).all()


def test_auto_v_normalises_exactly():
    clip = composed("clip=auto_v").clip
    assert clip == AutomaticClip(stabiliser=0.0)
    norms = torch.tensor([[1e-6, 1.0, 7.0]])
    torch.testing.assert_close(clip.factors(norms, 0.5) * norms, torch.full((1, 3), 0.5))


@pytest.mark.parametrize("r", [0.0, 1e-7, 1.5])
def test_psac_refuses_regularisers_out_of_range(r):
    with pytest.raises(UserError, match=r"clip\.regulariser"):
        PSAClip(regulariser=r)


ITERATES = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9999])
def test_exponential_average_follows_its_recursion(decay):
    stage, want = ExponentialAveraging(decay=decay), None
    for t, iterate in enumerate(ITERATES):
        stage.update(iterate.clone())
        weight = min(decay, (1 + t) / (10 + t))
        want = iterate.numpy() if want is None else weight * want + (1 - weight) * iterate.numpy()
        np.testing.assert_allclose(stage.average(iterate), want, rtol=1e-12)


def test_without_averaging_it_is_the_iterate_itself():
    stage, iterate = Averaging(), ITERATES[1]
    stage.update(ITERATES[0])
    assert stage.average(iterate) is iterate
    assert ExponentialAveraging().average(iterate) is iterate


def test_average_continues_from_its_state_bit_for_bit_and_copies_the_live_iterate():
    whole, first, second = (ExponentialAveraging(decay=0.9) for _ in range(3))
    live = torch.empty(4, dtype=torch.float64)
    for t, iterate in enumerate(ITERATES):
        whole.update(live.copy_(iterate))
        (first if t < 20 else second).update(live)
        if t == 19:
            second.load_state_dict(first.state_dict())
    assert torch.equal(second.average(live), whole.average(live))
    with pytest.raises(UserError, match=r"averaging\.decay"):
        ExponentialAveraging(decay=1.0)


def evaluations(record):
    return [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("shared_streams")
def test_the_average_is_evaluated_and_the_iterates_stay_what_they_are(tmp_path):
    plain, averaged = tmp_path / "plain", tmp_path / "averaged"
    assert run(plain, "epochs=1", "eps=inf").code == 0
    assert run(averaged, "epochs=1", "eps=inf", "averaging=exponential").code == 0
    without, with_ = (evaluations(only_record(folder)) for folder in (plain, averaged))
    assert [m["test_loss"] for m in with_] != [m["test_loss"] for m in without]
    assert [m["train_loss"] for m in with_] == [m["train_loss"] for m in without]


def test_an_uncertified_run_says_so_on_screen_and_in_its_record(tmp_path):
    outcome = run(tmp_path, "optim=adagrad_norm_uncertified", "optim.uncertified=true")
    assert outcome.code == 0
    assert "NOT CERTIFIED" in outcome.out
    assert read(only_record(tmp_path), "summary.json")["private"] is False


def test_a_run_that_records_gradients_leaves_them_marked_as_not_private(tmp_path):
    outcome = run(tmp_path, "record_coordinates=7", "privacy.accountant=pld")
    assert outcome.code == 0
    stored = np.load(only_record(tmp_path) / "gradients.npz")
    assert stored["signal"].shape == stored["observed"].shape == (3, 7)
    assert "not private" in str(stored["privacy"])
