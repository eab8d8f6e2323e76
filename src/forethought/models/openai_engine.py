"""Sampling from a server that speaks the OpenAI-compatible chat/completions protocol; HTTP by the standard library.

It gives text, not ids or log-probs, so what it samples cannot be trained on (`trainable` is False, and `score` says
so): it serves as a judge, a simulated user, a world model, or a teacher whose answers become SFT records. The ids of
its nodes are the answer's text encoded by the renderer's tokenizer, for counting and display; their log-probs are NaN.

A request that fails for a passing reason (429, 408, 5xx, time-out, broken connection, an answer that is not of the
protocol) is repeated with growing pauses; when the attempts are used up, its samples become empty nodes with Stop.ERROR
and the reason in meta["error"], so that their siblings are not lost. What no repetition can mend (any other 4xx)
raises at once.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from forethought.errors import ConfigError, DataError, EngineError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import EngineStats, Leaf, Sampling, row_seed
from forethought.tree.tree import Kind, Stop, TokenTree

_PASSING = (408, 409, 425, 429)  # and all 5xx
_LONGEST_PAUSE = 60.0
_NO_ROOM = ("context_length_exceeded", "maximum context length")


@dataclass
class HTTPStats:
    """Counters of the connection since the engine was made."""

    attempts: int = 0
    retries: int = 0
    failures: int = 0
    """Requests given up."""
    without_usage: int = 0
    """Answers without a usage field; their tokens are counted by the renderer's tokenizer."""


@dataclass
class _Sample:
    text: str
    stop: Stop
    meta: dict[str, Any] = field(default_factory=dict)


class _Passing(Exception):
    """Worth another attempt, after `pause` seconds if the server says so."""

    def __init__(self, why: str, pause: float | None = None):
        super().__init__(why)
        self.pause = pause


class _NoRoom(Exception):
    """The conversation does not fit into the model's context."""


class OpenAIEngine:
    """Samples from a chat/completions server.

    Args:
        base_url: up to and including the version, such as http://localhost:8000/v1.
        model: the name that the server knows.
        renderer: encodes answers and shows paths as messages; by default one token per byte.
        api_key_env: environment variable with the key; if it is not set, none is sent.
        timeout: seconds for one attempt, all in all.
        attempts: how often a request is tried.
        pause: seconds before the second attempt; doubled each time, and a server's Retry-After goes before.
        parallel: requests under way at once.
        extra: further fields of the request body (such as top_k of vLLM).

    Raises:
        ConfigError: an argument outside its range; all problems at once.
    """

    trainable = False

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        renderer: ChatRenderer | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 120.0,
        attempts: int = 5,
        pause: float = 0.5,
        parallel: int = 8,
        extra: Mapping[str, Any] | None = None,
    ):
        bad = []
        if urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).netloc:
            bad.append(f"base_url={base_url!r}: give an address such as http://localhost:8000/v1")
        if not model:
            bad.append("model='': give the name that the server knows")
        if not timeout > 0:
            bad.append(f"timeout={timeout}: give seconds above 0")
        if attempts < 1 or parallel < 1:
            bad.append(f"attempts={attempts}, parallel={parallel}: give at least 1")
        if not pause >= 0:
            bad.append(f"pause={pause}: give 0 or more seconds")
        if bad:
            raise ConfigError("openai engine: " + "; ".join(bad))
        if renderer is None:
            from forethought.models.tiny import byte_tokenizer

            renderer = ChatRenderer(byte_tokenizer())
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model = model
        self.renderer = renderer
        self.api_key_env = api_key_env
        self.timeout, self.attempts, self.pause, self.parallel = timeout, attempts, pause, parallel
        self.extra = dict(extra or {})
        self.stats = EngineStats()
        self.http = HTTPStats()
        self._lock = threading.Lock()  # of the counters

    # -- the engine protocol --
    def extend(
        self,
        leaves: Sequence[Leaf],
        n: int,
        sampling: Sampling,
        *,
        names: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """See `engine.Engine.extend`; nodes are added in the order of the leaves, whichever answer comes first.

        A conversation that does not fit into the context gives empty nodes with Stop.LENGTH.

        Raises:
            EngineError: n < 1; a setting that the protocol lacks; a path that ends in an assistant turn; the server
            refuses the request (key, model, ...); or every request failed. Then no tree was changed.
        """
        if n < 1:
            raise EngineError(f"n={n}: sample at least one continuation")
        if sampling.top_k or sampling.ignore_eos:
            raise EngineError(
                f"top_k={sampling.top_k}, ignore_eos={sampling.ignore_eos}: not in the chat/completions protocol; "
                "leave them off, or pass the server's own field in `extra`"
            )
        requests = [self._messages(tree, leaf, number) for number, (tree, leaf) in enumerate(leaves)]
        keys = [(t.task, leaf, len(t.children(leaf))) for t, leaf in leaves]
        if names is not None:
            keys = [(name, 0, 0) for name in names]
        seeds = [row_seed(sampling.seed, *key) % 2**31 for key in keys]
        samples: list[list[_Sample]] = [[] for _ in leaves]
        pool = ThreadPoolExecutor(self.parallel, thread_name_prefix="chat")
        over = threading.Event()  # wakes requests that pause when the call has failed or was interrupted
        try:
            jobs = {
                pool.submit(self._ask, m, n, sampling, s, over): i
                for i, (m, s) in enumerate(zip(requests, seeds, strict=True))
            }
            for done, job in enumerate(as_completed(jobs), 1):
                samples[jobs[job]] = job.result()
                if progress:
                    progress(done * n, len(leaves) * n)
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)
        every = [s for mine in samples for s in mine]
        if every and all(s.stop == Stop.ERROR for s in every):
            raise EngineError(f"{self.url}: every request failed; the last one: {every[-1].meta['error']}")
        rows = [[(s, self._ids(s)) for s in mine] for mine in samples]
        self.stats.requests += len(every)
        return [
            [self._add(tree, leaf, sample, ids) for sample, ids in mine]
            for (tree, leaf), mine in zip(leaves, rows, strict=True)
        ]

    def score(self, leaves: Sequence[Leaf], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Not possible here.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            f"{self.url}: chat/completions gives no log-probs of given tokens, so nothing can be scored or trained on; "
            "use the torch engine for the policy"
        )

    def load_weights(self, state: dict) -> None:
        """Not possible here.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self.url}: the weights of a served model cannot be replaced; use the torch engine")

    # -- trees --
    def _messages(self, tree: TokenTree, leaf: int, number: int) -> list[dict[str, Any]]:
        messages = self.renderer.display(tree, leaf)
        if not messages or messages[-1]["role"] == "assistant":
            what = "is empty" if not messages else "ends in an assistant turn"
            raise EngineError(
                f"leaf {number} (task {tree.task!r}): its path {what}; chat/completions only answers another's turn"
            )
        return messages

    def _ids(self, sample: _Sample) -> list[int]:
        try:
            ids = self.renderer.encode(sample.text)
        except DataError as err:
            raise EngineError(
                f"an answer cannot be shown in this vocabulary ({err}); use the default renderer"
            ) from err
        end = self.renderer.end_id
        return [*ids, end] if sample.stop == Stop.EOS and end is not None else ids

    def _add(self, tree: TokenTree, leaf: int, sample: _Sample, ids: list[int]) -> int:
        return tree.add(leaf, ids, kind=Kind.ASSISTANT, sampled=True, stop=sample.stop, meta=sample.meta)

    # -- requests --
    def _ask(
        self, messages: list[dict[str, Any]], n: int, sampling: Sampling, seed: int, over: threading.Event
    ) -> list[_Sample]:
        """n samples; a server that gives fewer choices than asked for is asked again for the rest."""
        out: list[_Sample] = []
        while len(out) < n:
            body: dict[str, Any] = {
                "model": self.model,
                "messages": messages,
                "n": n - len(out),
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": (seed + len(out)) % 2**31,
            }
            if sampling.top_p < 1:
                body["top_p"] = sampling.top_p
            if sampling.stop:
                body["stop"] = list(sampling.stop)
            try:
                out += self._patiently(body | self.extra, over)[: n - len(out)]
            except _NoRoom as err:
                return [_Sample("", Stop.LENGTH, {"why": str(err)}) for _ in range(n)]
            except _Passing as err:
                self._count(failures=1)
                failed = _Sample("", Stop.ERROR, {"error": f"{err} (tried {self.attempts} times)"})
                return out + [failed] * (n - len(out))
        return out

    def _count(self, tokens_prefilled: int = 0, tokens_generated: int = 0, **http: int) -> None:
        with self._lock:
            self.stats.tokens_prefilled += tokens_prefilled
            self.stats.tokens_generated += tokens_generated
            for name, number in http.items():
                setattr(self.http, name, getattr(self.http, name) + number)

    def _patiently(self, body: dict[str, Any], over: threading.Event) -> list[_Sample]:
        for attempt in range(self.attempts):
            try:
                return self._read(self._post(body))
            except _Passing as err:
                own = self.pause * 2**attempt * (1 + random.random() / 4)  # apart from the others that failed with it
                pause = min(_LONGEST_PAUSE, own if err.pause is None else err.pause)
                if attempt + 1 == self.attempts or over.wait(pause):
                    raise
                self._count(retries=1)
        raise AssertionError("unreachable")

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise EngineError(f"{self.api_key_env} holds characters that no HTTP header can carry; set it again")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body, allow_nan=False).encode()
        self._count(attempts=1)
        until = time.monotonic() + self.timeout
        try:
            request = urllib.request.Request(self.url, data=data, headers=headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                raw = self._all(response, until)
        except urllib.error.HTTPError as err:
            with err:
                raise self._refusal(err, until) from None
        except (TimeoutError, urllib.error.URLError, http.client.HTTPException, ConnectionError) as err:
            reason = getattr(err, "reason", err)
            if isinstance(reason, TimeoutError):
                raise _Passing(f"no answer within {self.timeout:g} s") from None
            raise _Passing(f"the connection failed: {reason or type(err).__name__}") from None
        try:
            return json.loads(raw)
        except ValueError:
            raise _Passing("the answer is not JSON") from None

    @staticmethod
    def _all(response: Any, until: float) -> bytes:
        """The whole body; a server that sends a little now and then does not get more time for it."""
        parts = []
        while block := response.read1(65536):
            parts.append(block)
            if time.monotonic() > until:
                raise TimeoutError
        return b"".join(parts)

    def _refusal(self, err: urllib.error.HTTPError, until: float) -> Exception:
        try:
            text = self._all(err, until).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        try:
            said = json.loads(text)["error"]
            said = (
                f"{said.get('message', '')} {said.get('code') or ''}".strip() if isinstance(said, dict) else str(said)
            )
        except (ValueError, KeyError, TypeError):
            said = text.strip()
        why = f"HTTP {err.code}: {said[:300] or err.reason}"
        if err.code in _PASSING or err.code >= 500:
            return _Passing(why, _retry_after(err.headers.get("Retry-After")))
        if any(mark in said for mark in _NO_ROOM):
            return _NoRoom(why)
        fix = {
            401: f"set {self.api_key_env} to a valid key",
            403: f"the key in {self.api_key_env} may not use this model",
            404: f"check base_url and that the server has a model {self.model!r}",
        }.get(err.code, "check the request's settings")
        return EngineError(f"{self.url}: {why}; {fix}")

    def _read(self, answer: Any) -> list[_Sample]:
        try:
            found = [self._choice(choice) for choice in answer["choices"]]
        except (KeyError, TypeError, AttributeError):
            raise _Passing("the answer is not of the chat/completions protocol") from None
        if not found:
            raise _Passing("the answer has no choices")
        usage = answer.get("usage") or {}
        sent, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(sent, int) and isinstance(made, int):
            self._count(sent, made)
        else:
            self._count(tokens_generated=sum(len(self._ids(s)) for s in found), without_usage=1)
        return found

    @staticmethod
    def _choice(choice: dict[str, Any]) -> _Sample:
        message, reason = choice["message"], choice.get("finish_reason")
        text = message.get("content") or ""
        if not isinstance(text, str):
            raise TypeError
        meta = {k: message[k] for k in ("refusal", "reasoning_content", "tool_calls") if message.get(k)}
        if reason == "length":
            return _Sample(text, Stop.LENGTH, meta)
        if reason == "content_filter":
            return _Sample(text, Stop.ERROR, meta | {"error": "the server's content filter cut the answer"})
        # vLLM tells which stop string ended it.
        return _Sample(text, Stop.STRING if isinstance(choice.get("stop_reason"), str) else Stop.EOS, meta)


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
