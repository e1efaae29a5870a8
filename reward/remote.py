"""A reward over HTTP: batches of samples by POST, several requests at once, retries, and a deadline for everything.

    request   {"samples": [{"data_source", "solution", "ground_truth", "extra_info"}, ...]}
    answer    {"scores": [number or table of numbers, ...]}     one per sample, in order

Answers cut short, 408, 429 and 5xx are tried three times, connection errors for as long as three slow answers would
take (a server that restarts); what has no score then is 0 and counted.
Standard library.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from launch.config import RewardConfig
from reward.rules import Item, Score, as_score

BATCH = 32
REQUESTS = 8
ATTEMPTS = 3
PAUSE_S = 0.5


class Remote:
    """Scores samples at `config.url`; `config.timeout_s` is the deadline of one request."""

    def __init__(self, config: RewardConfig):
        if not config.url.startswith(("http://", "https://")):
            raise ValueError(f"reward.url = {config.url!r} must begin with http:// or https://")
        self.config = config

    def score(self, items: Sequence[Item]) -> list[Score]:
        """Scores in the order of the items, after at most the time that all attempts of all requests may take."""
        batches: queue.SimpleQueue[range] = queue.SimpleQueue()
        answers: queue.SimpleQueue[tuple[range, list[Score]]] = queue.SimpleQueue()
        scores = [Score(0.0, {}, "timeout")] * len(items)
        count = -(-len(items) // BATCH)
        for start in range(0, len(items), BATCH):
            batches.put(range(start, min(start + BATCH, len(items))))

        def serve() -> None:
            while not batches.empty():
                try:
                    batch = batches.get_nowait()
                except queue.Empty:
                    return
                answers.put((batch, self._batch([items[i] for i in batch])))

        for _ in range(min(REQUESTS, count)):
            threading.Thread(target=serve, daemon=True).start()  # daemon: a stuck request cannot hold up the exit
        rounds = -(-count // REQUESTS)
        deadline = time.monotonic() + rounds * ATTEMPTS * (self.config.timeout_s + PAUSE_S * ATTEMPTS)
        for _ in range(count):
            try:
                batch, found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            scores[batch.start : batch.stop] = found
        return scores

    def close(self) -> None:
        pass

    def _batch(self, items: Sequence[Item]) -> list[Score]:
        """Scores of one request; its failure is that of all its samples. Nothing is raised: the thread serves on."""
        reason, attempt, until = "", 0, time.monotonic() + ATTEMPTS * self.config.timeout_s
        while attempt < ATTEMPTS:
            attempt += 1
            try:
                results = self._request(items)
                if not isinstance(results, list) or len(results) != len(items):
                    raise ValueError(f"not a list of {len(items)} scores")
                return [self._score(result) for result in results]
            except urllib.error.HTTPError as error:
                reason = f"error: HTTP {error.code}"
                if error.code not in (408, 429) and error.code < 500:
                    break
            except TimeoutError:
                reason = "timeout"
            except OSError as error:
                reason = "timeout" if isinstance(getattr(error, "reason", None), TimeoutError) else f"error: {error}"
                attempt -= reason != "timeout" and time.monotonic() < until
            except (http.client.HTTPException, json.JSONDecodeError) as error:
                reason = f"error: bad answer: {type(error).__name__}: {error}"
            except Exception as error:  # what a foreign server can make json or a score of
                reason = f"error: bad answer: {error}"
                break
            time.sleep(PAUSE_S * max(1, attempt))
        return [Score(0.0, {}, reason)] * len(items)

    def _score(self, result: Any) -> Score:
        try:
            return as_score(result, self.config.weights)
        except (ValueError, TypeError, OverflowError) as error:
            return Score(0.0, {}, f"error: bad answer: {error}"[:500])

    def _request(self, items: Sequence[Item]) -> list[Any]:
        names = ("data_source", "solution", "ground_truth", "extra_info")
        samples = [dict(zip(names, item, strict=True)) for item in items]
        body = json.dumps({"samples": samples}, default=_plain).encode()
        request = urllib.request.Request(self.config.url, body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + self.config.timeout_s
        with urllib.request.urlopen(request, timeout=self.config.timeout_s) as response:
            data = b""
            while part := response.read1(1 << 16):
                data += part
                if time.monotonic() > deadline:  # the socket's own timeout starts anew with every byte
                    raise TimeoutError
        return json.loads(data)["scores"]


def _plain(value: Any) -> Any:
    """numpy scalars and arrays of a parquet row as JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
