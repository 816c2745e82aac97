"""Stages of one's own that do not do what a run takes for granted of them: eps rests on some of it."""

import pytest
from cli import PLAIN, read, records, run, status, write_option

from dpbench.audit.__main__ import main as audit
from dpbench.config import compose_each
from dpbench.errors import UserError
from dpbench.run import main as dpbench_run

PROMISES = """\
import math
from dataclasses import dataclass

import numpy as np
import torch

from dpbench.clip import Clip, GroupClip
from dpbench.noise import Noise, TreeNoise
from dpbench.privacy.correlation import Tree
from dpbench.query import OnePoint
from dpbench.threshold import Threshold


@dataclass
class Bounded(GroupClip):
    promised: float = 1.0
    factor: float = 1.0
    flat: bool = False

    def _factors(self, norms, bound):
        factors = self.factor * (bound / norms.clamp(min=1e-15)).clamp(max=1.0)
        return factors[0] if self.flat else factors

    def sensitivity(self, threshold):
        return self.promised * threshold


@dataclass
class Lacking(Clip):
    pass


@dataclass
class OfEachGroup(Bounded):
    def factors(self, norms, threshold):
        return self._factors(norms, threshold)


@dataclass
class Weighted(OnePoint):
    weight: float = 1.0

    @property
    def sensitivity(self):
        return self.weight


@dataclass
class Apart(Weighted):
    count: int = 2
    clipped_apart = True

    @property
    def most_points(self):
        return 2

    def points(self, iterate):
        return self.count * super().points(iterate)


@dataclass
class Scaled(Noise):
    wrong: str = "1.0"

    def scale(self, step):
        return eval(self.wrong)


@dataclass
class Drawn(Noise):
    wrong: str = "source.fill(out)"

    def __post_init__(self):
        self._last = None

    def scale(self, step):
        return 1.0

    def draw(self, out, source):
        self._last = eval(self.wrong).clone()
        return out.copy_(self._last)


@dataclass
class Tired(Drawn):
    steps: int = 3

    def draw(self, out, source):
        self.drawn = getattr(self, "drawn", 0) + 1
        return source.fill(out) if self.drawn <= self.steps else out.zero_()


@dataclass
class OfTrees(TreeNoise):
    wrong: str = "noise"

    def draw(self, out, source):
        noise = super().draw(out, source)
        return out.copy_(eval(self.wrong))


@dataclass(frozen=True)
class Waning(Tree):
    # Each step but the first goes with the one before, the less the more steps there are.

    def _strategy(self, steps):
        return np.eye(steps) + 40 / steps * np.eye(steps, k=-1)


@dataclass
class OfFew(OfTrees):
    @property
    def correlation(self):
        return Waning(self.restart)

    def _correlate(self, fresh, step):
        if self._kept:
            fresh -= 40 / self.course.steps * self._kept.pop()
        self._kept.append(fresh.clone())
        return fresh


@dataclass
class Falling(Threshold):
    last: float = 1.0

    def value(self, step):
        return self.last if step == 3 else 1.0


@dataclass
class OfTheBatch(GroupClip):
    of: str = "norms.median()"

    def _factors(self, norms, bound):
        lowest = eval(self.of) if norms.numel() else 1.0
        return torch.minimum(bound / norms.clamp(min=1e-15), bound / (norms + lowest))


@dataclass
class Remembering(GroupClip):
    keeps: bool = True

    def __post_init__(self):
        super().__post_init__()
        self._largest = 0.0

    def _factors(self, norms, bound):
        factors = (bound / norms.clamp(min=1e-15)).clamp(max=1) / (1 + self._largest)
        self._largest = max(self._largest, float(norms.max())) if self.keeps else 0.0
        return factors


from dpbench.privacy.plan import Part
from dpbench.schedules import Schedule


@dataclass
class Counting(Threshold):
    noise: str = "50.0"
    released: str = "self._count + 50.0 * drawn(2)[0]"

    def __post_init__(self):
        self._last, self._count = 0.0, 0

    @property
    def beside(self):
        return (Part("count", 50.0), Part("median", eval(self.noise)))

    def value(self, step):
        return 1.0

    def observe(self, norms):
        self._count += len(norms)

    def release(self, source, error_weight):
        def drawn(numbers):
            return torch.zeros(numbers) if source is None else source.fill(torch.empty(numbers))

        self._last, self._count = eval(self.released), 0

    def state_dict(self):
        return {"last": [self._last]}


@dataclass
class Steep(Schedule):
    third: float = 1.0

    def factor(self, step, steps):
        return self.third if step == 3 else 1.0


from dpbench.data import Augmentation


@dataclass
class Mixing(Augmentation):
    share: float = 0.0
    of_before: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        self._before = None

    def views(self, images, generator):
        views = super().views(images, generator)
        before, self._before = views if self._before is None else self._before, views
        return (1 - self.share) * views + self.share * views.flip(0) + self.of_before * before[:1]


# What returns something else than it should.


@dataclass
class Viewed(Augmentation):
    of: str = "images"

    def views(self, images, generator):
        return eval(self.of)


@dataclass
class Forgetful(Noise):
    step: float = 1.0

    def scale(self, step):
        return self.step

    def draw(self, out, source):
        source.fill(out)


@dataclass
class Factorless(Bounded):
    def _factors(self, norms, bound):
        pass


@dataclass
class Bare(Threshold):
    of: str = "Part('count', 50.0)"

    @property
    def beside(self):
        return eval(self.of)

    def value(self, step):
        return 1.0


@dataclass
class Watching(Bare):
    def observe(self, norms):
        self._last = norms.median()


@dataclass
class Called(Bare):
    def beside(self):
        return ()
"""


@pytest.mark.parametrize(
    ("group", "name", "typed", "expected"),
    [
        ("clip", "Bounded", "clip.factor=1", None),
        ("clip", "Bounded", "clip.factor=0.5", None),
        ("clip", "Bounded", "clip.promised=0", "not 0 at threshold 0.001"),
        ("clip", "Bounded", "clip.promised=-1", "not -0.001 at threshold 0.001"),
        ("clip", "Bounded", "clip.promised=inf", "not inf at threshold 0.001"),
        ("clip", "Bounded", "clip.promised=nan", "not nan at threshold 0.001"),
        (
            "clip",
            "Bounded",
            "clip.factor=1.01",
            "a gradient of norm 0.001 with norm 0.00101 at threshold 0.001, more than its sensitivity of 0.001",
        ),
        ("clip", "Bounded", "clip.factor=nan", "norm 0 with norm nan at threshold 0.001, more than"),
        (
            "clip",
            "Bounded",
            "clip.flat=true",
            "expected factors, a tensor of the norms' shape (1, 16), not one of shape (16,)",
        ),
        ("clip", "Lacking", "clip.scope=flat", "Lacking: it lacks factors, which Clip leaves to it"),
        ("clip", "OfEachGroup", "clip.factor=0.125", None),
        (
            "clip",
            "OfEachGroup",
            "clip.factor=0.7",
            "a gradient whose 3 groups of parameters have norms 0.001, 0.001, ... with norm 0.00121244 at threshold",
        ),
        (
            "clip",
            "OfEachGroup",
            "clip.factor=0.3",
            "a gradient whose 64 groups of parameters have norms 0.001, 0.001, ... with norm 0.0024 at threshold",
        ),
        (
            "clip",
            "OfEachGroup",
            "clip.factor=0.75",
            "a gradient whose 2 groups of parameters have norms 0.001 and 0.001 with norm 0.00106066 at threshold "
            "0.001, more than its sensitivity of 0.001, on which eps rests; extend dpbench.clip.GroupClip, which gives",
        ),
        # Each term is bounded; but all of them change with one sample.
        ("clip", "OfTheBatch", "clip.of='norms.median()'", "depends on which others are in the batch"),
        ("clip", "OfTheBatch", "clip.of='norms.max()'", "depends on which others are in the batch"),
        ("clip", "OfTheBatch", "clip.of='torch.ones(1)'", None),
        ("clip", "Remembering", "clip.keeps=false", None),
        ("clip", "Remembering", "clip.keeps=true", "at threshold 0.001 depends on gradients before it"),
        ("query", "Weighted", "query.weight=2", None),
        ("query", "Weighted", "query.weight=1", None),
        ("query", "Weighted", "query.weight=0", "not 0"),
        (
            "query",
            "Weighted",
            "query.weight=0.999",
            "clipped as a whole and may be one clipped vector, more than its sensitivity of 0.999, on which eps rests",
        ),
        ("query", "Apart", "query.weight=2", None),
        (
            "query",
            "Apart",
            "query.weight=1.9",
            "its 2 points add up to as many clipped vectors, more than its",
        ),
        ("threshold", "Counting", "threshold.noise=50.0", None),
        ("threshold", "Counting", "threshold.noise=0", "a finite noise multiplier > 0 of its median, not 0"),
        ("threshold", "Counting", "threshold.noise=-1", "a finite noise multiplier > 0 of its median, not -1"),
        ("threshold", "Counting", "threshold.noise=math.nan", "a finite noise multiplier > 0 of its median, not nan"),
        ("threshold", "Counting", "threshold.noise=math.inf", "a finite noise multiplier > 0 of its median, not inf"),
        ("threshold", "Counting", "threshold.released='[drawn(1), drawn(1)]'", None),
        ("threshold", "Counting", "threshold.released='float(drawn(9).max() > 1)'", None),
        (
            "threshold",
            "Counting",
            "threshold.released='self._count'",
            "release() draws 0 numbers of the source at step 0 for its count and median, on which eps rests",
        ),
        (
            "threshold",
            "Counting",
            "threshold.released='self._count + torch.randn(2)'",
            "release() draws 0 numbers of the source at step 0 for its count and median",
        ),
        ("threshold", "Counting", "threshold.released='self._count + drawn(1)'", "draws 1 number of the source at"),
        (
            "threshold",
            "Counting",
            "threshold.released='self._count + (0 if self._last else drawn(2)[0])'",
            "draws 0 numbers of the source at step 1",
        ),
        (
            "threshold",
            "Counting",
            "threshold.released='self._count + 0 * drawn(2)'",
            "ends up the same whatever its release() draws at step 0 for its count and median, on which eps rests",
        ),
        (
            "threshold",
            "Counting",
            "threshold.released='[math.nan, np.full(2, math.nan), drawn(2)[:0]]'",
            "ends up the same whatever its release() draws at step 0 for its count and median, on which eps rests",
        ),
        # Limits that two norms and their noise do not reach, over the size of a batch.
        ("threshold", "Counting", "threshold.released='max(0.01, (self._count + float(drawn(2)[0])) / 1000)'", None),
        ("threshold", "Counting", "threshold.released='math.exp(max(300.0, float(drawn(2)[0])))'", None),
        ("augmentation", "Mixing", "augmentation.share=0", None),
        ("augmentation", "Mixing", "augmentation.flip=true", None),
        (
            "augmentation",
            "Mixing",
            "augmentation.share=0.01",
            "views of an image depend on which others are in the batch",
        ),
        ("augmentation", "Mixing", "augmentation.of_before=0.01", "views of an image depend on batches before"),
        ("augmentation", "Viewed", "augmentation.of=images", None),
        ("augmentation", "Viewed", "augmentation.of='images[:,None].repeat(1,3,1,1,1)'", None),
        ("augmentation", "Viewed", "augmentation.of='images*torch.rand(1,generator=generator)'", None),
        (
            "augmentation",
            "Viewed",
            "augmentation.of='None'",
            "(4, 1, 8, 8) or (4, copies, 1, 8, 8) for 4 images, not a",
        ),
        ("augmentation", "Viewed", "augmentation.of='images[:2]'", "for 4 images, not one of shape (2, 1, 8, 8)"),
        (
            "augmentation",
            "Viewed",
            "augmentation.of='images.mul_(0.5)'",
            "its views() changes the images that it is given",
        ),
        (
            "augmentation",
            "Viewed",
            "augmentation.of='images*torch.rand(1)'",
            "draws from elsewhere than the generator that",
        ),
        (
            "noise",
            "Forgetful",
            "noise.step=1.0",
            "expected draw() to return the tensor that it is given, not a NoneType",
        ),
        ("clip", "Factorless", "clip.factor=1", "a tensor of the norms' shape (1, 16), not a NoneType"),
        ("threshold", "Bare", "threshold.of='()'", None),
        ("threshold", "Watching", "threshold.of='()'", "its observe() is never called, because beside names no"),
        (
            "threshold",
            "Bare",
            "threshold.of='[]'",
            "expected beside, a property, to be a tuple of Part(name, noise_multiplier)",
        ),
        ("threshold", "Bare", "threshold.of='(1,2)'", "expected beside, a property, to be a tuple of Part(name,"),
        ("threshold", "Bare", "threshold.of='Part(1,2)'", "expected beside, a property, to be a tuple of Part(name,"),
        ("threshold", "Called", "threshold.of=x", "expected beside, a property, to be a tuple of Part(name,"),
        ("noise", "Scaled", "noise.wrong=1.0", None),
        ("noise", "Drawn", "noise.wrong='source.fill(out)'", None),
        ("noise", "Drawn", "noise.wrong='2*source.fill(out)'", None),
        ("noise", "Drawn", "noise.wrong='0.9*source.fill(out)'", "standard deviation 0.884 at scale 1"),
        ("noise", "Drawn", "noise.wrong='0.95*source.fill(out)'", "standard deviation 0.934 at scale 1"),
        ("noise", "Drawn", "noise.wrong='0*source.fill(out)'", "standard deviation 0 at scale 1, where eps rests on 1"),
        ("noise", "Drawn", "noise.wrong='math.nan*source.fill(out)'", "standard deviation nan"),
        (
            "noise",
            "Drawn",
            "noise.wrong='source.fill(out) if self._last is None else self._last'",
            "two steps whose correlation is 1, but gives no correlation for the account",
        ),
        (
            "noise",
            "Drawn",
            "noise.wrong='source.fill(out[::2]).repeat(2)'",
            "numbers of one step whose correlation is 1",
        ),
        ("noise", "Drawn", "noise.wrong='source.fill(out[::2]).repeat_interleave(2)'", "whose correlation is 1, where"),
        (
            "noise",
            "Drawn",
            "noise.wrong='torch.cat([source.fill(out[:-9]), torch.zeros(9)])'",
            "0 at scale 1 in a coord",
        ),
        (
            "noise",
            "Drawn",
            "noise.wrong='source.fill(out) * torch.linspace(.2, 1.7, len(out))'",
            "at scale 1 in a coordinate",
        ),
        ("noise", "Tired", "noise.steps=3", "standard deviation 0 at scale 1"),
        ("noise", "Tired", "noise.steps=100", "smaller than those of deviation 1 at step 100"),
        ("noise", "Tired", "noise.steps=225", None),
        ("noise", "Scaled", "noise.wrong=step", "not 0 at step 0"),
        ("noise", "Scaled", "noise.wrong=2-step", "not 0 at step 2"),
        ("noise", "Scaled", "noise.wrong=math.inf", "not inf at step 0"),
        ("noise", "Scaled", "noise.wrong=None", "not a NoneType at step 0"),
        ("noise", "Scaled", "noise.wrong='1/(step-4)'", "not -0.25 at step 0"),
        ("noise", "Scaled", "noise.wrong='1/abs(step-4)'", "promises.py, line 66: ZeroDivisionError"),
    ],
)
def test_a_stage_that_does_not_keep_what_eps_rests_on_is_refused(tmp_path, group, name, typed, expected):
    (tmp_path / "promises.py").write_text(PROMISES)
    write_option(tmp_path, "own", f"promises.{name}", group=group)
    line = [*PLAIN, f"{group}=own", typed]
    if expected is None:
        assert len(compose_each([line, [*line, "eps=inf"]], [tmp_path])) == 2
    else:
        with pytest.raises(UserError) as caught:
            compose_each([line], [tmp_path])
        assert expected in str(caught.value)
        if any(words in expected for words in ("norms' shape", "lacks", "never called")):
            with pytest.raises(UserError):
                compose_each([[*line, "eps=inf"]], [tmp_path])
        else:
            compose_each([[*line, "eps=inf"]], [tmp_path])


@pytest.mark.parametrize(
    ("name", "typed", "expected"),
    [
        ("Bounded", "clip.factor=1", None),
        ("Bounded", "clip.factor=1.01", "clip=Bounded: "),
        ("OfTheBatch", "clip.of='norms.max()'", "clip=OfTheBatch: "),
    ],
)
def test_a_command_refuses_such_a_stage_in_a_line(tmp_path, name, typed, expected):
    (tmp_path / "promises.py").write_text(PROMISES)
    write_option(tmp_path, "own", f"promises.{name}", group="clip")
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), "clip=own", typed, "plan=true", settings=PLAIN)
    if expected is None:
        assert (outcome.code, outcome.err) == (0, "")
    else:
        assert outcome.code == 2
        assert outcome.error().startswith(expected)


# Wrong noise, and what is said of it.
OF_TREES = (
    ("noise", None),
    ("0*noise", "standard deviation 0 at scale 1"),
    ("source.fill(out)", "correlation is 0.7"),  # of C Z, where Z is what the account takes C⁻¹ Z for
    ("noise*(torch.arange(len(noise))>9)", "0 at scale 1 in a coordinate"),
    ("noise*(self._drawn<70)", "smaller than those of deviation 1 at step 69"),
)


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        *(("OfTrees", f"noise.restart={on} noise.wrong='{wrong}'", says) for on in (0, 1) for wrong, says in OF_TREES),
        ("OfTrees", "batch_size=8 epochs=30", None),  # so many steps that C is too large to be made
        ("OfTrees", "batch_size=8 epochs=30 noise.wrong='0*noise'", "standard deviation 0 at scale 1"),
        ("OfFew", "noise.wrong=noise", None),  # C is that of all steps, of which some are drawn
        ("OfFew", "noise.wrong='source.fill(out)'", "correlation is 0.1"),
    ],
)
def test_correlated_noise_of_ones_own_is_what_its_correlation_says(tmp_path, name, line, expected):
    (tmp_path / "promises.py").write_text(PROMISES)
    write_option(tmp_path, "own", f"promises.{name}", group="noise")
    typed = [*PLAIN, "noise=own", "privacy=cyclic", *line.split()]
    if expected is None:
        assert len(compose_each([typed], [tmp_path])) == 1
    else:
        with pytest.raises(UserError, match=expected):
            compose_each([typed], [tmp_path])


@pytest.mark.parametrize("third", ["0", "-1", "nan", "inf"])
def test_noise_for_step_sizes_takes_a_schedule_of_ones_own_that_gives_such(tmp_path, third):
    (tmp_path / "promises.py").write_text(PROMISES)
    write_option(tmp_path, "own", "promises.Steep", group="schedule")
    line = ["-cd", str(tmp_path), "schedule=own", f"schedule.third={third}", "noise=step_size", "plan=true"]
    outcome = run(tmp_path / "results", *line, settings=PLAIN)
    assert outcome.code == 2
    assert "noise=step_size needs a finite learning rate > 0 at every step" in outcome.error()


def test_a_query_that_takes_more_points_than_it_promised_stops_the_run(tmp_path):
    (tmp_path / "promises.py").write_text(PROMISES)
    write_option(tmp_path, "own", "promises.Apart", group="query")
    line = ["-cd", str(tmp_path), "query=own", "query.weight=2"]
    assert run(tmp_path / "results", *line, settings=PLAIN).code == 0
    outcome = run(tmp_path / "results", *line, "query.count=3", settings=PLAIN)
    assert outcome.code == 1
    assert "query=Apart: expected at most the 2 points that it promised, not 3 at step 0" in outcome.error()


@pytest.mark.parametrize(
    ("result", "found"), [("(x, x)", "a tuple"), ("x.sum(1)", "shape "), ("x.sum()", "shape ()"), ("x[1:]", "shape ")]
)
def test_what_are_no_logits_of_a_model_of_ones_own_stops_the_run(tmp_path, result, found):
    (tmp_path / "no_logits.py").write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from dpbench.models.base import Model\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self, wrong):\n"
        "        super().__init__()\n"
        "        self.wrong, self.layer = wrong, nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        x = self.layer(x.flatten(1))\n"
        "        return eval(self.wrong)\n"
        "@dataclass\n"
        "class Wrong(Model):\n"
        "    name: str = 'wrong'\n"
        "    wrong: str = ''\n"
        "    def build(self, dataset):\n"
        "        return Odd(self.wrong)\n"
    )
    write_option(tmp_path, "own", "no_logits.Wrong", group="model")
    typed = ("-cd", str(tmp_path), "model=own", f"model.wrong='{result}'", "epochs=1")
    assert run(tmp_path / "results", *typed, settings=PLAIN).code == 1
    (record,) = records(tmp_path / "results")
    reason = read(record, "status.json")["reason"]
    assert reason.startswith("expected logits of the model, shape (")
    assert f", classes), not {found}" in reason


def test_logits_of_too_few_classes_stop_the_run_in_words(tmp_path):
    (tmp_path / "few_logits.py").write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from dpbench.models.base import Model\n"
        "@dataclass\n"
        "class Narrow(Model):\n"
        "    name: str = 'narrow'\n"
        "    logits: int = 10\n"
        "    def build(self, dataset):\n"
        "        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.logits))\n"
    )
    write_option(tmp_path, "own", "few_logits.Narrow", group="model")
    typed = ("-cd", str(tmp_path), "model=own", "epochs=0.1")
    assert run(tmp_path / "results", *typed, "model.logits=11", settings=PLAIN).code == 0
    outcome = run(tmp_path / "results", *typed, "model.logits=7", settings=PLAIN)
    assert outcome.code == 1
    assert "expected logits of the model for 10 classes, not for 7" in outcome.error()


@pytest.mark.parametrize(("group", "kind", "base"), [("model", "Model", "models"), ("optim", "Optimizer", "optim")])
def test_a_build_that_builds_nothing_is_refused(tmp_path, group, kind, base):
    (tmp_path / f"no_{group}.py").write_text(
        "from dataclasses import dataclass\n"
        f"from dpbench.{base}.base import {kind}\n"
        "@dataclass\n"
        f"class Empty({kind}):\n"
        "    name: str = 'empty'\n"
        "    def build(self, of):\n"
        "        pass\n"
    )
    write_option(tmp_path, "own", f"no_{group}.Empty", group=group)
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), f"{group}=own", settings=PLAIN)
    assert outcome.code != 0
    built = {"model": "Module", "optim": "Optimizer"}[group]
    assert f"{group}=Empty: expected build() to return torch's {built}, not a NoneType" in outcome.error()


@pytest.mark.parametrize(
    ("result", "found"), [("None", "a NoneType"), ("gradient[1:]", "shape (649,)"), ("gradient.sum()", "shape ()")]
)
@pytest.mark.parametrize("optim", ["sgd", "filtered_adam"])
def test_what_is_no_gradient_of_a_filter_of_ones_own_stops_the_run(tmp_path, result, found, optim):
    (tmp_path / "no_gradient.py").write_text(
        "from dataclasses import dataclass\n"
        "from dpbench.filters import Filter\n"
        "@dataclass\n"
        "class Odd(Filter):\n"
        "    wrong: str = ''\n"
        "    def apply(self, gradient):\n"
        "        return eval(self.wrong)\n"
    )
    write_option(tmp_path, "own", "no_gradient.Odd")
    typed = ("-cd", str(tmp_path), "filter=own", f"filter.wrong='{result}'", f"optim={optim}", "epochs=1")
    assert run(tmp_path / "results", *typed, "model=linear", settings=PLAIN).code == 1
    (record,) = records(tmp_path / "results")
    reason = read(record, "status.json")["reason"]
    assert reason == f"filter=Odd: expected apply() to return a tensor of shape (650,), not {found}"


@pytest.mark.parametrize("last", ["0", "-1", "nan", "inf", "1e-16", "1e16"])
def test_a_threshold_that_no_noise_can_be_made_for_stops_the_run(tmp_path, last):
    (tmp_path / "promises.py").write_text(PROMISES)
    write_option(tmp_path, "own", "promises.Falling", group="threshold")
    outcome = run(
        tmp_path / "results",
        "-cd",
        str(tmp_path),
        "threshold=own",
        f"threshold.last={last}",
        "epochs=1",
        settings=PLAIN,
    )
    assert outcome.code == 1
    (record,) = records(tmp_path / "results")
    assert f"expected thresholds from 1e-15 to 1e+15, not {float(last):g} at step 3" in outcome.err
    assert status(record) == "failed"


BOOM = """\
from dataclasses import dataclass
from dpbench.models import Model


@dataclass
class Boom(Model):
    name: str = "boom"

    def build(self, dataset):
        raise ValueError("no such thing")
"""


@pytest.mark.parametrize("command", [dpbench_run, audit], ids=["plan", "audit"])
def test_an_error_in_a_class_of_ones_own_is_told_by_its_place(tmp_path, command, capsys):
    (tmp_path / "boom.py").write_text(BOOM)
    write_option(tmp_path, "own", "boom.Boom", group="model")
    typed = ["-cd", str(tmp_path), "model=own", f"results_dir={tmp_path / 'results'}", "device=cpu"]
    assert command([*typed, *["plan=true"] * (command is dpbench_run)]) == 2
    assert capsys.readouterr().err == "error: boom.py, line 10: ValueError: no such thing\n"
