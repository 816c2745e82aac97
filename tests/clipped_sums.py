"""Models of images with a batch of each, and clipped sums of what was recorded of their gradients."""

import torch

from dpbench.clip import AutomaticClip, NoClip, NormalisedClip, ThresholdClip
from dpbench.config import compose_jobs
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.training.losses import per_sample_loss

CLIPS = {
    "threshold": ThresholdClip(),
    "automatic": AutomaticClip(stabiliser=0.01),
    "automatic_exact": AutomaticClip(stabiliser=0.0),
    "normalised": NormalisedClip(),
    "none": NoClip(),
    "threshold_per_layer": ThresholdClip(scope="per_layer"),
    "automatic_per_layer": AutomaticClip(scope="per_layer"),
    "normalised_per_layer": NormalisedClip(scope="per_layer"),
}
IMAGE_MODELS = {
    "linear": ("mnist", "linear"),
    "mlp": ("digits", "mlp"),
    "cnn_small": ("mnist", "cnn_small"),
    "cnn5_28": ("mnist", "cnn5"),
    "cnn5_32": ("cifar10", "cnn5"),
}


def built(name: str, batch: int):
    dataset, model = IMAGE_MODELS[name]
    config = compose_jobs([f"dataset={dataset}", f"model={model}"], multirun=False)[0].config
    torch.manual_seed(0)
    data = config.dataset
    inputs = torch.rand(batch, data.channels, data.height, data.width)
    return config.model.build(data), inputs, torch.randint(data.classes, (batch,))


def engine_of(model):
    return PerSampleGradients(model, FlatParameters(model), per_sample_loss)


def tapes(engine, points, inputs, labels, micro):
    return [engine.record(points, x, y) for x, y in zip(inputs.split(micro), labels.split(micro), strict=True)]


def clipped_sum(recorded, clip, threshold):
    return sum(tape.weighted_sum(clip.factors(tape.norms(), threshold)) for tape in recorded)
