"""UserArch: many request-only embeddings compressed to a few, once a request (ROO paper §3.2, eq. 1 and 2).

Letters: R requests, I embeddings in, C width of each, O embeddings out, P width of each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roostream.models.config import RankerConfig
from roostream.models.inputs import Inputs
from roostream.models.layers import Mlp
from roostream.models.parts import Floats, Part, Pooled
from roostream.schema.schema import Schema


class LinearCompression(nn.Module):
    """Linear compression embedding: X [R, C, I] → [R, O, P], no activation.

    f(X) = g(X) W + b with g(X) [R · C, I], W [I, O], b [O], as [R, O, C]; then f'(X) = f W' + b' with W' [C, P], b' [P].
    """

    def __init__(self, num_in: int, width_in: int, num_out: int, width_out: int) -> None:
        super().__init__()
        self.across = nn.Linear(num_in, num_out)
        self.each = nn.Linear(width_in, width_out)

    def forward(self, x_RCI: Tensor) -> Tensor:
        out: Tensor = self.each(self.across(x_RCI).transpose(1, 2))
        return out


class UserArch(Part):
    """[U, O · P] of a request's pooled lists and floats, of equal requests once (`Inputs.once`); P = C.

    Lists of another width than C go through a matrix of their own first; all floats become one embedding by a layer. There are
    never more out than in.
    """

    def __init__(self, schema: Schema, config: RankerConfig) -> None:
        super().__init__()
        width = config.userarch_width
        dims = {f.name: schema.table_by_name[f.table].dim for f in schema.lists("ro")}
        self._names = tuple(dims)
        self.widen = nn.ModuleDict(
            {name: nn.Linear(dim, width) for name, dim in dims.items() if dim != width}
        )
        self._floats = Floats(schema, "ro") if schema.floats("ro") else None
        self.dense = Mlp(self._floats.width, (width,)) if self._floats else None
        num_in = len(dims) + bool(self._floats)
        num_out = min(config.userarch_embeddings, num_in)
        self.compression = LinearCompression(num_in, width, num_out, width) if num_in else None
        self.width = num_out * width

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        once = {name: inputs.once(pooled[name]) for name in self._names}
        tokens = [self.widen[name](once[name]) if name in self.widen else once[name] for name in self._names]
        if self._floats is not None and self.dense is not None:
            tokens.append(self.dense(inputs.once(self._floats(inputs, pooled))))
        assert self.compression is not None, "without a request feature there is nothing to compress"
        return self.compression(torch.stack(tokens, dim=2)).flatten(1)
