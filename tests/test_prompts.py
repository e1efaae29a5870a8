"""Data files to prompts: both schemas, order, over-long prompts, and one clear error for each defect."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.config import DataConfig
from launch.tiny_models import write_model, write_tokenizer
from rollout.prompts import PromptSet, load_tokenizer

DATA = DataConfig(max_prompt_tokens=16)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 32, "model_type": "qwen3_moe"}))
    return load_tokenizer(path)


def row(text="0123", **changes):
    values = {
        "data_source": "copy",
        "prompt": [{"role": "user", "content": text}],
        "ability": "copy",
        "reward_model": {"style": "rule", "ground_truth": text},
        "extra_info": {"split": "train", "index": 0},
    }
    return {**values, **changes}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(values) + "\n" for values in rows))
    return path


def prompt_set(path, tokenizer, rows, data=DATA, seed=0):
    return PromptSet([write(path, rows)], tokenizer, data, seed)


def numbered(n):
    return [row(f"{number:04d}") for number in range(n)]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_verl_rows(tmp_path, tokenizer, name):
    prompts = prompt_set(tmp_path / name, tokenizer, numbered(3))
    prompt = prompts.all()[2]
    assert tokenizer.decode(prompt.ids) == "0002="
    assert (prompt.ground_truth, prompt.source, prompt.prompt_id) == ("0002", "copy", 2)
    assert prompt.extra == {"split": "train", "index": 0}
    assert prompts.sources == ["copy"]


def test_slime_rows(tmp_path, tokenizer):
    rows = [
        {"prompt": "12=", "label": "12"},
        {"prompt": [{"role": "user", "content": "7"}], "label": 7, "metadata": {}},
    ]
    data = replace(DATA, label_key="label", default_source="copy")
    first, second = prompt_set(tmp_path / "a.jsonl", tokenizer, rows, data).all()
    assert (tokenizer.decode(first.ids), first.ground_truth, first.source) == ("12=", "12", "copy")
    assert (tokenizer.decode(second.ids), second.ground_truth) == ("7=", "7")


def test_whole_numbers_are_told_without_a_point(tmp_path, tokenizer):
    rows = [row(reward_model={"ground_truth": value}) for value in (72.0, 0.5, 1e300, -3)]
    truths = [prompt.ground_truth for prompt in prompt_set(tmp_path / "a.parquet", tokenizer, rows).all()]
    assert truths == ["72", "0.5", "1e+300", "-3"]


def test_files_are_joined_in_order(tmp_path, tokenizer):
    one, two = write(tmp_path / "1.parquet", numbered(2)), write(tmp_path / "2.jsonl", [row("9999")])
    assert [prompt.ground_truth for prompt in PromptSet([two, one], tokenizer, DATA, 0).all()] == [
        "9999",
        "0000",
        "0001",
    ]


def test_order_is_a_function_of_seed_and_epoch(tmp_path, tokenizer):
    make = lambda seed: prompt_set(tmp_path / "a.jsonl", tokenizer, numbered(10), seed=seed)  # noqa: E731
    order = lambda prompts, epoch: [p.row for s in range(2) for p in prompts.batch(2 * epoch + s, 5)]  # noqa: E731
    prompts = make(0)
    assert sorted(order(prompts, 0)) == list(range(10))
    assert order(prompts, 0) == order(make(0), 0)
    assert len({tuple(order(make(seed), epoch)) for seed in (0, 1, -1) for epoch in (0, 1)}) == 6
    # Fixed for ever: a resumed run on another numpy must draw the same prompts.
    assert order(prompts, 0) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]


def test_prompt_ids_count_draws(tmp_path, tokenizer):
    prompts = prompt_set(tmp_path / "a.jsonl", tokenizer, numbered(10))
    ids = [prompt.prompt_id for step in range(6) for prompt in prompts.batch(step, 3)]
    assert ids == list(range(18))
    assert [prompts.epoch_of(step, 3) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_last_incomplete_batch(tmp_path, tokenizer):
    dropped = prompt_set(tmp_path / "a.jsonl", tokenizer, numbered(10))
    assert dropped.steps_per_epoch(4) == 2
    assert dropped.describe(4) == "10 prompts, 2 steps an epoch of 4; the last 2 are dropped"
    kept = prompt_set(tmp_path / "a.jsonl", tokenizer, numbered(10), replace(DATA, incomplete_batch="keep"))
    assert [len(kept.batch(step, 4)) for step in range(4)] == [4, 4, 2, 4]
    assert sorted(p.row for step in range(3) for p in kept.batch(step, 4)) == list(range(10))
    with pytest.raises(ValueError, match="data.prompts_per_step = 11 exceeds the 10 prompts"):
        dropped.steps_per_epoch(11)


def test_file_order_without_shuffle(tmp_path, tokenizer):
    prompts = prompt_set(tmp_path / "a.jsonl", tokenizer, numbered(4), replace(DATA, shuffle=False))
    assert [p.row for p in prompts.batch(3, 2)] == [2, 3]
    assert [p.row for p in prompts.all(3)] == [0, 1, 2]


@pytest.mark.parametrize(("rule", "expected"), [("left", "56789="), ("right", "012345"), ("middle", "01289=")])
def test_cuts_of_overlong_prompts(tmp_path, tokenizer, rule, expected):
    data = replace(DATA, max_prompt_tokens=6, overlong_prompts=rule)
    rows = [row("0123456789"), row("1")]
    prompts = prompt_set(tmp_path / "a.jsonl", tokenizer, rows, data)
    assert [tokenizer.decode(prompt.ids) for prompt in prompts.all()] == [expected, "1="]


def test_overlong_prompts_are_filtered_and_counted(tmp_path, tokenizer):
    rows = [row("1"), row("0123456789"), row("2")]
    prompts = prompt_set(tmp_path / "a.jsonl", tokenizer, rows, replace(DATA, max_prompt_tokens=6))
    assert [prompt.ground_truth for prompt in prompts.all()] == ["1", "2"]
    counted = f"1 of 3 prompts are longer than data.max_prompt_tokens = 6 and were dropped, the first is {tmp_path}"
    assert prompts.describe().startswith(f"2 prompts ({counted}/a.jsonl line 2)")
    assert prompts.describe(2).endswith("), 1 steps an epoch of 2")


def test_overlong_prompts_as_an_error_name_the_first(tmp_path, tokenizer):
    data = replace(DATA, max_prompt_tokens=6, overlong_prompts="error")
    with pytest.raises(ValueError, match=r"1 of 2 prompts are longer .* = 6, the first is \S+a.jsonl line 2; raise it"):
        prompt_set(tmp_path / "a.jsonl", tokenizer, [row("1"), row("0123456789")], data)
    with pytest.raises(ValueError, match="2 of 2 prompts are longer"):
        prompt_set(tmp_path / "a.jsonl", tokenizer, numbered(2), replace(DATA, max_prompt_tokens=2))


def test_chat_template_arguments_pass_through(tmp_path, tokenizer):
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{% if enable_thinking is defined and not enable_thinking %}00{% endif %}"
    try:
        data = replace(DATA, chat_template_kwargs={"enable_thinking": False})
        assert tokenizer.decode(prompt_set(tmp_path / "a.jsonl", tokenizer, [row("1")], data).all()[0].ids) == "1=00"
    finally:
        tokenizer.chat_template = template


BAD_ROWS = [
    ({"prompt": None}, "column 'prompt' must be a list of chat messages"),
    ({"prompt": []}, "column 'prompt' must be a list"),
    ({"prompt": ""}, "column 'prompt' must be a list"),
    ({"prompt": 5}, "column 'prompt' must be a list"),
    ({"prompt": ["hello"]}, "column 'prompt': message 0 must be a table"),
    ({"prompt": [{"role": "user"}]}, "column 'prompt': message 0: content must be text"),
    ({"prompt": [{"content": "1"}]}, "column 'prompt': message 0: role must be text"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content must be text"),
    ({"prompt": [{"role": "user", "content": "Z"}]}, "column 'prompt' cannot be tokenised"),
    ({"prompt": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ({"reward_model": None}, "column 'reward_model' must be text, a finite number"),
    ({"reward_model": {"style": "rule"}}, "column 'reward_model' has no key 'ground_truth'"),
    ({"reward_model": {"ground_truth": []}}, "ground_truth must be text"),
    ({"reward_model": {"ground_truth": ""}}, "ground_truth must be text"),
    ({"reward_model": float("nan")}, "must be text, a finite number"),
    ({"reward_model": True}, "must be text, a finite number"),
    ({"data_source": None}, "column 'data_source' must be text"),
    ({"data_source": 3}, "column 'data_source' must be text"),
    ({"extra_info": "x"}, "column extra_info must be a table"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ROWS)
def test_bad_rows_are_named(tmp_path, tokenizer, changes, message):
    with pytest.raises(ValueError) as caught:
        prompt_set(tmp_path / "a.jsonl", tokenizer, [row(), row(**changes)])
    assert f"{tmp_path / 'a.jsonl'} line 2: " in str(caught.value)
    assert message in str(caught.value)


def test_bad_files_are_named(tmp_path, tokenizer):
    load = lambda name: PromptSet([tmp_path / name], tokenizer, DATA, 0)  # noqa: E731
    for name, content, message in [
        ("a.txt", b"", "unknown kind of data file"),
        ("empty.jsonl", b"\n", "the file has no rows"),
        ("bad.jsonl", b"{", "line 1: not valid JSON"),
        ("list.jsonl", b"[1]", "line 1: expected a JSON object"),
        ("latin.jsonl", b'{"prompt": "\xff"}', "line 1: not valid JSON"),
        ("deep.jsonl", b"[" * 100_000, "line 1: not valid JSON"),
        ("bad.parquet", b"PAR1 no", "not a readable parquet file"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            load(name)
        assert name in str(caught.value)
    with pytest.raises(ValueError, match="missing.parquet: no such file"):
        load("missing.parquet")
    with pytest.raises(ValueError, match="data.train_files is empty"):
        PromptSet([], tokenizer, DATA, 0)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_missing_columns_are_named(tmp_path, tokenizer, name):
    rows = [{("prompts" if key == "prompt" else key): value for key, value in row().items()}]
    with pytest.raises(ValueError, match="no column 'prompt'; did you mean 'prompts'.*data.prompt_key"):
        prompt_set(tmp_path / name, tokenizer, rows)
    rows = [{key: value for key, value in row().items() if key != "data_source"}]
    with pytest.raises(ValueError, match="column 'data_source'.*data.default_source"):
        prompt_set(tmp_path / name, tokenizer, rows)


def test_messages_without_a_template(tmp_path, tokenizer):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            prompt_set(tmp_path / "a.jsonl", tokenizer, [row()])
    finally:
        tokenizer.chat_template = template


def test_tokenizer_larger_than_the_embedding(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 31, "model_type": "qwen3_moe"}))
    with pytest.raises(ValueError, match="ids up to 31, the embedding only 31 rows"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer(tmp_path):
    write_model(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


JUNK = [None, "", "x", "12", 0, -1, 1.5, float("inf"), True, [], {}, [None], {"a": 1}, "\ud800", "Z" * 50, 10**30]


def mutate(value, random_source):
    """The same value with one random place replaced, removed, renamed or repeated."""
    if isinstance(value, dict) and value and random_source.random() < 0.85:
        key = random_source.choice(list(value))
        kind = random_source.randrange(6)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return {(name + "_" if name == key else name): item for name, item in value.items()}
        return {**value, key: mutate(value[key], random_source)}
    if isinstance(value, list) and value and random_source.random() < 0.85:
        return [mutate(value[0], random_source), *value[1:]] if random_source.random() < 0.8 else value * 2
    return random_source.choice(JUNK)


def mutated_file(path, number):
    random_source = random.Random(number)
    rows = numbered(4)
    target = random_source.randrange(4)
    if path.suffix == ".parquet":
        # One type per column: the whole column changes, or bytes of the file do.
        mutated = mutate(rows[target], random_source)
        try:
            write(path, [mutated if isinstance(mutated, dict) else {}] * 4)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError):
            write(path, rows)
        spread = random_source.random() < 0.4
    else:
        rows[target] = mutate(rows[target], random_source)
        write(path, rows)
        spread = random_source.random() < 0.3
    if spread:
        content = bytearray(path.read_bytes())
        for _ in range(random_source.randrange(1, 4)):
            content[random_source.randrange(len(content))] = random_source.randrange(256)
        path.write_bytes(bytes(content[: random_source.choice([len(content), len(content) // 2])]))
    return path


def test_mutated_files_are_accepted_or_refused_in_one_message(tmp_path, tokenizer):
    outcomes = Counter()
    for number in range(300):
        path = mutated_file(tmp_path / f"rows{number}.{'parquet' if number % 2 else 'jsonl'}", number)
        try:
            PromptSet([path], tokenizer, DATA, 0).batch(0, 1)
            outcomes["accepted"] += 1
        except ValueError as error:
            assert path.name in str(error), (number, str(error))
            assert len(str(error).splitlines()) <= 5, (number, str(error))
            known = ("column", "JSON", "parquet", "no rows", "longer than data.max_prompt_tokens")
            assert any(word in str(error) for word in known), (number, str(error))
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50, outcomes
