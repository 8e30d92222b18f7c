"""Programs on several hosts: network namespaces with their own addresses and names. Tests skip where the
machine does not allow them."""

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
    """One namespace per host, and one with the network bridge between them, so that this machine's firewall
    sees none of it. `closing` removes all of it."""

    def __init__(self) -> None:
        self.bridge = f"r{os.getpid() % 100_000}"
        self.etc: list[Path] = []
        self.closing = contextlib.ExitStack()

    def open(self) -> Hosts:
        self._ip("netns", "add", self.bridge)
        self.closing.callback(self._ip, "netns", "del", self.bridge)
        self._ip("-n", self.bridge, "link", "add", self.bridge, "type", "bridge")
        self._ip("-n", self.bridge, "link", "set", self.bridge, "up")
        return self

    def add(self, number: int) -> str:
        """Add a host and return the name of its namespace."""
        name, outer, inner = f"{self.bridge}-{number}", f"{self.bridge}o{number}", f"{self.bridge}i{number}"
        self._ip("netns", "add", name)
        self.closing.callback(self._ip, "netns", "del", name)
        ends = ("netns", self.bridge, "type", "veth", "peer", "name", inner, "netns", name)
        self._ip("link", "add", "name", outer, *ends)
        self._ip("-n", self.bridge, "link", "set", outer, "master", self.bridge, "up")
        self._ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", inner)
        self._ip("-n", name, "link", "set", inner, "up")
        self._ip("-n", name, "link", "set", "lo", "up")
        etc = Path("/etc/netns") / name
        etc.mkdir(parents=True)
        self.closing.callback(shutil.rmtree, etc)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        return name

    def set_shard_address(self, host: str, address: str) -> None:
        """Let the shard's name resolve to `address` on this host."""
        (Path("/etc/netns") / host / "hosts").write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    @staticmethod
    def _ip(*words: str) -> None:
        done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False, timeout=10)
        if done.returncode:
            raise OSError(done.stderr.strip())


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if not shutil.which("ip"):
        pytest.skip("the command `ip` is not installed: network namespaces can't be made")
    hosts = Hosts()
    with hosts.closing:
        try:
            hosts.open()
            hosts.add(9)
        except OSError as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        yield hosts


def write_settings(folder: Path, authority: Authority, program: str, listen: str = "127.0.0.1:0") -> Path:
    """Write settings as a cluster mounts them: the address, the secrets and the paths come from the
    environment and files."""
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
def start_on(host: str, program: str, file: Path) -> Iterator[subprocess.Popen[str]]:
    command = ("ip", "netns", "exec", host, sys.executable, "-c", program, str(file))
    env = {**os.environ, "SHARD": NAME, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ask_where(caller: subprocess.Popen[str]) -> str:
    assert caller.stdin and caller.stdout
    caller.stdin.write("\n")
    caller.stdin.flush()
    return caller.stdout.readline().strip()


def test_a_shard_that_moved_to_another_host_is_found_by_its_name(hosts: Hosts, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    first_host, second_host, client_host = hosts.add(1), hosts.add(2), hosts.add(3)
    hosts.set_shard_address(client_host, "10.77.0.1")
    with start_on(client_host, CALLER, write_settings(tmp_path, authority, "worker")) as caller:
        file = write_settings(tmp_path, authority, "shard", f"10.77.0.1:{PORT}")
        with start_on(first_host, SERVER, file) as shard:
            assert shard.stdout and shard.stdout.readline() == "listens\n"
            assert ask_where(caller) == f"10.77.0.1:{PORT}"
        assert ask_where(caller).startswith("away:")
        hosts.set_shard_address(client_host, "10.77.0.2")
        with start_on(
            second_host, SERVER, write_settings(tmp_path, authority, "shard", f"10.77.0.2:{PORT}")
        ) as shard:
            assert shard.stdout and shard.stdout.readline() == "listens\n"
            assert ask_where(caller) == f"10.77.0.2:{PORT}"
