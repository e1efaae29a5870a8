"""Where Megatron keeps what: model shape + training grid -> Layout over its parameters. Pure.

Stores are "CHUNK:PARAMETER": the index of the virtual pipeline chunk on the rank, then Megatron's own name, in which
layers are numbered within the chunk. One row of rules per parameter:

    linear_qkv   rows per KV group [q heads; k; v], then cut into tp equal row blocks (a cut may fall inside a group)
    linear_fc1   per rank [gate rows; up rows]             experts.weight1 the same for each local expert
    linear_proj, linear_fc2   columns                      experts.weight2 columns of each local expert
    embedding, output_layer   rows of the padded vocabulary; a tied head of a later stage holds "embed" once more
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel.family import ModelShape, kinds
from parallel.grid import TrainGrid, stage_layers
from parallel.layout import Layout, Piece

Interval = tuple[int, int]


def padded_vocab(vocab: int, tp: int, multiple: int = 128) -> int:
    """Rows of Megatron's embedding over all tp ranks (Megatron's make_vocab_size_divisible_by rule)."""
    block = multiple * tp
    return -(-vocab // block) * block


def megatron_layout(
    shape: ModelShape,
    grid: TrainGrid,
    first: int = 0,
    last: int = 0,
    dtype: str = "bfloat16",
    stacked_experts: bool = True,
) -> Layout:
    """Layout of the parameters on grid.world ranks; `first` and `last` are the layers of the outer pipeline stages.

    Without `stacked_experts` each local expert is a parameter of its own, as in TransformerEngine's grouped linear.
    """
    stages = stage_layers(shape.num_layers, grid.pp, grid.vpp, first, last)
    rules = _Rules(shape, grid, stages, stacked_experts)
    return Layout(
        name=f"megatron tp{grid.tp} pp{grid.pp} vpp{grid.vpp} ep{grid.ep} etp{grid.etp} on {grid.world}",
        kinds=kinds(shape),
        coordinates=tuple((c.tp, c.pp, c.ep, c.etp) for c in grid.coords),
        pieces_of=lambda c: tuple(rules.pieces(*c)),
        dtype=dtype,
    )


class _Rules:
    def __init__(self, shape: ModelShape, grid: TrainGrid, stages: list[list[range]], stacked: bool):
        self.shape, self.grid, self.stages, self.stacked = shape, grid, stages, stacked

    def pieces(self, tp: int, pp: int, ep: int, etp: int) -> Iterator[Piece]:
        for chunk, layers in enumerate(self.stages[pp]):
            yield from self._ends(chunk, tp, pp)
            if len(layers):
                inside = (layers.start, layers.stop)
                prefix = f"{chunk}:decoder.layers.{{layer}}."
                yield from self._attention(prefix, inside, tp)
                yield from (
                    self._experts(prefix, inside, ep, etp) if self.shape.is_moe else self._mlp(prefix, inside, tp)
                )

    def _ends(self, chunk: int, tp: int, pp: int) -> Iterator[Piece]:
        s, grid = self.shape, self.grid
        block = padded_vocab(s.vocab, grid.tp) // grid.tp
        rows = (min(s.vocab, tp * block), min(s.vocab, (tp + 1) * block))
        is_first = pp == 0 and chunk == 0
        is_last = pp == grid.pp - 1 and chunk == grid.vpp - 1
        if is_first and rows[0] < rows[1]:
            yield _piece("embed", f"{chunk}:embedding.word_embeddings.weight", (0, 1), rows=rows, cols=(0, s.hidden))
        if is_last:
            yield _piece("final_norm", f"{chunk}:decoder.final_layernorm.weight", (0, 1), cols=(0, s.hidden))
            if rows[0] < rows[1] and not (s.tied and is_first):
                kind = "embed" if s.tied else "head"
                yield _piece(kind, f"{chunk}:output_layer.weight", (0, 1), rows=rows, cols=(0, s.hidden))

    def _attention(self, prefix: str, layers: Interval, tp: int) -> Iterator[Piece]:
        s, size = self.shape, self.grid.tp
        yield _piece("input_norm", prefix + "input_layernorm.weight", layers, cols=(0, s.hidden))
        yield _piece("post_norm", prefix + "pre_mlp_layernorm.weight", layers, cols=(0, s.hidden))
        yield from self._qkv(prefix, layers, tp)
        width = s.heads * s.head_dim // size
        columns = (tp * width, (tp + 1) * width)
        yield _piece("o", prefix + "self_attention.linear_proj.weight", layers, rows=(0, s.hidden), cols=columns)
        if s.qk_norm:
            for name in ("q", "k"):
                store = f"{prefix}self_attention.{name}_layernorm.weight"
                yield _piece(f"{name}_norm", store, layers, cols=(0, s.head_dim))

    def _qkv(self, prefix: str, layers: Interval, tp: int) -> Iterator[Piece]:
        """Rows [start, stop) of the fused matrix of all groups, cut by group and by q, k, v."""
        s = self.shape
        q_rows, group_rows = s.heads_per_group * s.head_dim, (s.heads_per_group + 2) * s.head_dim
        block = s.kv_heads * group_rows // self.grid.tp
        start, stop = tp * block, (tp + 1) * block
        parts = (("q", 0, q_rows), ("k", q_rows, s.head_dim), ("v", q_rows + s.head_dim, s.head_dim))
        whole = start % group_rows == 0 and stop % group_rows == 0
        first, end = start // group_rows, -(-stop // group_rows)
        for units in [(first, end)] if whole else [(u, u + 1) for u in range(first, end)]:
            for name, begin, length in parts:
                at = units[0] * group_rows + begin  # where this part begins in the fused matrix
                rows = (0, length) if whole else (max(start - at, 0), min(stop - at, length))
                if rows[0] >= rows[1]:
                    continue
                place = at + rows[0] - start
                store = prefix + "self_attention.linear_qkv."
                yield Piece(
                    name,
                    (layers, units, rows, (0, s.hidden)),
                    store + "weight",
                    0,
                    place * s.hidden,
                    (group_rows * s.hidden, s.hidden, 1),
                )
                if s.qkv_bias:
                    yield Piece(
                        f"{name}_bias", (layers, units, rows, (0, 1)), store + "bias", 0, place, (group_rows, 1, 1)
                    )

    def _mlp(self, prefix: str, layers: Interval, tp: int) -> Iterator[Piece]:
        s = self.shape
        width = s.ffn // self.grid.tp
        cut = (tp * width, (tp + 1) * width)
        for half, kind in enumerate(("gate", "up")):
            store = prefix + "mlp.linear_fc1.weight"
            yield _piece(kind, store, layers, rows=cut, cols=(0, s.hidden), offset=half * width * s.hidden)
        yield _piece("down", prefix + "mlp.linear_fc2.weight", layers, rows=(0, s.hidden), cols=cut)

    def _experts(self, prefix: str, layers: Interval, ep: int, etp: int) -> Iterator[Piece]:
        s = self.shape
        yield _piece("router", prefix + "mlp.router.weight", layers, rows=(0, s.experts), cols=(0, s.hidden))
        local, width = s.experts // self.grid.ep, s.expert_ffn // self.grid.etp
        cut, h = (etp * width, (etp + 1) * width), s.hidden
        for first, count, fc1, fc2 in self._expert_stores(prefix, ep * local, local):
            units = (first, first + count)
            for half, kind in enumerate(("expert_gate", "expert_up")):
                strides = (2 * width * h, h, 1)
                yield Piece(kind, (layers, units, cut, (0, h)), fc1, 0, half * width * h, strides)
            yield Piece("expert_down", (layers, units, (0, h), cut), fc2, 0, 0, (h * width, width, 1))

    def _expert_stores(self, prefix: str, first: int, local: int) -> Iterator[tuple[int, int, str, str]]:
        """(first expert, experts, fc1 store, fc2 store) of each expert parameter pair."""
        if self.stacked:
            yield first, local, prefix + "mlp.experts.weight1", prefix + "mlp.experts.weight2"
            return
        for e in range(local):
            base = f"{prefix}mlp.experts.linear_fc"
            yield first + e, 1, f"{base}1.weight{e}", f"{base}2.weight{e}"


def _piece(
    kind: str, store: str, layers: Interval, rows: Interval = (0, 1), cols: Interval = (0, 1), offset: int = 0
) -> Piece:
    """A piece of one unit that is a plain row-major matrix as wide as its columns."""
    width = cols[1] - cols[0]
    size = (rows[1] - rows[0]) * width
    return Piece(kind, (layers, (0, 1), rows, cols), store, 0, offset, (size, width, 1))
