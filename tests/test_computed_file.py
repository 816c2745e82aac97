"""The file of a computed artefact holds all of it."""

import math

from dpbench.claims.computed_file import Axis, Computed, Curve, Panel, Style, path_of, read_computed, write_computed


def test_what_is_written_is_read_again(tmp_path):
    curve = Curve("k", (1.0, 2.0), (0.5, math.inf), Style.STEPS, printed=True)
    panel = Panel("gain", Axis("steps"), Axis("gain", log=True), (curve,))
    computed = Computed({"data MNIST, delta here": 5.5e-6}, (panel,), ("kappa is ours",))
    path = path_of(tmp_path, "disk", "figure_3")
    assert read_computed(path) is None
    write_computed(path, computed, {"commit": "abc"})
    assert read_computed(path) == computed
