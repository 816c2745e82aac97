"""AutoAugment's policy for CIFAR-10, on batches of images of bytes (Cubuk et al. 2019, table 7).

torchvision has the operations, and the policy for one image at a time. Here all images that draw an operation go
through it together, for one call each would take longer than a step of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

# Magnitudes of the policy are of so many levels.
LEVELS = 10


class Operation(NamedTuple):
    """An operation of the policy.

    Attributes:
        name: of OPERATIONS.
        chance: the probability that it is carried out.
        level: of its magnitude, below LEVELS.
    """

    name: str
    chance: float
    level: int = 0


class Kind(NamedTuple):
    """What operations of one name do.

    Attributes:
        apply: to images (B, C, H, W) of bytes, with a magnitude.
        magnitude: of a level, for images of a height and a width.
        signed: whether the magnitude is negative for half of the images.
    """

    apply: Callable[[Tensor, float], Tensor]
    magnitude: Callable[[int, int, int], float]
    signed: bool = False


def _between(low: float, high: float) -> Callable[[int, int, int], float]:
    return lambda level, height, width: float(torch.linspace(low, high, LEVELS)[level])


def _bits(level: int, height: int, width: int) -> float:
    return round(8 - level / ((LEVELS - 1) / 4))


def _of_side(level: int, side: int) -> float:
    return float(torch.linspace(0.0, 150 / 331 * side, LEVELS)[level])


def _none(level: int, height: int, width: int) -> float:
    return 0.0


def _enhanced(function: Callable[[Tensor, float], Tensor]) -> Kind:
    return Kind(lambda images, amount: function(images, 1 + amount), _between(0, 0.9), signed=True)


def _moved(images: Tensor, amount: float, *, down: bool) -> Tensor:
    along = [0, int(amount)] if down else [int(amount), 0]
    moved: Tensor = F.affine(images, angle=0.0, translate=along, scale=1.0, shear=[0.0, 0.0])
    return moved


def _sheared(images: Tensor, amount: float, *, down: bool) -> Tensor:
    degrees = math.degrees(math.atan(amount))
    along = [0.0, degrees] if down else [degrees, 0.0]
    sheared: Tensor = F.affine(images, angle=0.0, translate=[0, 0], scale=1.0, shear=along, center=[0, 0])
    return sheared


OPERATIONS = {
    "ShearY": Kind(partial(_sheared, down=True), _between(0, 0.3), signed=True),
    "TranslateX": Kind(partial(_moved, down=False), lambda level, _, width: _of_side(level, width), signed=True),
    "TranslateY": Kind(partial(_moved, down=True), lambda level, height, _: _of_side(level, height), signed=True),
    "Rotate": Kind(F.rotate, _between(0, 30), signed=True),
    "Brightness": _enhanced(F.adjust_brightness),
    "Color": _enhanced(F.adjust_saturation),
    "Contrast": _enhanced(F.adjust_contrast),
    "Sharpness": _enhanced(F.adjust_sharpness),
    "Posterize": Kind(lambda images, bits: F.posterize(images, bits=int(bits)), _bits),
    "Solarize": Kind(lambda images, share: F.solarize(images, threshold=255 * share), _between(1, 0)),
    "AutoContrast": Kind(lambda images, _: F.autocontrast(images), _none),
    "Equalize": Kind(lambda images, _: F.equalize(images), _none),
    "Invert": Kind(lambda images, _: F.invert(images), _none),
}

# Pairs, of which an image draws one, and carries out one after the other. Levels of operations that have no magnitude,
# of which the paper prints some, are left out.
POLICY = tuple(
    (Operation(*first), Operation(*second))
    for first, second in (
        (("Invert", 0.1), ("Contrast", 0.2, 6)),
        (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
        (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
        (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.5), ("Equalize", 0.9)),
        (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
        (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
        (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
        (("Equalize", 0.6), ("Equalize", 0.5)),
        (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
        (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
        (("Equalize", 0.3), ("AutoContrast", 0.4)),
        (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
        (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
        (("Solarize", 0.5, 2), ("Invert", 0.0)),
        (("Equalize", 0.2), ("AutoContrast", 0.6)),
        (("Equalize", 0.2), ("Equalize", 0.6)),
        (("Color", 0.9, 9), ("Equalize", 0.6)),
        (("AutoContrast", 0.8), ("Solarize", 0.2, 8)),
        (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
        (("Solarize", 0.4, 5), ("AutoContrast", 0.9)),
        (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.9), ("Solarize", 0.8, 3)),
        (("Equalize", 0.8), ("Invert", 0.1)),
        (("TranslateY", 0.7, 9), ("AutoContrast", 0.9)),
    )
)


def autoaugment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images of bytes (B, C, H, W), each changed in place by a pair of operations that it draws."""
    count, device = len(images), images.device
    pair = torch.randint(len(POLICY), (count,), generator=generator, device=device)
    chances = torch.tensor([[operation.chance for operation in pair] for pair in POLICY], device=device)
    carried_out = torch.rand(count, 2, generator=generator, device=device) < chances[pair]
    negative = torch.rand(count, 2, generator=generator, device=device) < 0.5
    # What to do as a number: the pair, and the sign beside it.
    codes = torch.where(carried_out, 2 * pair.unsqueeze(1) + negative, -1).cpu()
    for place in (0, 1):
        kinds, counts = codes[:, place].unique(return_counts=True)
        groups = codes[:, place].argsort(stable=True).to(device).split(counts.tolist())
        for code, where in zip(kinds.tolist(), groups, strict=True):
            if code >= 0:
                operation = POLICY[code // 2][place]
                images[where] = _applied(images[where], operation, negative=bool(code % 2))
    return images


def _applied(images: Tensor, operation: Operation, *, negative: bool) -> Tensor:
    kind = OPERATIONS[operation.name]
    magnitude = kind.magnitude(operation.level, *images.shape[-2:])
    return kind.apply(images, -magnitude if negative and kind.signed else magnitude)
