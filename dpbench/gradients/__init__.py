"""Per-sample gradients of linear combinations over iterates, exact.

Asked for by a run:
    per_sample  tapes and clipped sums of one model, by a way that is found for it
    fused       clipped sums of several seeds, in the passes that they share
    request     what a run asks of either in a step
    clipped     a clipped sum, from a pass and over micro-batches
    flat        the trained parameters as one vector

A pass, and what it leaves:
    passes      passes of a model by a given way
    way         the ways there are: by books, or by rows
    functional  rows: all gradients in memory, by torch.func or one by one
    owners      which layers keep books, and which parameters lie outside of them
    layers      the layers that do; attention, recurrent, pooling and parts have some of them
    recording   what the layers of a pass read, and the gradients of what they gave
    weights     what they compute with: one value of each parameter, or one for each seed
    loss        the loss of each sample
    tape        norms and weighted sums of a micro-batch
    summands    its parts, of some parameters each
    joined      parts that are cheaper together
    uses        how a parameter enters a layer, and so what its gradient is made of
    choice      which strategy such a use takes
    replay      passes on a GPU, recorded and replayed

Whether a way is right:
    settle      the search for the fastest one that agrees with autograd, and comparisons later
    verify      what is compared, and how far it may deviate
    effects     what a pass leaves behind, in the model or outside of it
    row_order   whether the rows that layers read follow the data
    draws       random draws, held still for a comparison
    buffers     a model's buffers, put back after one
"""

from dpbench.gradients.clipped import Clipped, MicroBatch
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.per_sample import PerSampleGradients
from dpbench.gradients.request import Request
from dpbench.gradients.tape import Tape

__all__ = ["Clipped", "FlatParameters", "FusedGradients", "MicroBatch", "PerSampleGradients", "Request", "Tape"]
