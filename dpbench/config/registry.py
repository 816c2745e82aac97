"""The schemas of stages, models and data, by the names that YAML files have for them; Hydra is told of all of them."""

from __future__ import annotations

from functools import cache

from hydra.core.config_store import ConfigStore

from dpbench import averaging, clip, filters, models, noise, optim, query, schedules, threshold
from dpbench.config.privacy import Privacy
from dpbench.config.schema import RunConfig, TrackerSettings
from dpbench.data import Augmentation, AutoAugment, ImageDataset, TableDataset, TextDataset
from dpbench.error_feedback import ErrorFeedbackClip

# Group and option of every schema, as YAML files name them in `/schema/<group>: <option>`.
SCHEMAS: dict[str, dict[str, type]] = {
    "query": {
        "one_point": query.OnePoint,
        "two_point": query.TwoPoint,
        "last_iterates": query.LastIterates,
        "apart_iterates": query.ApartIterates,
    },
    "clip": {
        "threshold": clip.ThresholdClip,
        "automatic": clip.AutomaticClip,
        "normalised": clip.NormalisedClip,
        "psac": clip.PSAClip,
        "error_feedback": ErrorFeedbackClip,
        "none": clip.NoClip,
    },
    "threshold": {
        "fixed": threshold.FixedThreshold,
        "decay": threshold.DecayingThreshold,
        "percentile": threshold.PercentileThreshold,
        "expected_error": threshold.ExpectedErrorThreshold,
        "quantile": threshold.QuantileThreshold,
    },
    "noise": {
        "constant": noise.ConstantNoise,
        "step_size": noise.StepSizeNoise,
        "growing": noise.GrowingNoise,
        "decay": noise.DecayingNoise,
        "disk_released": noise.DiskReleasedNoise,
        "understated": noise.UnderstatedNoise,
        "tree": noise.TreeNoise,
        "banded": noise.BandedNoise,
    },
    "filter": {
        "identity": filters.Identity,
        "exponential": filters.Exponential,
        "recursive": filters.RecursiveLowPass,
        "butterworth": filters.Butterworth,
        "chebyshev": filters.Chebyshev,
        "online_fir": filters.OnlineFIR,
    },
    "optim": {
        "sgd": optim.SGD,
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "filtered_adam": optim.FilteredAdam,
        "adambc": optim.AdamBC,
        "galore": optim.GaLore,
        "adagrad_norm": optim.AdaGradNorm,
        "adagrad_norm_uncertified": optim.UncertifiedAdaGradNorm,
    },
    "schedule": {
        "constant": schedules.Constant,
        "cosine": schedules.Cosine,
        "inverse_sqrt": schedules.InverseSqrt,
        "sqrt_decay": schedules.SqrtDecay,
    },
    "averaging": {"none": averaging.Averaging, "exponential": averaging.ExponentialAveraging},
    "dataset": {"images": ImageDataset, "table": TableDataset, "text": TextDataset},
    "augmentation": {"augmentation": Augmentation, "autoaugment": AutoAugment},
    "model": {
        "linear": models.Linear,
        "mlp": models.MLP,
        "cnn5": models.CNN5,
        "cnn_small": models.SmallCNN,
        "cnn_abadi": models.AbadiCNN,
        "wide_resnet": models.WideResNet,
        "resnet": models.ResNet,
        "bit_resnet": models.BiTResNet,
        "efficientnet": models.EfficientNet,
        "vision_transformer": models.VisionTransformer,
        "small_transformer": models.SmallTransformer,
        "text_encoder": models.TextEncoder,
        "gpt2": models.GPT2,
        "character_lstm": models.CharacterLSTM,
    },
    "privacy": {"privacy": Privacy},
    "tracker": {"wandb": TrackerSettings},
}


@cache
def register() -> None:
    """Make the schemas known to Hydra, in groups of their own so that users' lists show only choices."""
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    for group, options in SCHEMAS.items():
        for name, node in options.items():
            store.store(group=f"schema/{group}", name=name, node=node)
