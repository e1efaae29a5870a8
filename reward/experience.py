"""The batch of a step as plain arrays, and its way from scores to the fields of the loss. Pure; every rank has it all.

Sequences are in canonical order (prompt id, sample id). `fields` hold a float array over the response of each sequence:
rollout_logprobs always; old_logprobs, ref_logprobs, advantage as they become known. Groups are found by prompt id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from launch.config import AlgorithmConfig
from reward import advantage
from reward.advantage import KLController


@dataclass
class Experience:
    sequences: list[np.ndarray]
    """int32 [P + R] each: prompt and response."""
    prompt_tokens: np.ndarray
    """[N] P of each sequence."""
    prompt_ids: np.ndarray
    scores: np.ndarray
    """[N] what the reward rule said."""
    truncated: np.ndarray
    """[N] bool: cut by the length limit."""
    fields: dict[str, Sequence[np.ndarray]] = field(default_factory=dict)
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """[N] after shaping and the KL penalty."""
    stats: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole batch that judging it gave."""
    kept: list[np.ndarray] | None = None
    """algorithm.correction = sequence_mask: bool [R] of each sequence, all True or all False."""

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Experience:
        """From rollout samples in canonical order."""
        return cls(
            sequences=[np.concatenate([s.prompt, s.response]) for s in samples],
            prompt_tokens=np.array([len(s.prompt) for s in samples]),
            prompt_ids=np.array([s.prompt_id for s in samples]),
            scores=np.array([s.score for s in samples]),
            truncated=np.array([s.finish == "length" for s in samples]),
            fields={"rollout_logprobs": [s.logprobs for s in samples]},
        )

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(s) for s in self.sequences])

    @property
    def response_tokens(self) -> np.ndarray:
        return self.lengths - self.prompt_tokens

    def flat(self, name: str) -> np.ndarray:
        """One field over all response tokens [T], sequence after sequence."""
        return np.concatenate(self.fields[name])

    def judge(
        self, algorithm: AlgorithmConfig, kl: KLController, max_response_tokens: int, seed: Sequence[int]
    ) -> float:
        """Scores -> rewards -> the field "advantage". Returns the mean KL of the reward penalty (0 without one).

        `seed` orders the permutation of algorithm.shuffle_rewards, a control experiment.
        """
        lengths = self.response_tokens
        shaped = self.scores + advantage.overlong(
            lengths, max_response_tokens, algorithm.overlong_buffer_tokens, algorithm.overlong_penalty
        )
        if algorithm.shuffle_rewards:
            shaped = np.random.default_rng(list(seed)).permutation(shaped)
        penalties = None
        if algorithm.kl_reward:
            both = zip(self.fields["old_logprobs"], self.fields["ref_logprobs"], strict=True)
            penalties = [advantage.kl_penalty(algorithm.kl_reward_estimator, old, ref) for old, ref in both]
        self.rewards = advantage.sequence_rewards(shaped, penalties, kl.coefficient)
        self.fields["advantage"] = advantage.advantages(
            algorithm, shaped, self.prompt_ids, lengths, penalties, kl.coefficient
        )
        if algorithm.correction == "sequence_mask":
            pairs = self.fields["old_logprobs"], self.fields["rollout_logprobs"]
            self.kept = advantage.keep_tokens(*pairs, algorithm.correction_low, algorithm.correction_high)
            self.stats["rollout_corr/rejected_fraction"] = float(np.mean([not mask.all() for mask in self.kept]))
        if penalties is None:
            return 0.0
        mean_kl = float(np.mean([p.mean() for p in penalties]))
        self.stats |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl.coefficient}
        return mean_kl

    def loss_fields(self, algorithm: AlgorithmConfig, indices: np.ndarray, norm_tokens: int) -> dict[str, Any]:
        """Fields of the loss for the mini-batch of sequences `indices`: values by sequence number."""
        lengths = self.response_tokens[indices]
        table = {name: {int(i): values[i] for i in indices} for name, values in self.fields.items()}
        kept = [self.kept[i] for i in indices] if self.kept else None  # rejected sequences leave the denominators
        weights = advantage.token_weights(algorithm.aggregation, lengths, kept, norm_tokens)
        table["weight"] = dict(zip(map(int, indices), weights, strict=True))
        if algorithm.aggregation.startswith("seq-mean-token-sum"):
            share = advantage.token_weights("token-mean", lengths, kept)
            table["share"] = dict(zip(map(int, indices), share, strict=True))
        return table

    def agreement(self, current: Mapping[int, np.ndarray], bypass: bool) -> tuple[np.ndarray, np.ndarray]:
        """(engine's, trainer's) log-probs [T] of the sequences in `current`, which holds the update pass's.

        The trainer's are the old policy's where they were computed; with `bypass` those are the engine's own.
        """
        old = current if bypass else self.fields.get("old_logprobs", current)
        own, nothing = sorted(current), np.zeros(0)
        engine = [self.fields["rollout_logprobs"][i] for i in own]
        return np.concatenate([nothing, *engine]), np.concatenate([nothing, *(old[i] for i in own)])

    def rows(self, decode: Callable[[Any], str], most: int) -> list[dict[str, Any]]:
        """Samples as people read them; `most` as log.samples_per_step: 0 all, -1 none."""
        chosen = self.sequences[: most or None] if most >= 0 else []
        return [self.row(i, decode) for i in range(len(chosen))]

    def row(self, i: int, decode: Callable[[Any], str]) -> dict[str, Any]:
        """Sample `i` of the batch as people read it."""
        sequence, cut = self.sequences[i], int(self.prompt_tokens[i])
        return {
            "prompt_id": int(self.prompt_ids[i]),
            "prompt": decode(sequence[:cut]),
            "response": decode(sequence[cut:]),
            "score": float(self.scores[i]),
            "reward": float(self.rewards[i]),
            "advantage": float(self.fields["advantage"][i][0]),
            "prompt_tokens": cut,
            "response_tokens": len(sequence) - cut,
            "truncated": bool(self.truncated[i]),
        }
