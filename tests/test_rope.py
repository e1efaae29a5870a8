"""The packed rotary embedding equals Megatron's, for uneven and empty sequences and both kinds of scale."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from parallel.rope import packed_rope, positions


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("mscale", [1.0, 1.2])
@pytest.mark.parametrize("lengths", [[5, 1, 9], [7, 0, 3, 0], [12]])
def test_equals_megatron(lengths: list[int], mscale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    torch.manual_seed(0)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    half = torch.randn(max(lengths), 1, 1, 4)
    freqs = torch.cat((half, half), -1)
    t = torch.randn(sum(lengths), 3, 8)
    original = rope_utils._apply_rotary_pos_emb_thd
    want = original(t, cu, freqs, mscale=mscale, cp_group=OneRank())
    apply = packed_rope(original)
    for _ in range(2):  # the second call finds the angles of the first
        got = apply(t, cu, freqs, rotary_interleaved=False, mscale=mscale, cp_group=OneRank())
        assert torch.equal(got, want)
    shifted = torch.tensor([0, *reversed(lengths)]).cumsum(0).int()
    want = original(t, shifted, freqs, mscale=mscale, cp_group=OneRank())
    assert torch.equal(apply(t, shifted, freqs, mscale=mscale, cp_group=OneRank()), want)


def test_positions_start_again_in_each_sequence() -> None:
    cu = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert positions(cu, 5).tolist() == [0, 1, 2, 0, 1]


def test_sorted_chunks_are_left_alone() -> None:
    from parallel.megatron_cpu import _unless_sorted

    sort = _unless_sorted(lambda tokens, sizes, order, probs=None, fused=False: (tokens.flip(0), probs))
    tokens = torch.arange(4)
    assert sort(tokens, None, torch.arange(3))[0] is tokens
    assert sort(tokens, None, torch.tensor([1, 0]))[0].tolist() == [3, 2, 1, 0]
