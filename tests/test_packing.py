"""Packing: budget, equal counts, nothing lost, balance; micro-batches: alignment, padding, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.micro_batches import build_micro_batches, padded_lengths, unpack
from parallel.packing import pack, plan_updates, work


@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 4),
    minimum=st.integers(1, 7),
    budget=st.integers(64, 200),
)
def test_every_sequence_once_within_the_budget(lengths, ranks, multiple, minimum, budget) -> None:
    plan = pack(lengths, ranks, budget, multiple, minimum)
    counts = {len(rank) for rank in plan.micro_batches}
    assert len(plan.micro_batches) == ranks and counts == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple == 0 and plan.num_micro_batches >= minimum
    members = [i for rank in plan.micro_batches for mb in rank for i in mb]
    assert sorted(members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in mb) <= budget for rank in plan.micro_batches for mb in rank)


def test_needs_no_more_micro_batches_than_tokens_ask_for() -> None:
    lengths = np.random.default_rng(0).integers(1, 1024, 2048).tolist()
    plan = pack(lengths, 8, 16384)
    assert plan.num_micro_batches <= -(-sum(lengths) // (8 * 16384)) + 1


def test_work_is_balanced_over_ranks_and_at_each_moment() -> None:
    lengths = np.random.default_rng(1).integers(100, 8000, 512).tolist()
    plan = pack(lengths, 8, 16384)
    cost = np.array([[sum(work(lengths[i]) for i in mb) for mb in rank] for rank in plan.micro_batches], float)
    totals = cost.sum(1)
    assert totals.max() / totals.mean() < 1.01
    assert (cost.max(0) / cost.mean(0)).max() < 1.2


def test_squares_of_long_sequences_do_not_overflow() -> None:
    lengths = np.array([3_000_000, 2_900_000, 1, 1], np.int32)
    plan = pack(lengths, 2, 3_000_001)
    assert work(3_000_000_000) > 2**62
    assert sorted(len(rank[0]) for rank in plan.micro_batches) in ([1, 3], [2, 2])
    assert not any({0, 1} <= set(rank[0]) for rank in plan.micro_batches)


def test_too_long_a_sequence_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 65 tokens, more than the 64 .*micro_batch_tokens.*train.cp"):
        pack([3, 65], 2, 64)


def test_is_the_same_whatever_the_number_type_and_repeats() -> None:
    lengths = np.random.default_rng(2).integers(1, 99, 50)
    assert pack(lengths, 3, 256) == pack(lengths.tolist(), 3, 256) == pack(lengths.astype(np.int16), 3, 256)


def case(num: int = 5) -> tuple[list[np.ndarray], list[int], dict[str, list[np.ndarray]]]:
    rng = np.random.default_rng(4)
    prompts = rng.integers(1, 6, num).tolist()
    responses = rng.integers(1, 20, num).tolist()
    sequences = [rng.integers(1, 99, p + r) for p, r in zip(prompts, responses, strict=True)]
    return sequences, prompts, {"weight": [rng.random(r).astype(np.float32) + 1 for r in responses]}


def test_values_sit_where_their_token_is_predicted() -> None:
    sequences, prompts, fields = case()
    (mb,) = build_micro_batches(sequences, prompts, [[3, 0, 4]], fields)
    assert mb.indices == [3, 0, 4] and mb.num_sequences == 3
    for number, index in enumerate(mb.indices):
        own = mb.segments == number
        ids, prompt = sequences[index], prompts[index]
        assert mb.tokens[own].tolist() == ids.tolist()
        assert mb.labels[own].tolist() == [*ids[1:].tolist(), 0]
        assert mb.positions[own].tolist() == list(range(len(ids)))
        weight = mb.fields["weight"][own]
        assert weight[prompt - 1 : -1].tolist() == fields["weight"][index].tolist()
        assert not weight[: prompt - 1].any() and not weight[-1:].any()
        assert mb.labels[own][weight > 0].tolist() == ids[prompt:].tolist()


@given(lengths=st.lists(st.integers(1, 40), max_size=8), cp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 3]))
def test_padding_makes_sequences_and_totals_divide(lengths, cp, tp) -> None:
    padded = padded_lengths(lengths, cp, tp)
    assert sum(padded) % (cp * tp) == 0 and len(padded) == max(1, len(lengths))
    assert cp == 1 or all(n % (2 * cp) == 0 for n in padded)
    assert all(n >= m for n, m in zip(padded, lengths, strict=False))


@settings(deadline=None)
@given(cp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2]), order=st.permutations(range(5)))
def test_context_parallel_parts_add_up(cp, tp, order) -> None:
    sequences, prompts, fields = case()
    ranks = [build_micro_batches(sequences, prompts, [order[:3], order[3:], []], fields, r, cp, tp) for r in range(cp)]
    for position, parts in enumerate(zip(*ranks, strict=True)):
        rows = torch.cat([mb.rows for mb in parts])
        total = int(parts[0].cu_seqlens[-1])
        assert sorted(rows.tolist()) == list(range(total)) and total % (cp * tp) == 0
        assert len({mb.tokens.numel() for mb in parts}) == 1
        whole = torch.zeros(total).index_add(0, rows, torch.cat([mb.fields["weight"] for mb in parts]))
        wanted = sum(float(fields["weight"][i].sum()) for i in parts[0].indices)
        assert abs(float(whole.sum()) - wanted) < 1e-4
        assert position < 2 or not whole.any()


def test_unpack_returns_what_was_packed() -> None:
    sequences, prompts, fields = case()
    batches = build_micro_batches(sequences, prompts, [[2, 0], [], [4, 1, 3]], fields, tp=3)
    back = unpack(batches, [mb.fields["weight"] for mb in batches])
    assert sorted(back) == list(range(5))
    assert all((back[i] == fields["weight"][i]).all() for i in range(5))


def test_empty_micro_batch_is_one_weightless_sequence() -> None:
    sequences, prompts, fields = case()
    (mb,) = build_micro_batches(sequences, prompts, [[]], fields, cp_rank=1, cp=2, tp=2)
    assert mb.indices == [] and mb.num_sequences == 1 and mb.tokens.numel() > 0
    assert not mb.fields["weight"].any()
    assert mb.sequence_sums(torch.ones(mb.tokens.numel())).shape == (1,)


def test_wrong_number_of_values_is_named() -> None:
    sequences, prompts, fields = case()
    fields["weight"][1] = fields["weight"][1][:-1]
    with pytest.raises(ValueError, match="field 'weight' of sequence 1 has"):
        build_micro_batches(sequences, prompts, [[1]], fields)


def test_fewer_groups_than_mini_batches_make_no_empty_updates():
    ids = np.repeat([3, 8, 9], 4)
    updates = plan_updates(ids, np.full(12, 10), mini_batches=5, num_ranks=2, budget=100)
    assert [list(u.indices) for u in updates] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
