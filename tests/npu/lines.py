"""Which lines of the project only an npu runs, read off the source, and which were run, by a tracer."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWN = re.compile("(^|_)npu|Npu|ascend|mindspeed")
WHOLE_FILES = ("parallel/npu.py",)
OTHERS = {("parallel/device.py", "_usable"), ("parallel/groups.py", "meet"), ("rollout/vllm_params.py", "sleep_level")}
OTHERS |= {("rollout/vllm_params.py", "restore_transposed_experts"), ("parallel/device.py", "to_host")}


def sources() -> list[str]:
    folders = ("parallel", "rollout", "launch", "reward")
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.py"))


def npu_lines(path: str) -> set[int]:
    """Lines inside functions and classes named after the npu, and inside branches that are taken for "npu"."""
    text = (ROOT / path).read_text()
    chosen: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body: list[ast.stmt] = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            mine = path in WHOLE_FILES or OWN.search(node.name) or (path, node.name) in OTHERS
            body = node.body if mine else []
        elif isinstance(node, ast.If) and _for_npu(node.test):
            body = node.body
        for statement in body:
            chosen |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return chosen & set(_code_lines(compile(text, path, "exec")))


def _for_npu(test: ast.expr) -> bool:
    """A comparison that holds for "npu"."""
    compared = [node for node in ast.walk(test) if isinstance(node, ast.Compare)]
    return any(
        isinstance(part, ast.Constant) and part.value == "npu" and isinstance(node.ops[0], (ast.Eq, ast.In))
        for node in compared
        for part in ast.walk(node)
    )


def _code_lines(code: types.CodeType) -> Iterator[int]:
    """Lines with instructions inside functions; those at import need no proof."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from (line for _, _, line in constant.co_lines() if line and line != constant.co_firstlineno)
            yield from _code_lines(constant)


class Tracer:
    """Lines of the project's files that this thread runs while it is active."""

    def __init__(self) -> None:
        self.files = {str(ROOT / path): path for path in sources()}
        self.seen: dict[str, set[int]] = {}

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *problem: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        self.seen.setdefault(self.files[frame.f_code.co_filename], set()).add(frame.f_lineno)
        return self._line
