"""Small models that several tests share."""

import torch
from torch import nn
from torchvision.models import resnet


class Expanded(nn.Module):
    """One channel as so many, without a copy."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, x):
        return x.expand(-1, self.channels, *x.shape[2:])


class Tokens(nn.Module):
    """A class token, position embeddings and a layer scale, as in vision transformers."""

    def __init__(self, length, d):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.token = nn.Parameter(torch.randn(1, 1, d))
        self.positions = nn.Parameter(torch.randn(1, length + 1, d))
        self.scale = nn.Parameter(torch.rand(d))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.start(x)], dim=1) + self.positions
        return x + self.scale * torch.tanh(x)


class Scaled(nn.Module):
    """Output of a layer times a parameter of some shape."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return self.layer(x) * self.scale


class Recurrent(nn.Module):
    """An LSTM of which all that it gives is used."""

    def __init__(self, d, **options):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.lstm = nn.LSTM(d, batch_first=True, **options)

    def forward(self, x):
        output, (h, c) = self.lstm(self.start(x))
        return torch.cat([output.flatten(1), h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)], dim=1)


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself, or of its first two tokens to the others."""

    def __init__(self, d, heads, *, cross=False, values=False, padding=None, mask=None, weights=None, bias=True):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.attention = nn.MultiheadAttention(d, heads, bias=bias, batch_first=True)
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter, std=0.7)
        self.cross, self.values, self.padding, self.mask, self.weights = cross, values, padding, mask, weights

    def forward(self, x):
        x = self.start(x)
        query, key = (x[:, :2], x[:, 2:]) if self.cross else (x, x)
        value = torch.sin(key) if self.values else key
        hidden = None
        if self.padding is not None:
            hidden = x.detach()[:, -key.shape[1] :, 0] > 0
            hidden[:, 0] = False
            if self.padding == "numbers":
                hidden = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -2.0)
        forbidden = None
        if self.mask is not None:
            forbidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=x.device).triu(1)
            if self.mask == "numbers":
                forbidden = -forbidden.to(x.dtype)
            elif self.mask == "of each head":
                forbidden = forbidden.repeat(len(x) * self.attention.num_heads, 1, 1)
        output, weights = self.attention(
            query,
            key,
            value,
            key_padding_mask=hidden,
            attn_mask=forbidden,
            need_weights=self.weights is not None,
            average_attn_weights=self.weights != "of each head",
        )
        assert (weights is None) == (self.weights is None)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], dim=1)


class Language(nn.Module):
    """A model of language whose last layer has the weight of its first; optionally read twice more."""

    def __init__(self, rows=5, d=4, *, padding_idx=None, bias=True, again=False):
        super().__init__()
        self.table = nn.Embedding(rows, d, padding_idx=padding_idx)
        self.mix = nn.Linear(d, d)
        self.head = nn.Linear(d, rows, bias=bias)
        self.head.weight = self.table.weight
        self.again = again

    def forward(self, ids):
        x = self.table(ids)
        if self.again:
            x = x + self.table(ids.flip(1)[:, :1]) + torch.tanh(self.head(x)).sum(2, keepdim=True)
        return self.head(torch.tanh(self.mix(x)))


class TimeFirst(nn.Module):
    """Puts the samples of each time together, which of one time alone is their order."""

    def __init__(self, d, hidden):
        super().__init__()
        self.inner, self.head = nn.Linear(d, hidden), nn.Linear(hidden, 3)

    def forward(self, x):
        h = torch.tanh(self.inner(x.transpose(0, 1).flatten(0, 1)))
        return self.head(h.view(-1, len(x), h.shape[1]).sum(0))


class CountingPasses(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


class PassCounter(nn.Sequential):
    """A linear model of digits that counts its passes in training, in a buffer."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += self.training
        return super().forward(x)


class NarrowResNet(resnet.ResNet):
    """A ResNet of torchvision with an eighth of the channels behind its stem."""

    def __init__(self, block, layers, num_classes, **settings):
        super().__init__(block, layers, num_classes=num_classes, **settings)
        self.fc = nn.Linear(512 // 8 * block.expansion, num_classes)

    def _make_layer(self, block, planes, *args, **settings):
        return super()._make_layer(block, planes // 8, *args, **settings)


class TokenClassifier(nn.Module):
    """Token ids (n, T), of which 0 is padding, to three classes; what is between is up to `hidden`."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, ids):
        return self.head(self.hidden(ids))


# Ids and labels for it.
TOKENS = torch.tensor([[5, 1, 7, 2], [3, 8, 8, 4], [1, 1, 6, 2], [2, 5, 3, 7]])
CLASSES = torch.tensor([0, 1, 2, 0])
