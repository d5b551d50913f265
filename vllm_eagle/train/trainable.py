"""A head while it is trained: inputs whitened, and a sensible start.

Embeddings are small (norm 2.8 for SmolLM2-135M), features large (45), and features share a strong common direction.
AdamW's steps have the same size in every weight whatever its input, and add up along a common direction. So every
matrix that reads such an input is trained in the basis in which that input's second moment is the identity:

    weight = trained @ (E[x xᵀ] + ridge)^(-1/2)

which is again a plain matrix: the exported head shows nothing of it.

Shapes: `N` slots, `D` hidden, `S` draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vllm_eagle.heads import AnyHead, Attend, Eagle3Head, HeadConfig, new_head
from vllm_eagle.train.batches import PackedBatch
from vllm_eagle.train.words import Words

_RIDGE = 1e-3  # of the mean eigenvalue
_READS_FEATURES = ("q_proj", "k_proj", "v_proj")
_READS_NORMED = ("gate_proj", "up_proj")


class Whitened(nn.Module):
    """Give `trained @ basis` as a layer's weight."""

    basis: Tensor
    inverse: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("basis", torch.eye(size))
        self.register_buffer("inverse", torch.eye(size))

    def set_moment(self, moment: Tensor) -> None:
        """Whiten inputs of second moment [D, D]."""
        values, vectors = torch.linalg.eigh(moment.double())
        values = (values.clamp_min(0) + _RIDGE * values.mean()).sqrt()
        self.basis.copy_(vectors / values @ vectors.T)
        self.inverse.copy_(vectors * values @ vectors.T)

    def forward(self, trained: Tensor) -> Tensor:
        with torch.autocast(trained.device.type, enabled=False):  # the basis spans more magnitudes than bfloat16 has digits
            return trained @ self.basis

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return what is trained for a plain `weight`."""
        return weight @ self.inverse


class TrainableHead(nn.Module, ABC):
    """Hold a head, itself a `Head`, some of whose input matrices are trained in whitened bases."""

    whitened: tuple[str, ...]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head = new_head(config)
        for name in self.whitened:
            for layer in self._layers(name):
                parametrize.register_parametrization(layer, "weight", Whitened(layer.in_features))

    @abstractmethod
    def begin(self, batches: Iterable[PackedBatch], words: Words) -> None:
        """Choose the bases and the first weights from data; `words` are those the head will draft from."""

    def _layers(self, name: str) -> list[nn.Linear]:
        return [part for path, part in self.head.named_modules() if isinstance(part, nn.Linear) and path.endswith(name)]

    def embedding(self, shared: Tensor) -> Tensor:
        return self.head.embedding(shared)

    def fuse(self, states: Tensor) -> Tensor:
        return self.head.fuse(states)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.head(embeddings, features, positions, attend)  # type: ignore[no-any-return]

    def readout(self, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.readout(features, lm_head)

    @torch.no_grad()
    def exported(self) -> AnyHead:
        """Return a plain head that gives the same outputs."""
        plain = new_head(self.head.config)
        for path, tensor in (*plain.named_parameters(), *plain.named_buffers()):
            owner, _, name = path.rpartition(".")
            tensor.copy_(getattr(self.head.get_submodule(owner), name))
        return plain.eval().requires_grad_(False)

    @torch.no_grad()
    def start_from(self, plain: AnyHead) -> None:
        """Continue a plain head in the bases set before."""
        for path, weight in plain.named_parameters():
            owner, _, name = path.rpartition(".")
            module = self.head.get_submodule(owner)
            if parametrize.is_parametrized(module, name):
                setattr(module, name, weight.detach())
            else:
                getattr(module, name).copy_(weight)

    def _whiten(self, names: Iterable[str], moment: Tensor) -> None:
        for layer in [layer for name in names for layer in self._layers(name)]:
            whitened = layer.get_submodule("parametrizations.weight.0")
            assert isinstance(whitened, Whitened)
            whitened.set_moment(moment)


class TrainableEagle1(TrainableHead):
    """Train an EAGLE-1 head from the best linear guess of the next feature."""

    whitened = ("fc", *_READS_FEATURES, *_READS_NORMED)

    @torch.no_grad()
    def begin(self, batches: Iterable[PackedBatch], words: Words) -> None:
        """Choose the bases from data, solve the fusion layer by ridge regression, and silence what follows it.

        The decoder layers begin as the identity (their last products are zero), so training starts from the best linear
        guess of the next feature.
        """
        hidden, embedding = self.head.config.hidden_size, words.embedding.cpu()
        moment = torch.zeros(3 * hidden, 3 * hidden)
        rows = 0
        for batch in batches:
            parts = (embedding[batch.tokens[batch.start]], batch.features[batch.start], batch.guides[batch.start])
            x = torch.cat(parts, -1)  # [N, 3D]: the two inputs, and what should come out
            moment, rows = moment + x.T @ x, rows + len(x)
        moment /= rows
        inputs, outputs = moment[: 2 * hidden, : 2 * hidden], moment[2 * hidden :, 2 * hidden :]
        self._whiten(("fc",), inputs)
        self._whiten(_READS_FEATURES, outputs)
        self._whiten(_READS_NORMED, outputs / outputs.diagonal().mean())  # RMSNorm brings the mean square to one
        regularised = inputs + _RIDGE * torch.diag(inputs.diagonal())
        self.head.fc.weight = torch.linalg.solve(regularised, moment[: 2 * hidden, 2 * hidden :]).T
        for name, weight in self.head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)


class TrainableEagle3(TrainableHead):
    """Train an EAGLE-3 head from the target's own LM head; its norms make most other bases white enough."""

    whitened = ("fc",)

    @torch.no_grad()
    def begin(self, batches: Iterable[PackedBatch], words: Words) -> None:
        """Choose the fusion layer's basis from data, draw it at unit scale, and take over the target's rows [S, D]."""
        head = self.head
        assert isinstance(head, Eagle3Head)
        moment, slots = torch.zeros(head.fc.in_features, head.fc.in_features), 0
        for batch in batches:
            moment, slots = moment + batch.features.T @ batch.features, slots + len(batch.features)
        self._whiten(("fc",), moment / slots)
        nn.init.normal_(head.get_parameter("fc.parametrizations.weight.original"), std=head.fc.in_features**-0.5)
        head.set_vocabulary(words.vocabulary.cpu())
        head.lm_head.weight.copy_(words.lm_head)


def trainable(config: HeadConfig) -> TrainableHead:
    """Make the trainable head of the kind that `config` describes."""
    return TrainableEagle3(config) if config.is_eagle3 else TrainableEagle1(config)
