"""What a plan costs, counted on every rank before anything runs: bytes, peers, rounds, memory, time. Pure.

need      the rollout shard                       local     already on this rank
received  need - local                            nic       what no device of the node holds
naive     everything that is not in this rank's training shard: per-tensor all-gather over PP, EP, ETP, TP
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel.layout import Layout, elements
from parallel.reshard_cuts import Ints
from parallel.reshard_plan import Plan, Table

ROUND_S = 1e-3
"""Launch and synchronisation of one round."""
CHANNEL_BYTES = 7.4e6
"""One NCCL peer-to-peer channel in one direction; from 3.3 GB that 8 GPUs with 32 channels a pair were seen to take."""
CHANNELS = 2
"""Channels a pair that NCCL uses between nodes, or NCCL_MAX_P2P_NCHANNELS."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of each rank, and of the whole movement."""

    need: Ints
    received: Ints
    sent: Ints
    local: Ints
    nic_received: Ints
    nic_sent: Ints
    naive_received: Ints
    peers: Ints
    """Other ranks that a rank sends to or receives from."""
    rounds: int
    buffer_bytes: int
    """Of the ranks that send and receive most."""

    @property
    def communicator_bytes(self) -> int:
        """Estimate of what NCCL allocates for the pairs of one rank."""
        return int(2 * int(self.peers.max()) * CHANNELS * CHANNEL_BYTES)

    def seconds(self, nic_gb_s: float, link_gb_s: float) -> float:
        """Time of the slowest rank at these one-way rates a device (GB = 1e9 bytes), transfers side by side."""
        nic = np.maximum(self.nic_received, self.nic_sent) / nic_gb_s
        inside = np.maximum(self.received - self.nic_received, self.sent - self.nic_sent) / link_gb_s
        return float(np.maximum(nic, inside).max()) / 1e9 + self.rounds * ROUND_S

    def naive_seconds(self, nic_gb_s: float, node_size: int) -> float:
        """A ring all-gather brings every byte through each node's NICs once; its devices share the work."""
        share = 1 / node_size if len(self.need) > node_size else 0
        return float(self.naive_received.max()) * share / nic_gb_s / 1e9


def traffic(plan: Plan, source: Layout) -> Traffic:
    """Counts of `plan`, which moves `source`."""
    moves, node = plan.moves, plan.node_size
    far = moves.take(np.flatnonzero(moves.src // node != moves.dst // node))
    local, received = _sum(plan, plan.local, "dst"), _sum(plan, moves, "dst")
    sent = _sum(plan, moves, "src")
    held = {c: sum(elements(box) for _, box in pieces) for c, pieces in _distinct(source).items()}
    total = sum(elements(kind.full_box) for kind in plan.kinds)
    shard = np.array([held[c] for c in source.coordinates], dtype=np.int64)
    busiest = {int(received.argmax()), int(sent.argmax())}
    return Traffic(
        need=local + received,
        received=received,
        sent=sent,
        local=local,
        nic_received=_sum(plan, far, "dst"),
        nic_sent=_sum(plan, far, "src"),
        naive_received=(total - shard) * plan.item_bytes,
        peers=_peers(plan),
        rounds=plan.rounds if len(moves) else 0,
        buffer_bytes=max(min(2, plan.rounds) * sum(plan.peak_bytes(rank)) for rank in busiest),
    )


def _sum(plan: Plan, table: Table, side: str) -> Ints:
    total = np.zeros(plan.world, dtype=np.int64)
    np.add.at(total, getattr(table, side), table.size * plan.item_bytes)
    return total


def _distinct(layout: Layout) -> dict[object, set]:
    coordinates = dict.fromkeys(layout.coordinates)
    return {c: {(p.kind, p.box) for p in layout.pieces(layout.coordinates.index(c))} for c in coordinates}


def _peers(plan: Plan) -> Ints:
    first = plan.stream_start[:-1]
    src, dst = plan.moves.src[first], plan.moves.dst[first]
    pairs = np.unique(np.concatenate([src * plan.world + dst, dst * plan.world + src]))
    return np.bincount(pairs // plan.world, minlength=plan.world)
