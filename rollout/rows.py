"""Rows of data files: parquet or jsonl -> messages, ground truth, reward rule, extra. Everything is checked here.

Works as they are: verl's rows (prompt = chat messages, reward_model.ground_truth, data_source, extra_info) and slime's
(prompt and label in jsonl; data.label_key = "label"). Each defect is one ValueError that names file, row and column.
No tokenizer and no order: rollout/prompts.py has those.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config import DataConfig

EXTRA_KEYS = ("extra_info", "metadata")


@dataclass(frozen=True)
class Row:
    """One checked row. `where` names file and row for messages: "train.parquet row 12", "train.jsonl line 13"."""

    where: str
    prompt: str | list[dict[str, str]]
    ground_truth: str
    source: str
    extra: dict[str, Any]
    has_table: bool = False
    """The ground truth is a table or a list, as JSON: for a reward function; no built-in rule reads it."""


def read_rows(file: str | Path, data: DataConfig) -> list[Row]:
    """All rows of one file, in its order."""
    path = Path(file)
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of data file; give .parquet or .jsonl")
    if not path.is_file():
        raise ValueError(f"{path}: no such file; see data.train_files and data.val_files")
    rows = [_row(where, values, data) for where, values in readers[path.suffix](path, data)]
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    return rows


def _read_parquet(path: Path, data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            needed = [data.prompt_key, data.label_key]
            needed += [] if data.default_source and data.source_key not in names else [data.source_key]
            for name in needed:
                if names.count(name) != 1:
                    raise ValueError(_column_error(path, name, names, data))
            table = file.read(columns=[name for name in names if name in (*needed, *EXTRA_KEYS)])
        values = table.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {_first_line(error)}") from None
    for index, row in enumerate(values):
        yield f"{path} row {index}", row


def _read_jsonl(path: Path, data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, endless digits, endless nesting
                raise ValueError(f"{where}: not valid JSON: {_first_line(error)}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {_short(row)}")
            for name in (data.prompt_key, data.label_key):
                if name not in row:
                    raise ValueError(_column_error(where, name, list(row), data))
            yield where, row


def _column_error(where: str | Path, name: str, names: list[str], data: DataConfig) -> str:
    options = {data.prompt_key: "prompt_key", data.label_key: "label_key", data.source_key: "source_key"}
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if names.count(name) > 1:
        return f"{where}: column {name!r} occurs {names.count(name)} times"
    remedy = f"set data.{options[name]}" + (" or data.default_source" if name == data.source_key else "")
    return f"{where}: no column {name!r}; {hint}{remedy}; columns: {_short(names, 200)}"


def _row(where: str, values: dict[str, Any], data: DataConfig) -> Row:
    extra: Any = next((values[key] for key in EXTRA_KEYS if values.get(key) is not None), {})
    if not isinstance(extra, dict):
        raise ValueError(f"{where}: column extra_info must be a table, got {_short(extra)}")
    truth, has_table = _ground_truth(f"{where}: column {data.label_key!r}", values[data.label_key])
    return Row(
        where=where,
        prompt=_prompt(f"{where}: column {data.prompt_key!r}", values[data.prompt_key]),
        ground_truth=truth,
        source=_source(where, values.get(data.source_key), data),
        extra=extra,
        has_table=has_table,
    )


def _prompt(where: str, value: Any) -> str | list[dict[str, str]]:
    if isinstance(value, str) and value:
        _check_text(where, value)
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list of chat messages or a string, not empty; got {_short(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"{where}: message {number} must be a table with role and content, got {_short(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{where}: message {number}: {key} must be text, got {_short(message.get(key))}")
            _check_text(where, message[key])
    # Absent fields of other rows come back from parquet as nulls; templates would take them for present.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _ground_truth(where: str, value: Any) -> tuple[str, bool]:
    """As text, and whether it was a table or a list."""
    if isinstance(value, dict):
        if "ground_truth" not in value:
            raise ValueError(f"{where} has no key 'ground_truth'; keys: {_short(list(value), 200)}")
        where, value = f"{where}: ground_truth", value["ground_truth"]
    if has_table := isinstance(value, (dict, list)) and bool(value):
        value = _json(where, value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0
    if not number and not (isinstance(value, str) and value):
        raise ValueError(f"{where} must be text, a finite number, a table or a list, not empty; got {_short(value)}")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)
    _check_text(where, text)
    return text, has_table


def _json(where: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not JSON: {_first_line(error)}") from None


def _source(where: str, value: Any, data: DataConfig) -> str:
    value = data.default_source if value is None else value
    if not isinstance(value, str) or not value:
        remedy = "set data.source_key or data.default_source"
        raise ValueError(f"{where}: column {data.source_key!r} must be text, not empty; got {_short(value)}; {remedy}")
    return value


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair at character {error.start}: no valid text") from None


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
