"""What noise of records from before `LONGER_SINCE`, on a CPU, tells of a sample: by the law of the numbers it is of.

torch made a normal number in single precision as sqrt(-2 log u) cos(2 pi w) of uniform u = 2^-24, 2 2^-24, ..., 1. So
its radius ends at sqrt(48 log 2), where it lies with probability 2^-24, at any angle.
"""

import math

from dpbench.privacy.tail import probability_beyond

END = math.sqrt(48 * math.log(2))


def shown(moved, coordinates):
    """Probability that a sample shows by a number beyond the end, at least and at most.

    At least: for one that moves all coordinates alike, by numbers of the last radius alone. At most: a radius below
    the last one is no more probable than with exact normal numbers, and what the last one adds is concave in the square
    of the move.
    """
    last = 2**-24 * math.acos(1 - moved / math.sqrt(coordinates) / END) / math.pi
    rest = probability_beyond(END, [(1, 1.0, moved)], coordinates=coordinates)
    return -math.expm1(coordinates * math.log1p(-last)), coordinates * last + rest
