"""Failures that users of other systems reported, each as a test that fails when ours makes the same mistake.

Experts swapped after a rearrangement: test_moe_eplb.py. Here: gathering from zeroed probabilities, padding rows, ranks
without tokens, dense layers first, a router bias that is never synced.
"""

import json

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from launch.tiny_models import write_model
from parallel.hf import read_index
from parallel.megatron_experts import load_metrics
from parallel.micro_batches import build_micro_batches
from parallel.replay import NATIVE, RouteQueue, local_routes
from rollout import routes
from tests.test_replay import Chunk
from tests.test_routes import capture_of, run


def routed(scores, wanted, pre_softmax):
    queue = RouteQueue()
    queue.forward.append(torch.tensor(wanted))
    probs, chosen = topk_routing_with_score_function(scores, 2, use_pre_softmax=pre_softmax, router_replay=queue)
    return probs, chosen, queue


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_forced_experts_get_their_live_weight_and_gradient(pre_softmax):
    """Others mask all but the native top k first: forced experts then weigh nothing and the router learns nothing."""
    scores = torch.tensor([[4.0, 3.0, 1.0, 0.5]], requires_grad=True)
    probs, chosen, _ = routed(scores, [[2, 3]], pre_softmax)
    assert chosen.nonzero().tolist() == [[0, 2], [0, 3]]
    if pre_softmax:
        expected = scores.softmax(-1)[0, 2:]
    else:
        expected = scores[0, 2:].softmax(-1)  # renormalised over the chosen ones: norm_topk_prob
    assert torch.allclose(probs[0, 2:], expected) and probs[0, :2].tolist() == [0, 0]
    probs[0, 2].backward()
    assert scores.grad[0, 2] > 0 > scores.grad[0, 3]


def test_a_native_row_routes_as_without_replay():
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    plain = topk_routing_with_score_function(scores, 2)
    probs, chosen, queue = routed(scores, [[0, 1], [NATIVE, NATIVE], [2, 3]], False)
    assert torch.equal(probs[1], plain[0][1]) and torch.equal(chosen[1], plain[1][1])
    assert queue.tally[0] == 2


def test_padding_rows_of_a_sequence_parallel_engine(monkeypatch):
    """One token on two TP ranks: the second rank routed a padding row, which is nobody's."""
    capture = capture_of([0], 1, split=True)
    monkeypatch.setattr(routes, "_all_gather_tp", lambda ids: torch.cat([torch.full_like(ids, 5), ids]))
    run(capture, ("a", 0, [3]))
    assert capture.take("a", 2).tolist() == [[[5, 5]]]


def test_padding_rows_of_a_micro_batch_route_natively():
    """Zigzag and tp padding is no token: a recorded route there would shift all that follow."""
    sequences = [np.arange(3), np.arange(6)]
    batch = build_micro_batches(sequences, [1, 1], [[0, 1]], {}, 0, 1, 4)[0]
    table = {i: np.full((len(ids) - 1, 1, 2), i + 1) for i, ids in enumerate(sequences)}
    rows = torch.cat([local_routes(table, batch, [0], 2, rank, 4) for rank in range(4)])[:, 0, 0].tolist()
    assert rows == [1, 1, NATIVE, 2, 2, 2, 2, 2, NATIVE, NATIVE, NATIVE, NATIVE]


def test_a_rank_without_sequences_takes_part_and_routes_natively():
    from tests.test_replay import fake_replay

    batch = build_micro_batches([np.arange(4)], [1], [[]], {}, 0, 1, 2)[0]
    replay = fake_replay([Chunk([0, 1])])
    replay.attach([batch])
    assert batch.routes is None and batch.tokens.numel() == 2 and replay.require_consumed([batch]) == 0


def test_dense_layers_first_on_both_sides():
    """Layer 0 and 2 are dense: the capture leaves them empty, the trainer asks for layers 1 and 3 by number."""
    from tests.test_replay import fake_replay

    capture = capture_of([1, 3], 4)
    run(capture, ("a", 0, [0, 1, 2]))
    replay = fake_replay([Chunk([0, 1], dense=[0]), Chunk([2, 3], dense=[2])])
    assert replay.layers == [1, 3]
    replay.sequences = {0: capture.take("a", 4)}
    batch = build_micro_batches([np.arange(4)], [1], [[0]], {})[0]
    replay.attach([batch])
    assert batch.routes[:3].tolist() == [[[10 + t, 11 + t], [30 + t, 31 + t]] for t in range(3)]


def test_a_router_bias_is_refused_instead_of_forgotten(tmp_path):
    """No supported family has one; a checkpoint with it is another model, and says so before anything is loaded."""
    from safetensors.torch import load_file, save_file

    path = write_model(tmp_path / "model", "qwen3-moe")
    read_index(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.zeros(4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="e_score_correction_bias"):
        read_index(path)
    assert "e_score" not in json.dumps(json.loads((path / "config.json").read_text()))


def test_load_of_skewed_routes():
    load = torch.tensor([[1] * 8, [4, 1, 1, 1, 1, 0, 0, 0]])
    assert load_metrics(load) == {"experts/load_max_over_mean": 2.5, "experts/load_max_over_mean_worst": 4}


def test_load_of_no_tokens_is_finite():
    assert load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {
        "experts/load_max_over_mean": 0.0,
        "experts/load_max_over_mean_worst": 0.0,
    }
