"""The port on which serving listens, alone or shared with other processes of the machine."""

from __future__ import annotations

import contextlib
import socket

import pytest

from roostream.errors import SetupError
from serving.http import server as http_server


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
