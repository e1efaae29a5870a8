"""The HTML report: what it reads, that nothing in it can break the page, and that a browser shows it fast."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launch.report import columns, flatten, main, names, page, parse_verl, samples
from parallel.phases import CYCLE

VERL_LINE = (Path(__file__).parent / "scripts" / "verl_step.log").read_text().strip()


MOVES = [move for move, _ in CYCLE.values()]


def write_run(path: Path, steps: int, text: str = "an answer", **options: object) -> Path:
    (path / "samples").mkdir(parents=True)
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {f"group{k}/metric{k}": step * k / 7 for k in range(90)}
            row |= {
                "critic/rewards/mean": step / steps,
                "timing_s/step": 2.0,
                "timing_s/gen": 1.0,
                "perf/throughput": 8.0,
            }
            row |= {"timing_s/update_actor": 0.5, "timing_s/generate_sequences": 0.9, "actor/kl_loss": None}
            row |= {f"memory_{what}_gb/{move}": 8.5 + step / steps for what in ("device", "host") for move in MOVES}
            row |= {"experts/load_max_over_mean": 1.5, "moe/z_loss": 2.5}
            file.write(json.dumps({"training/global_step": step} | row) + "\n")
    row = {"prompt": text, "response": text, "score": 1.0, "advantage": 0.5}
    for step in range(1, steps + 1, max(1, steps // 30)):
        (path / "samples" / f"step_{step:06d}.jsonl").write_text((json.dumps(row) + "\n") * 20)
    (path / "samples" / "val_000001.jsonl").write_text(json.dumps({**row, "response": "while validating"}) + "\n")
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    (path / "config.toml").write_text("seed = 1\n[train]\n" + "\n".join(lines) + "\n")
    return path


def data_of(html: str) -> list[dict]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_reference_log_line_is_read_whole():
    rows = parse_verl([f"\x1b[36m(TaskRunner pid=11069)\x1b[0m {VERL_LINE}\n", "no metrics here", "step:7 - nonsense"])
    assert len(rows) == 1
    steps, table = columns(rows)
    assert steps == [1] and len(table) == VERL_LINE.count(" - ") - 1  # all but the global step
    assert table["timing_s/reshard"] == [205.532] and table["actor/ppo_kl"] == [9.13248e-05]
    assert table["perf/total_num_tokens"] == [2894758] and table["perf/throughput"] == [8.03543]


def test_verl_numbers_of_newer_versions_and_odd_values():
    line = "step:3 - a/b:np.float64(0.5) - c:-1e-06 - d:nan - val-core/openai/gsm8k/reward/mean@1:0.25 - e:text"
    steps, table = columns(parse_verl([line]))
    assert table == {"a/b": [0.5], "c": [-1e-06], "d": [None], "val-core/openai/gsm8k/reward/mean@1": [0.25]}


def test_rows_of_a_step_join_and_gaps_are_none():
    rows = [{"training/global_step": 2, "a": 1}, {"training/global_step": 1, "b": float("inf")}]
    rows += [{"training/global_step": 2, "b": 3.123456789, "a": 5}, {"x": 1}]
    assert columns(rows) == ([1, 2], {"b": [None, 3.12346], "a": [None, 5]})


def test_flat_options_and_names():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
    paths = [Path("/x/one/run"), Path("/x/two/run"), Path("/x/other"), Path("/x/other")]
    assert names(paths) == ["one/run", "two/run", "other (1)", "other (2)"]


def test_samples_are_some_of_them(tmp_path):
    run = write_run(tmp_path / "run", 300, "x" * 9000)
    table = samples(run / "samples")
    assert len(table) == 12 and min(table) == 1 and max(table) == 291
    assert all(len(rows) == 8 and len(rows[0]["response"]) < 4100 for rows in table.values())


class Scripts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]


def test_page_is_self_contained_and_texts_cannot_leave_their_place(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u2028 @DATA@ <!--"
    html = page([write_run(tmp_path / "<b>&run", 3, hostile, lr=1.0), write_run(tmp_path / "other", 4, lr=2.0)])
    parser = Scripts()
    parser.feed(html)
    assert parser.tags.count("script") == 2 and "img" not in parser.tags and parser.addresses == ["data:,"]
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    runs = data_of(html)
    assert runs[0]["samples"]["1"][0]["response"] == hostile
    assert runs[0]["validation"]["1"][0]["response"] == "while validating"
    assert [run["config"]["train.lr"] for run in runs] == [1.0, 2.0] and len(runs[1]["steps"]) == 4


def test_command_line(tmp_path, capsys):
    run, log = write_run(tmp_path / "run", 5), tmp_path / "old.log"
    log.write_text(f"noise\n{VERL_LINE}\n")
    assert main([str(run), str(log)]) == 0 and (run / "report.html").exists()
    assert [r["name"] for r in data_of((run / "report.html").read_text())] == ["run", "old"]
    assert main([str(run / "metrics.jsonl"), "-o", str(tmp_path / "x.html")]) == 0 and (tmp_path / "x.html").exists()
    assert main([]) == main(["--help"]) == main([str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty.log").write_text("nothing\n")
    assert main([str(tmp_path / "empty.log")]) == 2 and "no steps" in capsys.readouterr().err


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.parametrize("scheme, background", [("light", (247, 247, 245)), ("dark", (19, 20, 23))])
def test_a_browser_draws_1000_steps_of_two_runs_within_2_s_and_says_nothing(tmp_path, scheme, background):
    if BROWSER is None:
        pytest.skip("needs chromium")
    image = pytest.importorskip("PIL.Image")
    html, picture = tmp_path / "report.html", tmp_path / "page.png"
    html.write_text(page([write_run(tmp_path / name, 1000) for name in ("a", "b")]))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command.append(f"--user-data-dir={tmp_path}/profile")
    command.append(f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")

    def browse(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options, f"file://{html}"], capture_output=True, text=True, timeout=120)

    done = browse("--dump-dom")
    ready = re.search(r'data-ready="(\d+)"', done.stdout)
    assert ready, done.stderr[-2000:]
    print(f"ready after {ready[1]} ms")
    assert int(ready[1]) < 2000 and "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") >= 6 and "NaN" not in done.stdout
    headings = re.findall(r"<h2>(.*?)</h2>", done.stdout)
    wanted = ["Speed", "Learning", "Where the time goes", "Memory by phase", "Experts", "Samples"]
    assert [h for h in headings if h in wanted] == wanted
    table = done.stdout.split("<h2>Memory by phase</h2>")[1].split("<h2>")[0]
    assert re.findall(r"<code>(\w+)</code>", table) == MOVES and table.count("9.5") == 2 * 2 * len(MOVES)
    assert "validation, step 1</option>" in done.stdout
    assert "CONSOLE" not in browse(f"--screenshot={picture}", "--window-size=1300,2600").stderr
    pixels = image.open(picture).convert("RGB")
    assert pixels.getpixel((2, 2500)) == background
