"""The port on which serving listens, alone or shared with other processes of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from starlette.requests import Request
from starlette.types import Message

from roostream.errors import SetupError
from roostream.runtime.thread_group import StopBudget
from serving.errors import RequestError
from serving.http import server as http_server
from serving.http.app import HttpInterface
from serving.http.body import BodyReader
from tests.serving.serving_cases import Client


def test_a_port_belongs_to_one_process_unless_all_share_it() -> None:
    with contextlib.closing(http_server.bind("127.0.0.1:0", reuse_port=True)) as first:
        address = "{}:{}".format(*first.getsockname())
        with contextlib.closing(http_server.bind(address, reuse_port=True)) as second:
            assert second.getsockname() == first.getsockname()
            second.listen()
            first.listen()
            with pytest.raises(SetupError, match="stop what uses it or choose another listen"):
                http_server.bind(address)
    with contextlib.closing(http_server.bind("127.0.0.1:0")) as alone:
        alone.listen()
        with pytest.raises(SetupError):
            http_server.bind("{}:{}".format(*alone.getsockname()), reuse_port=True)


@pytest.mark.parametrize(
    ("listen", "url"), [("127.0.0.1:0", "http://127.0.0.1:"), ("[::1]:0", "https://[::1]:")]
)
def test_the_announced_url_can_be_opened(listen: str, url: str) -> None:
    if "[" in listen and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with contextlib.closing(http_server.bind(listen)) as bound:
        assert http_server.url_of(bound, "https" in url) == f"{url}{bound.getsockname()[1]}"


def test_a_stop_at_the_moment_of_a_bodys_deadline_is_a_stop() -> None:
    """Both find the request: its deadline has passed, and its task has not run since."""

    async def stop_at_deadline() -> int:
        reader, loop = BodyReader(1 << 20, 1 << 20), asyncio.get_running_loop()

        async def receive() -> Message:
            loop.call_soon(reader.stop)  # after the deadline, which is due now, and before this task
            return await loop.create_future()

        request = Request({"type": "http", "headers": []}, receive)
        with pytest.raises(RequestError) as found:
            await reader.read(request, loop.time())
        return found.value.status

    failures: list[object] = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: failures.append(context))
        assert runner.run(stop_at_deadline()) == 503
    assert not failures


def test_serving_ends_if_the_task_that_watches_for_a_stop_fails(client: Client) -> None:
    _, serving = client()
    failed: list[BaseException] = []

    def turned() -> None:
        raise RuntimeError("a fault of the test")

    def serve() -> None:
        with contextlib.closing(http_server.bind("127.0.0.1:0")) as bound:
            try:
                http_server.run(
                    HttpInterface(serving.context), bound, StopBudget(threading.Event(), 5.0), turned
                )
            except RuntimeError as error:
                failed.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(60.0)
    assert "a fault of the test" in str(failed)
