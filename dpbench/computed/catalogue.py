"""Which tables and figures are computed, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpbench.claims import Artefact
from dpbench.claims.computed_file import Computed
from dpbench.computed import adp, dc_sgd, disk, doppler, dp_pmlf

# By paper and artefact. Figures 1, 3 and 4 of ADP have curves beside those that are trained, Table II of DC-SGD what
# its searches spend.
COMPUTED: Mapping[tuple[str, str], Callable[[Artefact], Computed]] = {
    ("doppler", "figure_1"): doppler.illustration,
    ("doppler", "figure_6"): doppler.responses_of_filters,
    ("doppler", "table_2"): doppler.taps_of_filters,
    ("doppler", "table_4"): doppler.taps_of_filters,
    ("disk", "figure_3"): disk.convergence_of_gain,
    ("disk", "figure_6a"): disk.synthetic_regression,
    ("disk", "table_7"): disk.deltas,
    ("adp", "figure_1"): adp.noise_and_budget,
    ("adp", "figure_2"): adp.step_sizes,
    ("adp", "figure_3"): adp.noise_of_runs,
    ("adp", "figure_4"): adp.budgets_over_epochs,
    ("adp", "text_1"): adp.quoted_budgets,
    ("adp", "text_2"): adp.effects_of_schedules,
    ("dp_pmlf", "text_2"): dp_pmlf.responses_of_filters,
    ("dp_pmlf", "text_3"): dp_pmlf.variance_of_momentum,
    ("dp_pmlf", "text_7"): dp_pmlf.measured_variance,
    ("dc_sgd", "figure_2"): dc_sgd.percentiles_of_noisy_histograms,
    ("dc_sgd", "figure_3"): dc_sgd.expected_errors_of_noisy_histograms,
    ("dc_sgd", "table_2"): dc_sgd.costs_of_searches,
    ("dc_sgd", "text_1"): dc_sgd.noise_multipliers,
    ("dc_sgd", "text_2"): dc_sgd.cost_of_tuning,
}
