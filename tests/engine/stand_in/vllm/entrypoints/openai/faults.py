"""Answers that are wrong, on demand."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api_server import StandIn


def damage(server: "StandIn", choices: list[dict]) -> None:
    """Spoil an answer that holds token ids and log-probs, as the faults say."""
    last, end = choices[-1], server.engine.tokenizer.eos_token_id
    ids, log_probs = last["token_ids"], (last["logprobs"] or {}).get("token_logprobs")
    if server.has_fault("wrong_prompt_ids"):
        last["prompt_token_ids"][-1] ^= 1
    if server.has_fault("ids_outside"):
        ids[0] = server.engine.vocab_size
    if server.has_fault("tokens_after_end"):
        ids[:], log_probs[:] = [end, *(ids[1:] or [end])], [-1.0, *(log_probs[1:] or [-1.0])]
    if server.has_fault("too_many_tokens"):
        ids += [ids[0]] * server.max_model_len
        log_probs += [log_probs[0]] * server.max_model_len
    if server.has_fault("cut_short"):
        del ids[-1], log_probs[-1]
    if server.has_fault("fewer_log_probs"):
        log_probs.pop()
    if server.has_fault("nan_log_probs"):
        log_probs[0] = math.nan
    if server.has_fault("positive_log_probs"):
        log_probs[0] = 0.5
    if server.has_fault("wrong_finish_reason"):
        last["finish_reason"] = "length" if last["finish_reason"] == "stop" else "stop"
    if server.has_fault("no_log_probs"):
        last["logprobs"] = None
    if server.has_fault("no_token_ids"):  # as servers before 0.10.2
        for choice in choices:
            del choice["token_ids"], choice["prompt_token_ids"]
    if server.has_fault("too_few"):
        choices.pop()
