"""Read models and tokenizers of Hugging Face; code that comes with a model is never run, and nobody is asked."""

from pathlib import Path

import torch

from common.errors import UserError

from common.plumbing.terminal import clean_log


def refuse_adapter(source: str, local_files_only: bool) -> None:
    """
    Raises:
        UserError: there is an adapter, which transformers would load as something that is neither trained nor saved.
    """
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(source, local_files_only=local_files_only) is None:
        return
    if Path(source).is_dir():
        raise UserError(f"{source} holds a model (config.json) and an adapter (adapter_config.json): remove either")
    raise UserError(
        f"{source} is an adapter: download it, with `hf download {source} --local-dir adapter` for example, and give "
        "its directory: --model ./adapter"
    )


def read_model(source: str, dtype: torch.dtype, local_files_only: bool, **options) -> torch.nn.Module:
    """The causal language model of a hub id or a directory.

    Raises:
        UserError: it cannot be loaded, or lacks weights.
    """
    from transformers import AutoModelForCausalLM

    clean_log("transformers")
    options |= {"local_files_only": local_files_only, "output_loading_info": True}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, dtype=dtype, **options)
    except Exception as error:  # a damaged file can raise anything, a KeyError for example
        raise UserError(f"the model {source} could not be loaded: {_reason(error)}") from error
    if loading["missing_keys"]:  # transformers would give them random numbers
        raise UserError(f"the model {source} lacks weights, {sorted(loading['missing_keys'])[0]} for one")
    return model


def read_config(source: str, local_files_only: bool):
    """The config of a model that is not loaded.

    Raises:
        UserError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=local_files_only)
    except Exception as error:
        raise UserError(f"the config of {source} could not be read: {_reason(error)}") from error


def read_tokenizer(source: str, local_files_only: bool):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local_files_only)
    except Exception as error:
        raise UserError(f"the tokenizer of {source} could not be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return "it needs code of its own, which is never run here: use a model that transformers itself has code for"
    return reason
