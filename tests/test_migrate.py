"""Scripts of the reference jobs -> recipes: equal to the shipped ones, every option accounted for, nothing executed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.config import load
from launch.migrate import main, migrate, recipe_text
from launch.option_text import value_text
from launch.shell_script import Script

SCRIPTS = Path(__file__).parent / "scripts"
RECIPES = Path(__file__).parent.parent / "launch" / "recipes"
PLACES = ("run_dir", "model.path", "data.train_files", "data.val_files")
DATA = ["data.label_key=none", "data.default_source=none"]  # launch.prepare writes verl's columns

JOBS = {
    "qwen3-235b-a22b-a2": ("verl", ["verl_a2_node.sh", "verl_a2.sh"], {}, []),
    "qwen3-235b-a22b-h100": ("verl", ["verl_h100.sh"], {}, []),
    "qwen3-30b-a3b": ("slime", ["vime_30b.sh"], {}, DATA),
    "qwen3-30b-a3b-2x8": ("slime", ["vime_30b.sh"], {"ACTOR_NUM_NODES": "2"}, DATA),
}


def option(config, name: str):
    for key in name.split("."):
        config = getattr(config, key)
    return config


@pytest.mark.parametrize("name", JOBS)
def test_reference_scripts_give_the_shipped_recipes(name, tmp_path):
    system, files, variables, more = JOBS[name]
    shipped = load([str(RECIPES / f"{name}.toml")])
    places = [f"{place}={value_text(option(shipped, place))}" for place in PLACES]
    texts = [(SCRIPTS / file).read_text() for file in files]
    result = migrate(system, texts, variables, [*places, *more])
    assert result.config == shipped
    (tmp_path / "recipe.toml").write_text(recipe_text(result, files))
    assert load([str(tmp_path / "recipe.toml")]) == shipped


@pytest.mark.parametrize("file", ["verl_a2.sh", "verl_h100.sh"])
def test_every_option_of_a_verl_script_has_a_fate_and_a_reason(file):
    text = (SCRIPTS / file).read_text()
    fates = migrate("verl", [text], {}, []).fates
    written = re.findall(r"^\s+\+*([a-z_]+\.[\w.]+)=", text, re.MULTILINE)
    assert len(written) > 50 and not [name for name in written if name not in fates]
    assert all(kind in ("translated", "unnecessary") and reason for kind, reason in fates.values())


def test_every_option_of_a_slime_script_has_a_fate_and_the_missing_one_is_told():
    text = (SCRIPTS / "vime_30b.sh").read_text()
    fates: dict = {}
    for nodes in ("1", "2"):
        fates |= migrate("slime", [text], {"ACTOR_NUM_NODES": nodes}, []).fates
    written = set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", re.sub(r"#.*", "", text)))
    written -= {"address", "runtime-env-json"}
    assert len(written) > 50 and not [name for name in written if name not in fates]
    assert [name for name, (kind, _) in fates.items() if kind == "unsupported"] == ["eval-max-response-len"]


def test_fragments_of_the_documentation_are_read():
    text = """
    VLLM_ARGS=(
       --rollout-num-gpus-per-engine 24
       --vllm-gpu-memory-utilization 0.7
       --vllm-data-parallel-size 3
       --vllm-enable-expert-parallel
       --vllm-enable-eplb
       --vllm-eplb-config '{"num_redundant_experts": 16}'
    )
    PERF_ARGS=(
       --tensor-model-parallel-size 4
       ...
    )
    PYTHONPATH=/root/Megatron-LM/ torchrun tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --save x
    """
    result = migrate("slime", [text], {}, [])
    shipped, config = load([str(RECIPES / "qwen3-30b-a3b-24.toml")]), result.config
    assert config.rollout.vllm == shipped.rollout.vllm and config.train.tp == shipped.train.tp
    for name in ("tp", "dp", "expert_parallel", "redundant_experts"):
        assert option(config.rollout, name) == option(shipped.rollout, name)
    assert any("convert_hf_to_torch_dist.py" in name for name in result.fates)


def test_the_typing_slip_is_kept_and_told():
    result = migrate("verl", [(SCRIPTS / "verl_h100.sh").read_text()], {}, [])
    assert result.config.data.max_response_tokens == 4816
    assert any("1204" in remark and "1024" in remark for remark in result.remarks)


def test_unknown_options_choices_and_differing_reference_layouts_are_unsupported():
    text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae a.b=1 actor_rollout_ref.ref.megatron.pipeline_"
    text += "model_parallel_size=4 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8"
    result = migrate("verl", [text], {}, [])
    lost = {name for name, (kind, _) in result.fates.items() if kind == "unsupported"}
    assert lost == {"a.b", "algorithm.adv_estimator", "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size"}
    assert "# unsupported: a.b: unknown" in recipe_text(result, ["x.sh"])
    assert any("gae" in remark for remark in result.remarks)


def test_nothing_is_executed(tmp_path):
    trap = tmp_path / "trap"
    text = f"X=$(touch {trap})\nY=`touch {trap}`\ntouch {trap}\npython3 -m verl.trainer.main_ppo a.b=$(touch {trap})"
    migrate("verl", [text], {}, [])
    assert not trap.exists()


def test_command_line(tmp_path, capsys):
    out = tmp_path / "recipe.toml"
    assert main(["verl", str(SCRIPTS / "verl_h100.sh"), "-o", str(out), "TRAIN_BS=256", "model.path=here"]) == 0
    config = load([str(out)])
    assert config.data.prompts_per_step == 256 and config.train.mini_batches == 2 and config.model.path == "here"
    assert "0 unsupported" in capsys.readouterr().err
    assert main(["verl"]) == main(["nemo", "x"]) == main(["verl", "/nowhere.sh"]) == 2
    (tmp_path / "odd.sh").write_text("echo 'never closed")
    assert main(["slime", str(tmp_path / "odd.sh")]) == 2 and "never closed" in capsys.readouterr().err


EXPANSIONS = {
    "A=${B:-7}; run $A": [["run", "7"]],
    "B=; run ${B:-x} ${B-y} z": [["run", "x", "z"]],
    "B=3; run ${B:+yes}${C:+no}": [["run", "yes"]],
    'A="a b"; run "$A" $A': [["run", "a b", "a", "b"]],
    "X=(1 '2 3'); X+=(4); run \"${X[@]}\"": [["run", "1", "2 3", "4"]],
    "X=(); run ${X[@]+\"${X[@]}\"} end": [["run", "end"]],
    "N=3; run $((N * (2 + 1) / 2)) $((-7 / 2))": [["run", "4", "-3"]],
    "run $(seq 3) $(seq 2 2 6)": [["run", "1", "2", "3", "2", "4", "6"]],
    "run a \\\n  b # c\n other": [["run", "a", "b"], ["other"]],
    "run a > log 2>&1 && next | tee x": [["run", "a"], ["next"], ["tee", "x"]],
    "if [ 1 -gt 2 ]; then a; elif [[ x == x ]]; then b; else c; fi; d": [["b"], ["d"]],
    "if [[ 1 -lt 2 ]]; then if [ -z 'x' ]; then a; else b; fi; else c; fi": [["b"]],
    "run 'it''s' \"q\\\"q\" \\$x": [["run", "its", 'q"q', "$x"]],
}  # fmt: skip


@pytest.mark.parametrize("text", EXPANSIONS)
def test_shell_words(text):
    script = Script()
    script.read(text)
    assert script.commands == EXPANSIONS[text]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab=$(){}[]'\"\\ \n;|&<>#@:-+*/1`", max_size=40))
def test_any_text_is_read_or_refused_with_one_message(text):
    try:
        Script().read(text)
    except ValueError as error:
        assert str(error)
