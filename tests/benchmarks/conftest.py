import gc

import pytest


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the garbage collection that a benchmark runs before each measurement. The test process has many
    more objects, so collecting them would take most of the time, and the tests measure nothing.
    """
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
