"""Read and check Hugging Face models and tokenizers; never runs a model's code, and never prompts the user."""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from common.chat import encode_prompt
from common.errors import UserError

from harness.base.checks import read_template
from harness.base.config import ModelConfig, shown
from harness.base.terminal import clean_log, say

PROBE = [{"role": "user", "content": "What is 1 + 1?"}]


def refuse_adapter(source: str, local_files_only: bool) -> None:
    """Refuse an adapter: transformers would load it in a form that is neither trained nor saved."""
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(source, local_files_only=local_files_only) is not None:
        if Path(source).is_dir():
            raise UserError(f"{source} holds a model (config.json) and an adapter (adapter_config.json): remove either")
        download = f"hf download {source} --local-dir adapter"
        raise UserError(f"{source} is an adapter: download it (`{download}`), and give its directory to --model")


def _read(auto: type, what: str, source: str, local_files_only: bool, **options):
    """Read a hub id or a directory with a class of transformers; UserError if that fails."""
    try:
        return auto.from_pretrained(source, trust_remote_code=False, local_files_only=local_files_only, **options)
    except Exception as error:  # a damaged file can raise anything, even a KeyError
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs its own code, which is never run here: use a model that transformers has code for"
        raise UserError(f"the {what} {source} could not be loaded: {reason}") from error


def read_model(
    source: str,
    dtype: torch.dtype,
    local_files_only: bool,
    auto: type | None = None,
    may_lack: tuple[str, ...] = (),
    **options,
) -> torch.nn.Module:
    """The model of a hub id or a directory, of the class `auto` (None: a causal language model).

    Raises:
        UserError: it cannot be loaded, or lacks weights other than those named in `may_lack`, which are random then.
    """
    from transformers import AutoModelForCausalLM

    clean_log("transformers")
    options |= {"dtype": dtype, "output_loading_info": True}
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(
        logging.ERROR if auto else level
    )  # it would report a head as a fault: missing, or in no plan of layers
    model, loading = _read(auto or AutoModelForCausalLM, "model", source, local_files_only, **options)
    log.setLevel(level)
    if missing := sorted(set(loading["missing_keys"]) - {*may_lack}):  # transformers filled them with random numbers
        raise UserError(f"the model {source} lacks weights, {missing[0]} for one")
    return model


def read_config(source: str, local_files_only: bool):
    """The config of a model that is not loaded."""
    from transformers import AutoConfig

    return _read(AutoConfig, "config of", source, local_files_only)


def is_reward_model(source: str, local_files_only: bool) -> bool:
    """Whether the config says that the model was saved with a head for scores, and not for tokens."""
    kinds = read_config(source, local_files_only).architectures or [""]
    return kinds[0].endswith("ForSequenceClassification")


def read_tokenizer(source: str, local_files_only: bool):
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, "tokenizer of", source, local_files_only)


def tokenizer_of(config: ModelConfig, local_files_only: bool):
    """The tokenizer of the model that `config` names, or the one saved with its adapter, with its chat template."""
    has_own = config.adapter_path is not None and (config.adapter_path / "tokenizer_config.json").is_file()
    tokenizer = read_tokenizer(str(config.adapter_path) if has_own else config.base, local_files_only)
    set_template(tokenizer, config.model, config.chat_template)
    return tokenizer


def set_template(tokenizer, model: str, chat_template: str | None) -> None:
    """Set the template of `--chat-template`; UserError if there is no template at all."""
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--model {shown(model)} has no chat template, like most base models: give it one with "
            "--chat-template FILE (Jinja; recipes/base_model.jinja is one), or use an instruction-tuned model"
        )


def find_end_of_turn_ids(tokenizer, generation_config) -> list[int]:
    """Every id that ends an assistant turn, from tokenizer and generation config (Llama 3 has several)."""
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
    except UserError:  # it may expect other messages; the run's own are checked before training
        prompt = [pad_id]
    if not prompt:
        raise ValueError("the chat template renders nothing for a plain question")
    # Special tokens beyond it are common (Gemma 3's image token), and harmless as long as nobody uses them
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


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """The counts for summary.json; shared weights count once, and a 4-bit weight as the weights that it packs."""
    if any(hasattr(weight, "ds_numel") for weight in model.parameters()):  # sharded by DeepSpeed: numel is the shard's
        sizes = [(weight.ds_numel, weight.requires_grad) for weight in model.parameters()]
        return {"parameters": sum(n for n, _ in sizes), "trained_parameters": sum(n for n, trained in sizes if trained)}
    return {"parameters": model.num_parameters(), "trained_parameters": model.num_parameters(only_trainable=True)}


def tell_size(model: torch.nn.Module) -> None:
    """Say how many parameters there are, how many are trained, and in which types they are stored."""
    total, trained = count_parameters(model).values()
    sentence = f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%}), in {_dtypes(model, True)}"
    if frozen := _dtypes(model, False):
        sentence += f"; the others are in {frozen}"
    say(sentence)


def _dtypes(model: torch.nn.Module, is_trained: bool) -> str:
    """The types of the trained or of the frozen weights, the most frequent one first."""
    found = Counter()
    for weight in model.parameters():
        if weight.requires_grad == is_trained:
            packed = {"Params4bit": "4 bits", "Int8Params": "8 bits"}.get(type(weight).__name__)
            found[packed or str(weight.dtype).removeprefix("torch.")] += weight.numel()
    return " and ".join(name for name, _ in found.most_common())


def check_finite(owner: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights of `owner` that are NaN or infinite."""
    for name, weight in weights:
        if not weight.is_floating_point() or not weight.numel():
            continue
        # the extremes are NaN if any number is and, unlike isfinite, need no memory of the weight's size
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise UserError(f"the weights of {owner} hold NaN or infinite numbers: {name} for one")
