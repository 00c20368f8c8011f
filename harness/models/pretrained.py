"""Read models and tokenizers of Hugging Face, and check them; code of a model is never run, and nobody is asked."""

from collections.abc import Iterable
from pathlib import Path

import torch

from common.chat import encode_prompt
from common.errors import UserError

from harness.base.config import ModelConfig, shown
from harness.base.terminal import clean_log

PROBE = [{"role": "user", "content": "What is 1 + 1?"}]


def refuse_adapter(source: str, local_files_only: bool) -> None:
    """An adapter, which transformers would load as something that is neither trained nor saved, is a UserError."""
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(source, local_files_only=local_files_only) is not None:
        if Path(source).is_dir():
            raise UserError(f"{source} holds a model (config.json) and an adapter (adapter_config.json): remove either")
        download = f"hf download {source} --local-dir adapter"
        raise UserError(f"{source} is an adapter: download it (`{download}`), and give its directory to --model")


def _read(auto: type, what: str, source: str, local_files_only: bool, **options):
    """What a class of transformers reads from a hub id or a directory; UserError if it cannot."""
    try:
        return auto.from_pretrained(source, trust_remote_code=False, local_files_only=local_files_only, **options)
    except Exception as error:  # a damaged file can raise anything, a KeyError for example
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which is never run here: use a model that transformers has code for"
        raise UserError(f"the {what} {source} could not be loaded: {reason}") from error


def read_model(source: str, dtype: torch.dtype, local_files_only: bool, **options) -> torch.nn.Module:
    """The causal language model of a hub id or a directory; UserError if it cannot be loaded, or lacks weights."""
    from transformers import AutoModelForCausalLM

    clean_log("transformers")
    options |= {"dtype": dtype, "output_loading_info": True}
    model, loading = _read(AutoModelForCausalLM, "model", source, local_files_only, **options)
    if loading["missing_keys"]:  # transformers would give them random numbers
        raise UserError(f"the model {source} lacks weights, {sorted(loading['missing_keys'])[0]} for one")
    return model


def read_config(source: str, local_files_only: bool):
    """The config of a model that is not loaded."""
    from transformers import AutoConfig

    return _read(AutoConfig, "config of", source, local_files_only)


def read_tokenizer(source: str, local_files_only: bool):
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, "tokenizer of", source, local_files_only)


def tokenizer_of(config: ModelConfig, local_files_only: bool):
    """The tokenizer of the model that `config` names, or the one that was saved with its adapter."""
    has_own = config.adapter_path is not None and (config.adapter_path / "tokenizer_config.json").is_file()
    return read_tokenizer(str(config.adapter_path) if has_own else config.base, local_files_only)


def set_template(tokenizer, config: ModelConfig) -> None:
    """Give it the template of `--chat-template`; UserError if it has none."""
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--model {shown(config.model)} has no chat template, like most base models: give it one with "
            "--chat-template FILE (Jinja), or use an instruction-tuned model"
        )


def find_end_of_turn_ids(tokenizer, generation_config) -> list[int]:
    """Every id that ends an assistant turn, of tokenizer and generation config (Llama 3 has several)."""
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    ids = {tokenizer.eos_token_id, *configured} - {None}
    if not ids:
        raise ValueError("neither the tokenizer nor the generation config names an end-of-turn (eos) token")
    return sorted(ids)


def check_tokenizer(tokenizer, end_of_turn_ids: list[int], pad_id: int, num_ids: int) -> None:
    """ValueError if the chat template renders nothing, or an id is beyond the `num_ids` rows of the embedding."""
    try:
        prompt = encode_prompt(tokenizer, PROBE)
    except UserError:  # it may want other messages; those that the run has are seen before it trains
        prompt = [pad_id]
    if not prompt:
        raise ValueError("the chat template renders nothing for a plain question")
    # Special tokens beyond it are common (Gemma 3's image token) and harmless as long as they are not used
    ordinary = [i for token, i in tokenizer.get_vocab().items() if token not in tokenizer.all_special_tokens]
    for what, ids in (
        ("the end-of-turn id", end_of_turn_ids),
        ("the padding id", [pad_id]),
        ("the chat template's id", prompt),
        ("the tokenizer's id", ordinary),
    ):
        for i in (min(ids), max(ids)):
            if not 0 <= i < num_ids:
                raise ValueError(f"{what} {i} is not among the {num_ids} ids that the model has")


def read_template(source: str) -> str:
    """The chat template in a file."""
    try:
        template = Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {shown(source)} cannot be read ({error})") from error
    if not template.strip():
        raise UserError(f"--chat-template {shown(source)} is empty")
    return template


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """As summary.json has them; shared weights count once, and a 4-bit weight as the weights that it packs."""
    if any(hasattr(weight, "ds_numel") for weight in model.parameters()):  # sharded by DeepSpeed: numel is of the shard
        sizes = [(weight.ds_numel, weight.requires_grad) for weight in model.parameters()]
        return {"parameters": sum(n for n, _ in sizes), "trained_parameters": sum(n for n, trained in sizes if trained)}
    return {"parameters": model.num_parameters(), "trained_parameters": model.num_parameters(only_trainable=True)}


def check_finite(owner: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights of `owner` that are NaN or infinite."""
    for name, weight in weights:
        if not weight.is_floating_point() or not weight.numel():
            continue
        # extremes are NaN if any number is, and unlike isfinite they need no memory of the weight's size
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise UserError(f"the weights of {owner} hold NaN or infinite numbers: {name} for one")
