"""What a conversation of several turns needs of a chat template, found out before a run begins."""

from common.chat import encode_observation, removes_thoughts
from common.policy import Policy
from common.tools import call_form

from common.plumbing.terminal import say


def check_turns(policy: Policy) -> None:
    """Refuse a template that knows no calls or no answers of tools; say so if it removes the thoughts of earlier turns.

    Raises:
        UserError: with what the template lacks.
    """
    call_form(policy.tokenizer)
    encode_observation(policy.tokenizer, ["?"], policy.end_of_turn_ids)
    if removes_thoughts(policy.tokenizer):
        say(
            "the chat template removes the thoughts of a turn when the next one begins; here they stay, since a policy "
            "is trained on exactly what it has seen: let the trained policy see them as well when you use it"
        )
