"""What was read from torch_npu and vLLM-Ascend: tests/npu/signatures.json, by version and file. Here it meets them.

The second half runs where the packages are: installed, or unpacked below the folder that NPU_PACKAGES names (wheel or
sdist: `pip download --no-deps torch_npu==2.10.0.post4`). Without them it is not collected.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NPU = Path(__file__).parent / "npu"
FACTS = json.loads((NPU / "signatures.json").read_text())
TORCH_NPU, ASCEND = FACTS["torch_npu"], FACTS["vllm_ascend"]


def package(name: str) -> Path | None:
    """Folder that holds the package's folder `name`."""
    for root in filter(None, [os.environ.get("NPU_PACKAGES")]):
        found = [path.parent for path in sorted(Path(root).glob(f"**/{name}/__init__.py")) if "tests" not in path.parts]
        if found:
            return min(found, key=lambda path: len(path.parts)).parent
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parents[1] if spec and spec.origin else None


@pytest.mark.parametrize("name", TORCH_NPU["schemas"])
def test_schemas_can_be_called_as_we_call_them(name):
    """Arguments of the calls in parallel/npu.py, by the published schema."""
    schema = torch._C.parse_schema(f"npu::{TORCH_NPU['schemas'][name]}")
    known = {argument.name: argument.kwarg_only for argument in schema.arguments}
    called = {}
    for node in ast.walk(ast.parse((NPU.parents[1] / "parallel/npu.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name.split(".")[0]:
            called = {keyword.arg: keyword for keyword in node.keywords}
            positional = [argument.name for argument in schema.arguments[: len(node.args)]]
            assert not [name for name in positional if known[name]]
    assert called and called.keys() <= known.keys()


def test_stand_in_offers_nothing_that_the_package_lacks():
    methods = set(re.findall(r"WorkPtr (\w+)\(", (NPU / "backend.cpp").read_text()))
    assert methods <= set(TORCH_NPU["hccl"])
    table = next(
        node.value
        for node in ast.walk(ast.parse((NPU / "torch_npu/__init__.py").read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and len(node.value.keys) > 9
    )
    offered = {key.value: value for key, value in zip(table.keys, table.values, strict=True)}  # type: ignore[union-attr]
    assert offered.keys() == TORCH_NPU["runtime"].keys()
    for name, function in offered.items():
        published = ast.parse(f"def f({TORCH_NPU['runtime'][name]['parameters']}): 0").body[0].args  # type: ignore[attr-defined]
        if isinstance(function, ast.Lambda):
            assert [a.arg for a in function.args.args] == [a.arg for a in published.args], name


def test_versions_pair():
    """vLLM-Ascend names the torch_npu that the signatures are from."""
    assert f"torch-npu=={TORCH_NPU['version']}" in ASCEND["requires"]


TORCH_NPU_AT, ASCEND_AT = package("torch_npu"), package("vllm_ascend")

if TORCH_NPU_AT and not (TORCH_NPU_AT / "backend.cpp").exists():

    @pytest.mark.full
    def test_torch_npu_is_as_it_was_read():
        root = TORCH_NPU_AT
        assert f"'{TORCH_NPU['version']}'" in (root / "torch_npu/version.py").read_text()
        library = (root / TORCH_NPU["schemas_file"]).read_bytes()
        assert not [name for name, schema in TORCH_NPU["schemas"].items() if schema.encode() not in library]
        assert not [name for name in TORCH_NPU["hccl"] if f"ProcessGroupHCCL{len(name)}{name}".encode() not in library]
        for name, said in TORCH_NPU["runtime"].items():
            tree = ast.parse((root / said["file"]).read_text())
            found = [ast.unparse(n.args) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
            assert found == [said["parameters"]], name
        assert not missing(root, TORCH_NPU["source"])


def missing(root: Path, facts: list[dict[str, str]]) -> list[dict[str, str]]:
    return [fact for fact in facts if fact["has"] not in (root / fact["file"]).read_text()]


def function_of(path: Path, owner: str, name: str) -> Any:
    """A method's own source, as a function without its module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            method = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name)
            space: dict[str, Any] = {"torch": torch}
            exec("from __future__ import annotations\n" + textwrap.dedent(ast.unparse(method)), space)
            return space[name], space
    raise AssertionError(f"{path} has no {owner}.{name}")


if ASCEND_AT:

    @pytest.mark.full
    def test_vllm_ascend_is_as_it_was_read():
        assert not missing(ASCEND_AT, ASCEND["source"])

    @pytest.mark.full
    def test_workers_own_wake_up_is_undone_in_place():
        """process_weights_after_loading and wake_up as published, then ours: the storage and the layout of before."""
        from rollout.vllm_params import require_stable, restore_transposed_experts, stores

        hidden, width = 12, 8
        layer = torch.nn.Module()
        layer.w13_weight = torch.nn.Parameter(torch.randn(3, 2 * width, hidden), requires_grad=False)
        layer.w2_weight = torch.nn.Parameter(torch.randn(3, hidden, width), requires_grad=False)
        process, space = function_of(
            ASCEND_AT / "vllm_ascend/ops/fused_moe/fused_moe.py",
            "AscendUnquantizedFusedMoEMethod",
            "process_weights_after_loading",
        )
        space |= {
            "UnquantizedFusedMoEMethod": object,
            "super": lambda *a: SimpleNamespace(process_weights_after_loading=id),
        }
        space |= {"get_ascend_config": lambda: SimpleNamespace(enable_fused_mc2=0, weight_nz_mode=0)}
        space |= {"maybe_trans_nz": lambda weight: weight}
        loaded = layer.w13_weight.clone()
        process(SimpleNamespace(_maybe_pad_weight=lambda weight: weight, dynamic_eplb=False), layer)
        assert torch.equal(layer.w13_weight.transpose(1, 2), loaded) and layer.w13_weight.is_contiguous()

        model = torch.nn.Module()
        model.experts = layer
        before = stores(model)
        wake_up, space = function_of(ASCEND_AT / "vllm_ascend/worker/worker.py", "NPUWorker", "wake_up")
        allocator = SimpleNamespace(wake_up=lambda tags: None)
        space |= {"CaMemAllocator": SimpleNamespace(get_instance=lambda: allocator)}
        space |= {"get_ascend_config": lambda: SimpleNamespace(weight_nz_mode=0)}
        text = SimpleNamespace(hidden_size=hidden)
        worker = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text), quant_config=None),
            model_runner=SimpleNamespace(model=model),
            _sleep_saved_buffers={},
        )
        for _ in range(2):
            wake_up(worker, ["weights"])
            assert not model.experts.w13_weight.is_contiguous() and not model.experts.w2_weight.is_contiguous()
            restore_transposed_experts(model)
            wake_up(worker, ["kv_cache"])
            require_stable(before, stores(model))
            assert all(tensor.shape == before[name].shape for name, tensor in stores(model).items())
