"""Vocabulary-parallel log-probs and entropies against float64, their gradients, and that nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.log_prob import log_probs
from tests.ranks import run_ranks


def inputs(tokens: int = 37, vocab: int = 50, hidden: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    h, w = (torch.randn(n, hidden, generator=generator) * 0.5 for n in (tokens, vocab))
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    return h, w, labels, *torch.randn(2, tokens, generator=generator)


def exact(temperature: float) -> tuple[torch.Tensor, ...]:
    h, w, labels, a, b = (t.double() if t.is_floating_point() else t for t in inputs())
    h.requires_grad_(), w.requires_grad_()
    log_p = (h @ w.t() / temperature).log_softmax(-1)
    logp, entropy = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (logp * a + entropy * b).sum().backward()
    return logp.detach(), entropy.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_float64_for_any_chunk(chunk: int, temperature: float) -> None:
    h, w, labels, a, b = inputs()
    h.requires_grad_(), w.requires_grad_()
    before = h.detach().clone(), w.detach().clone()
    logp, entropy = log_probs(h, w, labels, temperature, None, 50, chunk, entropy=True)
    (logp * a + entropy * b).sum().backward()
    for got, want in zip((logp, entropy, h.grad, w.grad), exact(temperature), strict=True):
        assert (got - want).abs().max() < 1e-5
    assert torch.equal(before[0], h) and torch.equal(before[1], w)


def test_padding_rows_have_no_probability_and_no_gradient() -> None:
    h, w, labels, a, _ = inputs()
    padded = torch.cat([w, torch.full((14, 16), 1e3)]).requires_grad_()
    logp, entropy = log_probs(h, padded, labels, 1.0, None, 50, 8)
    assert entropy is None and (logp - exact(1.0)[0]).abs().max() < 1e-5
    (logp * a).sum().backward()
    assert not padded.grad[50:].any() and padded.grad[:50].any()


def test_bf16_is_reduced_in_fp32() -> None:
    h, w, labels, _, _ = inputs(vocab=50_000, hidden=8)
    low = h.bfloat16(), (w * 0.1).bfloat16()
    logp, entropy = log_probs(*low, labels, 1.0, None, 50_000, 8, entropy=True)
    log_p = (low[0] @ low[1].t()).double().log_softmax(-1)
    assert logp.dtype == entropy.dtype == torch.float32
    assert (logp - log_p.gather(-1, labels[:, None])[:, 0]).abs().max() < 1e-5
    assert (entropy + (log_p.exp() * log_p).sum(-1)).abs().max() < 1e-4


def _sharded(rank: int) -> list[float]:
    """Ranks hold 32 rows each of a vocabulary of 50: the second has 14 padding rows, the third nothing else."""
    dist.init_process_group("gloo")
    h, w, labels, a, b = inputs()
    own = torch.cat([w, torch.full((46, 16), 7.0)])[rank * 32 : (rank + 1) * 32].clone().requires_grad_()
    h.requires_grad_()
    logp, entropy = log_probs(h, own, labels, 0.6, dist.group.WORLD, 50, 8, entropy=True)
    (logp * a + entropy * b).sum().backward()
    dist.all_reduce(h.grad)
    want = exact(0.6)
    rows = want[3][rank * 32 : (rank + 1) * 32]
    dist.destroy_process_group()
    pairs = [(logp, want[0]), (entropy, want[1]), (h.grad, want[2])]
    pairs += [(own.grad[: len(rows)], rows)] if len(rows) else []
    padding = float(own.grad[len(rows) :].abs().sum())
    return [float((got - reference).abs().max()) for got, reference in pairs] + [padding]


@pytest.mark.slow
def test_vocabulary_over_three_ranks() -> None:
    results = run_ranks(3, _sharded)
    assert max(max(errors) for errors in results) < 1e-5


KERNELS = """
import torch
from parallel.log_prob import _gradient, _statistics
from parallel.log_prob_kernels import gradient, statistics

torch.manual_seed(1)
logits, labels = torch.randn(6, 5000) * 3, torch.tensor([0, 4999, 4096, -3, 7000, 17])
rows = [torch.randn(6) for _ in range(4)]
for temperature in (1.0, 0.6):
    plain, fused = ([torch.empty(6) for _ in range(4)] for _ in "ab")
    _statistics(logits, labels, temperature, *plain)
    statistics(logits, labels, temperature, *fused)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(plain, fused)), (plain, fused)
    lse = plain[0] + plain[1].log()
    want = _gradient(logits.clone(), labels, temperature, lse, *rows[1:])
    assert torch.allclose(gradient(logits.clone(), labels, temperature, lse, *rows[1:]), want, rtol=1e-4, atol=1e-6)
"""


def test_kernels_equal_plain_torch() -> None:
    """Triton's interpreter stands for the device."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
