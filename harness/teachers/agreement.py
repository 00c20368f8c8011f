"""Whether a teacher reads tokens and prompts as the policy does."""

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy

from harness.base.terminal import short
from harness.models.pretrained import PROBE


def check_same_tokens(given: str, vocabulary: dict[str, int], own: dict[str, int]) -> None:
    """Refuse another tokenizer, by the first id that stands for another token: an id is all that the teacher gets."""
    tokens, own_tokens = ({i: token for token, i in ids.items()} for ids in (vocabulary, own))
    for i in sorted(tokens.keys() | own_tokens.keys()):
        if tokens.get(i) != own_tokens.get(i):
            raise UserError(
                f"{given} has another tokenizer than --model: token {i} is {short(tokens.get(i))} to the teacher, and "
                f"{short(own_tokens.get(i))} to the policy; a teacher scores the policy's own tokens"
            )


def check_same_prompt(given: str, prompt: list[int], policy: Policy, has_prefix: bool) -> None:
    """Refuse another chat template: the teacher would read prompts of a kind that it has never seen."""
    own = encode_prompt(policy.tokenizer, PROBE)
    if has_prefix:  # --completion-prefix, which the policy's prompts end with
        own = own[: len(prompt)]
    if own != prompt:
        theirs, ours = (short(policy.tokenizer.decode(ids)) for ids in (prompt, own))
        raise UserError(
            f"{given} has another chat template than --model: it begins a question with {theirs}, the policy with "
            f"{ours}; give both the same one with --chat-template FILE"
        )
