"""Computes which connections NetworkPolicies allow, as Kubernetes defines it. Both sides must allow a
connection; a side that no policy selects allows everything."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

Policies = Iterable[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A pod, or with `labels` None an address outside the pod network."""

    name: str
    labels: Mapping[str, str] | None
    namespace: str = "roostream"
    namespace_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    address: str = "203.0.113.7"


def allows(policies: Policies, source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP") -> bool:
    """Whether `source` can open a connection to `port` of `target`."""
    port_and_protocol = (port, protocol)
    return _side_allows(policies, "Egress", source, target, port_and_protocol) and _side_allows(
        policies, "Ingress", target, source, port_and_protocol
    )


def _side_allows(
    policies: Policies,
    direction: str,
    endpoint: Endpoint,
    other: Endpoint,
    port_and_protocol: tuple[int, str],
) -> bool:
    if endpoint.labels is None:
        return True
    selecting = [
        p["spec"]
        for p in policies
        if direction in p["spec"]["policyTypes"]
        and p["metadata"]["namespace"] == endpoint.namespace
        and selects(p["spec"]["podSelector"], endpoint.labels)
    ]
    rules = [(rule, spec) for spec in selecting for rule in spec.get(direction.lower(), ())]
    peers = "to" if direction == "Egress" else "from"
    return not selecting or any(
        _is_peer(rule.get(peers, ()), other, endpoint.namespace)
        and _is_port(rule.get("ports", ()), *port_and_protocol)
        for rule, _ in rules
    )


def _is_peer(peers: Iterable[Mapping[str, Any]], other: Endpoint, own_namespace: str) -> bool:
    peers = list(peers)
    return not peers or any(_fits(peer, other, own_namespace) for peer in peers)


def _fits(peer: Mapping[str, Any], other: Endpoint, own_namespace: str) -> bool:
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
    """Whether a label selector selects these labels."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()
