"""A reward model behind HTTP. In: a model's folder or Hub id. Out: a server that speaks the form of
`proxima.rewards.http_reward`.

    POST /score   {"prompts": [...], "completions": [...]}  ->  {"rewards": [number or null, ...]}
    GET  /health  {"name": ..., "ready": true}

`ended` in the request says which completions were finished (all, where it is left out): a model that was
trained on texts with EOS reads one after these. With `completion_ids` too, those very ids are scored, where
they are the model's own tokens.
"""

import asyncio
import hmac
import json
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

from proxima.base_setup.loading import load_network, pick_device
from proxima.base_setup.micro_batches import MicroBatches
from proxima.base_setup.model_setup import has_head, load_reward
from proxima.base_setup.tokenizer_setup import load_tokenizer
from proxima.config import PPOConfig
from proxima.core.tokenizer import Tokenizer
from proxima.models import Backbone
from proxima.rewards.http_reward import is_loopback
from proxima.rewards.model_reward import ClassifierSource, TrainedReward
from proxima.rewards.reward_options import check_options, keyword_options
from proxima.rewards.reward_samples import Samples, tokens_of

MAX_BODY_BYTES = 16 * 2**20
MAX_SAMPLES = 1024
MAX_CONNECTIONS = (
    64  # for more, idle ones are closed; where none is idle, clients are told to come back later
)
LOADING_SECONDS = 5  # after which a client may ask again

Scorer = Callable[[dict[str, Any]], list[float]]


class BadRequest(Exception):  # noqa: N818
    """What a client sent cannot be scored."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class RewardServer:
    """One model, one call at a time; it listens while the model is still loading and says so."""

    def __init__(self, name: str, load: Callable[[], Scorer], token: str = ""):
        self.name, self._load, self._token = name, load, token
        self._scorer: Scorer | None = None
        self._failure: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._scorer is not None

    def app(self) -> Any:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        one_at_a_time = asyncio.Lock()

        @app.exception_handler(BadRequest)
        async def refuse(request: Request, problem: BadRequest) -> JSONResponse:
            return JSONResponse({"error": str(problem)}, problem.status)

        @app.get("/health")
        async def health(request: Request) -> Any:
            self._check_host(request.headers)
            return {"name": self.name, "ready": self.ready}

        @app.post("/score")
        async def score(request: Request) -> Any:
            self._check_host(request.headers)
            self._check_caller(request.headers)
            batch = read_batch(await _body(request))
            if self._scorer is None:
                return JSONResponse({"error": "still loading"}, 503, {"Retry-After": str(LOADING_SECONDS)})
            async with one_at_a_time:
                rewards = await asyncio.to_thread(self._scorer, batch)
            return {"rewards": [None if math.isnan(reward) else reward for reward in rewards]}

        return app

    def _check_host(self, headers: Any) -> None:
        """A web page whose own name resolves to this machine names itself in Host; a token it cannot have."""
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not self._token and not is_loopback(name):
            raise BadRequest(
                403, "without a token (--token-env) this server answers to localhost and 127.0.0.1 only"
            )

    def _check_caller(self, headers: Any) -> None:
        given = headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise BadRequest(401, "a bearer token is needed")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise BadRequest(415, "send application/json")  # a web page cannot, without asking first

    def serve(self, host: str, port: int, announce: Callable[[str], None] = print) -> None:
        """Listen until interrupted; raises what went wrong in loading."""
        from proxima.pages.web.connections import bounded_server

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
                self._failure, server.should_exit = error, True

        shown = f"[{host}]" if ":" in host else host
        announce(f"reward {self.name} at http://{shown}:{listener.getsockname()[1]}/score, loading")
        threading.Thread(target=load, daemon=True).start()
        server.run(sockets=[listener])
        if self._failure:
            raise self._failure


def check_exposure(host: str, token: str) -> None:
    """Other machines may only reach a server that asks for a token."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"host {host!r} can be reached from other machines; name a token with --token-env, or use "
            "127.0.0.1"
        )


def load_scorer(config: PPOConfig) -> Scorer:
    """The config's one reward, a trained model of this package on its base or a classifier, alone in
    memory."""
    [spec] = config.rewards
    source, device = str(spec.source), pick_device(config.device)
    if not has_head(source):
        classifier = ClassifierSource(
            source, config, device, **check_options(spec, keyword_options(ClassifierSource))
        )
        return lambda batch: classifier(_sampled(batch, classifier.classifier.tokenizer)).sequence
    check_options(spec, {})
    tokenizer = load_tokenizer(config.model_name, config.trust_remote_code)
    model = load_reward(config, Backbone(load_network(config, config.model_name, device)))
    trained = TrainedReward(model, tokenizer, MicroBatches.of(config))

    def score(batch: dict[str, Any]) -> list[float]:
        if "completion_ids" not in batch:
            return trained(_samples(batch)).sequence
        if not _are_tokens(batch, tokenizer):
            raise BadRequest(
                422, "completion_ids are not this model's tokens for completions; leave them out"
            )
        return trained(_samples(batch, tokenizer)).sequence

    return lambda batch: score_what_fits(score, batch, tokenizer, model.backbone.context_length)


def score_what_fits(
    score: Scorer, batch: dict[str, Any], tokenizer: Tokenizer, context: int | None
) -> list[float]:
    """The scores of the samples that the model can read; nan for longer ones, as a classifier gives it."""
    if "completion_ids" in batch:
        pairs = zip(
            tokenizer(batch["prompts"], verbose=False)["input_ids"], batch["completion_ids"], strict=True
        )
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    else:
        samples = _samples(batch)
        rows = tokenizer(samples.full_texts, verbose=False)["input_ids"]
        lengths = [
            len(row) + ended for row, ended in zip(rows, samples.ended, strict=True)
        ]  # a finished one gets an EOS
    fits = [context is None or length <= context for length in lengths]
    kept = {
        name: [item for item, fit in zip(column, fits, strict=True) if fit] for name, column in batch.items()
    }
    scores = iter(score(kept) if any(fits) else [])
    return [next(scores) if fit else math.nan for fit in fits]


def read_batch(body: bytes) -> dict[str, Any]:
    """The request, checked: texts, and ids where there are any."""
    try:
        batch = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest(400, "the body is not JSON") from None
    if not isinstance(batch, dict):
        raise BadRequest(422, 'send {"prompts": [...], "completions": [...]}')
    count = len(batch["prompts"]) if isinstance(batch.get("prompts"), list) else 0
    if not 0 < count <= MAX_SAMPLES:
        raise BadRequest(413 if count else 422, f"send 1 to {MAX_SAMPLES} prompts")
    kinds: dict[str, Callable[[Any], bool]] = {
        "prompts": lambda item: _is_text(item) and item != "",
        "completions": _is_text,
    }
    if "completion_ids" in batch:
        kinds["completion_ids"] = lambda item: (
            isinstance(item, list) and all(type(token) is int for token in item)
        )
    if "completion_ids" in batch or "ended" in batch:
        kinds["ended"] = lambda item: isinstance(item, bool)
    for name, is_right in kinds.items():
        items = batch.get(name)
        if not isinstance(items, list) or len(items) != count or not all(map(is_right, items)):
            raise BadRequest(422, f"{name} must be a list of {count}, as many as prompts, each of its kind")
    return {name: batch[name] for name in kinds}


def _is_text(item: Any) -> bool:
    """A text that has bytes: JSON can also hold half of a surrogate pair, which no tokenizer reads."""
    try:
        return isinstance(item, str) and item.encode() is not None
    except UnicodeEncodeError:
        return False


def _are_tokens(batch: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the ids are this tokenizer's; those of another would be scored as other words."""
    size = len(tokenizer)
    return all(
        all(0 <= token < size for token in ids) and tokenizer.decode(ids, skip_special_tokens=True) == text
        for ids, text in zip(batch["completion_ids"], batch["completions"], strict=True)
    )


def _sampled(batch: dict[str, Any], tokenizer: Tokenizer) -> Samples:
    """With ids where these are the classifier's own tokens and end with its own EOS; else as text."""
    ids, end = batch.get("completion_ids"), tokenizer.eos_token_id
    own = ids is not None and _are_tokens(batch, tokenizer)
    own = own and all(
        row[-1:] == [end] for row, ended in zip(batch["completion_ids"], batch["ended"], strict=True) if ended
    )
    return _samples(batch, tokenizer if own else None)


def _samples(batch: dict[str, Any], tokenizer: Tokenizer | None = None) -> Samples:
    """
    Args:
        tokenizer: what wrote `completion_ids`; None = they are not used.
    """
    prompts, count = batch["prompts"], len(batch["prompts"])
    ended = batch.get("ended", [True] * count)  # a text that nobody sampled counts as ended
    if tokenizer is not None:
        return Samples.of_tokens(tokens_of(prompts, batch["completion_ids"], ended, tokenizer, "cpu"))
    return Samples(prompts, batch["completions"], [[] for _ in range(count)], ended)


async def _body(request: Any) -> bytes:
    from starlette.requests import ClientDisconnect

    received = bytearray()
    try:
        async for piece in request.stream():
            received += piece
            if len(received) > MAX_BODY_BYTES:
                raise BadRequest(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise BadRequest(400, "the body did not come whole") from None
    return bytes(received)
