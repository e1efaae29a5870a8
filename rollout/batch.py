"""What goes into the engine and what comes out: Request, Sample, and the exchange of samples between ranks.

Every rank ends with every sample in canonical order (prompt id, sample id), so that all later decisions are pure
functions of the batch. Ids, log-probs and lengths travel as flat arrays in one all-gather; routed experts are a hundred
times larger: they stay with the rank that sampled and are sent to the ranks that train on them (`fetch_routes`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Request:
    """One sample to draw. All randomness comes from `seed`."""

    prompt_id: int
    sample_id: int
    prompt_ids: list[int]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)
    expected_tokens: float = 0.0
    """Guess of the response length, for the hand-out order only; it never changes what is sampled."""


@dataclass
class Sample:
    prompt_id: int
    sample_id: int
    prompt: np.ndarray
    """int32 [P]."""
    response: np.ndarray
    """int32 [R], the stop token included."""
    logprobs: np.ndarray
    """float32 [R]: log-probabilities that the engine sampled from (after temperature and filters)."""
    finish: Literal["stop", "length"]
    score: float = float("nan")
    owner: int = -1
    """Rank that returned the sample from its engine; it keeps the routes."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [P + R - 1, layers, experts per token], on the owner only."""

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt_id, self.sample_id


def request_seed(seed: int, step: int, prompt_id: int, sample_id: int) -> int:
    """63-bit counter-based seed of one request: a hash, so that neighbours are unrelated and no state is kept."""
    data = struct.pack("<4q", seed, step, prompt_id, sample_id)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def requests(
    prompts: Sequence[Any], count: int, seed: int, step: int, max_tokens: int, **sampling: Any
) -> list[Request]:
    """`count` requests of each prompt (rollout/prompts.py); `sampling`: temperature, top_p and so on."""
    return [
        Request(
            prompt_id=prompt.prompt_id,
            sample_id=number,
            prompt_ids=prompt.ids,
            seed=request_seed(seed, step, prompt.prompt_id, number),
            max_tokens=max_tokens,
            expected_tokens=prompt.expected_tokens,
            **sampling,
        )
        for prompt in prompts
        for number in range(count)
    ]


def canonical(samples: Sequence[Sample]) -> list[Sample]:
    """Samples by (prompt id, sample id). ValueError when an id appears twice."""
    ordered = sorted(samples, key=lambda sample: sample.key)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.key == after.key:
            raise ValueError(f"prompt {after.prompt_id} sample {after.sample_id} was sampled twice in one batch")
    return ordered


def gather(samples: Sequence[Sample], group: dist.ProcessGroup | None = None) -> list[Sample]:
    """The samples of all ranks of a gloo group, on every rank, in canonical order. Collective.

    Routes stay where they are: the returned samples carry them on the owning rank only.
    """
    rank = dist.get_rank()
    mine = [replace(sample, owner=rank) for sample in samples]
    merged = [sample for part in _all_gather_bytes(encode(mine), group) for sample in decode(part)]
    held = {sample.key: sample.routes for sample in mine}
    for sample in merged:
        sample.routes = held.get(sample.key) if sample.owner == rank else None
    return canonical(merged)


FIELDS = ("prompt_id", "sample_id", "owner", "stopped", "prompt_tokens", "response_tokens")


def encode(samples: Sequence[Sample]) -> np.ndarray:
    """Samples -> uint8 [bytes]: count, then columns (ids and lengths int64, scores), then all tokens and log-probs."""
    table = np.array(
        [(s.prompt_id, s.sample_id, s.owner, s.finish == "stop", len(s.prompt), len(s.response)) for s in samples],
        dtype=np.int64,
    ).reshape(len(samples), len(FIELDS))
    parts = [
        np.array([len(samples)], dtype=np.int64),
        table,
        np.array([s.score for s in samples], dtype=np.float64),
        *(np.asarray(s.prompt, dtype=np.int32) for s in samples),
        *(np.asarray(s.response, dtype=np.int32) for s in samples),
        *(np.asarray(s.logprobs, dtype=np.float32) for s in samples),
    ]
    return np.frombuffer(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), dtype=np.uint8)


def decode(data: np.ndarray) -> list[Sample]:
    """Inverse of `encode`; arrays are views of `data`. Trailing padding is ignored."""
    count = int(data[:8].view(np.int64)[0])
    width = len(FIELDS)
    table = data[8 : 8 + 8 * width * count].view(np.int64).reshape(count, width)
    start = 8 + 8 * width * count
    scores = data[start : start + 8 * count].view(np.float64)
    start += 8 * count
    prompt_tokens, response_tokens = int(table[:, 4].sum()), int(table[:, 5].sum())
    words = data[start : start + 4 * (prompt_tokens + 2 * response_tokens)].view(np.int32)
    prompts = np.split(words[:prompt_tokens], np.cumsum(table[:, 4])[:-1])
    cuts = np.cumsum(table[:, 5])[:-1]
    responses = np.split(words[prompt_tokens : prompt_tokens + response_tokens], cuts)
    logprobs = np.split(words[prompt_tokens + response_tokens :].view(np.float32), cuts)
    return [
        Sample(
            prompt_id=int(row[0]),
            sample_id=int(row[1]),
            prompt=prompts[i],
            response=responses[i],
            logprobs=logprobs[i],
            finish="stop" if row[3] else "length",
            score=float(scores[i]),
            owner=int(row[2]),
        )
        for i, row in enumerate(table)
    ]


def _all_gather_bytes(data: np.ndarray, group: dist.ProcessGroup | None) -> list[np.ndarray]:
    """One uint8 array per rank. Buffers are padded to the longest, rounded up to 8 bytes so that views stay aligned."""
    world = dist.get_world_size(group)
    size = torch.tensor([len(data)], dtype=torch.int64)
    sizes = torch.empty(world, 1, dtype=torch.int64)
    dist.all_gather(list(sizes), size, group=group)
    room = -(-int(sizes.max()) // 8) * 8
    buffer = torch.zeros(room, dtype=torch.uint8)
    buffer[: len(data)] = torch.from_numpy(data.copy())
    merged = torch.empty(world, room, dtype=torch.uint8)
    dist.all_gather(list(merged), buffer, group=group)
    return list(merged.numpy())


def fetch_routes(
    batch: Sequence[Sample],
    wanted: Sequence[Sequence[int]],
    layers: Sequence[Sequence[int]],
    topk: int,
    dtype: np.dtype | type,
    group: dist.ProcessGroup | None = None,
) -> dict[int, np.ndarray]:
    """Routes of the samples that this rank trains on, in its layers: index in `batch` -> [P + R - 1, layers, topk].

    `batch` is a gathered batch; `wanted[rank]` and `layers[rank]` are the indices and layers each rank needs, alike on
    every rank of the group, whose ranks are those of the world: both sides know every size, so one uneven all-to-all
    moves the bytes. Collective.
    """
    rank, item = dist.get_rank(), topk * np.dtype(dtype).itemsize
    ranks, num_rows = range(dist.get_world_size(group)), [len(s.prompt) + len(s.response) - 1 for s in batch]
    outgoing = [[i for i in wanted[to] if batch[i].owner == rank] for to in ranks]
    incoming = [[i for i in wanted[rank] if batch[i].owner == origin] for origin in ranks]
    data = b"".join(_route_bytes(batch[i], num_rows[i], layers[to], topk, dtype) for to in ranks for i in outgoing[to])
    send = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    receive_sizes = [sum(num_rows[i] for i in part) * len(layers[rank]) * item for part in incoming]
    send_sizes = [sum(num_rows[i] for i in outgoing[to]) * len(layers[to]) * item for to in ranks]
    receive = torch.empty(sum(receive_sizes), dtype=torch.uint8)
    dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    order = [i for part in incoming for i in part]
    rows = receive.numpy().view(dtype).reshape(-1, len(layers[rank]), topk)
    pieces = np.split(rows, np.cumsum([num_rows[i] for i in order])[:-1]) if order else []
    return dict(zip(order, pieces, strict=True))


def _route_bytes(sample: Sample, num_rows: int, layers: Sequence[int], topk: int, dtype: np.dtype | type) -> bytes:
    if sample.routes is None:
        raise ValueError(f"prompt {sample.prompt_id} sample {sample.sample_id}: its owner holds no routed experts")
    rows, _, k = sample.routes.shape
    if (rows, k) != (num_rows, topk) or sample.routes.shape[1] <= max(layers):
        raise ValueError(
            f"prompt {sample.prompt_id} sample {sample.sample_id}: routes {sample.routes.shape}, but "
            f"{len(sample.prompt)} + {len(sample.response)} tokens need {num_rows} rows, layer {max(layers)}, k {topk}"
        )
    return np.ascontiguousarray(sample.routes[:, list(layers)], dtype=dtype).tobytes()
