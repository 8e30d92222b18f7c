"""What NetworkPolicies allow, computed as Kubernetes defines it: a connection needs leave on both sides, and
a side that no policy selects gives it to everybody."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

Policies = Iterable[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Place:
    """A pod, or with `labels` None an address outside of the pods' network."""

    name: str
    labels: Mapping[str, str] | None
    namespace: str = "roostream"
    namespace_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    address: str = "203.0.113.7"


def allows(policies: Policies, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether `source` can open a connection to `port` of `target`."""
    side = (port, protocol)
    return _side(policies, "Egress", source, target, side) and _side(
        policies, "Ingress", target, source, side
    )


def _side(policies: Policies, way: str, at: Place, other: Place, side: tuple[int, str]) -> bool:
    if at.labels is None:
        return True
    holding = [
        p["spec"]
        for p in policies
        if way in p["spec"]["policyTypes"]
        and p["metadata"]["namespace"] == at.namespace
        and selects(p["spec"]["podSelector"], at.labels)
    ]
    rules = [(rule, spec) for spec in holding for rule in spec.get(way.lower(), ())]
    peers = "to" if way == "Egress" else "from"
    return not holding or any(
        _is_peer(rule.get(peers, ()), other, at.namespace) and _is_port(rule.get("ports", ()), *side)
        for rule, _ in rules
    )


def _is_peer(peers: Iterable[Mapping[str, Any]], other: Place, own_namespace: str) -> bool:
    peers = list(peers)
    return not peers or any(_fits(peer, other, own_namespace) for peer in peers)


def _fits(peer: Mapping[str, Any], other: Place, own_namespace: str) -> bool:
    if other.labels is None or "ipBlock" in peer:
        block = peer.get("ipBlock", {"cidr": "0.0.0.0/32"})["cidr"]
        return other.labels is None and ipaddress.ip_address(other.address) in ipaddress.ip_network(block)
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], other.namespace_labels):
            return False
    elif other.namespace != own_namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def _is_port(ports: Iterable[Mapping[str, Any]], port: int, protocol: str) -> bool:
    ports = list(ports)
    return not ports or any(
        p.get("protocol", "TCP") == protocol and p["port"] <= port <= p.get("endPort", p["port"])
        for p in ports
    )


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector fits."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()
