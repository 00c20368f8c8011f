"""The tiny policy before its first lesson: a byte-level BPE tokenizer, a chat template, and a small Llama.

It is saved as an ordinary Hugging Face model directory, so `AutoModelForCausalLM.from_pretrained` loads it unchanged
and every experiment treats it like `meta-llama/Llama-3.2-3B-Instruct`. Digits are single tokens, so that a number's
digits can be copied and carried one by one; the tags and the markers of the template are single tokens too.
"""

import random
from pathlib import Path

import torch
from arithmetic_grammar import KINDS, draw_question, render

VOCAB_SIZE = 1024
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    "<think>", "</think>", "<answer>", "</answer>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip

# ChatML with Hermes-style tool calls, as in Qwen2.5 and Qwen3; tools are one short line of signatures.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools: ' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {{- function.name + '(' + (function.parameters.properties | list | join(', ')) + ')' }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer():
    """Train the byte-level BPE on the bundled questions and a page of plain English; the same every time."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"'[a-z]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")  # each digit is a separate piece
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=list(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_text(), trainer)
    # Not "special": a reward must still see the tags in text that is decoded without the template's markers.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, seed: int):
    """A freshly initialised Llama for `tokenizer`: about 1.8 million parameters, drawn from `seed`."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    token_ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCAB_SIZE, "intermediate_size": 512, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, **token_ids))
    model.generation_config = GenerationConfig(**token_ids)
    return model


def _tokenizer_text() -> list[str]:
    rng = random.Random(0)
    kinds, weights = list(KINDS), list(KINDS.values())
    questions = [render(draw_question(rng, rng.choices(kinds, weights)[0], "warm_start")) for _ in range(2000)]
    prose = Path(__file__).with_name("tokenizer_text.txt").read_text(encoding="utf-8").splitlines()
    roles = ["system\nuser\nassistant\ntool\n check"] * 1000  # frequent enough to become one token each
    return questions + roles + ["Write in symbols. Copy. Repeat. Say."] * 50 + prose * 20
