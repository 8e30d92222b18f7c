import gc

import pytest


@pytest.fixture(autouse=True)
def _no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's own process collects garbage before it measures; in the process of the tests, which has
    far more objects and measures nothing, that is most of the time."""
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
