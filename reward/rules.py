"""Reward rules: functions (data_source, solution, ground_truth, extra) -> score or table of scores; standard library.

`solution` is the response decoded without special tokens. `extra` is the row's extra_info, to which the trainer adds
"finish" ("stop" or "length") and "response_ids". A table may hold any numbers; its "score", or the sum of its entries
weighted by reward.weights, is the reward, and the others are logged.

Text of the model is data: it is never evaluated as code. math-verify's plain expressions would be, through sympy's
parse_expr, so only its LaTeX grammar is used, from which nothing but numerals gets there. The rules that run in the
trainer's own process (CHEAP) take time linear in the text.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import logging
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NamedTuple

from launch.config import RewardConfig

Rule = Callable[[str, str, str, dict[str, Any]], "float | Mapping[str, Any]"]


class Item(NamedTuple):
    data_source: str
    solution: str
    ground_truth: str
    extra: dict[str, Any]


class Score(NamedTuple):
    value: float
    parts: dict[str, float]
    """Numbers of a rule that returns a table."""
    failed: str = ""
    """Why the rule gave no score: "timeout", "memory", "crash" or "error: ..."; the value is then 0."""


# Rules


def copy(data_source: str, solution: str, ground_truth: str, extra: dict[str, Any]) -> float:
    """The quickstart's task, answer with `ground_truth` and end-of-text: right positions / positions.

    Characters are compared one by one with the ground truth. The position after them is right when the response ended
    there by itself: finish "stop" and one token more than the ground truth has characters.
    """
    stopped = extra.get("finish") == "stop"
    length = len(extra["response_ids"]) if "response_ids" in extra else len(solution) + stopped
    target = len(ground_truth) + 1
    right = sum(a == b for a, b in zip(solution, ground_truth))  # noqa: B905 (lengths differ)
    return (right + (stopped and length == target)) / max(target, length)


def gsm8k(
    data_source: str, solution: str, ground_truth: str, extra: dict[str, Any], mode: str = "strict", window: int = 0
) -> float:
    """1 when the last number after "#### " (strict) or the last number (flexible) is the ground truth.

    Strict is verl's rule to the letter: exactly one space, commas dropped, equal strings ("42." is not "42");
    verl looks at the last 300 characters (window), where a long epilogue hides a right answer. Flexible compares
    values, so "1,000." and "42.00" count.
    """
    text = solution[-window:] if window else solution
    if mode == "strict":
        found = re.findall(r"#### (-?[0-9.,]+)", text)
        return float(bool(found) and found[-1].replace(",", "") == ground_truth)
    numbers = [number for number in re.findall(r"-?[0-9.,]+", text) if number.strip("-.,")]
    return float(bool(numbers) and _same_number(numbers[-1].rstrip(".,"), ground_truth))


def gsm8k_parts(data_source: str, solution: str, ground_truth: str, extra: dict[str, Any]) -> dict[str, float]:
    """Two rewards for reward.weights: `correct` (gsm8k's strict rule) and `format`, 1 when the response stops right
    behind its only "#### NUMBER".
    """
    ends = re.search(r"#### -?\d[\d.,]*\s*$", solution)
    formatted = bool(ends) and solution.count("####") == 1 and extra.get("finish", "stop") == "stop"
    return {"correct": gsm8k(data_source, solution, ground_truth, extra), "format": float(formatted)}


def last_number(data_source: str, solution: str, ground_truth: str, extra: dict[str, Any]) -> float:
    """1 when the last number of the response is the ground truth, whatever reward.gsm8k_mode is."""
    return gsm8k(data_source, solution, ground_truth, extra, mode="flexible")


def _same_number(first: str, second: str) -> bool:
    try:
        return Decimal(first.replace(",", "")) == Decimal(second.replace(",", ""))
    except InvalidOperation:
        return False


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} or \\fbox{...} with its braces balanced, of "\\boxed 7" up to a $, or None."""
    starts = list(re.finditer(r"\\(?:boxed|fbox)\s*\{|\\boxed ", text))
    if not starts:
        return None
    begin = starts[-1].end()
    if text[begin - 1] != "{":
        return re.split(r"[$\n]", text[begin:], maxsplit=1)[0].strip() or None
    depth = 1
    for position in range(begin, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[begin:position]
    return None


def math_boxed(data_source: str, solution: str, ground_truth: str, extra: dict[str, Any]) -> float:
    """1 when the last \\boxed{} equals the ground truth: as text, or as mathematics by math-verify."""
    answer, gold = boxed(solution), boxed(ground_truth) or ground_truth
    if answer is None:
        return 0.0
    if answer.strip() == gold.strip():
        return 1.0
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # the pool has the deadline, not signal.alarm
    return float(verify(_latex(gold), _latex(answer), timeout_seconds=None))


@functools.lru_cache(maxsize=256)
def _latex(expression: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(f"\\boxed{{{expression}}}", [LatexExtractionConfig()], parsing_timeout=None)


def dapo_math(data_source: str, solution: str, ground_truth: str, extra: dict[str, Any]) -> dict[str, float]:
    """DAPO's rule: +1 or -1 by the last "Answer: ..." line, normalised as in Minerva (arXiv 2206.14858, appendix D).

    verl looks at the last 300 characters of the response; here the whole text counts.
    """
    found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution)
    said = normalized_answer(found[-1]) if found else ""
    right = bool(said) and said == normalized_answer(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm"
    " pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{}^2 \\text{}^3 \\text{}"
    ' \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
).split()


def normalized_answer(answer: str) -> str:
    """Minerva's normal form of a short LaTeX answer; an answer of more than 300 characters is none."""
    if len(answer) > 300:
        return ""
    answer = answer.split("=")[-1]
    for old, new in (*REPLACED, *((unit, "") for unit in UNITS)):
        answer = answer.replace(old, new)
    if answer.count("$") >= 2:
        answer = answer.split("$")[1]
    for _ in range(3):  # one in another
        answer = re.sub(r"\\(?:text|textbf|overline)\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer.strip()


# data_source -> rule


NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
MATH_SOURCES = (
    *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hendrycks_math", "math"),
    *(f"numina_{name}" for name in NUMINA),
)
RULES: dict[str, Rule] = {
    "copy": copy,
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "sums": last_number,
    "math_dapo": dapo_math,
    "math_dapo_reasoning": dapo_math,
    "aime*": dapo_math,
    **dict.fromkeys(MATH_SOURCES, math_boxed),
}
CHEAP = (copy, gsm8k, last_number, dapo_math)


def find_rule(data_source: str) -> Rule:
    """Rule of a data source; ValueError that lists the known ones. A name that ends in * stands for its prefix."""
    for name, rule in RULES.items():
        if data_source == name or (name.endswith("*") and data_source.startswith(name[:-1])):
            return rule
    near = difflib.get_close_matches(data_source, RULES, 1)
    raise ValueError(
        f"no reward rule for data_source {data_source!r}{f', did you mean {near[0]!r}' if near else ''}; known:"
        f" {', '.join(RULES)}; set reward.function (package.module:function) or reward.url for any other"
    )


def answer(data_source: str, solution: str, mode: str = "strict") -> str | None:
    """What a built-in rule compares, in a form in which equal answers are equal texts: maj@k votes on it.

    None where the rule finds no answer; the whole text for sources without a built-in rule. `mode`: of gsm8k. Numbers
    and fractions count by value; other mathematics as text without spaces, for math-verify compares only pairs.
    """
    try:
        rule = find_rule(data_source)
    except ValueError:
        return solution.strip()
    if rule in (gsm8k, last_number):
        if mode == "strict" and rule is gsm8k:
            found = re.findall(r"#### (-?[0-9.,]+)", solution)
            return found[-1].replace(",", "") if found else None
        found = [number for number in re.findall(r"-?[0-9.,]+", solution) if number.strip("-.,")]
        return _value(found[-1].rstrip(".,")) if found else None
    if rule is dapo_math:
        found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution)
        return normalized_answer(found[-1]) if found else None
    if rule is math_boxed:
        inner = boxed(solution)
        return None if inner is None else _value(inner)
    return solution


def _value(text: str) -> str:
    """A short number or fraction, also in LaTeX, in lowest terms; any other text without its spaces."""
    text = re.sub(r"\s", "", text)
    plain = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text.replace("\\!", "")).replace(",", "").strip("$")
    try:
        return str(Fraction(plain)) if len(plain) <= 40 and re.fullmatch(r"[-+]?[\d./]+", plain) else text
    except (ValueError, ZeroDivisionError):
        return text


def check_sources(sources: Iterable[str]) -> list[Rule]:
    """Rules of all sources, or one error before anything slow starts."""
    rules = [find_rule(source) for source in sorted(set(sources))]
    if math_boxed in rules and importlib.util.find_spec("math_verify") is None:
        raise ValueError('MATH rewards need math-verify, which is not installed: pip install "alternator[math]"')
    return rules


def load_function(path: str) -> Rule:
    """Function named "package.module:function" or "path/to/file.py:function"."""
    module_name, _, function = path.rpartition(":")
    if not module_name or not function:
        raise ValueError(f"reward.function = {path!r} is not of the form package.module:function")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("reward_function", module_name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["reward_function"] = module  # dataclasses and pickle look their module up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"reward.function = {path!r}: {module_name} has no function {function!r}")
    return found


# One sample


def as_score(result: Any, weights: Mapping[str, float]) -> Score:
    """Score of what a rule returned; ValueError when it is not a finite number or a table with the needed entries."""
    if not isinstance(result, Mapping):
        parts, value = {}, float(result)
    else:
        parts = {name: float(part) for name, part in result.items() if isinstance(part, numbers.Real)}
        missing = [name for name in weights or ("score",) if name not in parts]
        if missing:
            raise ValueError(f"the reward has no number {missing[0]!r}; it has {sorted(parts)} (see reward.weights)")
        value = sum(weight * parts[name] for name, weight in weights.items()) if weights else parts["score"]
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return Score(value, parts)


def scorer(config: RewardConfig) -> Callable[[Item], Score]:
    """The configured rule as a function of one sample; whatever it raises is a failed score, not an exception."""
    function = load_function(config.function) if config.function else None
    strict = functools.partial(gsm8k, mode=config.gsm8k_mode, window=config.gsm8k_window_chars)

    def score(item: Item) -> Score:
        rule = function or find_rule(item.data_source)
        try:
            return as_score((strict if rule is gsm8k else rule)(*item), config.weights)
        except (MemoryError, RecursionError):
            return Score(0.0, {}, "memory")
        except Exception as error:  # a reward function is foreign code; the caller counts and reports this
            return Score(0.0, {}, f"error: {type(error).__name__}: {error}"[:500])

    return score
