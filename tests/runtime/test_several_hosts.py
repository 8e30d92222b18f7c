"""Programs on several hosts: network namespaces with addresses and names of their own, where this machine
lets one make them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority

NAME, PORT = "shard-0.shards", 7000
TOKEN = "0123456789abcdef0123456789abcdef"
SERVER = """
import sys
from roostream.schema.settings import load
from param_server.config import ShardConfig
from roostream.runtime.address import parse_address
from roostream.runtime.rpc.server import RpcServer
config = load(ShardConfig, sys.argv[1], program="shard")
where = lambda method, header, arrays: ({"from": config.listen}, arrays)
server = RpcServer(where, *parse_address(config.listen), credentials=config.link_credentials())
server.start()
print("listens", flush=True)
sys.stdin.read()
"""
CALLER = """
import sys
from roostream.schema.settings import load
from roostream.errors import TransportError
from roostream.runtime.rpc.client import SocketTransport
from param_server.config import ShardConfig
config = load(ShardConfig, sys.argv[1], program="shard")
transport = SocketTransport(config.controller, credentials=config.link_credentials())
for line in sys.stdin:
    try:
        print(transport.call("where", {}, timeout_s=5)[0]["from"], flush=True)
    except TransportError as error:
        print("away:", error, flush=True)
"""


class Hosts:
    """A bridge of our own with one namespace a host; gone with `close`."""

    def __init__(self) -> None:
        self.tag = f"r{os.getpid() % 100_000}"
        self.etc: list[Path] = []
        self.closing = contextlib.ExitStack()

    def open(self) -> Hosts:
        self._ip("link", "add", self.tag, "type", "bridge")
        self.closing.callback(self._ip, "link", "del", self.tag)
        self._ip("link", "set", self.tag, "up")
        return self

    def add(self, number: int) -> str:
        """A host; the words in front of a command there."""
        name, outer, inner = f"{self.tag}-{number}", f"{self.tag}o{number}", f"{self.tag}i{number}"
        self._ip("netns", "add", name)
        self.closing.callback(self._ip, "netns", "del", name)
        self._ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        self._ip("link", "set", outer, "master", self.tag, "up")
        self._ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", inner)
        self._ip("-n", name, "link", "set", inner, "up")
        self._ip("-n", name, "link", "set", "lo", "up")
        etc = Path("/etc/netns") / name
        etc.mkdir(parents=True)
        self.closing.callback(shutil.rmtree, etc)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        return name

    def names(self, host: str, address: str) -> None:
        """What the shard's name leads to, from this host on."""
        (Path("/etc/netns") / host / "hosts").write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    @staticmethod
    def _ip(*words: str) -> None:
        done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False, timeout=10)
        if done.returncode:
            raise OSError(done.stderr.strip())


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if not shutil.which("ip"):
        pytest.skip("no `ip` here: one host only")
    hosts = Hosts()
    with hosts.closing:
        try:
            hosts.open()
            hosts.add(9)
        except OSError as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        yield hosts


def settings(folder: Path, authority: Authority, program: str, listen: str = "127.0.0.1:0") -> Path:
    """As they are mounted in a cluster: no address, no secret and no path in the file."""
    certificate, key = authority.issue(program, NAME)
    (folder / "token").write_text(TOKEN + "\n")
    path = folder / f"{program}.toml"
    path.write_text(
        f'schema = "s"\nstore = "s"\nhome = "h"\nlisten = "{listen}"\ncontroller = "${{SHARD}}:{PORT}"\n'
        f'[link]\ncertificate = "{certificate}"\nkey = "{key}"\nca = "{authority.pem}"\n'
        f'token_file = "{folder}/token"\n'
    )
    return path


@contextlib.contextmanager
def started(host: str, program: str, file: Path) -> Iterator[subprocess.Popen[str]]:
    command = ("ip", "netns", "exec", host, sys.executable, "-c", program, str(file))
    env = {**os.environ, "SHARD": NAME, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def asked(caller: subprocess.Popen[str]) -> str:
    assert caller.stdin and caller.stdout
    caller.stdin.write("\n")
    caller.stdin.flush()
    return caller.stdout.readline().strip()


def test_a_shard_that_moved_to_another_host_is_found_by_its_name(hosts: Hosts, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    first, second, near = hosts.add(1), hosts.add(2), hosts.add(3)
    hosts.names(near, "10.77.0.1")
    with started(near, CALLER, settings(tmp_path, authority, "worker")) as caller:
        file = settings(tmp_path, authority, "shard", f"10.77.0.1:{PORT}")
        with started(first, SERVER, file) as shard:
            assert shard.stdout and shard.stdout.readline() == "listens\n"
            assert asked(caller) == f"10.77.0.1:{PORT}"
        assert asked(caller).startswith("away:")
        hosts.names(near, "10.77.0.2")
        with started(second, SERVER, settings(tmp_path, authority, "shard", f"10.77.0.2:{PORT}")) as shard:
            assert shard.stdout and shard.stdout.readline() == "listens\n"
            assert asked(caller) == f"10.77.0.2:{PORT}"
