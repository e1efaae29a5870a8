"""Layouts: every element of a store belongs to one piece, every element of the model has a holder, padding is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from parallel.family import ModelShape, kinds, model_shape
from parallel.grid import RolloutGrid, TrainGrid
from parallel.layout import Kind, Layout, Piece, elements, intersect
from parallel.megatron_layout import megatron_layout, padded_vocab
from rollout.vllm_layout import initial_expert_map, linear_experts, vllm_layout
from tests.test_reshard_plan import layouts, random_job

MAY_HAVE_PADDING = ("embed", "head")


def check_layout(layout: Layout) -> None:
    """Pieces of a rank do not overlap and leave no gap in a store; the boxes of all ranks are the whole model."""
    for coordinate in dict.fromkeys(layout.coordinates):
        stores: dict[str, list[tuple[Piece, int]]] = {}
        for piece in layout.pieces(layout.coordinates.index(coordinate)):
            for layer in range(*piece.box[0]):
                stores.setdefault(piece.store_name(layer), []).append((piece, layer))
        for name, parts in stores.items():
            count = np.zeros(max(end(piece) for piece, _ in parts), dtype=np.int8)
            for piece, _ in parts:
                shape = [hi - lo for lo, hi in piece.box[1:]]
                np.lib.stride_tricks.as_strided(count[piece.offset :], shape, piece.strides)[...] += 1
            assert (count == 1).all(), name
            assert len({layer for _, layer in parts}) == 1
    for name, kind in layout.kinds.items():
        held = np.zeros(kind.shape, dtype=bool)
        for box in layout.table[name]:
            held[tuple(slice(*span) for span in box)] = True
        assert held.all(), name


def end(piece: Piece) -> int:
    return piece.offset + 1 + sum((hi - lo - 1) * s for (lo, hi), s in zip(piece.box[1:], piece.strides, strict=True))


@pytest.mark.parametrize("seed", range(80))
def test_random_layouts_are_complete(seed):
    job = random_job(random.Random(1000 + seed))
    for layout in layouts(job):
        check_layout(layout)


def shape(**changes) -> ModelShape:
    config = dict(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=2,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=130,
        max_position_embeddings=64,
    )
    return model_shape({**config, **changes})


def test_kinds_are_all_tensors_of_the_checkpoint():
    found = kinds(shape())
    names = [
        kind.tensor_name(layer, unit)
        for kind in found.values()
        for layer in range(kind.shape[0])
        for unit in range(kind.shape[1] if kind.unit_is_tensor else 1)
    ]
    assert len(names) == len(set(names)) == 3 + 2 * (9 + 3 * 8)
    assert found["q"].tensor_shape == (16, 8) and found["expert_down"].tensor_shape == (8, 8)
    assert found["q_norm"].tensor_shape == (2,) and "head" not in kinds(shape(tie_word_embeddings=True))


def test_pieces_say_where_elements_are():
    piece = Piece("k", ((4, 6), (1, 3), (0, 2), (2, 5)), "layers.{layer}.w", 1, 10, (100, 3, 1))
    assert [piece.store_name(layer) for layer in (4, 5)] == ["layers.1.w", "layers.2.w"]
    assert piece.offset_of(2, 1, 4) == 10 + 100 + 3 + 2
    assert elements(piece.box) == 2 * 2 * 2 * 3 and elements(((0, 1), (2, 1), (0, 1), (0, 1))) == 0
    assert intersect(piece.box, ((5, 9), (0, 2), (0, 9), (0, 9))) == ((5, 6), (1, 2), (0, 2), (2, 5))
    assert intersect(piece.box, ((6, 9), (0, 2), (0, 9), (0, 9))) is None


def test_a_tied_head_is_held_twice_and_counted_once():
    layout = megatron_layout(shape(tie_word_embeddings=True), TrainGrid(2, pp=2))
    assert [p.store for p in layout.pieces(1) if p.kind == "embed"] == ["0:output_layer.weight"]
    assert list(layout.table["embed"].values()) == [(0, 1)]
    alone = megatron_layout(shape(tie_word_embeddings=True), TrainGrid(1))
    assert len([p for p in alone.pieces(0) if p.kind == "embed"]) == 1


def test_vocabulary_cuts_do_not_align():
    train = megatron_layout(shape(), TrainGrid(2, tp=2))
    roll = vllm_layout(shape(), RolloutGrid(2, tp=2))
    assert padded_vocab(130, 2) == 256 and [box[2] for box in train.table["embed"]] == [(0, 128), (128, 130)]
    assert [box[2] for box in roll.table["embed"]] == [(0, 96), (96, 130)]


def test_kv_heads_are_repeated_beyond_their_number():
    roll = vllm_layout(shape(), RolloutGrid(8, tp=8))
    assert [(box[1], ranks) for box, ranks in roll.table["k"].items()] == [
        ((0, 1), (0, 1, 2, 3)),
        ((1, 2), (4, 5, 6, 7)),
    ]
    assert [len(ranks) for ranks in roll.table["q"].values()] == [1] * 8


def test_expert_maps():
    assert initial_expert_map(shape(), 4)[0] == (*range(8), 0, 1, 2, 3)
    layout = vllm_layout(shape(), RolloutGrid(4, 4, 1, True), expert_map=initial_expert_map(shape(), 4))
    check_layout(layout)
    slots = [[p.box[1] for p in layout.pieces(rank) if p.kind == "expert_up"] for rank in range(4)]
    assert slots == [[(0, 3)], [(3, 6)], [(6, 8), (0, 1)], [(1, 4)]]
    assert [linear_experts(10, 4, rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    by_layer = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]]
    check_layout(vllm_layout(shape(), RolloutGrid(2, 2, 1, True), expert_map=by_layer, transposed_experts=True))


def test_experts_as_parameters_of_their_own():
    layout = megatron_layout(shape(), TrainGrid(2, ep=2), stacked_experts=False)
    check_layout(layout)
    assert "0:decoder.layers.{layer}.mlp.experts.linear_fc1.weight3" in {p.store for p in layout.pieces(1)}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (dict(tp=3), "tp = 3 must divide 8 heads and divide, or be a multiple of, 2 KV heads"),
        (dict(tp=8, dp=2), "16 does not divide the expert size 8"),
    ],
)
def test_what_the_engine_cannot_build(grid, message):
    with pytest.raises(ValueError, match=message):
        vllm_layout(shape(), RolloutGrid(48, **grid))


def test_expert_map_that_does_not_spread():
    with pytest.raises(ValueError, match="9 expert slots do not spread over 2"):
        vllm_layout(shape(), RolloutGrid(2, 2, 1, True), expert_map=[[*range(8), 0]] * 2)


def test_kind_names():
    assert Kind("x", "a.{layer}.b.{unit}.w", (2, 3, 4, 5)).tensor_name(1, 2) == "a.1.b.2.w"


def test_stores_of_a_layout_can_be_picked():
    """Some layers of a kind become boxes of one layer at their old places; untouched pieces stay as they are."""
    whole = vllm_layout(shape(), RolloutGrid(2, 2))
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rest, one = whole.only(lambda store: store != name), whole.only(name.__eq__)
    assert set(one.kinds) == {"q", "k", "v"} and one.kinds["q"] is whole.kinds["q"]
    for rank in range(2):
        assert {p.store_name(layer) for p in one.pieces(rank) for layer in range(*p.box[0])} == {name}
        assert set(rest.pieces(rank)) >= {p for p in whole.pieces(rank) if p.kind not in "qkv"}
        for kind in "qkv":
            parts = [p for layout in (rest, one) for p in layout.pieces(rank) if p.kind == kind]
            want = {
                (n, p.store_name(n), p.box[1:], p.offset)
                for p in whole.pieces(rank)
                if p.kind == kind
                for n in range(*p.box[0])
            }
            got = [(n, p.store_name(n), p.box[1:], p.offset) for p in parts for n in range(*p.box[0])]
            assert len(got) == len(want) and set(got) == want
