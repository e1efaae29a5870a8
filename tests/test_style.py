"""House rules that a machine can check: layers, sizes, Python 3.10, pure modules, formatting, types."""

from __future__ import annotations

import ast
import io
import os
import statistics
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tests import areas

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rollout", "parallel", "reward", "launch")
STANDARD_LIBRARY_ONLY = [
    f"launch/{name}.py"
    for name in ("config", "options", "option_text", "checks", "layout_checks", "selfcheck", "shrink")
]
PURE = [
    *STANDARD_LIBRARY_ONLY,
    *(f"parallel/{name}.py" for name in ("family", "grid", "layout", "megatron_layout", "reshard_plan", "packing")),
    *("parallel/memory.py", "parallel/reshard_cuts.py", "parallel/reshard_traffic.py", "rollout/vllm_layout.py"),
    "rollout/expert_placement.py",
    *(f"launch/{name}.py" for name in ("plan", "plan_job", "plan_search", "estimate", "hardware", "migrate")),
    *(f"launch/{name}.py" for name in ("migrate_verl", "migrate_slime", "migration", "shell_script")),
]
ALLOWED_FROM_PARALLEL = {f"parallel.{name}" for name in ("device", "grid", "groups", "layout", "family")}
REACH_EVERYWHERE = {
    *(
        f"launch/{name}.py"
        for name in (
            "doctor",
            "doctor_checks",
            "doctor_groups",
            "probe",
            "convert",
            "bench",
            "bench_rows",
            "bench_run",
            "inputs",
            "prepare",
        )
    ),
    *(f"launch/{name}.py" for name in ("plan", "plan_job", "plan_search", "estimate")),
}
MEGATRON = "parallel/megatron_"
ONLY_IN = {
    "vllm": {f"rollout/{name}.py" for name in ("engine", "vllm_params", "vllm_packed", "vllm_cpu", "routes")},
    # megatron_layout.py is pure; its own rule is stricter.
    "megatron": {f"parallel/{name}.py" for name in ("attention", "replay", "offload", "checkpoint")},
    "torch_npu": {f"parallel/{name}.py" for name in ("device", "megatron_cpu", "npu")},
    "torch.cuda": {"parallel/device.py", "parallel/megatron_cpu.py"},
}
LINES_OF_CODE = 14500  # CHANGELOG says why
LONGEST_FILE = 350
LONGER_FILES = {
    "launch/options.py": 450,  # a list of options with one sentence each, no logic
    "trainer.py": 380,  # the whole loop, of which 60 lines are imports
}
LONGEST_FUNCTION, MEDIAN_FUNCTION, P90_FUNCTION = 80, 12, 45


def sources() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found += [path for path in (ROOT / "trainer.py", ROOT / "setup.py") if path.exists()]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def imports(tree: ast.AST) -> list[tuple[str, int, bool]]:
    """(module, line, at import time). `from a import b` counts as a.b, which says more when b is a module."""
    lazy = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(block)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in line {node.lineno}"
            found += [(f"{node.module}.{alias.name}", node.lineno, id(node) not in lazy) for alias in node.names]
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def under(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def layer_violations(path: str, text: str) -> list[str]:
    tree = ast.parse(text)
    broken = []
    for module, line, top in imports(tree):
        reason = _pure_rule(path, module) if path in PURE else None
        reason = reason or _folder_rule(path, module, top) or _engine_rule(path, module)
        if reason:
            broken.append(f"{path}:{line}: {module}: {reason}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and path not in ONLY_IN["torch.cuda"]:
            if node.attr in ("cuda", "npu") and isinstance(node.value, ast.Name) and node.value.id == "torch":
                broken.append(f"{path}:{node.lineno}: torch.{node.attr} belongs in parallel/device.py")
    return broken


def _pure_rule(path: str, module: str) -> str | None:
    top = module.split(".")[0]
    if top in sys.stdlib_module_names or top in ("__future__", "tomli") or is_pure(module):
        return None
    if top == "numpy" and path not in STANDARD_LIBRARY_ONLY:
        return None
    return "a pure module imports the standard library, numpy and pure modules"


def is_pure(module: str) -> bool:
    return under(module, *(name[:-3].replace("/", ".") for name in PURE))


def _folder_rule(path: str, module: str, top: bool) -> str | None:
    folder, target = path.split("/")[0], module.split(".")[0]
    if target == "trainer":
        return "trainer.py is imported by tests only"
    if target == "tests":
        return "tests are imported by tests only"
    if target not in FOLDERS or folder not in FOLDERS or target == folder:
        return None
    if folder == "launch":
        if path not in REACH_EVERYWHERE:
            return "only launch/{doctor,plan,convert,bench,inputs} reach into other folders"
        return "imported lazily, inside functions" if top and not is_pure(module) else None
    if target == "launch":
        return None if under(module, "launch.config") else "only launch.config is for the other folders"
    if folder == "rollout" and target == "parallel":
        return None if under(module, *ALLOWED_FROM_PARALLEL) else f"rollout uses {sorted(ALLOWED_FROM_PARALLEL)} only"
    return f"{folder}/ does not import {target}/"


def _engine_rule(path: str, module: str) -> str | None:
    for name, files in ONLY_IN.items():
        if under(module, name) and path not in files and not (name == "megatron" and path.startswith(MEGATRON)):
            return f"imported only in {sorted(files)}"
    return None


def code_lines(text: str) -> int:
    """Lines that hold code: no blanks, no comments, no docstrings (those of attributes included)."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def function_lengths() -> dict[str, int]:
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources()
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.parametrize("path", sources())
def test_layers(path):
    assert not layer_violations(path, (ROOT / path).read_text())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("reward/loss.py", "from parallel.layout import Kind"),
        ("reward/loss.py", "import launch.metrics"),
        ("parallel/groups.py", "def f():\n    from rollout.batch import Sample"),
        ("rollout/batch.py", "from parallel.megatron_step import score"),
        ("rollout/batch.py", "from parallel import reshard"),
        ("rollout/batch.py", "import vllm.config"),
        ("parallel/groups.py", "from megatron.core import parallel_state"),
        ("parallel/groups.py", "import torch\ntorch.cuda.synchronize()"),
        ("parallel/groups.py", "import torch_npu"),
        ("parallel/layout.py", "def f():\n    import torch"),
        ("parallel/megatron_layout.py", "import megatron.core"),
        ("launch/config.py", "import numpy"),
        ("launch/plan.py", "from parallel.groups import Groups"),
        ("launch/plan.py", "import rich"),
        ("launch/doctor.py", "from parallel.groups import Groups"),
        ("launch/metrics.py", "def f():\n    from parallel.groups import Groups"),
        ("launch/bench.py", "def f():\n    import trainer"),
    ],
)
def test_layer_rules_catch(path, text):
    assert len(layer_violations(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("reward/loss.py", "import torch\nfrom launch.config import Config\nfrom reward.advantage import grpo"),
        ("parallel/groups.py", "import torch\nfrom parallel.grid import TrainGrid"),
        ("parallel/megatron_spec.py", "from megatron.core import fusions"),
        ("rollout/engine.py", "import vllm\nfrom parallel.groups import Groups"),
        ("launch/plan.py", "import numpy\nfrom parallel.memory import bytes_per_rank"),
        ("launch/doctor.py", "def f():\n    from parallel.groups import Groups"),
        ("trainer.py", "from parallel.groups import Groups\nfrom rollout.engine import Engine"),
    ],
)
def test_layer_rules_allow(path, text):
    assert not layer_violations(path, text)


COPIES_TO_THE_DEVICE = {f"parallel/{name}.py" for name in ("offload", "replay", "megatron_spec")}


@pytest.mark.parametrize("path", sources())
def test_device_traps(path):
    """Copies that only start are dangerous towards the host: Device.to_host waits. is_cuda is True on npu, too."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr == "is_cuda"), f"{path}:{node.lineno}: device.type"
        if isinstance(node, ast.Call) and any(keyword.arg == "non_blocking" for keyword in node.keywords):
            assert path == "parallel/device.py" or path in COPIES_TO_THE_DEVICE, f"{path}:{node.lineno}: to_host"


def test_files_are_short():
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in sources()}
    assert not {path: n for path, n in lengths.items() if n > LONGER_FILES.get(path, LONGEST_FILE)}


def test_functions_are_short():
    lengths = function_lengths()
    assert not {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION}
    ordered = sorted(lengths.values())
    assert statistics.median(ordered) <= MEDIAN_FUNCTION
    assert ordered[int(0.9 * len(ordered))] <= P90_FUNCTION


def test_code_fits_its_budget():
    counted = {path: code_lines((ROOT / path).read_text()) for path in sources()}
    assert sum(counted.values()) <= LINES_OF_CODE, counted


def test_code_lines_leave_out_what_is_not_code():
    text = '"""Header\n\nmore."""\n\nimport os  # why\n\n# comment\nX = (\n    1,\n)\n"""About X."""\n'
    assert code_lines(text) == 4


@pytest.mark.parametrize("path", sources())
def test_syntax_is_that_of_python_3_10(path):
    ast.parse((ROOT / path).read_text(), feature_version=(3, 10))


def test_full_tests_belong_to_an_area():
    listed = set(areas.files("all"))
    marked = [str(path) for path in (ROOT / "tests").glob("test_*.py") if "mark.full" in path.read_text()]
    assert not [path for path in marked if path not in listed and Path(path) != Path(__file__)]


BLOCK = """
import importlib, importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("torch", "vllm", "megatron", "torch_npu", "transformers"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
if "--stand-in" in sys.argv:
    from unittest.mock import MagicMock
    for name in ("numpy", "tomli"):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock()
for name in sys.argv[1].split(","):
    importlib.import_module(name)
"""


def existing_pure() -> list[str]:
    return [path[:-3].replace("/", ".") for path in PURE if (ROOT / path).exists()]


@pytest.mark.parametrize("module", existing_pure())
def test_pure_modules_need_no_engine(module):
    done = subprocess.run([sys.executable, "-c", BLOCK, module], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def python_3_10() -> str | None:
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob("3.10*/bin/python")
    for candidate in ["python3.10", "/usr/bin/python3.10", *map(str, installed)]:
        try:
            if not subprocess.run([candidate, "-c", "0"], capture_output=True).returncode:
                return candidate
        except OSError:
            continue
    return None


def test_python_3_10_compiles_all_and_imports_pure_modules(tmp_path):
    python = python_3_10()
    if python is None:
        pytest.skip("no Python 3.10 on this machine")
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    files = [str(ROOT / path) for path in sources()]
    # numpy need not be installed for 3.10: a stand-in is enough to run what happens at import.
    for command in (["-m", "py_compile", *files], ["-c", BLOCK, ",".join(existing_pure()), "--stand-in"]):
        done = subprocess.run([python, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=["ruff", "format", "mypy"]
)
def test_tools(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
