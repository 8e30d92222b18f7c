"""DCNv2's cross network: polynomials of the columns, one degree more a layer.

Letters: N rows, D width.
"""

from __future__ import annotations

from torch import Tensor, nn


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

    def forward(self, x_ND: Tensor) -> Tensor:
        x0_ND = x_ND
        for i, layer in enumerate(self.layers):
            x_ND = x0_ND * layer(self.down[i](x_ND) if self.down else x_ND) + x_ND
        return x_ND
