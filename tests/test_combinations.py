"""Stages of different papers together, and every algorithm without privacy."""

import math

import pytest
import torch
from helpers import ALGORITHMS, composed, trained

from dpbench.errors import UserError
from dpbench.privacy.gaussian import GaussianSource

# Six steps, or seven of passes over the data.
SHORT = ("model=linear", "epochs=1", "evaluation.every_epochs=null", "privacy.accountant=rdp", "device=cpu")

COMBINATIONS = [
    "algo=disk threshold=dcsgd_e clip=normalised",
    "algo=disk threshold=dcsgd_p noise=step_size schedule=inverse_sqrt clip=threshold privacy=shuffled",
    "algo=disk noise=step_size schedule=sqrt_decay optim=adam",
    "algo=disk threshold=quantile clip=psac optim=adamw",
    "algo=disk optim=galore query.kappa=0.8",
    "algo=dp_pmlf threshold=dcsgd_e clip=threshold",
    "algo=dp_pmlf threshold=quantile filter=chebyshev",
    "algo=dp_pmlf noise=decay threshold=decay clip=normalised privacy=shuffled",
    "algo=innerouter filter=butterworth threshold=dcsgd_p",
    "algo=doppler threshold=dcsgd_e clip=threshold noise=step_size schedule=cosine privacy=shuffled",
    "algo=lp_dpadambc query=two_point threshold=quantile noise=decay privacy=shuffled",
    "algo=lp_dpgalore query=last_iterates clip=auto_v",
    "algo=adp_adagrad query=last_iterates filter=momentum",
    "algo=doppler filter=online_fir query=two_point clip.scope=per_layer",
    "algo=dp_ftrl query=two_point filter=exponential",
    "algo=dp_ftrl_banded threshold=dcsgd_e clip=threshold query=last_iterates",
    "algo=dp_ftrl_banded optim=adambc threshold=quantile filter=first_v2",
    "algo=dicesgd query=two_point filter=exponential threshold=quantile",
    "algo=dpsgd privacy=shuffled threshold=dcsgd_p noise=growing",
    "algo=disk privacy=fixed_size threshold=dcsgd_e clip=threshold averaging=exponential",
]

REFUSED = [
    ("algo=doppler optim=adam", "optim.beta1=0.9: a low-pass filter replaces Adam's first moment"),
    ("algo=disk threshold=dcsgd_e", "threshold=dcsgd_e: this threshold makes the error of clipping at a threshold"),
    ("algo=dcsgd_e clip.scope=per_layer", "clip.scope=per_layer: this threshold goes by norms of whole gradients"),
    ("algo=dcsgd_p query=apart_iterates", "query=apart_iterates: this threshold goes by one norm of each sample"),
    ("algo=andrew clip.scope=per_layer", "clip.scope=per_layer: this threshold goes by norms of whole gradients"),
    ("algo=adp_adagrad noise=step_size", "noise=step_size: AdaGrad-Norm's step sizes are not known before training"),
    ("algo=dpsgd clip=none", "clip=none: without clipping no noise makes a step private"),
    ("algo=dpsgd optim=adagrad_norm_uncertified", "optim.uncertified=false: its step size is made of un-noised"),
    ("algo=dpsgd clip=error_feedback", "clip.uncertified=false: un-clipped gradients come back in later steps"),
    ("algo=dicesgd query=apart_iterates", "query=apart_iterates: what is left over of gradients clipped one by one"),
    ("algo=dicesgd noise=banded privacy=cyclic", "clip=error_feedback: error feedback spreads a sample over all"),
    ("algo=disk noise=tree", "privacy.sampler=poisson: noise correlated between steps is accounted for by when"),
    ("algo=dp_ftrl noise.restart=false privacy=shuffled", "privacy.sampler=shuffled: noise correlated between steps"),
    ("algo=dp_ftrl filter=online_fir", "filter=online_fir: it tells signal from noise by noise being independent"),
    ("algo=dp_ftrl privacy=as_published", "privacy.published=poisson_rdp: the rules of publications take noise for"),
]


class Untouched(GaussianSource):
    def fill(self, out):
        raise AssertionError("no noise is drawn where eps is inf")


@pytest.mark.parametrize("line", COMBINATIONS)
def test_stages_of_different_papers_go_together(line):
    metrics, iterate, ledger = trained(*SHORT, "eps=8", *line.split())
    assert ledger.complete()
    assert 7.9 < ledger.epsilon() <= 8
    assert torch.isfinite(iterate).all()
    assert metrics[-1].test_loss < 5


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_stages_that_make_no_sense_together_are_refused_with_the_reason(line, said):
    with pytest.raises(UserError) as caught:
        composed(*line.split())
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_runs_without_privacy_and_draws_no_noise(algo):
    metrics, iterate, ledger = trained(*SHORT, "eps=inf", f"algo={algo}", "epochs=3", source=Untouched())
    assert ledger.complete()
    assert ledger.epsilon() == math.inf
    assert torch.isfinite(iterate).all()
    assert metrics[-1].test_accuracy > 0.25  # chance is 0.1, and those that follow AdamBC move slowly


@pytest.mark.usefixtures("shared_streams")
@pytest.mark.parametrize("algo", ["dpsgd", "disk", "dp_ftrl", "dp_pmlf"])
def test_without_privacy_the_clip_stays_unless_it_is_taken_off(algo):
    ends = [
        trained(*SHORT, "eps=inf", f"algo={algo}", f"clip={clip}", "threshold.norm=0.01").vector
        for clip in ("threshold", "none")
    ]
    assert not torch.equal(*ends)
