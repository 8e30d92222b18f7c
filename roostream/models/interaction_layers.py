"""Feature interaction of a candidate: DCNv2's cross network, and DHEN.

DHEN: Zhang et al. 2022, "DHEN: a deep and hierarchical ensemble network", §3: X_{l+1} = Norm(Σ_k
Interaction_k(X_l) + Shortcut(X_l)). Each layer combines several kinds of interaction of the layer below.

No layer mixes rows: the result of a row does not depend on the others.

Letters: N rows, K tokens of a row, D width of a token (cross network: of a row).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roostream.models.config import InteractionName
from roostream.models.named_columns import ColumnNames


class DotProducts(nn.Module):
    """Dot products of all pairs of tokens, as in DLRM (Naumov et al. 2019): X Xᵀ [K, K], flat, W + b → [N, K,
    D]."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(tokens * tokens, tokens * width)

    def forward(self, x_NKD: Tensor) -> Tensor:
        product_NKK = torch.matmul(x_NKD, x_NKD.transpose(1, 2))
        out: Tensor = self.out(product_NKK.flatten(1)).view(x_NKD.shape)
        return out


class CrossTokens(nn.Module):
    """A DCNv2 layer over all columns of a row: x ⊙ (W x + b) + x."""

    def __init__(self, tokens: int, width: int, rank: int) -> None:
        super().__init__()
        self.cross = CrossNet(tokens * width, 1, rank)

    def forward(self, x_NKD: Tensor) -> Tensor:
        out: Tensor = self.cross(x_NKD.flatten(1)).view(x_NKD.shape)
        return out


class MixTokens(nn.Module):
    """Linear across tokens: each new token is a weighted sum of all, W [K, K], then W' [D, D] + b for
    each."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.across = nn.Linear(tokens, tokens, bias=False)
        self.each = nn.Linear(width, width)

    def forward(self, x_NKD: Tensor) -> Tensor:
        # Contiguous, because torch multiplies transposed tensors in another way without gradients (G9).
        mixed_NKD = self.across(x_NKD.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()
        out: Tensor = self.each(mixed_NKD)
        return out


class DhenLayer(nn.Module):
    """[N, K, D] → [N, K, D]; the shortcut is X itself, because all shapes are equal."""

    def __init__(self, names: Sequence[InteractionName], tokens: int, width: int, rank: int) -> None:
        super().__init__()
        makers: dict[InteractionName, Callable[[], nn.Module]] = {
            "cross": lambda: CrossTokens(tokens, width, rank),
            "dot": lambda: DotProducts(tokens, width),
            "mix": lambda: MixTokens(tokens, width),
        }
        self.interactions = nn.ModuleDict({name: makers[name]() for name in names})
        self.norm = nn.LayerNorm(width)

    def forward(self, x_NKD: Tensor) -> Tensor:
        sum_NKD = x_NKD
        for interaction in self.interactions.values():
            sum_NKD = sum_NKD + interaction(x_NKD)
        out: Tensor = self.norm(sum_NKD)
        return out


class Dhen(nn.Module):
    """[N, width in] → [N, width = K · D]: one matrix turns the columns of a row into K tokens; then the
    layers."""

    def __init__(
        self,
        width_in: int,
        layers: int,
        names: Sequence[InteractionName],
        *,
        tokens: int,
        token_width: int,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.width = tokens * token_width
        self.tokens = nn.Linear(width_in, self.width)
        self.layers = nn.ModuleList(DhenLayer(names, tokens, token_width, rank) for _ in range(layers))
        self._shape_KD = (tokens, token_width)

    def column_names(self, columns: tuple[str, ...]) -> dict[str, ColumnNames]:
        """`columns`: the names of the inputs."""
        return {"tokens.weight": (None, columns)}

    def forward(self, x_NW: Tensor) -> Tensor:
        x_NKD = self.tokens(x_NW).view(-1, *self._shape_KD)
        for layer in self.layers:
            x_NKD = layer(x_NKD)
        return x_NKD.flatten(1)


class CrossNet(nn.Module):
    """DCNv2's cross network (Wang et al. 2021, §3.1; low-rank form §3.3), [N, D] → [N, D].

    x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l, or with W_l = U_l V_l of rank r where 0 < r < D.
    """

    def __init__(self, width: int, layers: int, rank: int = 0) -> None:
        super().__init__()
        self.width = width
        low_rank = 0 < rank < width
        self.down = nn.ModuleList(
            nn.Linear(width, rank, bias=False) for _ in range(layers if low_rank else 0)
        )
        self.layers = nn.ModuleList(nn.Linear(rank if low_rank else width, width) for _ in range(layers))

    def column_names(self, columns: tuple[str, ...]) -> dict[str, ColumnNames]:
        """`columns`: the names of the inputs, which are also those of the outputs."""
        names: dict[str, ColumnNames] = {f"down.{i}.weight": (None, columns) for i in range(len(self.down))}
        for i in range(len(self.layers)):
            names |= {
                f"layers.{i}.weight": (columns, None if self.down else columns),
                f"layers.{i}.bias": (columns,),
            }
        return names

    def forward(self, x_ND: Tensor) -> Tensor:
        x0_ND = x_ND
        for i, layer in enumerate(self.layers):
            x_ND = x0_ND * layer(self.down[i](x_ND) if self.down else x_ND) + x_ND
        return x_ND
