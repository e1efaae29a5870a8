"""Reward rules on well-formed, odd and hostile text; the table of sources; HTTP rewards; start-up errors."""

import builtins
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import math_verify
import numpy as np
import pytest

import reward
from launch.config import RewardConfig
from reward import rules
from reward.remote import Remote
from reward.rules import Item, Score, as_score


def item(source, solution, truth, **extra):
    return Item(source, solution, truth, extra)


@pytest.mark.parametrize(
    "solution, length, finish, want",
    [
        ("1234", 5, "stop", 1.0),
        ("1234", 4, "length", 4 / 5),
        ("12345678", 8, "length", 4 / 8),
        ("9234", 5, "stop", 4 / 5),
        ("", 1, "stop", 0.0),
        ("12", 3, "stop", 2 / 5),
        ("4321", 5, "stop", 1 / 5),
        ("1234", 6, "stop", 4 / 6),
    ],
)
def test_copy(solution, length, finish, want):
    assert rules.copy("copy", solution, "1234", {"finish": finish, "response_ids": [0] * length}) == want


@pytest.mark.parametrize(
    "solution, strict, flexible",
    [
        ("so 6 * 7\n#### 42", 1, 1),
        ("#### 41\n#### 42", 1, 1),
        ("#### 42\n#### 41", 0, 0),
        ("#### 42 " + "blah " * 100, 1, 1),
        ("#### 42.", 0, 1),
        ("#### $42", 0, 1),
        ("####42", 0, 1),
        ("####  42", 0, 1),
        ("The answer is 42.", 0, 1),
        ("The answer is 42.00!", 0, 1),
        ("#### -42", 0, 0),
        ("no number", 0, 0),
        ("", 0, 0),
        ("#### 4,2", 1, 1),
    ],
)
def test_gsm8k(solution, strict, flexible):
    assert rules.gsm8k("gsm8k", solution, "42", {}) == strict
    assert rules.gsm8k("gsm8k", solution, "42", {}, mode="flexible") == flexible


@pytest.mark.parametrize(
    "solution, correct, form, finish",
    [
        ("so 42\n#### 42", 1, 1, "stop"),
        ("#### 1,042.5 \n", 0, 1, "stop"),
        ("#### 42", 1, 0, "length"),
        ("#### 41 no, #### 42", 1, 0, "stop"),
        ("#### 42 dollars", 1, 0, "stop"),
        ("####42", 0, 0, "stop"),
        ("42", 0, 0, "stop"),
    ],
)
def test_gsm8k_in_two_parts(solution, correct, form, finish):
    assert rules.gsm8k_parts("gsm8k", solution, "42", {"finish": finish}) == {"correct": correct, "format": form}


def test_gsm8k_window_is_the_reference_rule():
    text = "#### 42" + " " * 294
    assert rules.gsm8k("gsm8k", text, "42", {}) == 1 and rules.gsm8k("gsm8k", text, "42", {}, window=300) == 0
    score = reward.build(RewardConfig(gsm8k_window_chars=300), ["openai/gsm8k"]).score
    assert score([item("openai/gsm8k", text, "42")]) == [Score(0.0, {})]
    flexible = reward.build(RewardConfig(gsm8k_mode="flexible"), ["openai/gsm8k"]).score
    assert flexible([item("openai/gsm8k", "about 1,000.", "1000")])[0].value == 1


@pytest.mark.parametrize(
    "solution, truth, want",
    [
        ("thus $\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}", 1),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1),
        ("\\boxed{1} no, \\boxed{2}", "2", 1),
        ("\\boxed{2} no, \\boxed{1}", "2", 0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1),
        ("1/2", "\\frac{1}{2}", 0),
        ("\\boxed{1", "1", 0),
        ("\\boxed{}", "1", 0),
        ("\\boxed{7}", "\\boxed{7}", 1),
        ("so $\\boxed 7$, as said", "7", 1),
        ("\\fbox{7}", "7", 1),
        ("\\boxed {7}", "7", 1),
        ("\\boxed{1}, \\fbox{2", "1", 0),
        ("\\boxed ", "", 0),
    ],
)
def test_math_boxed(solution, truth, want):
    assert rules.math_boxed("math", solution, truth, {}) == want


def test_text_of_the_model_is_never_evaluated(monkeypatch, tmp_path):
    """Nothing but numerals may reach eval, through which sympy turns strings into numbers and expressions."""
    real, calls = builtins.eval, []
    monkeypatch.setattr(builtins, "eval", lambda *args: (calls.append(args[0]), real(*args))[1])
    math_verify.parse("The answer is 2*3")
    assert calls, "the trap itself does not work"
    rules.math_boxed("x", "\\boxed{1 m}", "2 km", {})  # sympy's units are evaluated at their first import
    calls.clear()
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    for text in (
        code,
        f"\\text{{{code}}}",
        f"1+{code}",
        f"f({code})",
        f"\\operatorname{{eval}}({code})",
        "[x for x in ()]",
        "2**3",
    ):
        for rule in (rules.math_boxed, rules.dapo_math, rules.gsm8k, rules.copy):
            for solution in (text, f"\\boxed{{{text}}}", f"$\\boxed{{{text}}}$ Answer: {text} #### {text}"):
                rule("x", solution, "1", {})
                rule("x", solution, "\\frac{1}{x}", {})
    evaluated = {call if isinstance(call, str) else repr(call) for call in calls}
    assert all(re.fullmatch(r"(Integer|Float) ?\('?[0-9.]+ ?'?\)", text.strip()) for text in evaluated), evaluated
    assert not mark.exists()


@pytest.mark.parametrize(
    "solution, truth, right",
    [
        ("... Answer: 42", "42", True),
        ("answer : $42$", "42", True),
        ("Answer: 41\nAnswer: 42", "42", True),
        ("Answer: \\boxed{1,000}", "1000", True),
        ("Answer: \\frac12", "\\frac{1}{2}", True),
        ("Answer: x = 3 meters", "3", True),
        ("Answer: 42" + "\nblah" * 100, "42", True),
        ("42", "42", False),
        ("Answer:", "42", False),
        ("Answer: \\text{\\textbf{A}}", "A", True),
        ("Answer: units", "km", False),  # both are nothing in the normal form
    ],
)
def test_dapo_math(solution, truth, right):
    assert rules.dapo_math("math_dapo", solution, truth, {}) == {"score": 1.0 if right else -1.0, "acc": float(right)}


@pytest.mark.parametrize("rule", rules.CHEAP)
def test_rules_that_run_in_process_take_linear_time(rule):
    attacks = [
        "." * 200_000,
        "-" * 200_000,
        "Answer:" + " " * 200_000,
        "answer " * 40_000,
        "#### " * 50_000,
        "$" * 200_000,
        "\\boxed{" * 40_000,
        "\\boxed" + " " * 200_000,
    ]
    attacks += [
        "Answer: " + "\\text{" * 40_000,
        "Answer: $" + "a" * 200_000,
        "Answer:" + "\n" * 200_000,
        "1," * 100_000,
    ]
    start = time.perf_counter()
    for text in attacks:
        rule("x", text, "42", {})
        if rule is rules.gsm8k:
            rule("x", text, "42", {}, mode="flexible")
        for source in ("gsm8k", "math_dapo", "math", "any"):  # what maj@k votes on
            rules.answer(source, text, "flexible")
    assert time.perf_counter() - start < 2.0


def test_unknown_sources_are_an_error_at_start():
    with pytest.raises(ValueError, match="'openai/gsm8K', did you mean 'openai/gsm8k'; known: copy, .*reward.function"):
        reward.build(RewardConfig(), ["copy", "openai/gsm8K"])
    assert rules.find_rule("aime2024") is rules.dapo_math


def test_missing_math_verify_is_an_error_at_start(monkeypatch):
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install"):
        reward.build(RewardConfig(), ["lighteval/MATH"])


def test_several_weighted_rewards():
    table = {"correct": 1, "format": True, "note": "text"}
    assert rules.as_score(table, {"correct": 1.0, "format": 0.5}) == Score(1.5, {"correct": 1.0, "format": 1.0})
    assert rules.as_score({"score": 2}, {}).value == 2
    assert rules.as_score(0.5, {"correct": 1.0}).value == 0.5
    for bad, message in (({"correct": 1}, "no number 'score'"), (float("nan"), "nan"), ("x", "could not convert")):
        with pytest.raises(ValueError, match=message):
            rules.as_score(bad, {})


def test_metrics_count_failures():
    scores = [Score(1.0, {"acc": 1.0}), Score(0.0, {}, "timeout"), Score(0.0, {}, "error: ValueError: x")]
    got = reward.metrics(scores)
    assert got["reward/timeout"] == got["reward/error"] == (1.0, 3.0)
    assert got["reward/memory"] == (0.0, 3.0) and got["reward/part/acc"] == (1.0, 1.0)


# HTTP


@pytest.fixture
def server():
    """An HTTP reward whose behaviour a test sets; it remembers the sizes of the batches."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
            with lock:
                state["sizes"].append(len(samples))
            state["reply"](self, samples)

        def answer(self, value, code=200):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *args):
            pass

    lock, state = threading.Lock(), {"sizes": [], "reply": None}
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    state["url"] = f"http://127.0.0.1:{http.server_address[1]}/score"
    yield state
    http.shutdown()
    http.server_close()


def remote(server, **options):
    return reward.build(RewardConfig(url=server["url"], **options), ["anything"])


ITEMS = [Item("any", str(i), "", {"index": i}) for i in range(100)]


def test_http_scores_in_order_and_in_batches(server):
    server["reply"] = lambda h, samples: h.answer(
        {"scores": [{"score": float(s["solution"]), "a": 1} for s in samples]}
    )
    assert remote(server).score(ITEMS) == [Score(float(i), {"score": float(i), "a": 1.0}) for i in range(100)]
    assert sorted(server["sizes"]) == [4, 32, 32, 32]
    assert remote(server).score([]) == []


def test_http_retries(server, monkeypatch):
    monkeypatch.setattr("reward.remote.PAUSE_S", 0.01)
    bad = iter([503, 429])
    server["reply"] = lambda h, samples: h.answer({"scores": [1] * len(samples)}, next(bad, 200))
    assert [s.value for s in remote(server).score(ITEMS[:3])] == [1, 1, 1] and len(server["sizes"]) == 3


@pytest.mark.parametrize(
    "reply, reason, requests",
    [
        (lambda h, s: h.answer({}, 404), "error: HTTP 404", 1),
        (lambda h, s: h.answer({}, 500), "error: HTTP 500", 3),
        (lambda h, s: h.answer({"scores": [1]}), "error: bad answer: not a list of 3 scores", 1),
        (lambda h, s: h.answer({"scores": {"0": 1, "1": 1, "2": 1}}), "error: bad answer: not a list", 1),
        (lambda h, s: h.answer({"scores": "111"}), "error: bad answer: not a list", 1),
        (lambda h, s: h.answer([]), "error: bad answer", 1),
        (lambda h, s: h.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n{"), "error: bad answer: JSONDecodeError", 3),
        (lambda h, s: time.sleep(1.0), "timeout", 3),
    ],
)
def test_http_failures_score_zero(server, monkeypatch, reply, reason, requests):
    monkeypatch.setattr("reward.remote.PAUSE_S", 0.01)
    server["reply"] = reply
    scores = remote(server, timeout_s=0.2).score(ITEMS[:3])
    assert all(s.value == 0 and s.failed.startswith(reason) for s in scores), scores
    assert len(server["sizes"]) == requests


@pytest.mark.parametrize("wrong", [None, float("nan"), "x", [1], 10**400])
def test_http_one_bad_score_hurts_no_other(server, wrong):
    server["reply"] = lambda h, s: h.answer({"scores": [1, 1, wrong, 1]})
    scores = remote(server).score(ITEMS[:4])
    assert [s.value for s in scores] == [1, 1, 0, 1] and scores[2].failed.startswith("error: bad answer")


@pytest.mark.parametrize(
    "broken", [b"garbage\r\n\r\n", b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{"sco\r\n', b""]
)
def test_http_connection_that_breaks_is_tried_again(server, monkeypatch, broken):
    monkeypatch.setattr("reward.remote.PAUSE_S", 0.01)
    replies = iter([lambda h, s: h.wfile.write(broken)])
    server["reply"] = lambda h, s: next(replies, lambda h, s: h.answer({"scores": [1] * len(s)}))(h, s)
    start = time.monotonic()
    assert [s.value for s in remote(server).score(ITEMS[:3])] == [1, 1, 1] and len(server["sizes"]) == 2
    assert time.monotonic() - start < 5


def test_scores_of_numpy_are_numbers():
    table = {"score": np.float32(0.5), "hits": np.int64(3), "text": "no"}
    assert as_score(table, {}) == Score(0.5, {"score": 0.5, "hits": 3.0})
    assert as_score(table, {"hits": 2.0}).value == 6


def test_failures_of_any_kind_are_told(caplog):
    class Hangs:
        def score(self, items):
            return [Score(0.0, {}, "timeout")] * len(items)

    reward.Scorer(Hangs()).score(ITEMS)
    assert "failed on 100 of 100 samples; the first: timeout" in caplog.text


def test_http_server_that_restarts_is_waited_for(server, monkeypatch):
    """Refused connections are no answer: they are tried again for as long as slow answers would be."""
    monkeypatch.setattr("reward.remote.PAUSE_S", 0.01)
    refusals = iter([ConnectionRefusedError()] * 20)
    client, request = remote(server, timeout_s=2.0), reward.remote.Remote._request

    def refused(self, items):
        for error in refusals:
            raise error
        return request(self, items)

    monkeypatch.setattr("reward.remote.Remote._request", refused)
    server["reply"] = lambda h, s: h.answer({"scores": [1] * len(s)})
    assert [s.value for s in client.score(ITEMS[:3])] == [1, 1, 1]


def test_a_reward_that_broke_later_is_no_fault_of_the_configuration():
    class Breaks:
        failed = ""

        def score(self, items):
            return [Score(0.0, {}, self.failed)] * len(items)

    scorer = reward.Scorer(Breaks())
    scorer.score(ITEMS)
    scorer.backend.failed = "error: HTTP 503"
    with pytest.raises(RuntimeError, match="failed on all 100 samples; the first: error: HTTP 503"):
        scorer.score(ITEMS)


def test_http_answer_that_drips_meets_the_deadline(server, monkeypatch):
    monkeypatch.setattr("reward.remote.ATTEMPTS", 1)

    def drip(handler, samples):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)

    server["reply"] = drip
    start = time.monotonic()
    assert remote(server, timeout_s=0.3).score(ITEMS[:1])[0].failed == "timeout"
    assert time.monotonic() - start < 2.0


def test_http_reward_that_fails_altogether_stops_the_run(server, monkeypatch):
    server["reply"] = lambda h, s: h.answer({}, 404)
    with pytest.raises(ValueError, match="failed on all 100 samples; the first: error: HTTP 404"):
        remote(server).score(ITEMS)
    with pytest.raises(ValueError, match="must begin with http"):
        Remote(RewardConfig(url="example.org"))
