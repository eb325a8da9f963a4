"""Recurrent models, scans, caches, and other things that go step by step; and graphs of nodes and edges."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo_models.registry import Call, Made, model


def sequences(*shape: int, calls: int = 2) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(*shape),) for _ in range(calls)]


class Tagger(nn.Module):
    """A recurrent layer between an embedding and a linear layer."""

    def __init__(self, kind: str, **kwargs: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.recurrent = getattr(nn, kind)(12, 16, batch_first=True, **kwargs)
        self.tag = nn.Linear(32 if kwargs.get("bidirectional") else 16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tag(torch.tanh(self.recurrent(self.words(ids))[0]))


def ids(*shape: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 50, shape),)


@model("nn.LSTM in the middle; Dynamo leaves it to eager; trained", under=("no_grad", "grad"), session=True)
def lstm() -> Made:
    return Tagger("LSTM"), [ids(3, 7), ids(3, 7)]


@model("bidirectional nn.GRU in the middle, longer sequences the second time", session=True)
def gru() -> Made:
    return Tagger("GRU", bidirectional=True), [ids(3, 7), ids(3, 9)]


class Cells(nn.Module):
    """An LSTM written as cells in a loop, with its state as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        outputs = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            outputs.append(h)
        return torch.stack(outputs, 1), (h, c)


@model("LSTM cells in a loop that is unrolled; trained", under=("no_grad", "grad"))
def lstm_cells() -> Made:
    return Cells(), [(torch.randn(2, 4, 8), torch.zeros(2, 8), torch.zeros(2, 8)) for _ in range(2)]


class SelectiveScan(nn.Module):
    """A state-space layer whose step depends on its input, as in Mamba."""

    def __init__(self, width: int = 8, state: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.step, self.mix = nn.Linear(width, width), nn.Linear(width, 2 * state)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(width, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.enter(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        delta = F.softplus(self.step(u))
        b, c = self.mix(u).chunk(2, -1)
        keep = torch.exp(-delta[..., None] * self.decay.exp())
        add = delta[..., None] * u[..., None] * b[:, :, None]
        h, outputs = torch.zeros_like(add[:, 0]), []
        for t in range(x.shape[1]):
            h = keep[:, t] * h + add[:, t]
            outputs.append((h * c[:, t, None]).sum(-1))
        return self.leave(torch.stack(outputs, 1) * F.silu(gate))


@model("selective scan; trained", under=("no_grad", "grad"), session=True)
def selective_scan() -> Made:
    return SelectiveScan(), sequences(2, 6, 8)


class LinearAttention(nn.Module):
    """A cumulative sum in the place of attention's softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bti,btj->btij", k, v).cumsum(1)
        return torch.einsum("bti,btij->btj", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)


@model("linear attention by cumulative sums; the length marked dynamic", dynamic=True)
def linear_attention() -> Made:
    return LinearAttention(), [(torch.randn(2, n, 8),) for n in (6, 9, 5)]


class Cached(nn.Module):
    """Attention of one new position over a cache that lies in buffers, at a place that a counter tells."""

    keys: torch.Tensor
    values: torch.Tensor
    filled: torch.Tensor

    def __init__(self, longest: int = 8, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.leave, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("keys", torch.zeros(1, heads, longest, width // heads))
        self.register_buffer("values", torch.zeros(1, heads, longest, width // heads))
        self.register_buffer("filled", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, self.heads, 1, -1) for part in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, self.filled, k)
        self.values.index_copy_(2, self.filled, v)
        seen = torch.arange(self.keys.shape[2]) <= self.filled
        self.filled += 1
        return self.leave(
            F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None, None, None]).flatten()
        )


@model("decoding into a cache in buffers, with a counter that moves on", session=True)
def kv_cache() -> Made:
    return Cached(), sequences(1, 16, calls=5)


@model("decoding into a cache that the caller passes and that is written in place")
def kv_cache_argument() -> Made:
    def attend(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, at, k)
        return torch.softmax(q @ cache.transpose(1, 2), -1) @ cache

    cache = torch.zeros(2, 6, 8)
    calls = [(torch.randn(2, 1, 8), torch.randn(2, 1, 8), cache, torch.tensor([i])) for i in range(3)]
    return attend, calls


class Experts(nn.Module):
    """A mixture of experts with capacity for every word: each expert computes all, and a gate chooses."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 16, width) * 0.2)

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.einsum("nef,efd->ned", F.silu(torch.einsum("nd,edf->nef", x, self.up)), self.down)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return (picked * (weights / weights.sum(-1, keepdim=True))[..., None]).sum(1), chosen


@model("mixture of experts, dense; which expert is an integer output; trained", under=("no_grad", "grad"))
def experts() -> Made:
    return Experts(), sequences(10, 8)


class Routed(Experts):
    """The same with only the chosen experts at work: sizes that depend on the data, and a graph break for each."""

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        first = (chosen == 0).nonzero().squeeze(1)
        out = torch.zeros_like(x).index_add_(0, first, self.expert(0, x[first], weights[first]))
        second = (chosen == 1).nonzero().squeeze(1)
        return out.index_add_(0, second, self.expert(1, x[second], weights[second]))

    def expert(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight[:, None] * (F.silu(x @ self.up[number]) @ self.down[number])


@model("mixture of experts, sparse: sizes that depend on the data", under=("no_grad",))
def experts_routed() -> Made:
    return Routed(experts=2), sequences(10, 8)


class GraphNet(nn.Module):
    """Messages along edges, summed by scatter, and attention over a node's edges by segment maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.score = nn.Linear(16, 8), nn.GRUCell(8, 8), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        pair = torch.cat([x[source], x[target]], -1)
        score = F.leaky_relu(self.score(pair)).squeeze(-1)
        largest = torch.full((x.shape[0],), -1e9).scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - largest[target])
        total = torch.zeros(x.shape[0]).scatter_add(0, target, weight)
        message = F.relu(self.message(pair)) * (weight / total[target])[:, None]
        return self.update(torch.zeros_like(x).index_add(0, target, message), x)


@model(
    "graph neural net: gather, scatter, segment softmax; another number of edges; trained", under=("no_grad", "grad")
)
def graph_net() -> Made:
    calls = [(torch.randn(6, 8), torch.randint(0, 6, (2, edges))) for edges in (14, 14, 20)]
    return GraphNet(), calls


@model("embedding bags with offsets, and a dot-product interaction, as in DLRM; trained", under=("no_grad", "grad"))
def recommender() -> Made:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(20, 6, mode="sum") for _ in range(3))
            self.dense, self.top = nn.Linear(4, 6), nn.Linear(6 + 6, 1)

        def forward(self, dense: torch.Tensor, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            low = F.relu(self.dense(dense))
            every = torch.stack([low, *(bag(items, offsets) for bag in self.bags)], 1)
            first, second = torch.triu_indices(4, 4, 1)
            pairs = (every @ every.transpose(1, 2))[:, first, second]
            return torch.sigmoid(self.top(torch.cat([low, pairs], 1)))

    offsets = torch.tensor([0, 3, 5])
    return Recommender(), [(torch.randn(3, 4), torch.randint(0, 20, (9,)), offsets) for _ in range(2)]


@model(
    "nn.TransformerEncoder, with padding and its fast path in evaluation; trained",
    under=("no_grad", "grad"),
    reason="eager's fast path leaves zeros where the padding is, and Dynamo does not trace it",
)
def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    fn = nn.TransformerEncoder(layer, 2)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    return fn, [Call((torch.randn(2, 6, 16),), {"src_key_padding_mask": padding}) for _ in range(2)]
