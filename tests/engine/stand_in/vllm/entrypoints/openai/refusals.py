"""What the server refuses, in the words of vLLM 0.32: of what this project could ask."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api_server import StandIn

FAILED = "Call to collective_rpc method failed: Worker failed with error '{}', please check the stack trace above for "
FAILED += "the root cause"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
KINDS = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


class RefusedRequest(Exception):  # noqa: N818
    def __init__(self, status: int, message: str, param: str | None = None, kind: str | None = None):
        error = {"message": message, "type": kind or KINDS.get(status), "param": param, "code": status}
        self.status, self.body = status, {"error": error}


def given(body: dict, name: str, default: float) -> float:
    return default if body.get(name) is None else body[name]


def detail(status: int, sentence: str) -> RefusedRequest:
    refused = RefusedRequest(status, sentence)
    refused.body = {"detail": sentence}
    return refused


def check(body: object, server: "StandIn") -> None:
    """Refuse what the real server refuses. Unknown fields are ignored, there too."""
    if not isinstance(body, dict) or not isinstance(body.get("prompt"), list):
        raise detail(400, "The stand-in takes one prompt of token ids.")
    if body.get("model", server.name) != server.name:
        message = f"The model `{body['model']}` does not exist. Valid aliases: {server.name}."
        raise RefusedRequest(404, message, "model")
    prompt, temperature, n, longest = (
        body["prompt"],
        given(body, "temperature", 1.0),
        given(body, "n", 1),
        server.max_model_len,
    )
    if not -(2**63) <= given(body, "seed", 0) < 2**63:
        sentence = "Input should be less than or equal to 9223372036854775807"
        raise RefusedRequest(
            400, f"1 validation error:\n  {{'loc': 'body.seed', 'msg': '{sentence}'}}", "body.seed", "Bad Request"
        )
    if len(prompt) > longest:
        sentence = (
            f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(prompt)} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={len(prompt)})"
        )
        raise RefusedRequest(400, sentence, "input_tokens")
    budget = min(given(body, "max_tokens", 16), longest - len(prompt))  # cut silently, as there
    if budget < 1:
        sentence = f"max_tokens must be at least 1, got {budget}. (parameter=max_tokens, value={budget})"
        raise RefusedRequest(400, sentence, "max_tokens")
    if max(prompt) >= server.engine.vocab_size:
        raise RefusedRequest(400, f"Token id {max(prompt)} is out of vocabulary")
    if not 0 <= temperature <= 2:
        rule = f"temperature must be in [0, 2], got {temperature}. (parameter=temperature, value={temperature})"
        raise RefusedRequest(400, rule, "temperature")
    if n > 1 and temperature == 0:
        raise RefusedRequest(400, f"n must be 1 when using greedy sampling, got {n}.")
