"""A small server that speaks as vLLM's does, with `transformers` and PEFT behind it; and that can be told
to misbehave."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from proxima.core.sampling import kept_logits, truncate
from proxima.runtime.vllm.vllm_server import WITH_MASKS


class AdapterModel:
    """What samples: a model and its adapters, in `transformers` and PEFT.

    With `other_sets` it keeps other tokens than the training side would: as if its arithmetic were coarse.
    With `coarse` it is: logits are multiples of 1/4, and all that tie with the last one kept are kept too.
    """

    def __init__(self, model, processed=True, other_sets=False, coarse=False):
        self.base = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        )  # here: loading in two threads fails
        self.model, self.processed, self.other_sets, self.coarse = None, processed, other_sets, coarse
        self.loaded, self.paths = {}, {}
        self.masks_of = {}
        """By response (its ids), the ids that each token was sampled from."""

    def _load(self, name, path):
        if self.model is None:
            self.model = PeftModel.from_pretrained(self.base, path, adapter_name=name).eval()
        elif name not in self.model.peft_config:
            self.model.load_adapter(path, adapter_name=name)
        self.loaded[name] = self.paths[name] = path

    @torch.no_grad()
    def _complete(self, asked):
        ids, generator = list(asked["prompt"]), torch.Generator().manual_seed(asked["seed"])
        raw = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        choice = {"index": 0, "token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "length"}
        if asked.get("prompt_logprobs") is not None:
            chosen = [{str(token): {"logprob": float(raw[i, token])}} for i, token in enumerate(ids[1:])]
            choice["prompt_logprobs"] = [None, *chosen]
        masks = []
        for _ in range(asked["max_tokens"]):
            scaled = raw[-1:] / asked["temperature"]
            if self.coarse:
                scaled = (scaled * 4).round() / 4
            logits = scaled.unsqueeze(1)
            compared = scaled + torch.arange(scaled.shape[-1]).sin() if self.other_sets else scaled
            if self.coarse:
                cut = logits < scaled.topk(asked["top_k"]).values[0, -1]
                masks.append((~cut[0, 0]).nonzero().flatten().tolist())
                logits = logits.masked_fill(cut, -torch.inf)
            elif (
                kept := truncate(compared, asked["top_k"], asked["top_p"])
            ) is not None and kept.ids is not None:
                cut = torch.ones_like(logits, dtype=torch.bool)
                masks.append(kept.ids[kept.ids >= 0].tolist())
                cut[0, 0, masks[-1]] = False
                logits = logits.masked_fill(cut, -torch.inf)
            elif kept is not None:
                logits = kept_logits(logits, kept)
            acting = logits[0, 0].log_softmax(-1)
            token = int(torch.multinomial(acting.exp(), 1, generator=generator))
            choice["token_ids"].append(token)
            choice["logprobs"]["token_logprobs"].append(float((acting if self.processed else raw[-1])[token]))
            if token in asked.get("stop_token_ids", ()):
                choice["finish_reason"] = "stop"
                break
            ids.append(token)
            raw = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        self.masks_of[tuple(choice["token_ids"])] = masks
        return {"model": asked["model"], "choices": [choice]}


class RolloutServer(AdapterModel):
    """Real answers, unless `fault(server, path, asked, answer)` returns something else: an answer, text,
    or None to hang up. With `masks` it returns sampling masks, at the endpoint and in the form of vLLM's."""

    def __init__(self, model, fault=None, masks=False, **settings):
        super().__init__(model, **settings)
        self.fault, self.masks = fault, masks
        self.asked, self.unloaded = [], []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    status, answer = outer.answer(self.path, asked)
                if outer.fault is not None:
                    changed = outer.fault(outer, self.path, asked, answer)
                    if changed is None:
                        self.close_connection = True
                        return self.connection.close()
                    status, answer = changed if isinstance(changed, tuple) else (status, changed)
                body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                body = json.dumps({"version": "0.0.7"}).encode()
                self.send_response(200 if self.path == "/version" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except OSError:  # the client has gone
                    self.close_connection = True

            def log_message(self, *given):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def restart(self):
        """As after a crash: up again, and all adapters forgotten."""
        with self._lock:
            self.loaded.clear()

    def answer(self, path, asked):
        name = asked.get("lora_name") or asked.get("model")
        if path == "/v1/load_lora_adapter":
            if name in self.loaded:
                return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
            self._load(name, asked["lora_path"])
            return 200, "Success"
        if path == WITH_MASKS and not self.masks:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        if name not in self.loaded:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        if path == "/v1/unload_lora_adapter":
            del self.loaded[name]
            self.unloaded.append(name)
            return 200, "Success"
        self.asked.append(asked)
        self.model.set_adapter(name)
        return 200, self._generate(asked) if path == WITH_MASKS else self._complete(asked)

    def _generate(self, asked):
        """The endpoint that returns sampling masks."""
        flat = {"model": asked["model"], "prompt": asked["token_ids"], **asked["sampling_params"]}
        reply = self._complete(flat)
        (choice,) = reply["choices"]
        places = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        content = [{"token_id": token, "logprob": number, "rank": 1} for token, number in places]
        masks = self.masks_of[tuple(choice["token_ids"])]
        return {**reply, "choices": [{**choice, "logprobs": {"content": content}, "sampling_mask": masks}]}


def is_sampling(path, asked):
    """Not the probe, nor an adapter's coming and going."""
    if path == WITH_MASKS:
        return asked["sampling_params"]["top_k"] != 1
    return path == "/v1/completions" and "prompt_logprobs" not in asked


def stalls(seconds):
    def fault(server, path, asked, answer):
        if is_sampling(path, asked):
            time.sleep(seconds)
        return answer

    return fault
