"""Data files -> tokenised prompts in an order that is a pure function of (seed, epoch) and of a counter.

Nothing is iterated and nothing is saved: `batch(step)` can be asked for any step, so resuming is asking for the next
one, and the number of ranks plays no part. Over-long prompts are settled at load time, never in the middle of a run.
Left out on purpose: streaming of data sets that do not fit the host, and mixing weights between files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.config import DataConfig
from parallel.family import read_config
from rollout.rows import Row, read_rows


@dataclass(frozen=True)
class Prompt:
    """One draw of a row. Draws of the same row in different epochs have different prompt ids: separate groups."""

    prompt_id: int
    ids: list[int]
    source: str
    ground_truth: str
    extra: dict[str, Any]
    row: int
    """Index into the prompts that were kept, over all files in order."""
    expected_tokens: float = 0.0
    """Guess of the response length (rollout/lengths.py), for the hand-out order only."""


class PromptSet:
    """The prompts of some files. ValueError names file, row and column, or the option that does not fit."""

    def __init__(self, files: Sequence[str | Path], tokenizer: Any, data: DataConfig, seed: int):
        if not files:
            raise ValueError("data.train_files is empty; give parquet or jsonl files")
        rows = [row for file in files for row in read_rows(file, data)]
        fitted = [_fit(ids, data) for ids in _tokenise(rows, tokenizer, data)]
        too_long = [row for row, ids in zip(rows, fitted, strict=True) if ids is None]
        self._left_out = _left_out(too_long, len(rows), data) if too_long else ""
        kept = [(row, ids) for row, ids in zip(rows, fitted, strict=True) if ids is not None]
        self._rows = [row for row, _ in kept]
        self._ids = [ids for _, ids in kept]
        self._data, self._seed = data, seed

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sources(self) -> list[str]:
        """Reward rules that occur, sorted."""
        return sorted({row.source for row in self._rows})

    @property
    def first_table(self) -> str:
        """Where the first ground truth is that no built-in rule can read, or ""."""
        return next((row.where for row in self._rows if row.has_table), "")

    def steps_per_epoch(self, prompts_per_step: int) -> int:
        """Batches of one epoch. ValueError when not even one is full and data.incomplete_batch is "drop"."""
        full, rest = divmod(len(self), prompts_per_step)
        if self._data.incomplete_batch == "keep":
            return full + (rest > 0)
        if not full:
            raise ValueError(
                f"data.prompts_per_step = {prompts_per_step} exceeds the {len(self)} prompts of an epoch; "
                f'use at most {len(self)}, or data.incomplete_batch = "keep"'
            )
        return full

    def describe(self, prompts_per_step: int = 0) -> str:
        """One line for the log: prompts, those left out, steps of an epoch and what becomes of its last incomplete
        batch; without `prompts_per_step` (validation) no steps.
        """
        said = f"{len(self)} prompts{self._left_out}"
        if not prompts_per_step:
            return said
        steps, rest = self.steps_per_epoch(prompts_per_step), len(self) % prompts_per_step
        end = f"; the last {rest} are {'a smaller batch' if self._data.incomplete_batch == 'keep' else 'dropped'}"
        return f"{said}, {steps} steps an epoch of {prompts_per_step}{end if rest else ''}"

    def epoch_of(self, step: int, prompts_per_step: int = 0) -> int:
        """Epoch of a step, both from 0; 0 prompts per step stands for data.prompts_per_step."""
        return step // self.steps_per_epoch(prompts_per_step or self._data.prompts_per_step)

    def batch(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """Prompts of a step (from 0), prompt_id = step * prompts_per_step + position."""
        epoch, index = divmod(step, self.steps_per_epoch(prompts_per_step))
        rows = self._order(epoch)[index * prompts_per_step :][:prompts_per_step]
        return [self._prompt(step * prompts_per_step + number, int(row)) for number, row in enumerate(rows)]

    def all(self, limit: int = 0) -> list[Prompt]:
        """The first `limit` prompts (0: all) in file order, prompt_id = row: validation sets."""
        return [self._prompt(row, row) for row in range(min(limit, len(self)) if limit else len(self))]

    def _prompt(self, prompt_id: int, row: int) -> Prompt:
        source = self._rows[row]
        return Prompt(prompt_id, self._ids[row], source.source, source.ground_truth, source.extra, row)

    def _order(self, epoch: int) -> np.ndarray:
        if not self._data.shuffle:
            return np.arange(len(self))
        # Sorting raw counter-based bits: numpy fixes those for ever, but not what `permutation` makes of them.
        key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(len(self))
        return np.argsort(bits, kind="stable")


def load_tokenizer(path: str | Path) -> Any:
    """Tokenizer of a model directory. ValueError when it cannot be read or has ids that the embedding has not."""
    from transformers import AutoTokenizer

    vocab = read_config(path).get("vocab_size")
    if isinstance(vocab, bool) or not isinstance(vocab, int):
        raise ValueError(f"{path}/config.json: vocab_size must be an integer, got {vocab!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        largest = max(tokenizer.get_vocab().values(), default=-1)
    except Exception as error:  # the tokenizer libraries raise whatever they meet, plain Exception included
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise ValueError(f"{path}: the tokenizer cannot be loaded: {reason}") from None
    if largest < 0:
        raise ValueError(f"{path}: the tokenizer has no tokens; is tokenizer.json missing?")
    if largest >= vocab:
        raise ValueError(
            f"{path}: the tokenizer has ids up to {largest}, the embedding only {vocab} rows (config.json vocab_size); "
            "tokenizer and weights do not belong together"
        )
    return tokenizer


def _tokenise(rows: list[Row], tokenizer: Any, data: DataConfig) -> list[list[int]]:
    """Token ids of each row; the chat template adds what it wants, nothing else is added."""
    texts = [_render(row, tokenizer, data) for row in rows]
    try:
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception:  # which row it was: once more, one at a time
        ids = [_encode(row, text, tokenizer, data) for row, text in zip(rows, texts, strict=True)]
    for row, row_ids in zip(rows, ids, strict=True):
        if not row_ids:
            raise ValueError(f"{row.where}: column {data.prompt_key!r}: the prompt has no tokens")
    return ids


def _render(row: Row, tokenizer: Any, data: DataConfig) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    where = f"{row.where}: column {data.prompt_key!r}"
    if not tokenizer.chat_template:
        raise ValueError(f"{where} has chat messages, but the tokenizer has no chat template; give text instead")
    try:
        return tokenizer.apply_chat_template(
            row.prompt, tokenize=False, add_generation_prompt=True, **data.chat_template_kwargs
        )
    except Exception as error:  # templates raise what their authors chose, for example on an unknown role
        raise ValueError(f"{where}: the chat template refuses it: {str(error)[:200]}") from None


def _encode(row: Row, text: str, tokenizer: Any, data: DataConfig) -> list[int]:
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise ValueError(f"{row.where}: column {data.prompt_key!r} cannot be tokenised: {str(error)[:200]}") from None


def _fit(ids: list[int], data: DataConfig) -> list[int] | None:
    """The ids within data.max_prompt_tokens, or None when they are not to be cut."""
    limit, rule = data.max_prompt_tokens, data.overlong_prompts
    if len(ids) <= limit:
        return ids
    if rule == "left":  # the end stays: the question, but not the system message
        return ids[-limit:]
    if rule == "right":
        return ids[:limit]
    if rule == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    return None


def _left_out(too_long: list[Row], num_rows: int, data: DataConfig) -> str:
    """What the log says about dropped prompts; ValueError when they are not to be dropped, or are all there is."""
    said = f"{len(too_long)} of {num_rows} prompts are longer than data.max_prompt_tokens = {data.max_prompt_tokens}"
    if data.overlong_prompts == "error" or len(too_long) == num_rows:
        remedy = "raise it" + (", or cut or filter them (data.overlong_prompts)" if len(too_long) < num_rows else "")
        raise ValueError(f"{said}, the first is {too_long[0].where}; {remedy}")
    return f" ({said} and were dropped, the first is {too_long[0].where})"
