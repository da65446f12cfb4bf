"""lm-evaluation-harness: scores choices, rolls over texts and lets the model write, on questions of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server

from . import DEFAULT

pytestmark = [pytest.mark.client("lm_eval"), pytest.mark.timeout(400)]

TASKS = Path(__file__).parent / "lm_eval_tasks"
RUN_SECONDS = 180
QUESTIONS = 4

Samples = dict[str, list[dict[str, Any]]]


def evaluate(folder: Path, model: str, tasks: list[str], *more: str, **arguments: object) -> Samples:
    """By its command line, in a process that may fetch nothing: what came of each question, by task."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", ",".join(tasks)]
    given = ",".join(f"{name}={value}" for name, value in {"model": DEFAULT, "max_retries": 1, **arguments}.items())
    command += ["--model_args", given, "--include_path", str(TASKS), "--output_path", str(folder), "--log_samples"]
    done = subprocess.run(
        [*command, *more],
        cwd=TASKS,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    samples = {}
    for task in tasks:
        (file,) = folder.glob(f"*/samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples[task]) == QUESTIONS
    return samples


def test_completions_are_scored_and_written(server: Server, default_model_dir: Path, tmp_path: Path) -> None:
    """The right city is the likeliest, and its own next word; each score is what the server says of the same tokens."""
    samples = evaluate(
        tmp_path,
        "local-completions",
        ["capitals_chosen", "capitals_written", "capitals_rolled"],
        "--batch_size=4",
        base_url=f"{server.url}/v1/completions",
        tokenizer=default_model_dir,
        tokenizer_backend="huggingface",
        num_concurrent=2,
    )
    assert [sample["acc"] for sample in samples["capitals_chosen"]] == [1] * QUESTIONS
    assert [sample["exact_match"] for sample in samples["capitals_written"]] == [1] * QUESTIONS
    for sample in samples["capitals_chosen"]:
        context = score(server, f"The capital of {sample['doc']['country']} is")
        for city, ((scored, is_greedy),) in zip(sample["doc"]["cities"], sample["resps"], strict=True):
            whole = score(server, f"The capital of {sample['doc']['country']} is {city}")
            assert float(scored) == pytest.approx(sum(whole) - sum(context), abs=1e-3)
            assert (is_greedy == "True") == (city == sample["doc"]["capital"])
    for sample in samples["capitals_rolled"]:
        start = token_ids(server, "<|im_start|>")
        text = f"The capital of {sample['doc']['country']} is {sample['doc']['capital']}."
        expected = sum(score(server, [*start, *token_ids(server, text)]))
        ((rolled,),) = sample["resps"]
        assert float(rolled) == pytest.approx(expected, abs=1e-3)


def test_chat_completions_are_written(server: Server, tmp_path: Path) -> None:
    samples = evaluate(
        tmp_path,
        "local-chat-completions",
        ["capitals_asked"],
        "--apply_chat_template",
        base_url=f"{server.url}/v1/chat/completions",
    )
    assert [sample["exact_match"] for sample in samples["capitals_asked"]] == [1] * QUESTIONS


def score(server: Server, prompt: str | list[int]) -> list[float]:
    """The log probability of each token of the prompt but the first."""
    scored = server.post(
        "/v1/completions", {"model": DEFAULT, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
    ).json()
    (choice,) = scored["choices"]
    logprobs: list[float] = choice["logprobs"]["token_logprobs"][1:]
    return logprobs


def token_ids(server: Server, text: str) -> list[int]:
    asked = {"model": DEFAULT, "prompt": text, "max_tokens": 1, "return_token_ids": True}
    ids: list[int] = server.post("/v1/completions", asked).json()["choices"][0]["prompt_token_ids"]
    return ids
