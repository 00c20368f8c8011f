"""The teacher of imitation/distill: a language model on this machine, or one that a server holds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from common.chat import encode_prompt
from common.errors import UserError
from common.experience import Experience
from common.logprobs import token_log_probs
from common.policy import Policy

from harness.base.checks import check_model
from harness.base.config import InputPath, ModelConfig, OfTeacher, RunConfig, shown
from harness.base.terminal import say, short
from harness.models.loading import load_policy
from harness.models.pretrained import PROBE
from harness.task.task import Task, check_context

Teacher = Callable[[Experience], torch.Tensor]  # its log-probs (B, T-1) of the action tokens, in nats


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(RunConfig):
    """The additional settings of an experiment with a teacher."""

    # the policy learns from this model, a hub id or a directory (also of a LoRA adapter), with the policy's tokenizer
    # and chat template; tiny_teacher: the bundled policy after it has learned to reason
    teacher: OfTeacher[InputPath] = "tiny_teacher"
    # the address of a vLLM server that holds the teacher, such as http://127.0.0.1:8000, instead of --teacher
    teacher_url: OfTeacher[str | None] = None


def load_teacher(config: TeacherConfig, task: Task, policy: Policy) -> Teacher:
    """The teacher that `config` names, frozen; UserError if it does not read tokens as the policy does."""
    if config.teacher_url is not None:
        from harness.teachers.teacher_server import TeacherServer  # not at the top: most runs have no server

        server = TeacherServer(config.teacher_url, policy)
        check_same_prompt(f"--teacher-url {config.teacher_url}", server.prompt, policy, bool(config.completion_prefix))
        return server
    given = f"--teacher {shown(config.teacher)}"
    same = {name: getattr(config, name) for name in ("chat_template", "device", "dtype", "attn_implementation")}
    of_teacher = ModelConfig(model=config.teacher, **same)
    try:
        check_model(of_teacher)
        teacher = load_policy(of_teacher, policy.temperature, is_frozen=True).requires_grad_(False)
    except UserError as error:
        raise UserError(str(error).replace("--model", "--teacher")) from error
    teacher.packing = teacher.packing if config.pack else None
    check_same_tokens(given, teacher.tokenizer.get_vocab(), policy.tokenizer.get_vocab())
    check_same_prompt(given, encode_prompt(teacher.tokenizer, PROBE), policy, bool(config.completion_prefix))
    check_context(config, task, teacher)
    say(f"{given} is the teacher: {sum(weight.numel() for weight in teacher.model.parameters()):,} parameters")
    return partial(token_log_probs, teacher, micro_batch_size=config.micro_batch)


def check_same_tokens(given: str, vocabulary: dict[str, int], own: dict[str, int]) -> None:
    """Refuse another tokenizer, by the first id that stands for another token: an id is all that the teacher gets."""
    texts, own_texts = ({i: text for text, i in ids.items()} for ids in (vocabulary, own))
    for i in sorted(texts.keys() | own_texts.keys()):
        if texts.get(i) != own_texts.get(i):
            raise UserError(
                f"{given} has another tokenizer than --model: token {i} is {short(texts.get(i))} to the teacher, and "
                f"{short(own_texts.get(i))} to the policy; a teacher scores the policy's own tokens"
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
