"""A server that answers like vLLM 0.32 on a CPU, with this project's own sampler: for tests without vLLM.

`PYTHONPATH=tests/engine/stand_in:. python -m vllm.entrypoints.openai.api_server --model FOLDER ...` starts it with
vLLM's own command; `StandIn(FOLDER).start()` within a process. A completion requested while there are no weights
(`engine.py`) gets a 500, and the server exits.

Differences: answers contain only what this project reads; the prefix cache is never stale; with bfloat16 the weights
are rounded and the arithmetic is float32; log-probs are always the processed ones; top_k, min_p and penalties have no
effect; texts and several prompts in a request are refused; sleep mode works, as on a GPU, and a request to a server
that sleeps is refused, not kept.
"""

import argparse
import contextlib
import json
import math
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import torch

from common.chat import encode_prompt
from common.sampling import begin_rows

from .engine import Engine, Job, RefusedRequest

COMPLETIONS, RPC, RESET = "/v1/completions", "/collective_rpc", "/reset_prefix_cache"
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
METHODS = {"/health": "GET", "/version": "GET", "/v1/models": "GET", "/server_info": "GET", COMPLETIONS: "POST"}
METHODS |= {RPC: "POST", RESET: "POST", CHAT: "POST", TOKENIZE: "POST", "/stand_in": "POST"}
SLEEP, WAKE, SLEEPS = "/sleep", "/wake_up", "/is_sleeping"
METHODS |= {SLEEP: "POST", WAKE: "POST", SLEEPS: "GET"}
DEVELOPMENT = (RPC, RESET, SLEEP, WAKE, SLEEPS, "/server_info")


class StandIn:
    """The server: `start()` and `stop()` it, or call `serve()`; the attributes from `calls` on are for tests."""

    def __init__(self, folder: str | Path, port: int = 0, **flags: object):
        flags = {"served_model_name": str(folder), "dtype": "float32", "logprobs_mode": "raw_logprobs"} | flags
        self.flags = {"dev_mode": True, "max_model_len": 512} | flags
        dtype = getattr(torch, str(flags["dtype"]))
        self.engine = Engine(Path(folder), dtype, int(self.flags["max_model_len"]))
        self.calls: Counter[str] = Counter()  # by path
        self.requests: list[dict] = []  # the requested completions
        self.faults: dict[tuple[str, str], float] = {}  # (name, path): how many more times
        self.damage: Callable[[list[dict]], object] = lambda choices: None  # damages the answer
        self.running, self.is_dead = 0, False
        self.connections: list[socket.socket] = []
        self.lock, self.stopped, self.closed = threading.Lock(), threading.Event(), threading.Event()
        handler = type("Bound", (Handler,), {"server_of": self})
        self.http = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 256})(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

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
        """Misbehave for the next `times` requests of `path`, None: for good."""
        self.faults[name, path] = math.inf if times is None else times

    def has_fault(self, name: str, path: str) -> bool:
        with self.lock:
            left = self.faults.get((name, path), 0)
            self.faults[name, path] = max(left - 1, 0)
        return left > 0

    def answer(self, method: str, path: str, body: object) -> dict | None:
        """The answer, as JSON; None: nothing. RefusedRequest has the status of the real server."""
        if self.is_dead:
            raise RefusedRequest(503 if path == "/health" else 500, "EngineCore encountered an issue.")
        if METHODS.get(path) != method or (path in DEVELOPMENT and not self.flags["dev_mode"]):
            raise RefusedRequest(404, "Not Found")
        self.calls[path] += 1
        if path == COMPLETIONS:
            return self.complete(body)
        if path == CHAT:
            return self.chat(body)
        if path == TOKENIZE:
            return {"tokens": encode_prompt(self.engine.tokenizer, body["messages"])}
        if path == RPC:
            fails = self.has_fault("failed_reload", RPC)
            self.engine.reload("/nowhere" if fails else body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == SLEEP:
            if body != {"level": ["2"]}:
                raise RefusedRequest(400, "The stand-in knows level 2 only.")
            self.engine.sleep()
            return {"status": "sleeping"}
        if path == WAKE:
            self.engine.asleep -= set(body["tags"])
            return {"status": "sleeping" if self.engine.asleep else "awake"}
        if path == SLEEPS:
            return {"is_sleeping": bool(self.engine.asleep)}
        if path == RESET:
            return {"success": not self.has_fault("busy_cache", RESET) and not self.running}
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/v1/models":
            model = {"id": self.flags["served_model_name"], "max_model_len": self.engine.max_model_len}
            return {"object": "list", "data": [model]}
        if path == "/server_info":
            chunks = {"enable_chunked_prefill": "no_enable_chunked_prefill" not in self.flags}
            model = {"logprobs_mode": self.flags["logprobs_mode"], "dtype": f"torch.{self.flags['dtype']}"}
            model["enable_sleep_mode"] = "enable_sleep_mode" in self.flags
            config = {"model_config": model, "scheduler_config": chunks, "device_config": {"device": "cpu"}}
            return {"vllm_config": config}
        if path == "/stand_in":
            self.fault(body["fault"], body.get("times"), body.get("path", COMPLETIONS))
        return None

    def chat(self, body: dict) -> dict:
        ids = encode_prompt(self.engine.tokenizer, body["messages"])
        choices = self.complete(body | {"prompt": ids, "stop_token_ids": []})["choices"]
        for choice in choices:
            text = self.engine.tokenizer.decode(choice.pop("token_ids"), skip_special_tokens=True)
            found = [(text.find(stop), stop) for stop in body.get("stop", ()) if stop in text]
            if found:  # as in vLLM, texts end with the stop text or before it; ids do not
                start, stop = min(found)
                text = text[: start + len(stop) * body.get("include_stop_str_in_output", False)]
            choice["message"] = {"role": "assistant", "content": text}
        return {"choices": choices}

    def complete(self, body: dict) -> dict:
        prompt, n, seed, longest = body["prompt"], body.get("n", 1), body.get("seed", 0), self.engine.max_model_len
        temperature, top_p = body["temperature"], body.get("top_p", 1.0)
        budget = min(body["max_tokens"], longest - len(prompt))  # cut silently, as in vLLM
        if body.get("model", self.flags["served_model_name"]) != self.flags["served_model_name"]:
            raise RefusedRequest(404, f"The model `{body['model']}` does not exist.")
        is_right = budget > 0 and max(prompt) < self.engine.vocab_size and abs(seed) < 2**63
        if not is_right or not 0 <= temperature <= 2 or (n > 1 and temperature == 0):
            raise RefusedRequest(400, "wrong prompt, seed, temperature or n")
        self.requests.append(body)
        own = [] if body.get("ignore_eos") else [self.engine.tokenizer.eos_token_id]
        stop_ids = tuple(sorted({*own, *body.get("stop_token_ids", [])}))
        rows = begin_rows([prompt], n)
        for j, row in enumerate(rows):  # the random numbers of a completion depend only on seed + j
            row.prompt_index, row.completion_index = (seed + j) % 2**64, 0
        with self.lock:
            self.running += 1
        try:
            self.engine.run(Job(rows, (temperature, top_p, stop_ids, budget, tuple(body.get("stop", ())))))
        except RefusedRequest:  # there are no weights: the real server exits, too
            self.is_dead = True
            threading.Timer(0.2, self.stop).start()  # after this answer
            raise
        finally:
            with self.lock:
                self.running -= 1
        choices = [
            {
                "index": index,
                "token_ids": row.completion_ids,
                "prompt_token_ids": list(prompt),
                "finish_reason": row.finish_reason,
                "logprobs": {"token_logprobs": row.sampler_log_probs[row.prompt_length :]},
            }
            for index, row in enumerate(rows)
        ]
        if "prompt_logprobs" in body:
            choices[0]["prompt_logprobs"] = self.engine.score(prompt)
        if self.has_fault("fewer_log_probs", COMPLETIONS):
            choices[-1]["logprobs"]["token_logprobs"].pop()
        self.damage(choices)
        return {"choices": choices}


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
        server, (path, _, query) = self.server_of, self.path.partition("?")
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = os.environ.get("VLLM_API_KEY")
        try:
            if key and path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
                raise RefusedRequest(401, "Unauthorized")
            if server.has_fault("hang", path):
                server.stopped.wait()
            if server.has_fault("status_500", path):
                raise RefusedRequest(500, "The stand-in was told to fail.")
            self.send(200, server.answer(method, path, json.loads(content) if content else parse_qs(query)))
        except RefusedRequest as refused:
            self.send(refused.status, refused.body)

    def send(self, status: int, answer: dict | None) -> None:
        server, path = self.server_of, self.path.partition("?")[0]
        content = b"" if answer is None else json.dumps(answer).encode()
        if server.has_fault("invalid_json", path):
            content = content[:-1]
        self.send_response(status)
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
    parser.add_argument("--port", type=int)
    for name in ("served-model-name", "dtype", "max-model-len", "logprobs-mode"):
        parser.add_argument(f"--{name}")
    for name in ("no-enable-chunked-prefill", "enable-sleep-mode"):
        parser.add_argument(f"--{name}", action="store_true")
    known, _ = parser.parse_known_args()
    flags = {name: value for name, value in vars(known).items() if name not in ("model", "port") and value}
    torch.set_num_threads(1)
    server = StandIn(known.model, known.port, dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1", **flags)
    print(f"INFO:     Uvicorn running on {server.url}", file=sys.stderr, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
