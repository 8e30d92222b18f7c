"""What a request is retrieved with: a version's request tower and items' vectors of the same version, replaced as one (G4)."""

from __future__ import annotations

import dataclasses

from roostream.models.two_tower.retrieval import Retrieval
from serving.retrieval.catalogue import Catalogue
from serving.retrieval.nearest_items import NearestItems
from serving.scorer import Version


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ItemSpace:
    """Vectors within it follow the rows; version and catalogue stay."""

    version: Version
    model: Retrieval  # the version's, or the part of it that retrieves
    catalogue: Catalogue
    nearest: NearestItems
