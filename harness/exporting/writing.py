"""Write the weights, and ask the written and the trained model the same questions: greedy ids must agree."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy
from common.sampling import sample

from harness.base.config import ADAPTER_SETTINGS, RESOLVED, shown
from harness.base.terminal import say
from harness.exporting.source import Source
from harness.models.pretrained import find_end_of_turn_ids, read_config, read_model, read_tokenizer
from harness.models.saving import save_merged


@dataclass(frozen=True)
class Questions:
    """The questions for both models."""

    conversations: list[list[dict]]
    prompts: list[list[int]]  # ids, as in training
    budget: int  # tokens per answer


def read_questions(source: Source, limit: int, policy: Policy) -> Questions:
    """The first held-out questions of the run's task, with its system turn."""
    task, system_prompt = source.load_task(limit)
    conversations = [task.messages(row, system_prompt) for row in task.eval_rows]
    budget = source.settings.get("max_new_tokens", RESOLVED["tiny"]["max_new_tokens"])  # imitation/sft has none
    return Questions(conversations, [encode_prompt(policy.tokenizer, turns) for turns in conversations], budget)


def trained_answers(policy: Policy, questions: Questions) -> list[list[int]]:
    """The ids that the training sampler chooses greedily for every question."""
    settings = {"max_new_tokens": questions.budget, "key": (0, 0), "greedy": True, "generation_batch_size": 16}
    return [row.completion_ids for row in sample(policy, questions.prompts, 1, **settings)]


@torch.no_grad()
def written_answers(directory: Path, questions: Questions, device: str) -> tuple[list[list[int]], torch.dtype]:
    """The ids that `generate` of transformers chooses with its default settings, given only the directory.

    Returns: the ids, and the dtype that the model was loaded in; of an adapter alone it is the base's own.
    """
    model = read_model(str(directory), "auto", local_files_only=True, device_map={"": device}).eval()
    found = []
    for prompt in questions.prompts:
        ids = torch.tensor([prompt], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=questions.budget)
        found.append(output[0, len(prompt) :].tolist())
    return found, model.dtype


def num_equal(trained: list[list[int]], written: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(trained, written, strict=True))


def num_prompts_equal(directory: Path, questions: Questions) -> int:
    """How many questions the written chat template renders to the same ids as training; a date in it changes them."""
    tokenizer = read_tokenizer(str(directory), local_files_only=True)
    options = {"add_generation_prompt": True, "return_dict": False}
    rendered = [tokenizer.apply_chat_template(turns, **options) for turns in questions.conversations]
    equal = num_equal(questions.prompts, rendered)
    if equal < len(rendered):
        others = f"{len(rendered) - equal} of {len(rendered)} questions"
        say(f"the chat template renders {others} otherwise: it writes the date, or they spell control tokens")
    return equal


def refuse_quantised(source: Source) -> None:
    """Refuse a run whose base is a quantised checkpoint: no adapter can be merged into it."""
    if getattr(read_config(source.policy.base, local_files_only=True), "quantization_config", None):
        what = f"has trained an adapter on quantised weights ({source.policy.base})"
        raise UserError(f"RUN {shown(source.run)} {what}: export it without --merge and --quantize")


def write_model(source: Source, directory: Path, dtype: str) -> None:
    """Write a model with its tokenizer; an adapter is merged first."""
    tokenizer, torch_dtype = read_tokenizer(str(source.weights), local_files_only=True), getattr(torch, dtype)
    if source.is_adapter:
        save_merged(source.weights, directory, tokenizer, torch_dtype)
    else:
        read_model(str(source.weights), torch_dtype, local_files_only=True).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    write_generation_config(directory)


def write_adapter(source: Source, directory: Path) -> None:
    """Write the adapter and its tokenizer, with the hub id of the base."""
    for name in (ADAPTER_SETTINGS, "adapter_model.safetensors"):
        shutil.copyfile(source.weights / name, directory / name)
    read_tokenizer(str(source.weights), local_files_only=True).save_pretrained(directory)


def write_quantised(source: Source, directory: Path, bits: str, device: str) -> None:
    """Write a bitsandbytes checkpoint, NF4 or LLM.int8().

    It is written before any forward pass: on some CPUs, bitsandbytes repacks 4-bit weights in the first one.
    """
    from transformers import BitsAndBytesConfig

    settings = {"load_in_8bit": True}
    if bits == "4bit":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings["bnb_4bit_compute_dtype"] = torch.bfloat16
    options = {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": device}}
    unquantised = directory / "unquantised"
    write_model(source, unquantised, "bfloat16")
    read_model(str(unquantised), torch.bfloat16, local_files_only=True, **options).save_pretrained(directory)
    read_tokenizer(str(unquantised), local_files_only=True).save_pretrained(directory)
    shutil.rmtree(unquantised)


def write_generation_config(directory: Path) -> None:
    """Decode greedily, with training's end-of-turn ids. The base's config can hold penalties that change answers."""
    from transformers import GenerationConfig

    tokenizer = read_tokenizer(str(directory), local_files_only=True)
    given = GenerationConfig.from_pretrained(directory) if (directory / "generation_config.json").is_file() else None
    ends = find_end_of_turn_ids(tokenizer, given)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    settings = {"eos_token_id": ends, "pad_token_id": pad, "bos_token_id": tokenizer.bos_token_id, "do_sample": False}
    GenerationConfig(**settings).save_pretrained(directory)
