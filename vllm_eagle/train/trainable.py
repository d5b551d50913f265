"""A head while it is trained: inputs whitened, and a first guess by least squares.

Embeddings are small (norm 2.8 for SmolLM2-135M), features large (45), and features share a strong common direction.
AdamW's steps have the same size in every weight whatever its input, and add up along a common direction. So every
matrix that reads such an input is trained in the basis in which that input's second moment is the identity:

    weight = trained @ (E[x xᵀ] + ridge)^(-1/2)

which is again a plain matrix: the exported head shows nothing of it.

Shapes: `N` slots, `D` hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vllm_eagle.heads import Attend, EagleHead, HeadConfig
from vllm_eagle.train.batches import PackedBatch

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
        with torch.autocast(
            trained.device.type, enabled=False
        ):  # the basis spans more orders of magnitude than bfloat16 digits
            return trained @ self.basis

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return what is trained for a plain `weight`."""
        return weight @ self.inverse


class TrainableHead(nn.Module):
    """Hold an `EagleHead` whose input matrices are trained in whitened bases."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head = EagleHead(config)
        for name in ("fc", *_READS_FEATURES, *_READS_NORMED):
            for layer in self._layers(name):
                parametrize.register_parametrization(layer, "weight", Whitened(layer.in_features))

    def _layers(self, name: str) -> list[nn.Linear]:
        return [part for path, part in self.head.named_modules() if isinstance(part, nn.Linear) and path.endswith(name)]

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Take and return what `EagleHead.forward` does."""
        return self.head(embeddings, features, positions, attend)  # type: ignore[no-any-return]

    @torch.no_grad()
    def exported(self) -> EagleHead:
        """Return a plain head that gives the same outputs."""
        plain = EagleHead(self.head.config)
        for path, weight in plain.named_parameters():
            owner, _, name = path.rpartition(".")
            weight.copy_(getattr(self.head.get_submodule(owner), name))
        return plain.eval().requires_grad_(False)

    @torch.no_grad()
    def start_from(self, plain: EagleHead) -> None:
        """Continue a plain head in the bases set before."""
        for path, weight in plain.named_parameters():
            owner, _, name = path.rpartition(".")
            module = self.head.get_submodule(owner)
            if parametrize.is_parametrized(module, name):
                setattr(module, name, weight.detach())
            else:
                getattr(module, name).copy_(weight)

    @torch.no_grad()
    def start_linear(self, batches: Iterable[PackedBatch], embedding: Tensor) -> None:
        """Choose the bases from data, solve the fusion layer by ridge regression, and silence what follows it.

        The decoder layers begin as the identity (their last products are zero), so training starts from the best linear
        guess of the next feature.
        """
        hidden = self.head.config.hidden_size
        moment = torch.zeros(3 * hidden, 3 * hidden)
        rows = 0
        for batch in batches:
            parts = (embedding[batch.tokens[batch.start]], batch.features[batch.start], batch.guides[batch.start])
            x = torch.cat(parts, -1)  # [N, 3D]: the two inputs, and what should come out
            moment, rows = moment + x.T @ x, rows + len(x)
        moment /= rows
        inputs, outputs = moment[: 2 * hidden, : 2 * hidden], moment[2 * hidden :, 2 * hidden :]
        self._set_bases(inputs, outputs)
        regularised = inputs + _RIDGE * torch.diag(inputs.diagonal())
        self.head.fc.weight = torch.linalg.solve(regularised, moment[: 2 * hidden, 2 * hidden :]).T
        for name, weight in self.head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)

    def _set_bases(self, inputs: Tensor, features: Tensor) -> None:
        """Set bases from second moments of the fused inputs [2D, 2D] and of the features they become [D, D]."""
        normed = features / features.diagonal().mean()  # RMSNorm brings the mean square to one
        for names, moment in ((("fc",), inputs), (_READS_FEATURES, features), (_READS_NORMED, normed)):
            for layer in [layer for name in names for layer in self._layers(name)]:
                whitened = layer.get_submodule("parametrizations.weight.0")
                assert isinstance(whitened, Whitened)
                whitened.set_moment(moment)
