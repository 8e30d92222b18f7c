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
One connection over loopback with a process at each end and blocking calls. Large arrays move at about the
speed of a plain socket and at least twice as fast as with gRPC; other work on the machine varies the
socket's figure by half. A small call costs five times two process switches: that is Python in both
processes. With `[link]`'s certificates and a token (docs/operations/security.md) both ends encrypt, in
records of 16 KiB; the caller is checked once a connection, not here.""",
)
