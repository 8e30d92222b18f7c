"""How fast are calls between two of our programs on one machine?"""

from typing import Any, Literal

from benchmarks.harness.benchmark import Benchmark, Row, Subject

_BULK = 8 << 20


def _row(name: str, function: str, *arguments: Any, unit: str, shows: Literal["rate", "cost"]) -> Row:
    def at(module: str) -> str:
        return f"benchmarks.common.{module}:{function}"

    return Row(
        name=name,
        unit=unit,
        shows=shows,
        subjects=(
            Subject("runtime.rpc", at("rpc_ours"), arguments),
            Subject("runtime.rpc, certificates and a token", at("rpc_ours"), (*arguments, True)),
            Subject("grpcio, unary, bytes", at("rpc_grpc"), arguments, "peer", environment="grpcio"),
            Subject("plain socket", at("rpc_socket"), arguments, "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="rpc",
    summary="How fast are calls between two of our programs on one machine?",
    rows=(
        _row("8 MiB to the peer, one call at a time", "send", _BULK, unit="MB", shows="rate"),
        _row("8 MiB from the peer, one call at a time", "receive", _BULK, unit="MB", shows="rate"),
        _row("64 bytes there and back, one call at a time", "small", unit="calls", shows="cost"),
    ),
    slice_s=0.2,
    interpretation="""\
Large arrays move at about the speed of a plain socket, twice that of gRPC and more; on a machine with other work the socket's own
figure varies by half, so that it can come out below ours. A small call costs five times what two switches between
processes cost: it is Python around them, in both processes.

One connection over loopback, client and server in a process each, blocking calls. A bulk call is bound by the kernel's copies:
the plain socket moves the same bytes with nothing around them. A small call is bound by two switches between processes and the
Python around them.

With `[link]`'s certificates and a token (docs/operations/security.md) both ends encrypt what they move, a record of 16 KiB at a
time: that is what a bulk call then costs. A small call pays for two records; who calls is asked once a connection, not here.""",
)
