"""Metrics of the replicas, as this front end sees them: samples for `gateway.metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.metrics import Sample
from gateway.replicas.replica_set import ReplicaSet

LOCAL = "local"  # label of this server
FAMILIES = (
    ("llm_replica_ready", "gauge", "1 if the replica takes requests"),
    ("llm_replica_requests_total", "counter", "requests that this server has sent to the replica"),
    ("llm_replica_lost_requests_total", "counter", "of these, requests that were sent to another replica after a loss"),
    ("llm_replica_inexact_requests_total", "counter", "answers that the replica continued with another fingerprint"),
)


def samples(replicas: ReplicaSet) -> Iterator[Sample]:
    """Yield a sample of each family and replica."""
    values = [
        (
            LOCAL if each is replicas.local else each.name,
            (int(each.is_ready), each.num_requests, each.num_lost, each.num_inexact),
        )
        for each in (replicas.local, *replicas.others)
    ]
    for index, (family, kind, doc) in enumerate(FAMILIES):
        for name, of_replica in values:
            yield family, kind, doc, (("replica", name),), of_replica[index], ""
