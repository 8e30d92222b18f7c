"""The live list on serving's front page, in a real browser over a full stack that trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from infra.stack import Stack
from tests.browser.live_page_movie import items_of_lowest_kind
from tests.e2e.loop_stack import applied, quick_options, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LOADED = "document.querySelectorAll('.story .score:not(:empty)').length === 12"


@pytest.fixture(scope="module")
def stack(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Start a stack and wait for 1,000 trained samples. Without a browser, no stack is started."""
    options = quick_options()
    options.overrides["simulate"]["rate"] = 40.0  # type: ignore[index]
    with Stack(tmp_path_factory.mktemp("live"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=120)
        wait_until("1,000 trained samples", lambda: applied(running) >= 1000, 300)
        yield running


def wait_for_script(tab: Any, script: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not tab.evaluate(script):
        assert time.monotonic() < deadline_s, f"{script} did not become true"
        tab.wait_for_timeout(100)


def item_order(tab: Any) -> list[str]:
    return tab.eval_on_selector_all(".story .name", "all => all.map(e => e.textContent)")


def test_clicks_on_one_kind_move_it_up_and_are_trained(browser: Any, stack: Stack) -> None:
    tab = browser.new_page(viewport={"width": 1200, "height": 1000})
    tab.goto(f"{stack.endpoints.serving}/")
    wait_for_script(tab, LOADED)
    before = item_order(tab)
    clicked = items_of_lowest_kind(before)
    for name in clicked:
        tab.click(f".story:has-text('{name}') .pick")
        wait_for_script(tab, "document.querySelectorAll('#stages .done').length >= 2")
    assert "history" in tab.inner_text("#stages li:nth-child(2)")
    assert "features" in tab.inner_text("#cards")

    def rank_sum(names: list[str]) -> int:
        return sum(names.index(name) for name in clicked)

    wait_until("the clicked items are higher", lambda: rank_sum(item_order(tab)) < rank_sum(before), 60)
    wait_for_script(tab, "document.querySelectorAll('#stages .done').length === 4")
    assert "yours" in tab.inner_text("#verdict") or "training changed nothing" in tab.inner_text("#verdict")
    tab.close()
