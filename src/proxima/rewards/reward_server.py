"""Serves a reward model, from a folder or the Hub, over HTTP, in the format of `proxima.rewards.http_reward`.

    POST /score   {"prompts": [...], "completions": [...]}  ->  {"rewards": [number or null, ...]}
    GET  /health  {"name": ..., "ready": true}

`ended` in the request says which completions were finished (all, where it is left out): a model that was
trained on texts with EOS reads one after these. With `completion_ids`, these ids are scored where they are
the model's own tokens.
"""

import asyncio
import hmac
import json
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from proxima.base_setup import MicroBatches, has_head, load_network, load_reward, load_tokenizer, pick_device
from proxima.config import PPOConfig, trained_quantize
from proxima.core.terminal_text import is_encodable
from proxima.core.tokenizer import Tokenizer
from proxima.models import Backbone
from proxima.rewards.endings import Ending
from proxima.rewards.http_reward import is_loopback
from proxima.rewards.model_reward import ClassifierSource, TrainedReward
from proxima.rewards.reward_options import check_options, keyword_options
from proxima.rewards.reward_samples import Samples, tokens_of

MAX_BODY_BYTES = 16 * 2**20
MAX_SAMPLES = 1024
MAX_CONNECTIONS = 64  # beyond it idle ones are closed; where none is idle, clients get 503
LOADING_SECONDS = 5  # after which a client may ask again

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.datastructures import Headers

Batch: TypeAlias = dict[str, list[Any]]
"""A checked request: columns of equal length, by name."""
Scorer = Callable[[Batch], list[float]]


class BadRequest(Exception):  # noqa: N818
    """A request that cannot be scored."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class RewardServer:
    """Serves one model, one call at a time. While the model loads, it replies 503."""

    def __init__(self, name: str, load: Callable[[], Scorer], token: str = ""):
        self.name = name
        self._load = load
        self._token = token
        self._scorer: Scorer | None = None
        self._failure: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._scorer is not None

    def app(self) -> "FastAPI":
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        one_at_a_time = asyncio.Lock()

        @app.exception_handler(BadRequest)
        async def refuse(request: Request, problem: BadRequest) -> JSONResponse:
            return JSONResponse({"error": str(problem)}, problem.status)

        @app.get("/health")
        async def health(request: Request) -> JSONResponse:
            self._check_host(request.headers)
            return JSONResponse({"name": self.name, "ready": self.ready})

        @app.post("/score")
        async def score(request: Request) -> JSONResponse:
            self._check_host(request.headers)
            self._check_caller(request.headers)
            batch = read_batch(await _body(request))
            if self._scorer is None:
                return JSONResponse({"error": "still loading"}, 503, {"Retry-After": str(LOADING_SECONDS)})
            async with one_at_a_time:
                rewards = await asyncio.to_thread(self._scorer, batch)
            return JSONResponse({"rewards": [None if math.isnan(reward) else reward for reward in rewards]})

        return app

    def _check_host(self, headers: "Headers") -> None:
        """Against DNS rebinding: a web page whose name resolves to this machine sends that name as Host. It
        cannot have a token."""
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not self._token and not is_loopback(name):
            raise BadRequest(
                403, "without a token (--token-env) this server answers to localhost and 127.0.0.1 only"
            )

    def _check_caller(self, headers: "Headers") -> None:
        given = headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise BadRequest(401, "a bearer token is needed")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise BadRequest(415, "send application/json")  # a web page cannot, without a CORS preflight

    def serve(self, host: str, port: int, announce: Callable[[str], None] = print) -> None:
        """Listen until interrupted; raises the error where loading fails."""
        from proxima.pages.web import bounded_server

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot listen at {host}, port {port}: {reason}; try --port 0") from None
        server = bounded_server(self.app(), MAX_CONNECTIONS)

        def load() -> None:
            try:
                self._scorer = self._load()
                announce("ready")
            except Exception as error:
                self._failure = error
                server.should_exit = True

        shown = f"[{host}]" if ":" in host else host
        announce(f"reward {self.name} at http://{shown}:{listener.getsockname()[1]}/score, loading")
        threading.Thread(target=load, daemon=True).start()
        server.run(sockets=[listener])
        if self._failure:
            raise self._failure


def check_exposure(host: str, token: str) -> None:
    """Raise a ValueError where other machines could reach a server without a token."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"host {host!r} can be reached from other machines; name a token with --token-env, or use "
            "127.0.0.1"
        )


def load_scorer(config: PPOConfig, announce: Callable[[str], None] = print) -> Scorer:
    """Loads the config's one reward, without the other roles: a reward model of this package or a
    classifier.

    Args:
        announce: told how texts end for a classifier, and why, whenever that changes.
    """
    [spec] = config.rewards
    source, device = str(spec.source), pick_device(config.device)
    if not has_head(source):
        classifier = ClassifierSource(
            source, config, device, **check_options(spec, keyword_options(ClassifierSource))
        )
        return ServedClassifier(classifier, announce)
    options = check_options(spec, keyword_options(TrainedReward))
    config = replace(config, quantize=trained_quantize(Path(source)) or "none")
    tokenizer = load_tokenizer(config.model_name, config.trust_remote_code)
    model = load_reward(config, Backbone(load_network(config, config.model_name, device)))
    trained = TrainedReward(model, tokenizer, MicroBatches.of(config, config.minibatch_size), **options)

    def score(batch: Batch) -> list[float]:
        if "completion_ids" not in batch:
            return trained(_samples(batch)).sequence
        if not _are_tokens(batch, tokenizer):
            raise BadRequest(
                422, "completion_ids are not this model's tokens for completions; leave them out"
            )
        return trained(_samples(batch, tokenizer)).sequence

    return lambda batch: score_what_fits(score, batch, tokenizer, model.backbone.context_length)


class ServedClassifier:
    """Scores requests with a classifier, and says how texts end for it."""

    def __init__(self, classifier: ClassifierSource, announce: Callable[[str], None]):
        self.classifier, self.announce = classifier, announce
        self.said: Ending | None = None
        self.is_known = classifier.ending is not None
        if self.is_known:
            self._say()

    def _say(self) -> None:
        ending = self.classifier.ending_now
        if ending == self.said:
            return
        self.said = ending
        hint = "" if self.is_known or ending.is_guess else f"; start with eos={ending.how} to keep this"
        self.announce(f"{ending}{hint}")

    def __call__(self, batch: Batch) -> list[float]:
        scores = self.classifier(_sampled(batch, self.classifier.classifier.tokenizer)).sequence
        self._say()
        return scores


def score_what_fits(score: Scorer, batch: Batch, tokenizer: Tokenizer, context: int | None) -> list[float]:
    """Scores of the samples that fit the model's context; nan for longer ones, as a classifier gives."""
    if "completion_ids" in batch:
        pairs = zip(
            tokenizer(batch["prompts"], verbose=False)["input_ids"], batch["completion_ids"], strict=True
        )
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    else:
        samples = _samples(batch)
        rows = tokenizer(samples.full_texts, verbose=False)["input_ids"]
        # a finished sample gets an EOS
        lengths = [len(row) + ended for row, ended in zip(rows, samples.ended, strict=True)]
    fits = [context is None or length <= context for length in lengths]
    kept = {name: list(compress(column, fits)) for name, column in batch.items()}
    scores = iter(score(kept) if any(fits) else [])
    return [next(scores) if fit else math.nan for fit in fits]


def read_batch(body: bytes) -> Batch:
    """A request's body, checked: texts, and ids if there are any."""
    try:
        batch = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest(400, "the body is not JSON") from None
    if not isinstance(batch, dict):
        raise BadRequest(422, 'send {"prompts": [...], "completions": [...]}')
    count = len(batch["prompts"]) if isinstance(batch.get("prompts"), list) else 0
    if not 0 < count <= MAX_SAMPLES:
        raise BadRequest(413 if count else 422, f"send 1 to {MAX_SAMPLES} prompts")
    checks: dict[str, Callable[[object], bool]] = {"prompts": _is_prompt, "completions": _is_text}
    if "completion_ids" in batch:
        checks["completion_ids"] = _is_id_list
    if "completion_ids" in batch or "ended" in batch:
        checks["ended"] = lambda item: isinstance(item, bool)
    for name, is_valid in checks.items():
        items = batch.get(name)
        if not isinstance(items, list) or len(items) != count or not all(map(is_valid, items)):
            raise BadRequest(422, f"{name} must be a list of {count} items of the right type, one per prompt")
    return {name: batch[name] for name in checks}


def _is_text(item: object) -> bool:
    """A text that UTF-8 can encode: JSON can also hold half of a surrogate pair, which no tokenizer reads."""
    return isinstance(item, str) and is_encodable(item)


def _is_prompt(item: object) -> bool:
    return _is_text(item) and item != ""


def _is_id_list(item: object) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)


def _are_tokens(batch: Batch, tokenizer: Tokenizer) -> bool:
    """Whether the ids are this tokenizer's; another one's would be scored as other words."""
    size = len(tokenizer)
    return all(
        all(0 <= token < size for token in ids) and tokenizer.decode(ids, skip_special_tokens=True) == text
        for ids, text in zip(batch["completion_ids"], batch["completions"], strict=True)
    )


def _sampled(batch: Batch, tokenizer: Tokenizer) -> Samples:
    """With ids where they are the classifier's own tokens and end with its own EOS; otherwise as text."""
    use_ids = "completion_ids" in batch and _are_tokens(batch, tokenizer)
    if use_ids:
        finished = compress(batch["completion_ids"], batch["ended"])
        use_ids = all(row[-1:] == [tokenizer.eos_token_id] for row in finished)
    return _samples(batch, tokenizer if use_ids else None)


def _samples(batch: Batch, tokenizer: Tokenizer | None = None) -> Samples:
    """
    Args:
        tokenizer: the one of `completion_ids`; None = they are not used.
    """
    prompts = batch["prompts"]
    count = len(prompts)
    ended = batch.get("ended", [True] * count)  # a text that was not sampled counts as finished
    if tokenizer is not None:
        return Samples.of_tokens(tokens_of(prompts, batch["completion_ids"], ended, tokenizer, "cpu"))
    return Samples(prompts, batch["completions"], [[] for _ in range(count)], ended)


async def _body(request: "Request") -> bytes:
    from starlette.requests import ClientDisconnect

    received = bytearray()
    try:
        async for piece in request.stream():
            received += piece
            if len(received) > MAX_BODY_BYTES:
                raise BadRequest(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise BadRequest(400, "the body is incomplete") from None
    return bytes(received)
