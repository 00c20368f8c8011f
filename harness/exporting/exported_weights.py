"""Write the weights: of the model, with its adapter merged, quantised, or of the adapter alone."""

import dataclasses
import shutil
from pathlib import Path

import torch

from common.errors import UserError
from common.policy import Policy

from harness.base.config import ADAPTER_SETTINGS, shown
from harness.exporting.source import Source
from harness.models.loading import load_policy
from harness.models.pretrained import find_end_of_turn_ids, read_config, read_model, read_tokenizer
from harness.models.saving import save_merged

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def refuse_quantised(source: Source) -> None:
    """Refuse a run whose base is a quantised checkpoint, into which no adapter can be merged."""
    if getattr(read_config(source.policy.base, local_files_only=True), "quantization_config", None):
        what = f"has trained an adapter on quantised weights ({source.policy.base})"
        raise UserError(f"RUN {shown(source.run)} {what}: export it without --merge and --quantize")


def write_model(source: Source, directory: Path, dtype: str) -> None:
    """A model with its tokenizer; of a run with an adapter, that is merged."""
    tokenizer = read_tokenizer(str(source.weights), local_files_only=True)
    if source.is_adapter:
        save_merged(source.weights, directory, tokenizer, DTYPES[dtype])
        return
    model = read_model(str(source.weights), DTYPES[dtype], local_files_only=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_adapter(source: Source, directory: Path) -> None:
    """The adapter and its tokenizer, with the hub id of its base."""
    for name in (ADAPTER_SETTINGS, "adapter_model.safetensors"):
        shutil.copyfile(source.weights / name, directory / name)
    read_tokenizer(str(source.weights), local_files_only=True).save_pretrained(directory)


def write_quantised(model: Path, directory: Path, bits: str, device: str) -> None:
    """A checkpoint of bitsandbytes, NF4 or LLM.int8(), of the model in `model`.

    It is written before any forward pass: bitsandbytes packs 4-bit weights anew in the first one on some CPUs.
    """
    from transformers import BitsAndBytesConfig

    settings = {"load_in_8bit": True}
    if bits == "4bit":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings["bnb_4bit_compute_dtype"] = torch.bfloat16
    options = {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": device}}
    read_model(str(model), torch.bfloat16, local_files_only=True, **options).save_pretrained(directory)
    read_tokenizer(str(model), local_files_only=True).save_pretrained(directory)


def write_generation_config(directory: Path) -> None:
    """Greedy, and ended by what ended a turn in training. The base's own can hold penalties that change the answers."""
    from transformers import GenerationConfig

    tokenizer = read_tokenizer(str(directory), local_files_only=True)
    given = GenerationConfig.from_pretrained(directory) if (directory / "generation_config.json").is_file() else None
    ends = find_end_of_turn_ids(tokenizer, given)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    settings = {"eos_token_id": ends, "pad_token_id": pad, "bos_token_id": tokenizer.bos_token_id, "do_sample": False}
    GenerationConfig(**settings).save_pretrained(directory)


def load_trained(source: Source, device: str) -> Policy:
    """The policy as it was trained, ready to answer."""
    return load_policy(dataclasses.replace(source.policy, device=device)).eval()
