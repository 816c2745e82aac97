"""The settings of the privacy group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpbench.errors import require
from dpbench.privacy import ACCOUNTANTS, SCHEMES, Scheme, tightest
from dpbench.privacy.accountants import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER
from dpbench.privacy.published import RULES


@dataclass
class Privacy:
    """How batches are drawn and eps is accounted for.

    Attributes:
        sampler: "poisson", "fixed_size", "shuffled" or "cyclic".
        accountant: "auto" takes the tightest that is valid for the sampler; or "pld", "rdp", "gdp".
        noise_multiplier: use this z instead of calibrating; refused where it would spend more than eps.
        published: calibrate by a rule that publications used though it does not cover what is run: "poisson_rdp",
            "adp_theorem" or "adp_main_text". The guarantee recorded is that of the accountant all the same.
        secure_noise: noise and batches of a stream cipher under a key of the operating system's instead of seeded
            generators. Such a run can't be repeated, and its noise can't be taken off again.
        search_runs: eps is that of a random search, with so many runs expected, of which the best is published
            (`TruncatedNegativeBinomial`, shape 0), and all of which make the same releases; null: of the run alone.
    """

    sampler: str = "poisson"
    accountant: str = "auto"
    noise_multiplier: float | None = None
    published: str | None = None
    secure_noise: bool = False
    search_runs: float | None = None

    def __post_init__(self) -> None:
        require(self.sampler in SCHEMES, "privacy.sampler", self.sampler, f"one of {', '.join(SCHEMES)}")
        known = ("auto", *ACCOUNTANTS)
        require(self.accountant in known, "privacy.accountant", self.accountant, f"one of {', '.join(known)}")
        valid = self.scheme.accountants
        require(
            self.accountant in ("auto", *valid),
            "privacy.accountant",
            self.accountant,
            f"auto or one that is valid for {self.sampler} sampling: {', '.join(valid)}",
        )
        given = self.noise_multiplier
        fits = given is None or SMALLEST_MULTIPLIER <= given <= LARGEST_MULTIPLIER
        require(fits, "privacy.noise_multiplier", given, "a number from 1e-6 to 1e8, or null")
        published = self.published
        require(published is None or published in RULES, "privacy.published", published, f"null, {', '.join(RULES)}")
        runs = self.search_runs
        require(runs is None or 1 < runs < math.inf, "privacy.search_runs", runs, "a number > 1, or null")
        alone = runs is None or published is None
        require(alone, "privacy.published", published, "null where privacy.search_runs is given")

    @property
    def scheme(self) -> Scheme:
        """The sampling scheme."""
        return SCHEMES[self.sampler]

    @property
    def valid_accountant(self) -> str:
        """The accountant by name."""
        return tightest(self.scheme) if self.accountant == "auto" else self.accountant
