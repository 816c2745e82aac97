import math
import re
import warnings

import numpy as np
import pytest
import torch
from draws import normal
from filter_references import (
    TAPS,
    catalogued,
    fractions,
    impulse_response,
    impulse_response_of,
    outputs_of,
    taps,
    weights,
)
from helpers import assembled, composed
from scipy.signal import freqz, lfilter

from dpbench.errors import UserError
from dpbench.filters import Exponential, RecursiveLowPass
from dpbench.optim import SGD, Adam

# Noise-power gain Σ κ², computed by hand from the taps.
NOISE_GAIN = {
    "sgd": 1,
    "momentum": 1 / 19,
    "first_v1": 1 / 11,
    "first_v2": 7 / 55,
    "second": 0.098276,
    "f1": 0.050658,
    "f2": 0.050658,
    "f3": 0.1,
    "f4": 0.2,
    "f5": 0.04875,
    "f6": 1 / 6,
}

# doppler.md 2.8: kappa_0..kappa_5, and the delay Σ τ κ_τ.
RESPONSE = {
    "sgd": ((1, 0, 0, 0, 0, 0), 0),
    "momentum": ((0.1, 0.09, 0.081, 0.0729, 0.06561, 0.059049), 9),
    "first_v1": ((0.090909, 0.165289, 0.135237, 0.110648, 0.090530, 0.074070), 5),
    "first_v2": ((0.272727, 0.132231, 0.108189, 0.088519, 0.072424, 0.059256), 4),
    "second": ((0.017241, 0.061831, 0.104022, 0.124491, 0.129316, 0.123558), 5),
    "f1": ((0.075, 0.0925, 0.08325, 0.074925, 0.067433, 0.060689), 9.25),
    "f2": ((0.025, 0.0975, 0.08775, 0.078975, 0.071078, 0.063970), 9.75),
    "f3": ((0.1, 0.18, 0.144, 0.1152, 0.09216, 0.073728), 4.5),
    "f4": ((0.2, 0.32, 0.192, 0.1152, 0.06912, 0.041472), 2),
    "f5": ((0.025, 0.0725, 0.09025, 0.081225, 0.073103, 0.065792), 10),
    "f6": ((0.025, 0.07, 0.10475, 0.12905, 0.143253, 0.148162), 2.5),  # printed: 0.148163, from the rounded kappa_4
}

# doppler.md 2.10: vectors of size d that a filter keeps.
KEPT = {"sgd": 0, "momentum": 1, "first_v1": 2, "first_v2": 2, "second": 4, "f5": 3, "f6": 3}

# Filtered SEQUENCE, six decimals.
SEQUENCE = (1, -2, 3, 0.5, -1, 2)
FILTERED = {
    "sgd": SEQUENCE,
    "momentum": (1, -0.578947, 0.741697, 0.671416, 0.263266, 0.633920),
    "first_v1": (1, -0.064516, 0.197697, 0.759829, 0.450006, 0.463640),
    "first_v2": (1, -1.020408, 1.289898, 0.673459, 0.019795, 0.882640),
    "second": (1, 0.345865, 0.175232, 0.359446, 0.471674, 0.469369),
    "f1": (1, -0.343284, 0.491525, 0.686037, 0.352531, 0.550300),
    "f2": (1, 0.387755, -0.153389, 0.720806, 0.555443, 0.365602),
    "f3": (1, -0.071429, 0.198113, 0.773739, 0.449442, 0.463783),
    "f4": (1, -0.153846, 0.213483, 0.956480, 0.418065, 0.453013),
    "f5": (1, 0.230769, 0.107856, 0.486012, 0.563184, 0.455751),
    "f6": (1, 0.210526, 0.198999, 0.432026, 0.443600, 0.453363),
}

# Filtered impulse (1, 0, 0, 0), six decimals.
IMPULSE = {
    "sgd": (1, 0, 0, 0),
    "momentum": (1, 0.473684, 0.298893, 0.211980),
    "first_v1": (1, 0.645161, 0.345489, 0.220378),
    "first_v2": (1, 0.326531, 0.210835, 0.147122),
    "second": (1, 0.781955, 0.568133, 0.404735),
    "f1": (1, 0.552239, 0.332004, 0.230061),
    "f2": (1, 0.795918, 0.417360, 0.273057),
    "f3": (1, 0.642857, 0.339623, 0.213650),
    "f4": (1, 0.615385, 0.269663, 0.139265),
    "f5": (1, 0.743590, 0.480692, 0.301980),
    "f6": (1, 0.736842, 0.524406, 0.392488),
}

# Variance of filtered white noise over that of the noise, after steps 1, 5 and 50.
NOISE_RATIO = {
    "sgd": (1, 1, 1),
    "momentum": (0.501385, 0.172021, 0.053122),
    "first_v1": (0.542144, 0.179539, 0.090916),
    "first_v2": (0.560183, 0.223434, 0.127281),
    "second": (0.658997, 0.198743, 0.098269),
    "f1": (0.505458, 0.169745, 0.051143),
    "f2": (0.675135, 0.184507, 0.051170),
    "f3": (0.540816, 0.181709, 0.100003),
    "f4": (0.526627, 0.226314, 0.200000),
    "f5": (0.618672, 0.182116, 0.049256),
    "f6": (0.612188, 0.196598, 0.165490),
}

in_the_catalogue = pytest.mark.parametrize("name", TAPS)
with_memory = pytest.mark.parametrize("name", [*TAPS, "exponential"])


@in_the_catalogue
def test_taps_are_those_of_the_paper(name):
    stage = catalogued(name)
    assert (list(stage.b), list(stage.a)) == taps(name)


@in_the_catalogue
def test_gain_at_frequency_zero_is_one(name):
    stage = catalogued(name)
    assert sum(stage.b) - sum(stage.a) == pytest.approx(1, abs=1e-15)


@in_the_catalogue
def test_catalogue_gives_no_warning(name):
    b, a = taps(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RecursiveLowPass(b=b, a=a)


@in_the_catalogue
def test_impulse_has_the_reference_values(name):
    assert_six_decimals(weights(catalogued(name), 4)[:, 0], IMPULSE[name])


@in_the_catalogue
def test_sequence_has_the_reference_values(name):
    outputs = outputs_of(catalogued(name), torch.tensor(SEQUENCE, dtype=torch.float64).unsqueeze(1))
    assert_six_decimals(outputs[:, 0], FILTERED[name])


@in_the_catalogue
def test_noise_ratio_has_the_reference_values(name):
    by_step = (weights(catalogued(name), 51) ** 2).sum(1)
    assert_six_decimals(by_step[[1, 5, 50]], NOISE_RATIO[name])


def assert_six_decimals(got, printed):
    np.testing.assert_allclose(got, printed, rtol=0, atol=6e-7)


@in_the_catalogue
def test_equals_lfilter_over_its_response_to_ones(name):
    assert_equals_lfilter(catalogued(name), *taps(name))


@pytest.mark.parametrize(("zeros", "poles"), [(3, 1), (0, 3), (4, 2), (2, 4), (1, 5)])
def test_equals_lfilter_for_other_orders(zeros, poles):
    generator = np.random.default_rng([zeros, poles])
    a = np.poly(generator.uniform(-0.5, 0.9, poles))[1:]
    b = generator.uniform(0.1, 1, zeros + 1)
    b *= (1 + a.sum()) / b.sum()
    assert_equals_lfilter(RecursiveLowPass(b=b.tolist(), a=a.tolist()), b, a)


def assert_equals_lfilter(stage, b, a):
    g = normal(60, 5)
    expected = lfilter(b, [1, *a], g, axis=0) / lfilter(b, [1, *a], np.ones((60, 1)), axis=0)
    np.testing.assert_allclose(outputs_of(stage, g), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("seed", "optim"), [(0, SGD()), (1, SGD(momentum=0.9)), (2, Adam())])
@pytest.mark.usefixtures("shared_streams")
def test_filter_sgd_leaves_every_bit_of_the_base_optimizer(seed, optim):
    steps = []
    for algo in (["algo=dpsgd"], ["algo=doppler", "filter=sgd"]):
        config = composed(*algo, "dataset=digits", "model=linear")
        config.seed, config.optim = seed, optim
        steps.append(assembled(config, noise_multiplier=1.0).step)
    plain, filtered = steps
    assert isinstance(filtered.filter, RecursiveLowPass)
    for t in range(4):
        batch = (normal(8, 1, 8, 8, seed=t, dtype=torch.float32), torch.arange(8))
        plain([batch])
        filtered([batch])
        assert torch.equal(plain.gradients.flat.vector, filtered.gradients.flat.vector)


def test_momentum_is_the_average_of_adam_with_its_bias_correction():
    g = normal(20, 3)
    parameter = torch.nn.Parameter(torch.zeros_like(g[0]))
    adam = torch.optim.Adam([parameter], betas=(0.9, 0.999))
    expected = []
    for t, parameter.grad in enumerate(g):
        adam.step()
        expected.append(adam.state[parameter]["exp_avg"] / (1 - 0.9 ** (t + 1)))
    torch.testing.assert_close(outputs_of(catalogued("momentum"), g), torch.stack(expected), rtol=1e-12, atol=1e-12)


@in_the_catalogue
def test_first_output_is_the_first_input(name):
    g = normal(1, 7)
    torch.testing.assert_close(outputs_of(catalogued(name), g), g, rtol=1e-15, atol=0)


@in_the_catalogue
def test_constant_input_is_returned_at_every_step(name):
    g = normal(7).expand(80, 7)
    torch.testing.assert_close(outputs_of(catalogued(name), g), g, rtol=1e-12, atol=0)


@in_the_catalogue
def test_linear_in_the_inputs(name):
    g, h = normal(30, 4, seed=1), normal(30, 4, seed=2)
    apart = 2 * outputs_of(catalogued(name), g) - 3 * outputs_of(catalogued(name), h)
    torch.testing.assert_close(outputs_of(catalogued(name), 2 * g - 3 * h), apart, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("factor", [3, -0.5, 1e-3])
@in_the_catalogue
def test_scaling_b_changes_nothing_but_gives_a_warning(name, factor):
    b, a = taps(name)
    with pytest.warns(UserWarning, match=r"filter\.b=.* gain at frequency zero is not 1"):
        scaled = RecursiveLowPass(b=[factor * tap for tap in b], a=a)
    g = normal(30, 4)
    torch.testing.assert_close(outputs_of(scaled, g), outputs_of(catalogued(name), g), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "responses"),
    [
        ("momentum", (0.1, 0.19, 0.271, 0.3439)),
        ("first_v1", (0.090909, 0.256198, 0.391435, 0.502083)),
        ("second", (0.017241, 0.079073, 0.183095, 0.307586)),
    ],
)
def test_start_up_correction_has_the_values_computed_by_hand(name, responses):
    got = taps(name)[0][0] / weights(catalogued(name), 4).diagonal()
    assert_six_decimals(got, responses)


@in_the_catalogue
def test_start_up_correction_is_the_sum_of_the_impulse_response_and_tends_to_one(name):
    response = taps(name)[0][0] / weights(catalogued(name), 300).diagonal()
    np.testing.assert_allclose(response, impulse_response(name, 300).cumsum(), rtol=1e-9)
    np.testing.assert_allclose(response[-1], 1, rtol=1e-9)


@in_the_catalogue
@pytest.mark.filterwarnings("ignore:filter.b")
def test_the_weights_sum_to_the_gain_and_not_to_what_the_proof_prints(name):
    """doppler.md E2: Σ κ = Σ b/(1 + Σ a), here also of b_0 alone; printed Σ b/(1 - Σ a), which is no bound."""
    b, a = fractions(name)
    for kept in (b, b[:1]):
        stage = RecursiveLowPass(b=[float(tap) for tap in kept], a=[float(tap) for tap in a])
        found = impulse_response_of(stage, 400).sum()
        assert found == pytest.approx(float(sum(kept) / (1 + sum(a))), rel=1e-9)
        assert (found <= sum(kept) / (1 - sum(a))) == (len(a) == 0)


@in_the_catalogue
def test_impulse_response_is_that_of_the_partial_fractions(name):
    b, a = taps(name)
    poles = np.roots([1, *a])
    residues = [np.prod([1 / (1 - other / pole) for other in poles if other != pole]) for pole in poles]

    def all_pole(tau):
        return sum(z * p**tau for z, p in zip(residues, poles, strict=True)) if len(poles) else float(tau == 0)

    expected = np.array([sum(tap * all_pole(tau - s) for s, tap in enumerate(b) if s <= tau) for tau in range(40)])
    np.testing.assert_allclose(np.imag(expected), 0, atol=1e-12)
    np.testing.assert_allclose(impulse_response(name, 40), np.real(expected), rtol=1e-9, atol=1e-12)


@in_the_catalogue
def test_noise_power_gain_is_the_mean_power_of_the_frequency_response(name):
    b, a = taps(name)
    _, response = freqz(b, [1, *a], worN=1024, whole=True)
    gain = (impulse_response(name, 400) ** 2).sum()
    np.testing.assert_allclose(gain, np.mean(np.abs(response) ** 2), rtol=1e-9)
    assert_six_decimals(gain, NOISE_GAIN[name])


@in_the_catalogue
def test_impulse_response_and_delay_have_the_reference_values(name):
    kappa, delay = RESPONSE[name]
    found = impulse_response(name, 400)
    assert_six_decimals(found[:6], kappa)
    np.testing.assert_allclose(np.arange(400) @ found, delay, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "smallest"), [("second", -0.0047), ("f6", -0.0459)])
def test_filters_of_second_order_have_negative_weights(name, smallest):
    assert impulse_response(name, 300).min() == pytest.approx(smallest, abs=6e-5)
    assert all(impulse_response(other, 300).min() >= 0 for other in TAPS if other not in ("second", "f6"))


def test_response_of_the_resonant_filter_overshoots():
    """doppler.md 2.8: to 1.310."""
    assert impulse_response("f6", 300).cumsum().max() == pytest.approx(1.310, abs=6e-4)


@pytest.mark.parametrize(("name", "vectors"), KEPT.items())
def test_filter_keeps_as_many_vectors_as_it_has_taps_into_the_past(name, vectors):
    stage = catalogued(name)
    outputs_of(stage, normal(9, 5))
    state = stage.state_dict()
    assert [vector.shape for vector in [*state["inputs"], *state["outputs"]]] == [(5,)] * vectors


@pytest.mark.parametrize("kappa", [0.3, 0.7, 1.0])
def test_exponential_is_a_first_order_low_pass_started_at_the_first_input(kappa):
    g = normal(30, 4)
    expected, _ = lfilter([kappa], [1, kappa - 1], g, axis=0, zi=(1 - kappa) * g[:1])
    np.testing.assert_allclose(outputs_of(Exponential(kappa=kappa), g), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("split", [0, 1, 2, 5])
@with_memory
def test_continued_from_its_state_bit_for_bit(name, split):
    g = normal(12, 3, dtype=torch.float32)
    uninterrupted = outputs_of(catalogued(name), g)
    stopped = catalogued(name)
    outputs_of(stopped, g[:split])
    state = stopped.state_dict()
    outputs_of(stopped, normal(3, 3, seed=1, dtype=torch.float32))
    for _ in range(2):  # the state is a copy, and stays one
        resumed = catalogued(name)
        outputs_of(resumed, normal(4, 3, seed=2, dtype=torch.float32))
        resumed.load_state_dict(state)
        assert torch.equal(outputs_of(resumed, g[split:]), uninterrupted[split:])


@pytest.mark.parametrize("state", [{}, {"mean": torch.ones(3)}, {"average": torch.ones(3), "steps": 1}])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match=re.escape(f"Exponential keeps average, got {sorted(state)}")):
        Exponential().load_state_dict(state)


@with_memory
def test_caller_may_overwrite_the_input(name):
    g = normal(12, 3)
    stage, outputs, buffer = catalogued(name), [], torch.empty(3, dtype=torch.float64)
    for gradient in g:
        output = stage.apply(buffer.copy_(gradient))
        buffer.fill_(torch.nan)
        outputs.append(output.clone())
    assert torch.equal(torch.stack(outputs), outputs_of(catalogued(name), g))


@pytest.mark.parametrize("a", [[-1.0], [-1.1], [1.1], [0.0, -1.01], [-1.8, 1.01], [-2.0, 0.9]])
def test_unstable_feedback_is_refused(a):
    with pytest.raises(UserError, match=r"^filter\.a=\[.*\]: expected .* stable"):
        RecursiveLowPass(b=[1.0], a=a)


@pytest.mark.parametrize("b", [[], [0.0], [0.0, 0.1], [math.nan], [math.inf, 1.0]])
def test_vanishing_first_tap_is_refused(b):
    with pytest.raises(UserError, match=r"^filter\.b=\[.*\]: expected finite taps whose first is not 0"):
        RecursiveLowPass(b=b, a=[-0.9])


@pytest.mark.parametrize(("field", "value"), [("filter.a", "[-1.1]"), ("filter.b", "[0,0.1]")])
def test_bad_taps_on_the_command_line_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"^{field}="):
        composed("algo=doppler", "filter=f1", f"{field}={value}")


@pytest.mark.parametrize(
    ("b", "a", "step"),
    [
        ([1.0, -1.0, 0.5], [], 1),
        ([0.5, 0.5], [1.5, 0.99], None),
        ([1.0, 0.5, -1.5, 2.0], [], 2),
        ([1.0], [1.0, 0.25], 1),
        ([1.0, 1.0, 1.0, 1.0, 1.0, -5.0, 2.0], [], 5),
        ([1023.0, -1023.5], [-0.5], 10),  # 1024/2^t - 1
    ],
)
@pytest.mark.filterwarnings("ignore:filter.b")
def test_a_start_up_correction_that_vanishes_is_refused(b, a, step):
    responses = lfilter(b, [1.0, *a], np.ones(1000))
    assert (None if np.all(responses) else int(np.argmin(np.abs(responses)))) == step
    if step is None:
        RecursiveLowPass(b=b, a=a)
        return
    with pytest.raises(UserError, match=rf"^filter\.b=.* vanishes at no step, here at {step}$"):
        RecursiveLowPass(b=b, a=a)


def test_taps_that_let_no_constant_pass_are_refused():
    with pytest.raises(UserError, match=r"^filter\.b=\[1, -1\]: expected taps that do not sum to 0"):
        RecursiveLowPass(b=[1.0, -1.0])


@pytest.mark.parametrize("a", [[-1.0], [-1.8, 1.0], [-0.5, 1.0], [math.nan]])
def test_poles_on_the_unit_circle_and_taps_that_are_no_numbers_are_refused(a):
    with pytest.raises(UserError, match=r"^filter\.a=.*stable"):
        RecursiveLowPass(b=[1.0], a=a)


def test_a_resonance_that_float32_does_not_keep_is_refused_however_narrow():
    """Poles at a distance of 1e-7 from the circle: at their angle alone, rounded taps have quite another gain."""
    radius, angle = 1 - 1e-7, 60.5 * math.pi / 1024
    a = [-2 * radius * math.cos(angle), radius**2]
    (_, own), (_, rounded) = (freqz([1.0], [1.0, *taps], worN=[angle]) for taps in (a, np.float32(a).astype(float)))
    assert abs(np.log(abs(rounded / own))) > 0.3
    with pytest.raises(UserError, match=r"^filter\.a=.*: expected feedback taps whose filter float32 keeps"):
        RecursiveLowPass(b=[1.0], a=a)


@pytest.mark.parametrize("kappa", [0.0, -0.1, 1.1, float("nan")])
def test_exponential_refuses_weights_outside_zero_to_one(kappa):
    with pytest.raises(UserError, match=r"^filter\.kappa="):
        Exponential(kappa=kappa)
