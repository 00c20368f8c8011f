"""What the server refuses, in the words of vLLM 0.32, and what this one cannot do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api_server import StandIn

NEUTRAL = {"top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,)}
NEUTRAL |= {"frequency_penalty": (0,), "stream": (False,)}
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


def _invalid(place: str, sentence: str) -> RefusedRequest:
    place = f"body.{place}".rstrip(".")
    return RefusedRequest(
        400, f"1 validation error:\n  {{'loc': '{place}', 'msg': '{sentence}'}}", place, "Bad Request"
    )


def check(body: object, server: "StandIn") -> None:
    """Refuse what the real server refuses, and what this one cannot do. Unknown fields are ignored, there too."""

    def refuse(name: str, sentence: str) -> None:
        raise RefusedRequest(400, f"{sentence} (parameter={name}, value={body.get(name)})", name)

    if not isinstance(body, dict):
        raise _invalid("", "Input should be a valid dictionary or object to extract fields from")
    for name in ("n", "max_tokens", "seed", "logprobs"):
        if body.get(name) is not None and type(body[name]) is not int:
            raise _invalid(name, "Input should be a valid integer")
    if not -(2**63) <= given(body, "seed", 0) < 2**63:
        raise _invalid("seed", "Input should be less than or equal to 9223372036854775807")
    if body.get("model", server.name) != server.name:
        message = f"The model `{body['model']}` does not exist. Valid aliases: {server.name}."
        raise RefusedRequest(404, message, "model")
    prompt, temperature, n = body.get("prompt"), given(body, "temperature", 1.0), given(body, "n", 1)
    if prompt is None:
        sentence = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise RefusedRequest(400, sentence, "prompt")
    if prompt == []:
        raise RefusedRequest(400, "You must pass at least one prompt")
    if not isinstance(prompt, list) or any(type(i) is not int or i < 0 for i in prompt):
        raise _invalid("prompt", "Input should be a valid list of token ids")
    if len(prompt) > server.max_model_len:
        sentence = (
            f"This model's maximum context length is {server.max_model_len} tokens. However, your prompt contains "
        )
        sentence += (
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
        )
        sentence += f"the length of the input prompt. (parameter=input_tokens, value={len(prompt)})"
        raise RefusedRequest(400, sentence, "input_tokens")
    budget = min(given(body, "max_tokens", 16), server.max_model_len - len(prompt))  # cut silently, as there
    if budget < 1:
        body = body | {"max_tokens": budget}
        refuse("max_tokens", f"max_tokens must be at least 1, got {budget}.")
    if max(prompt) >= server.engine.vocab_size:
        raise RefusedRequest(400, f"Token id {max(prompt)} is out of vocabulary")
    if not 0 <= temperature <= 2:
        rule = "be non-negative" if temperature < 0 else "be in [0, 2]"
        refuse("temperature", f"temperature must {rule}, got {temperature}.")
    if not 0 < given(body, "top_p", 1.0) <= 1:
        refuse("top_p", f"top_p must be in (0, 1], got {body['top_p']}.")
    if not 0 <= given(body, "logprobs", 0) <= 20:
        refuse("logprobs", f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: 20")
    if n < 1:
        raise RefusedRequest(400, f"n must be at least 1, got {n}.")
    if n > 1 and temperature == 0:
        raise RefusedRequest(400, f"n must be 1 when using greedy sampling, got {n}.")
    outside = [i for i in body.get("stop_token_ids") or [] if not 0 <= i < server.engine.vocab_size]
    if outside:
        sentence = f"token_id(s) {outside} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: "
        refuse("stop_token_ids", f"{sentence}{server.engine.vocab_size}")
    for name, values in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in values:
            refuse(name, f"The stand-in has no {name}.")
