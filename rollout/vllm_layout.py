"""Where vLLM keeps what: model shape + rollout grid (+ live expert map) -> Layout over its parameters. Pure.

Stores are the names of named_parameters(). Fused parameters hold, per tensor-parallel rank, [q; k; v] and [gate; up];
KV heads are repeated when tp exceeds them; the vocabulary is padded to a multiple of 64. Experts lie whole on
rank dp*tp of the replica with expert parallelism, else every expert is split over all ranks of the replica.
vLLM pads nothing else. Ascend keeps experts transposed: strides say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel.family import ModelShape, kinds
from parallel.grid import RolloutGrid
from parallel.layout import Layout, Piece

Interval = tuple[int, int]
ExpertMap = Sequence[Sequence[int]]
"""[layer][physical slot] -> logical expert, as vLLM's physical_to_logical_map."""

VOCAB_MULTIPLE = 64
LAYER = "model.layers.{layer}."
W13, W2 = LAYER + "mlp.experts.routed_experts.w13_weight", LAYER + "mlp.experts.routed_experts.w2_weight"


def vllm_layout(
    shape: ModelShape,
    grid: RolloutGrid,
    dtype: str = "bfloat16",
    expert_map: ExpertMap | None = None,
    transposed_experts: bool = False,
    expert_maps: Sequence[ExpertMap] | None = None,
) -> Layout:
    """Layout of the engine's parameters on grid.world ranks. ValueError where vLLM could not build the model.

    `expert_map` holds for every replica; `expert_maps`, one per replica, stand in its place when they differ.
    """
    maps = list(dict.fromkeys(expert_maps)) if expert_maps else [expert_map]
    which = [maps.index(held) for held in expert_maps] if expert_maps else [0] * grid.replicas
    rules = []
    for held in maps:
        _check(shape, grid, held)
        rules.append(_Rules(shape, grid, held, transposed_experts))
    coordinates = tuple(
        (c.tp, c.dp * grid.tp + c.tp if shape.is_moe else 0, which[c.replica])
        for c in map(grid.coord, range(grid.world))
    )
    return Layout(
        name=f"vllm tp{grid.tp} dp{grid.dp} ep{grid.ep_size} x {grid.replicas}",
        kinds=kinds(shape),
        coordinates=coordinates,
        pieces_of=lambda c: tuple(rules[c[2]].pieces(*c[:2])),
        dtype=dtype,
    )


def _check(shape: ModelShape, grid: RolloutGrid, expert_map: ExpertMap | None) -> None:
    tp, kv = grid.tp, shape.kv_heads
    if shape.heads % tp or (kv % tp and tp % kv):
        raise ValueError(
            f"rollout.tp = {tp} must divide {shape.heads} heads and divide, or be a multiple of, {kv} KV heads"
        )
    if not shape.is_moe and shape.ffn % tp:
        raise ValueError(f"rollout.tp = {tp} does not divide the intermediate size {shape.ffn}")
    if shape.is_moe and shape.expert_ffn % grid.expert_tp:
        raise ValueError(f"rollout.tp*dp = {grid.expert_tp} does not divide the expert size {shape.expert_ffn}")
    if -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE % tp:
        raise ValueError(f"rollout.tp = {tp} does not divide the vocabulary {shape.vocab} padded to {VOCAB_MULTIPLE}")
    if expert_map is not None and any(len(row) % grid.ep_size for row in expert_map):
        raise ValueError(f"{len(expert_map[0])} expert slots do not spread over {grid.ep_size} expert-parallel ranks")


class _Rules:
    def __init__(self, shape: ModelShape, grid: RolloutGrid, expert_map: ExpertMap | None, transposed: bool):
        self.shape, self.grid, self.expert_map, self.transposed = shape, grid, expert_map, transposed
        self.layers = (0, shape.num_layers)

    def pieces(self, tp: int, expert_rank: int) -> Iterator[Piece]:
        s = self.shape
        yield from self._vocabulary(tp)
        yield self._plain("final_norm", "model.norm.weight", (0, 1), (0, s.hidden), layers=(0, 1))
        yield self._plain("input_norm", LAYER + "input_layernorm.weight", (0, 1), (0, s.hidden))
        yield self._plain("post_norm", LAYER + "post_attention_layernorm.weight", (0, 1), (0, s.hidden))
        yield from self._attention(tp)
        yield from self._experts(expert_rank) if s.is_moe else self._mlp(tp)

    def _plain(
        self, kind: str, store: str, rows: Interval, cols: Interval, offset: int = 0, layers: Interval | None = None
    ) -> Piece:
        width = cols[1] - cols[0]
        size = (rows[1] - rows[0]) * width
        return Piece(kind, (layers or self.layers, (0, 1), rows, cols), store, 0, offset, (size, width, 1))

    def _vocabulary(self, tp: int) -> Iterator[Piece]:
        s = self.shape
        block = -(-s.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // self.grid.tp
        rows = (min(s.vocab, tp * block), min(s.vocab, (tp + 1) * block))
        if rows[0] < rows[1]:
            yield self._plain("embed", "model.embed_tokens.weight", rows, (0, s.hidden), layers=(0, 1))
            if not s.tied:
                yield self._plain("head", "lm_head.weight", rows, (0, s.hidden), layers=(0, 1))

    def _attention(self, tp: int) -> Iterator[Piece]:
        s, size, h = self.shape, self.grid.tp, self.shape.hidden
        q_rows, d = s.heads_per_group * s.head_dim, s.head_dim
        copies = max(1, size // s.kv_heads)  # ranks that share one KV head
        groups = max(1, s.kv_heads // size)
        units = (tp // copies * groups, tp // copies * groups + groups)
        part = q_rows // copies
        cut = (tp % copies * part, tp % copies * part + part)
        start = 0
        for name, rows in (("q", cut), ("k", (0, d)), ("v", (0, d))):
            height = rows[1] - rows[0]
            store = LAYER + "self_attn.qkv_proj."
            box = (self.layers, units, rows, (0, h))
            yield Piece(name, box, store + "weight", 0, start * h, (height * h, h, 1))
            if s.qkv_bias:
                yield Piece(f"{name}_bias", (*box[:3], (0, 1)), store + "bias", 0, start, (height, 1, 1))
            start += groups * height
        width = s.heads * d // size
        yield self._plain("o", LAYER + "self_attn.o_proj.weight", (0, h), (tp * width, (tp + 1) * width))
        if s.qk_norm:
            yield self._plain("q_norm", LAYER + "self_attn.q_norm.weight", (0, 1), (0, d))
            yield self._plain("k_norm", LAYER + "self_attn.k_norm.weight", (0, 1), (0, d))

    def _mlp(self, tp: int) -> Iterator[Piece]:
        s = self.shape
        width = s.ffn // self.grid.tp
        cut = (tp * width, (tp + 1) * width)
        yield self._plain("gate", LAYER + "mlp.gate_up_proj.weight", cut, (0, s.hidden))
        yield self._plain("up", LAYER + "mlp.gate_up_proj.weight", cut, (0, s.hidden), offset=width * s.hidden)
        yield self._plain("down", LAYER + "mlp.down_proj.weight", (0, s.hidden), cut)

    def _experts(self, expert_rank: int) -> Iterator[Piece]:
        s, h = self.shape, self.shape.hidden
        yield self._plain("router", LAYER + "mlp.gate.weight", (0, s.experts), (0, h))
        width = s.expert_ffn // self.grid.expert_tp
        part = expert_rank if self.grid.expert_tp > 1 else 0
        cut = (part * width, (part + 1) * width)
        w13 = (2 * width * h, 1, 2 * width) if self.transposed else (2 * width * h, h, 1)
        w2 = (width * h, 1, h) if self.transposed else (width * h, width, 1)
        up = width if self.transposed else width * h
        for layers, slot, units in self._runs(expert_rank):
            yield Piece("expert_gate", (layers, units, cut, (0, h)), W13, layers[0], slot * w13[0], w13)
            yield Piece("expert_up", (layers, units, cut, (0, h)), W13, layers[0], slot * w13[0] + up, w13)
            yield Piece("expert_down", (layers, units, (0, h), cut), W2, layers[0], slot * w2[0], w2)

    def _runs(self, expert_rank: int) -> Iterator[tuple[Interval, int, Interval]]:
        """(layers, first slot, experts): runs of consecutive experts in consecutive slots, equal over layers."""
        experts = self.shape.experts
        if self.expert_map is None:
            yield self.layers, 0, linear_experts(experts, self.grid.ep_size, expert_rank % self.grid.ep_size)
            return
        slots = len(self.expert_map[0]) // self.grid.ep_size
        first = expert_rank % self.grid.ep_size * slots
        layer = 0
        while layer < self.shape.num_layers:
            row = tuple(self.expert_map[layer][first : first + slots])
            end = layer + 1
            while end < self.shape.num_layers and tuple(self.expert_map[end][first : first + slots]) == row:
                end += 1
            start = 0
            for slot in range(1, slots + 1):
                if slot == slots or row[slot] != row[slot - 1] + 1:
                    yield (layer, end), start, (row[start], row[start] + slot - start)
                    start = slot
            layer = end


def linear_experts(experts: int, ep_size: int, ep_rank: int) -> Interval:
    """Experts of an expert-parallel rank under vLLM's linear placement: the first ranks take the remainder."""
    base, extra = divmod(experts, ep_size)
    first = ep_rank * base + min(ep_rank, extra)
    return first, first + base + (ep_rank < extra)


def initial_expert_map(shape: ModelShape, redundant: int) -> ExpertMap:
    """[layer][slot] with which vLLM starts: every expert once, then the first `redundant` ones again, cyclically."""
    row = tuple(slot % shape.experts for slot in range(shape.experts + redundant))
    return (row,) * shape.num_layers
