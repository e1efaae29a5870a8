"""launch/config.py, option_text.py, options.py, checks.py: every accepted form, every refusal with its message."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Union

import pytest

from launch.checks import CHOICES, RANGES
from launch.config import (
    Config,
    ConfigError,
    answer,
    check,
    check_model,
    check_passthrough,
    check_world,
    help_text,
    load,
    options,
    show,
    to_toml,
)

ROOT = Path(__file__).parent.parent
VALID = ["model.path=m", 'data.train_files=["a.parquet"]']
MESSAGE_LINES = 5


def refusal(call: Any, *arguments: Any) -> str:
    """The one message of a refused call."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and len(message.splitlines()) <= MESSAGE_LINES and len(message) < 700, message
    return message


def recipe(tmp_path: Path, text: str | bytes, name: str = "recipe.toml") -> str:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def checked(*overrides: str) -> str:
    """Message of check() for a valid config with these overrides."""
    return refusal(check, load([*VALID, *overrides]))


# Loading


def test_nothing_gives_the_defaults() -> None:
    assert load([]) == Config()


def test_files_merge_left_to_right_and_overrides_win_anywhere(tmp_path: Path) -> None:
    first = recipe(tmp_path, "seed = 1\n[train]\ntp = 2\npp = 4\n[rollout.vllm]\na = 1\nb = 2\n", "first.toml")
    second = recipe(tmp_path, "seed = 2\n[train]\npp = 8\n[rollout.vllm]\nb = 3\nc = [4]\n", "second.toml")
    config = load(["train.tp=16", first, second, "rollout.vllm.c=[5, 6]"])
    assert (config.seed, config.train.tp, config.train.pp) == (2, 16, 8)
    assert config.rollout.vllm == {"a": 1, "b": 3, "c": [5, 6]}
    assert load([second, first]).train.pp == 4


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.lr=2e-6", "train.lr", 2e-6),
        ("--train.lr=2e-6", "train.lr", 2e-6),
        ("train.lr = 1", "train.lr", 1.0),
        ("train.lr=-0.0", "train.lr", 0.0),
        ("world=1_000", "world", 1000),
        ("rollout.top_k=-1", "rollout.top_k", -1),
        ("rollout.expert_parallel=true", "rollout.expert_parallel", True),
        ("run_dir=runs/a=b", "run_dir", "runs/a=b"),
        ("run_dir=5", "run_dir", "5"),
        ("run_dir=true", "run_dir", "true"),
        ("run_dir=2026-01-02", "run_dir", "2026-01-02"),
        ('run_dir="5"', "run_dir", "5"),
        ("run_dir='none'", "run_dir", "none"),
        ("run_dir=", "run_dir", ""),
        ("run_dir=a\nseed = 3", "run_dir", "a\nseed = 3"),
        ('data.train_files=["a", "b"]', "data.train_files", ["a", "b"]),
        ("rollout.stop_token_ids=[1, 2]", "rollout.stop_token_ids", [1, 2]),
        ("train.recompute=full", "train.recompute", "full"),
        ('train.recompute="full"', "train.recompute", "full"),
        ("train.offload=['params', 'optimizer']", "train.offload", ["params", "optimizer"]),
        ("algorithm.kl_estimator=k3+", "algorithm.kl_estimator", "k3+"),
        ("checkpoint.resume=none", "checkpoint.resume", "none"),
        ("checkpoint.resume=runs/x/step_000010", "checkpoint.resume", "runs/x/step_000010"),
        ("reward.weights={acc = 1, format = 0.5}", "reward.weights", {"acc": 1.0, "format": 0.5}),
        ("reward.weights.acc=2", "reward.weights", {"acc": 2.0}),
        ("data.chat_template_kwargs.enable_thinking=false", "data.chat_template_kwargs", {"enable_thinking": False}),
        ("rollout.vllm.eplb_config.window_size=10", "rollout.vllm", {"eplb_config": {"window_size": 10}}),
        ("rollout.vllm={a = [{b = 1}], c = 1.5}", "rollout.vllm", {"a": [{"b": 1}], "c": 1.5}),
        ("rollout.vllm.date=2026-01-02", "rollout.vllm", {"date": "2026-01-02"}),
        ("train={tp = 2}", "train.tp", 2),
    ],
)
def test_override_values(override: str, path: str, value: Any) -> None:
    found: Any = load([override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_none_clears_options_sections_and_pass_through_keys(tmp_path: Path) -> None:
    text = "[train]\ntp = 2\nlr = 1.0\nrecompute = 'full'\n[rollout.vllm]\na = 1\nb = {c = 1, d = 2}\n"
    file = recipe(tmp_path, text)
    assert load([file, "train.lr=none"]).train.lr == Config().train.lr
    assert load([file, "train.recompute=none"]).train.recompute == "none"
    assert load([file, "train=none", "train.pp=2"]).train == dataclasses.replace(Config().train, pp=2)
    assert load([file, "rollout.vllm.b.c=none"]).rollout.vllm == {"a": 1, "b": {"d": 2}}
    assert load([file, "rollout.vllm=none"]).rollout.vllm == {}
    assert load([file, "rollout.vllm.a.x.y=none", "rollout.vllm.z=none"]).rollout.vllm["a"] == 1
    assert load([file, "checkpoint.resume=None"]).checkpoint.resume == "none"
    assert "train.tpp" in refusal(load, [file, "train.tpp=none"])


def test_a_loaded_config_shares_nothing_with_the_next() -> None:
    load([]).rollout.vllm["x"] = 1
    assert load([]).rollout.vllm == {} and Config().rollout.vllm == {}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.tpp=2", "'train.tp'"),
        ("lr=1e-6", "'train.lr'"),
        ("train.temperature=1", "'rollout.temperature' or 'eval.temperature'"),
        ("rolout.tp=2", "'rollout'"),
        ("trian={tp = 2}", "'train"),
        ("train.optimizer.lr=1", "'train.lr'"),
        ("train.micro-batch-tokens=1", "'train.micro_batch_tokens'"),
        ("zzz=1", "did you mean '"),
        ("=1", "did you mean '"),
        ("train.=1", "did you mean '"),
        ("model.path.x=1", "model.path is str, not a table"),
        ("data.train_files.x=1", "data.train_files is list, each str, not a table"),
    ],
)
def test_unknown_names_say_the_nearest(override: str, nearest: str) -> None:
    message = refusal(load, [override])
    assert message.startswith("unknown option ") and nearest in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.tp=fast", ["train.tp must be int, got 'fast'"]),
        ("train.tp=1.0", ["train.tp must be int, got 1.0"]),
        ("train.tp=true", ["train.tp must be int, got true"]),
        ('train.tp="2"', ["train.tp must be int, got '2'", "without quotes"]),
        ("train.tp=99999999999999999999", ["train.tp must be int", "64 bits"]),
        ("train.lr=true", ["train.lr must be float, got true"]),
        ("train.lr=nan", ["train.lr must be float, got nan", "refused"]),
        ("train.lr=-inf", ["train.lr must be float, got -inf"]),
        ("train.lr=1e999", ["train.lr must be float, got inf"]),
        ("train.lr=1" + "0" * 400, ["train.lr must be float"]),
        ("data.shuffle=1", ["data.shuffle must be true or false, got 1"]),
        ("data.shuffle=True", ["data.shuffle must be true or false, got 'True'"]),
        ("train.recompute=ful", ["must be one of none, selective, full, got 'ful'; did you mean full?"]),
        ("train.recompute=1", ["must be one of none, selective, full, got '1'"]),
        ("data.train_files=a.parquet", ["data.train_files must be list, each str", "'a.parquet'", '["a", "b"]']),
        ("data.train_files=[1]", ["data.train_files[0] must be str, got 1"]),
        ("train.offload=['params', 'grads']", ["train.offload[1] must be one of params, optimizer, got 'grads'"]),
        ("rollout.stop_token_ids=[1, true]", ["rollout.stop_token_ids[1] must be int"]),
        ("reward.weights.acc=high", ["reward.weights.acc must be float, got 'high'"]),
        ("train=3", ["train must be table, got 3"]),
        ("rollout.vllm=3", ["rollout.vllm must be table, got 3"]),
        ("rollout.vllm.x=nan", ["rollout.vllm.x must be float, got nan"]),
        ("rollout.vllm.x=[2026-01-02]", ["rollout.vllm.x[0] must be", "quote dates"]),
        ("rollout.vllm.x=" + "[" * 30 + "]" * 30, ["rollout.vllm.x[0]", "nested deeper than 20"]),
        ("rollout.vllm." + ".".join("a" * 30) + "=1", ["nested deeper than 20"]),
        ("run_dir=a\udc80b", ["is not UTF-8"]),
        ("run_dir={a = 1}", []),
    ],
)
def test_wrong_values(override: str, parts: list[str]) -> None:
    if not parts:
        assert load([override]).run_dir == override.partition("=")[2]
        return
    message = refusal(load, [override])
    assert all(part in message for part in parts), message


def test_flags_and_bare_names() -> None:
    assert "unknown flag '--train.lr'" in refusal(load, ["--train.lr", "2e-6"])
    assert "train.lr=VALUE" in refusal(load, ["train.lr", "2e-6"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train]\ntp = 2\npp = \n", ["not valid TOML", "line 3"]),
        ("[train]\ntp = 2\ntp = 3\n", ["not valid TOML", "line 3"]),
        (b"[train]\n# caf\xe9\n", ["line 2 is not UTF-8 (byte 0xe9)"]),
        ("[train]\ntpp = 2\n", ["unknown option 'train.tpp'; did you mean 'train.tp'?"]),
        ("[train]\nlr = '1e-6'\n", ["train.lr must be float, got '1e-6'; write it without quotes"]),
        ("train = 1\n", ["train must be table"]),
        ("[[train]]\ntp = 1\n", ["train must be table"]),
        ("[rollout.vllm]\nx = 2026-01-02\n", ["rollout.vllm.x must be", "quote dates"]),
        ("run_dir = 12:30:45\n", ["run_dir must be str", "quote dates"]),
        ("[rollout]\nvllm = " + "[" * 5000, ["nested deeper than 20"]),
        ("seed = " + "9" * 5000, ["seed"]),
        ('["train\\nx"]\n', ["unknown option"]),
        ("x" * 5000 + " = 1", ["unknown option"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    file = recipe(tmp_path, text)
    message = refusal(load, [file])
    if "9999" in str(text):  # Python's limit of digits speaks before the option can
        parts = ["not valid TOML"] if "digits" in message else parts
    assert message.startswith(f"{file}: ") and all(part in message for part in parts), message


def test_mistakes_in_an_earlier_file_are_not_hidden_by_a_later_one(tmp_path: Path) -> None:
    first = recipe(tmp_path, "train = 3\n", "first.toml")
    second = recipe(tmp_path, "[train]\ntp = 2\n", "second.toml")
    assert refusal(load, [first, second]).startswith(first)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    recipe(tmp_path, "", "quickstart.toml")
    message = refusal(load, [str(tmp_path / "quikstart.toml")])
    assert "no such recipe file" in message and str(tmp_path / "quickstart.toml") in message
    assert "no such recipe file" in refusal(load, [str(tmp_path / "nowhere" / "x.toml")])
    assert "Is a directory" in refusal(load, [str(tmp_path)])
    assert refusal(load, ["x" * 300]).count("cannot be read") == 1
    assert load([recipe(tmp_path, "", "a=b.toml")]) == Config()


# Writing


def exact(config: Config) -> str:
    """Text that tells 1, 1.0 and true apart, and not the order of keys."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["int", "float", "bool", "str"] + (["list", "table"] if depth < 4 else [])
    kind = rng.choice(kinds)
    if kind == "int":
        return rng.choice([0, -1, 2**63 - 1, -(2**63), rng.randrange(10**6)])
    if kind == "float":
        return rng.choice([0.0, 1e-6, 1e22, -1.5, 5e-324, 1.7976931348623157e308, rng.random()])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        return random_text(rng)
    if kind == "list":
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {random_text(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_text(rng: random.Random) -> str:
    alphabet = "ab.-_ =\"'#[]{}\\\n\r\t\x00\x1f\x7f\x85\u2028\u00e9\u4e2d\U0001f600"
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(6)))


def test_round_trip_of_any_pass_through_and_text(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(300):
        table = {random_text(rng): random_value(rng) for _ in range(4)}
        base = Config(run_dir=random_text(rng))
        config = dataclasses.replace(
            base,
            train=dataclasses.replace(base.train, megatron=table, lr=rng.random() * 1e-5),
            rollout=dataclasses.replace(base.rollout, vllm={"x": table}, stop=[random_text(rng)]),
            reward=dataclasses.replace(base.reward, weights={random_text(rng): 1.0}),
        )
        for text in (to_toml(config), show(config)):
            again = load([recipe(tmp_path, text)])
            assert again == config and exact(again) == exact(config)


def test_round_trip_keeps_every_option_when_all_differ_from_their_defaults(tmp_path: Path) -> None:
    chosen = {name: option for name, option in options().items() if name != "shrink"}  # it changes the others
    config = load([f"{name}={other(option.kind, option.default)}" for name, option in chosen.items()])
    again = load([recipe(tmp_path, to_toml(config))])
    assert exact(again) == exact(config)
    changed = [line for line in show(config).splitlines() if "  # default " in line]
    tables = sum(isinstance(option.default, dict) for option in chosen.values())
    assert len(changed) == len(chosen) - tables
    assert "# default" not in show(Config())


def other(kind: Any, default: Any) -> str:
    """Text of a value of this type that is not the default."""
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, (int, float)):
        return repr(default + 1)
    if isinstance(default, dict):
        return "{x = 1}"
    if isinstance(default, list):
        return {"list[int]": "[7]", "list[str]": '["x"]'}.get(str(kind), '["params"]')
    choices = [choice for choice in getattr(kind, "__args__", ()) if isinstance(choice, str) and choice != default]
    return choices[0] if choices else "other"


def test_programs_cannot_write_what_toml_cannot_hold() -> None:
    config = dataclasses.replace(Config(), rollout=dataclasses.replace(Config().rollout, vllm={"x": None}))
    assert "None cannot be written as TOML" in refusal(to_toml, config)


# Help


def test_every_option_has_help_and_a_type() -> None:
    text = help_text()
    assert len(options()) > 100
    for name, option in options().items():
        assert option.help.strip() and "\n" not in option.help.strip(), f"{name} has no sentence"
        assert f"\n{name} = " in text and option.help in text
    assert text.startswith("usage: trainer.py")


def test_help_of_a_section_of_an_option_and_of_nothing() -> None:
    assert help_text("train.optimizer").splitlines()[0] == "train.optimizer.weight_decay = 0.01    (float)"
    assert "train.optimizer.beta1" in help_text("train") and "rollout.tp" not in help_text("train")
    assert help_text("train.tp").startswith("train.tp = 1    (int)\n    Tensor parallel size")
    assert 'checkpoint.resume = "auto"    (one of auto, none, or str)' in help_text("checkpoint")
    assert "did you mean train?" in refusal(help_text, "trian")
    assert "sections: " in refusal(help_text, "7")


def test_answer(tmp_path: Path) -> None:
    file = recipe(tmp_path, "[train]\nlr = 2e-6\n")
    assert answer([file, "seed=1"]) is None
    assert answer(["--help"]) == answer(["-h"]) == answer([file, "--help"]) == help_text()
    assert answer([file, "--help", "train"]) == help_text("train")
    shown = answer([file, "--show", "seed=1"])
    assert shown and "lr = 2e-06  # default 1e-06" in shown and "seed = 1  # default 0" in shown
    assert "--nonsense" in refusal(answer, ["--show", "--nonsense"])


def test_config_needs_no_torch_and_no_time() -> None:
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "megatron", "numpy", "transformers", "torch_npu"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from launch.config import check, load, help_text, show
help_text(); show(load(["train.tp=2"])); check(load(["model.path=m", 'data.train_files=["a"]']))
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3  # processor time: others run too


# Mutations


def mutate(rng: random.Random, text: bytes) -> bytes:
    """One to three edits: bytes, lines, and values that are legal TOML of the wrong kind."""
    values = [
        b"nan",
        b"-1",
        b"true",
        b"'x'",
        b"[]",
        b"{}",
        b"2026-01-02",
        b"1e400",
        b"9" * 30,
        b'"\\ud800"',
        b"[[[",
        b"",
    ]
    for _ in range(rng.randint(1, 3)):
        lines = text.split(b"\n")
        at, spot = rng.randrange(len(lines)), rng.randrange(len(text) + 1)
        edit = rng.randrange(7)
        if edit == 0:
            text = text[:spot] + bytes([rng.randrange(256)]) + text[spot + 1 :]
        elif edit == 1:
            text = text[:spot] + text[spot + rng.randrange(20) :]
        elif edit == 2:
            text = (
                text[:spot] + rng.choice([b"\x00", b"\r", b'"', b"[", b"]", b".", b"=", b"\xff", b"\n"]) + text[spot:]
            )
        elif edit == 3:
            text = b"\n".join([*lines[:at], lines[rng.randrange(len(lines))], *lines[at:]])
        elif edit == 4:
            text = b"\n".join([*lines[:at], *lines[at + 1 :]])
        else:
            key, equals, _ = lines[at].partition(b"=")
            lines[at] = key + equals + b" " + rng.choice(values) if equals else lines[at][::-1]
            text = b"\n".join(lines)
    return text


def test_500_mutations_of_a_valid_file_are_accepted_or_refused_with_one_message(tmp_path: Path) -> None:
    rng = random.Random(20240607)
    valid = load([*VALID, "rollout.vllm={a = 1, b = {c = ['x', 1.5]}}", "train.megatron.moe_aux_loss_coeff=0.01"])
    text, counts = to_toml(valid).encode(), {"accepted": 0, "refused": 0}
    shape = SimpleNamespace(**MOE)
    for number in range(500):
        file = recipe(tmp_path, mutate(rng, text))
        try:
            config = load([file])
        except ConfigError as error:
            assert str(error).startswith(f"{file}: ") and len(str(error).splitlines()) <= MESSAGE_LINES, (number, error)
            counts["refused"] += 1
            continue
        assert exact(load([recipe(tmp_path, to_toml(config), "again.toml")])) == exact(config)
        try:
            check(config)
            check_world(config, 8)
            check_model(config, shape)
        except ConfigError as error:
            assert str(error) and len(str(error).splitlines()) <= MESSAGE_LINES, (number, error)
            counts["refused"] += 1
        else:
            counts["accepted"] += 1
    assert counts["accepted"] > 25 and counts["refused"] > 150, counts


# Rules of the config


def test_the_rules_accept_valid_configs() -> None:
    check(load(VALID))
    check(
        load([*VALID, "train.pp=2", "train.vpp=2", "train.etp=1", "algorithm.kl_reward=0.1", "algorithm.kl_target=0.2"])
    )
    check(
        load([*VALID, "rollout.expert_parallel=true", "rollout.dp=8", "rollout.tp=8", "rollout.redundant_experts=16"])
    )
    check(load([*VALID, "rollout.top_p=0.9", "algorithm.old_log_probs=recompute"]))
    check(load([*VALID, "algorithm.correction=icepop", "train.mini_batches=4"]))
    check(load([*VALID, "eval.top_p=0.7", "eval.every_steps=0", "algorithm.overlong_penalty=2.0"]))
    check(load([*VALID, "reward.function=my.rules:score", "reward.weights.acc=1", "log.hook=a:b"]))
    check(load([*VALID, "reward.function=some/where/rules.py:score", "reward.workers=4", "reward.memory_mib=64"]))


def test_every_number_has_a_range_and_every_row_names_options() -> None:
    named = [name for _, _, names in RANGES for name in names.split()]
    assert len(named) == len(set(named)) and set(named) <= set(options())
    numbers = {name for name, option in options().items() if type(option.default) in (int, float)}
    numbers |= {name for name, option in options().items() if option.kind == list[int]}
    assert numbers <= set(named), numbers - set(named)
    assert {name for row in CHOICES for name in row[:2]} <= set(options())
    for _, choice, users in CHOICES:
        assert set(users.split()) <= set(options()[choice].kind.__args__)


@pytest.mark.parametrize(
    "override",
    [
        *("train.tp=0", "train.tp=-1", "seed=-1", "seed=4294967296", "train.etp=-1", "rollout.temperature=0"),
        *("rollout.top_p=0", "rollout.top_p=1.1", "rollout.top_k=0", "rollout.min_p=-0.1", "rollout.min_p=2"),
        *("algorithm.dual_clip=1", "algorithm.dual_clip=0.5", "train.optimizer.beta2=1", "train.optimizer.eps=0"),
        *("algorithm.gamma=1.5", "log.samples_per_step=-2", "rollout.stop_token_ids=[-1]", "log.profile_steps=[0]"),
        *("run_dir=", "rollout.stop=['']", "checkpoint.keep=0", "reward.timeout_s=0", "data.prompts_per_step=0"),
        *("data.prompt_key=", "checkpoint.resume=", "runtime.debug_rank=-2", "total_epochs=0", "total_steps=-1"),
    ],
)
def test_ranges(override: str) -> None:
    name, _, value = override.partition("=")
    message = checked(override)
    assert message.startswith(f"{name} must be ") and "got" in message and value.strip("[]'") in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.path="], ["model.path is empty"]),
        (["data.train_files=[]"], ["data.train_files is empty"]),
        (["eval.every_steps=5"], ["eval.every_steps", "data.val_files is empty"]),
        (["eval.before_training=true"], ["eval.before_training", "data.val_files is empty"]),
        (
            ["data.prompts_per_step=100", "train.mini_batches=8"],
            ["100 is not a multiple of train.mini_batches = 8", "96 or 104 prompts", "5 or 10 mini-batches"],
        ),
        (["data.prompts_per_step=3", "train.mini_batches=4"], ["use 4 prompts, or 3 mini-batches"]),
        (
            ["train.micro_batch_tokens=1000", "train.tp=3", "train.cp=2"],
            ["1024 + 1024 = 2048 tokens (2052 as a multiple of 12)", "1000 * 2 = 2000", "micro_batch_tokens >= 1026"],
        ),
        (["train.vpp=2"], ["train.vpp = 2 needs train.pp > 1"]),
        (["train.first_stage_layers=3"], ["train.first_stage_layers = 3 needs train.pp > 1"]),
        (["train.last_stage_layers=3"], ["train.last_stage_layers = 3 needs train.pp > 1"]),
        (
            ["train.order=tp-cp-ep-pp-dp", "train.pp=2", "train.tp=2", "train.ep=4", "train.etp=1"],
            ["needs tp*cp = ep*etp", "2*1 = 2 and 4*1 = 4", "use train.order = tp-cp-ep-dp-pp"],
        ),
        (["train.optimizer.min_lr=1", "train.optimizer.lr_schedule=cosine"], ["min_lr = 1.0 exceeds train.lr = 1e-06"]),
        (["train.offload=['params', 'params']"], ["train.offload names params more than once"]),
        (["train.spec=te", "runtime.device=cpu"], ["train.spec = te cannot run"]),
        (["rollout.dp=2"], ["rollout.dp = 2 needs rollout.expert_parallel = true"]),
        (["rollout.redundant_experts=2"], ["rollout.redundant_experts = 2 needs rollout.expert_parallel"]),
        (["rollout.redundant_experts=2", "rollout.expert_parallel=true"], ["rollout.tp*dp > 1 (it is 1)"]),
        (["rollout.routing_replay=R2", "algorithm.old_log_probs=rollout"], ["R2 records routes", "use R3"]),
        (
            ["rollout.top_p=0.9", "rollout.top_k=5", "algorithm.correction=token"],
            [
                "algorithm.correction = token",
                "rollout.top_p = 0.9 and rollout.top_k = 5",
                "algorithm.correction = none",
            ],
        ),
        (["rollout.min_p=0.1", "algorithm.correction=sequence_mask"], ["rollout.min_p = 0.1"]),
        (["rollout.top_p=0.9", "algorithm.old_log_probs=rollout"], ["algorithm.old_log_probs = rollout", "auto"]),
        (["algorithm.advantage=rloo", "rollout.samples_per_prompt=1"], ["advantage = rloo compares", ">= 2, not 1"]),
        (["algorithm.dynamic_sampling=true", "rollout.samples_per_prompt=1"], ["dynamic_sampling compares"]),
        (["algorithm.kl_target=0.1"], ["algorithm.kl_target = 0.1 adapts kl_reward, which is 0"]),
        (["algorithm.overlong_buffer_tokens=1025"], ["1025 exceeds data.max_response_tokens = 1024"]),
        (["algorithm.correction=icepop", "algorithm.correction_low=2"], ["correction_low = 2.0 must be below", "2.0"]),
        (["algorithm.correction=token", "algorithm.old_log_probs=rollout"], ["correction = token has no effect"]),
        (["algorithm.gamma=0.9"], ["algorithm.gamma = 0.9 has no effect", "advantage = grpo", "to reinforce_pp"]),
        (["algorithm.norm_by_std=false", "algorithm.advantage=rloo"], ["norm_by_std", "grpo or grpo_passk"]),
        (["algorithm.sapo_tau_negative=2"], ["sapo_tau_negative = 2.0 has no effect", "policy_loss = clip"]),
        (["algorithm.aggregation_norm_tokens=5"], ["aggregation = token-mean", "to seq-mean-token-sum-norm"]),
        (["train.optimizer.min_lr=1e-9"], ["min_lr = 1e-09 has no effect", "linear or cosine"]),
        (["train.optimizer.kind=sgd", "train.optimizer.beta1=0.5"], ["beta1 = 0.5 has no effect"]),
        (["algorithm.policy_loss=sapo", "algorithm.clip_high=0.3"], ["clip_high = 0.3 has no effect", "= sapo"]),
        (["algorithm.policy_loss=gspo", "algorithm.dual_clip=10"], ["dual_clip = 10.0 has no effect", "to clip"]),
        (["algorithm.correction=token", "algorithm.correction_low=0.1"], ["correction_low = 0.1 has no effect"]),
        (["algorithm.correction_high=5"], ["correction_high = 5.0 has no effect", "correction = none"]),
        (["reward.url=http://h", "reward.workers=3"], ["reward.workers has no effect with reward.url"]),
        (["reward.function=a:b", "reward.gsm8k_mode=flexible"], ["gsm8k_mode has no effect with reward.function"]),
        (["log.hook=a/b.py:c"], ["log.hook must be package.module:function, got"]),
        (
            ["reward.function=score"],
            ["reward.function must be package.module:function or file.py:function, got 'score'"],
        ),
        (["log.hook=a.b:"], ["log.hook must be package.module:function"]),
        (["reward.function=a:b", "reward.url=http://h"], ["exclude each other"]),
        (["reward.weights.acc=1"], ["reward.weights", "built-in rules give one number"]),
        (["reward.url=ftp://h"], ["reward.url must begin with http", "'ftp://h'"]),
        (["log.profile_steps=[1]", "log.profile_ranks=[]"], ["log.profile_ranks is empty"]),
        (["world=12", "train.tp=8"], ["train.tp*pp*cp = 8*1*1 = 8 does not divide 12 ranks"]),
    ],
)
def test_impossible_combinations(overrides: list[str], parts: list[str]) -> None:
    message = checked(*overrides)
    assert all(part in message for part in parts), message


# The world


def test_world_messages_have_the_arithmetic_and_the_nearest_worlds() -> None:
    config = load(["train.tp=4", "train.pp=8"])
    assert refusal(check_world, config, 120) == (
        "train.tp*pp*cp = 4*8*1 = 32 does not divide 120 ranks; use 96 or 128 ranks, or change train.tp or pp or cp"
    )
    assert "use 32 ranks" in refusal(check_world, config, 4)
    config = load(["train.tp=4", "train.ep=8", "train.etp=1", "rollout.tp=3"])
    assert "train.ep*etp*pp = 8*1*1 = 8 does not divide 12 ranks; use 24 ranks" in refusal(check_world, config, 12)
    assert "rollout.tp*dp = 3*1 = 3 does not divide 8 ranks; use 24 ranks" in refusal(check_world, config, 8)
    check_world(config, 24)


def test_etp_zero_is_tp() -> None:
    assert "train.ep*etp*pp = 2*4*1 = 8" in refusal(check_world, load(["train.tp=4", "train.ep=2"]), 4)


def test_every_nearest_world_is_valid_and_none_lies_between() -> None:
    def fits(config: Config, world: int) -> bool:
        try:
            check_world(config, world)
        except ConfigError:
            return False
        return True

    rng = random.Random(1)
    for _ in range(200):
        sizes = {name: rng.choice([1, 2, 3, 4, 8]) for name in ("tp", "pp", "cp", "ep", "etp")}
        config = load([*(f"train.{k}={v}" for k, v in sizes.items()), f"rollout.tp={rng.choice([1, 2, 4, 16])}"])
        world = rng.randint(1, 300)
        if not fits(config, world):
            named = [int(w) for w in refusal(check_world, config, world).partition("; use ")[2].split() if w.isdigit()]
            assert all(fits(config, w) for w in named)
            assert not any(fits(config, w) for w in range(named[0] + 1 if len(named) > 1 else 1, named[-1]))


def test_ranks_and_the_world_of_the_recipe() -> None:
    assert "world = 128 ranks, launched are 16" in refusal(check_world, load(["world=128"]), 16)
    assert "runtime.debug_rank: rank 8" in refusal(check_world, load(["runtime.debug_rank=8"]), 8)
    assert "log.profile_ranks: rank 9" in refusal(check_world, load(["log.profile_ranks=[0, 9]"]), 8)
    check_world(load(["world=8", "runtime.debug_rank=7", "log.profile_ranks=[]"]), 8)


# The model

DENSE: dict[str, Any] = dict(
    family="qwen3", is_moe=False, num_layers=36, heads=32, kv_heads=8, ffn=9728, max_positions=40960, rope_scaling=None
)
MOE: dict[str, Any] = DENSE | dict(
    family="qwen3_moe", is_moe=True, num_layers=94, heads=64, kv_heads=4, experts=128, expert_ffn=1536, ffn=12288
)


def test_the_reference_layouts_fit_their_model() -> None:
    a2 = ["train.tp=4", "train.pp=8", "train.ep=4", "train.etp=4", "rollout.tp=8", "rollout.dp=8"]
    a2 += ["rollout.expert_parallel=true", "train.first_stage_layers=11", "train.last_stage_layers=11"]
    h100 = ["train.tp=4", "train.pp=8", "train.ep=4", "train.etp=1", "train.last_stage_layers=10", "rollout.tp=16"]
    for overrides in (a2, h100):
        config = load([*VALID, "world=128", *overrides])
        check(config)
        check_world(config, 128)
        check_model(config, SimpleNamespace(**MOE))


@pytest.mark.parametrize(
    ("base", "change", "overrides", "parts"),
    [
        (DENSE, {}, ["train.tp=3"], ["num_attention_heads = 32 is not a multiple of train.tp = 3; use 2 or 4"]),
        (
            DENSE,
            {"heads": 9, "kv_heads": 3},
            ["rollout.tp=2"],
            ["num_attention_heads = 9", "rollout.tp = 2; use 1 or 3"],
        ),
        (DENSE, {"heads": 12, "kv_heads": 6}, ["train.tp=4"], ["num_key_value_heads = 6; use train.tp = 3 or 6"]),
        (
            DENSE,
            {"ffn": 100},
            ["rollout.tp=8"],
            ["intermediate_size = 100 is not a multiple of rollout.tp = 8; use 5 or 10"],
        ),
        (DENSE, {}, ["train.ep=2"], ["train.ep = 2 needs experts, and qwen3 has none; set train.ep=none"]),
        (DENSE, {}, ["train.etp=2"], ["train.etp = 2 needs experts"]),
        (DENSE, {}, ["rollout.expert_parallel=true"], ["rollout.expert_parallel = True needs experts"]),
        (DENSE, {}, ["rollout.routing_replay=R3"], ["rollout.routing_replay = R3 needs experts"]),
        (DENSE, {}, ["data.max_response_tokens=40000"], ["1024 + 40000 = 41024 exceeds the model's 40960", "by 64"]),
        (MOE, {}, ["train.ep=12"], ["num_experts = 128 is not a multiple of train.ep = 12; use 8 or 16"]),
        (MOE, {"expert_ffn": 6}, ["train.tp=4"], ["moe_intermediate_size = 6", "train.etp (0, hence train.tp) = 4"]),
        (MOE, {"expert_ffn": 6}, ["train.etp=4"], ["moe_intermediate_size = 6 is not a multiple of train.etp = 4"]),
        (MOE, {"expert_ffn": 6}, ["rollout.tp=4"], ["moe_intermediate_size = 6 is not a multiple of rollout.tp = 4"]),
        (
            MOE,
            {"experts": 4},
            ["rollout.tp=4", "rollout.dp=2", "rollout.expert_parallel=true"],
            ["rollout.tp*dp = 4*2 = 8 ranks cannot share 4 experts"],
        ),
        (
            MOE,
            {},
            ["rollout.tp=8", "rollout.dp=3", "rollout.expert_parallel=true", "rollout.redundant_experts=8"],
            ["128 + 8 = 136 is not a multiple of rollout.tp*dp = 24; use rollout.redundant_experts = 16"],
        ),
    ],
)
def test_models_that_do_not_fit(base: dict[str, Any], change: dict[str, Any], overrides: list[str], parts: Any) -> None:
    message = refusal(check_model, load(overrides), SimpleNamespace(**(base | change)))
    assert all(part in message for part in parts), message


def test_yarn_stretches_the_positions() -> None:
    shape = SimpleNamespace(**DENSE | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768}})
    config = load(["data.max_response_tokens=100000"])
    check_model(config, shape)
    assert "131072 positions" in refusal(check_model, load(["data.max_response_tokens=200000"]), shape)


def test_uneven_experts_without_redundancy_are_vllms_business() -> None:
    overrides = ["rollout.tp=8", "rollout.dp=3", "rollout.expert_parallel=true"]
    check_model(load([*overrides, "train.pp=2"]), SimpleNamespace(**MOE))
    check_model(load([*overrides, "rollout.redundant_experts=16"]), SimpleNamespace(**MOE))


def megatron_accepts(layers: int, pp: int, vpp: int, first: int, last: int) -> bool:
    """TransformerConfig.__post_init__ of megatron-core 0.16.1, written down independently."""
    named = [n for n in (first, last) if n]
    if not named:
        return layers % pp == 0 and layers // pp % vpp == 0
    rest, stages = layers - sum(named), pp - len(named)
    if any(n % vpp for n in named) or rest < 0 or stages < 0 or bool(rest) != bool(stages):
        return False
    return not stages or rest % stages == 0 and rest // stages % vpp == 0


def test_stage_splits_agree_with_megatron_and_remedies_work() -> None:
    rng, remedies = random.Random(2), 0
    for _ in range(3000):
        layers, pp, vpp = rng.randint(1, 40), rng.randint(1, 8), rng.choice([1, 1, 2, 3])
        first, last = (rng.choice([0, 0, rng.randint(1, 9)]) if pp > 1 else 0 for _ in range(2))
        degrees: dict[str, Any] = dict(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        config = dataclasses.replace(Config(), train=dataclasses.replace(Config().train, **degrees))
        shape = SimpleNamespace(**DENSE | {"num_layers": layers})
        if megatron_accepts(layers, pp, vpp, first, last):
            check_model(config, shape)
            continue
        message = refusal(check_model, config, shape)
        assert f"{layers} layers do not split into train.pp*vpp = {pp}*{vpp}" in message
        if "use first_stage_layers" in message:
            words = message.partition("; use ")[2].split()
            assert megatron_accepts(layers, pp, vpp, int(words[2]), int(words[6])), message
            remedies += 1
    assert remedies > 500


def test_94_layers_on_8_stages_names_the_reference_split() -> None:
    message = refusal(check_model, load(["train.pp=8"]), SimpleNamespace(**MOE))
    assert "use first_stage_layers = 11 and last_stage_layers = 11" in message


# Pass-through tables

FIELDS = {
    **{"max_num_seqs": int | None, "enforce_eager": bool, "gpu_memory_utilization": float, "seed": "int"},
    **{"dtype": Literal["auto", "half"], "sizes": list[int], "either": int | str},
    "maybe": Union[None, float],  # noqa: UP007 (vLLM and Megatron have both spellings)
}
OWNED = {"tensor_parallel_size": "rollout.tp"}


def passthrough(table: dict[str, Any]) -> None:
    check_passthrough(table, FIELDS, OWNED, "rollout.vllm", "vLLM 0.32.0 EngineArgs")


def test_pass_through_accepts_known_fields() -> None:
    passthrough({"max_num_seqs": 4, "enforce_eager": True, "gpu_memory_utilization": 1, "seed": "anything"})
    passthrough({"dtype": 5, "sizes": "checked by upstream", "either": [], "maybe": 0.5})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"max_num_seq": 1},
            "unknown option 'rollout.vllm.max_num_seq'; did you mean 'max_num_seqs'? (vLLM 0.32.0 EngineArgs)",
        ),
        (
            {"tensor_parallel_size": 2},
            "rollout.vllm.tensor_parallel_size is not free: the run sets it from rollout.tp; change that instead",
        ),
        (
            {"tensor_parallel_siz": 2},
            "unknown option 'rollout.vllm.tensor_parallel_siz'; did you mean 'rollout.tp'? (vLLM 0.32.0 EngineArgs)",
        ),
        (
            {"max_num_seqs": "many"},
            "rollout.vllm.max_num_seqs must be int, got 'many' (vLLM 0.32.0 EngineArgs)",
        ),
        ({"enforce_eager": 1}, "rollout.vllm.enforce_eager must be true or false, got 1 (vLLM 0.32.0 EngineArgs)"),
        ({"maybe": True}, "rollout.vllm.maybe must be float, got true (vLLM 0.32.0 EngineArgs)"),
    ],
)
def test_pass_through_refuses(table: dict[str, Any], message: str) -> None:
    assert refusal(passthrough, table) == message


# Recipes


def test_shipped_recipes_load_check_and_round_trip(tmp_path: Path) -> None:
    files = sorted((ROOT / "launch" / "recipes").glob("*.toml"))
    for file in files:
        config = load([str(file)])
        assert load([recipe(tmp_path, to_toml(config))]) == config
        if config.model.path and config.data.train_files:  # overlays have neither
            check(config)
