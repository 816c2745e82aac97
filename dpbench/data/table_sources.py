"""Tables of numbers and categories, with the sums of their files."""

from __future__ import annotations

import csv
import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.data.sources import Fetchable, File, FileSource, Source, fetched

# Features float32 (N, F), labels int64 (N,).
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TableSource(Source):
    """A data set of which rows of numbers can be read."""

    @abstractmethod
    def read(self, root: Path, *, download: bool) -> tuple[Rows, Rows]:
        """Features and labels for training, then for the test.

        Args:
            root: data root.
            download: fetch what is missing.

        Raises:
            UserError: a file is missing, truncated or corrupt.
        """


# Columns of the census data. Numbers are divided by a bound that is public; amounts of money are taken as logarithms.
# The third column, the weight of a person in the census' sample, is no attribute of the person and left out.
NUMBERS = {0: 100.0, 4: 16.0, 12: 100.0}
AMOUNTS = {10: 1e5, 11: 1e5}
CATEGORIES = {
    1: "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, Never-worked",
    3: (
        "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, Masters, "
        "1st-4th, 10th, Doctorate, 5th-6th, Preschool"
    ),
    5: ("Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, Married-AF-spouse"),
    6: (
        "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, Handlers-cleaners, "
        "Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, Protective-serv, "
        "Armed-Forces"
    ),
    7: "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    8: "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    9: "Female, Male",
    13: (
        "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, Japan, "
        "Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, "
        "Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
        "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands"
    ),
}
COLUMNS = 15


@dataclass(frozen=True)
class Adult(Fetchable, FileSource, TableSource):
    """The UCI repository's census income: who earns more than 50,000 dollars.

    The encoding draws on nothing but the published description of the columns, so that it costs no privacy: numbers
    over public bounds, a one for each category, zeros where a value is not known.
    """

    URL = "https://archive.ics.uci.edu/static/public/2/adult.zip"

    @override
    def fetch(self, root: Path) -> None:
        with fetched(self.URL, root) as folder:
            for path in (root / file.path for file in self.files):
                path.parent.mkdir(exist_ok=True)
                (folder / path.name).replace(path)

    @override
    def read(self, root: Path, *, download: bool) -> tuple[Rows, Rows]:
        self.obtain(root, download=download)
        train, test = (self._rows(root / file.path) for file in self.files)
        return train, test

    def _rows(self, path: Path) -> Rows:
        try:
            with path.open(newline="") as stream:
                rows = [row for row in csv.reader(stream, skipinitialspace=True) if len(row) == COLUMNS]
            features = torch.tensor([_encoded(row) for row in rows])
            labels = torch.tensor([("<=50K", ">50K").index(row[-1].rstrip(".")) for row in rows])
        except (ValueError, OSError) as error:
            raise self.error(f"{path} can't be read ({type(error).__name__}: {error}); fetch it anew") from error
        return features, labels


def _encoded(row: list[str]) -> list[float]:
    """One person: numbers, amounts, then the categories in the order of their columns."""
    numbers = [float(row[i]) / bound for i, bound in NUMBERS.items()]
    amounts = [math.log1p(float(row[i])) / math.log1p(bound) for i, bound in AMOUNTS.items()]
    return numbers + amounts + [float(row[i] == one) for i, names in CATEGORIES.items() for one in names.split(", ")]


TABLES: dict[str, TableSource] = {
    "adult": Adult(
        "adult",
        "Adult, census income",
        32_561,
        16_281,
        files=(
            File("adult/adult.data", "5d7c39d7b8804f071cdd1f2a7c460872", 3_974_305),
            File("adult/adult.test", "35238206dfdf7f1fe215bbb874adecdc", 2_003_153),
        ),
    )
}
