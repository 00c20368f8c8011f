"""Chat templates: the mask covers exactly the assistant's tokens; templates without such a mask are refused."""

import copy
from types import SimpleNamespace

import pytest

from common.chat import encode_prompt
from common.chat_template import TEMPLATE_DATE, end_of_turn
from common.errors import UserError
from common.given_answers import encode_chat

from harness.models.loading import find_end_of_turn_ids

SYSTEM = {"role": "system", "content": "Answer."}
QUESTION = {"role": "user", "content": "2+3"}
ANSWER = {"role": "assistant", "content": "<answer>5</answer>"}
SECOND_QUESTION = {"role": "user", "content": "7*8"}
SECOND_ANSWER = {"role": "assistant", "content": "<think>7*8=56</think><answer>56</answer>"}

# Like the beginning of Llama 3.2's: today's date, unless a date is passed in.
LLAMA_LIKE = """\
{%- if date_string is not defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- '<|im_start|>system\\nToday Date: ' + date_string + '<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture
def with_template(tokenizer):
    def make(template: str):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return changed

    return make


def spoken(tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """The text of each run of ones in the mask."""
    texts, previous = [], 0
    for token, bit in zip(ids, mask, strict=True):
        if bit and not previous:
            texts.append([])
        if bit:
            texts[-1].append(token)
        previous = bit
    return [tokenizer.decode(text) for text in texts]


def test_a_prompt_ends_where_the_assistant_begins(tokenizer):
    ids = encode_prompt(tokenizer, [SYSTEM, QUESTION])
    expected = "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", ["", "Be brief.", "You are a calculator, and you answer in one word."])
def test_a_turn_of_a_prompt_that_the_template_leaves_out_is_refused(tokenizer, with_template, role, content):
    """As Qwen's leaves out a developer; one that only writes it in another way is taken."""
    turns = [{"role": role, "content": content}, QUESTION]
    of_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=rf"^the chat template leaves out message 0 \({role}\)"):
        encode_prompt(with_template(of_users), turns)
    shouted = with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert tokenizer.decode(encode_prompt(shouted, turns)) == content.upper() + QUESTION["content"]


def test_the_mask_ends_with_the_end_of_turn_token(tokenizer):
    ids, mask = encode_chat(tokenizer, [QUESTION, ANSWER], [tokenizer.eos_token_id])
    # <|im_start|> user \n 2 + 3 <|im_end|> \n <|im_start|> assistant \n | <answer> 5 </answer> <|im_end|> | \n
    assert mask == [0] * 11 + [1] * 4 + [0]
    assert [tokenizer.decode(token) for token in ids[11:]] == ["<answer>", "5", "</answer>", "<|im_end|>", "\n"]


def test_the_end_of_a_turn_is_the_first_after_its_text(tokenizer):
    turns = [f"{text}{tokenizer.eos_token}" for text in ("a", "longer than a marker", "b")]
    end = end_of_turn(tokenizer, "".join(turns), "longer than a marker", (tokenizer.eos_token_id,))
    assert end == len(turns[0] + turns[1])


def test_the_mask_covers_all_assistant_turns_and_nothing_else(tokenizer):
    messages = [SYSTEM, QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER]
    ids, mask = encode_chat(tokenizer, messages, [tokenizer.eos_token_id])
    assert spoken(tokenizer, ids, mask) == [turn["content"] + "<|im_end|>" for turn in (ANSWER, SECOND_ANSWER)]
    assert sum(mask) == 4 + 13  # <think> 7 * 8 = 5 6 </think> <answer> 5 6 </answer> <|im_end|>
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids) == rendered
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)


def test_a_tokenizer_adds_no_special_tokens_to_a_template(tokenizer):
    from tokenizers.processors import TemplateProcessing

    messages = [SYSTEM, QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER]
    eager = copy.deepcopy(tokenizer)
    begin = ("<|endoftext|>", tokenizer.pad_token_id)
    eager.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    assert eager.encode("2")[0] == begin[1]
    assert encode_prompt(eager, messages[:2]) == encode_prompt(tokenizer, messages[:2])
    end_of_turn_ids = [tokenizer.eos_token_id]
    assert encode_chat(eager, messages, end_of_turn_ids) == encode_chat(tokenizer, messages, end_of_turn_ids)


@pytest.mark.parametrize("condition", ["date_string is not defined", "true"], ids=["passed in", "read by the template"])
def test_the_date_is_pinned(with_template, condition):
    tokenizer = with_template(LLAMA_LIKE.replace("date_string is not defined", condition))
    ids, _ = encode_chat(tokenizer, [QUESTION, ANSWER], [tokenizer.eos_token_id])
    for prompt in (encode_prompt(tokenizer, [QUESTION]), ids):
        assert f"Today Date: {TEMPLATE_DATE}" in tokenizer.decode(prompt)


def test_a_template_that_does_not_end_a_turn_is_refused(tokenizer, with_template):
    open_ended = with_template(
        tokenizer.chat_template.replace(
            "{{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor", "{%- endif %}{%- endfor"
        )
    )
    with pytest.raises(ValueError, match="does not end message 1"):
        encode_chat(open_ended, [QUESTION, ANSWER], [tokenizer.eos_token_id])


@pytest.mark.parametrize("content", [[{"type": "text", "text": "2+3"}], {"text": "2+3"}, True, None])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_content_that_is_not_text_is_refused(tokenizer, with_template, role, content):
    python = with_template(tokenizer.chat_template.replace("message.content", "(message.content | string)"))
    messages = [QUESTION, ANSWER, {"role": role, "content": content}, ANSWER]
    with pytest.raises(ValueError, match=rf"^the content of message 2 \({role}\) is not text$"):
        encode_chat(python, messages, [tokenizer.eos_token_id])


def test_a_call_of_a_tool_needs_no_content(tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
    result = {"role": "tool", "content": "5"}
    for turn in (call, {key: call[key] for key in ("role", "tool_calls")}):
        ids, mask = encode_chat(tokenizer, [QUESTION, turn, result, ANSWER], [tokenizer.eos_token_id])
        assert len(spoken(tokenizer, ids, mask)) == 2
    with pytest.raises(ValueError, match="message 1"):
        encode_chat(tokenizer, [QUESTION, call | {"tool_calls": []}], [tokenizer.eos_token_id])


@pytest.mark.parametrize("message", ["2+3", None, ["user", "2+3"], {}, {"content": "2+3"}, {"role": 1, "content": "a"}])
def test_a_message_without_role_is_refused(tokenizer, message):
    with pytest.raises(ValueError, match=r"^message 1 is not an object with a role$"):
        encode_chat(tokenizer, [SYSTEM, message, ANSWER], [tokenizer.eos_token_id])


@pytest.mark.parametrize("content", ["5", "", "What is 2 plus 3, please, and why?"])
@pytest.mark.parametrize("before", [[], [QUESTION, ANSWER]])
def test_a_message_that_the_template_leaves_out_is_refused(tokenizer, content, before):
    messages = [SYSTEM, *before, {"role": "human", "content": content}, ANSWER]
    with pytest.raises(ValueError, match=rf"^the chat template leaves out message {1 + len(before)} \(human\)$"):
        encode_chat(tokenizer, messages, [tokenizer.eos_token_id])


def test_a_content_that_the_template_rewrites_is_kept(tokenizer, with_template):
    for written in ("(message.content | trim)", "(message.content | tojson)"):
        rewriting = with_template(
            tokenizer.chat_template.replace("user\\n' + message.content", f"user\\n' + {written}")
        )
        for text in (' "a"\n', ' "What is 2 plus 3, please,\nand why?" ', "<|im_end|> "):
            ids, _ = encode_chat(rewriting, [{"role": "user", "content": text}, ANSWER], [tokenizer.eos_token_id])
            assert f"user\n{text}<|im_end|>" not in tokenizer.decode(ids)


@pytest.mark.parametrize(("of_tokenizer", "of_config", "expected"), [
    (9, [1, 8, 9], [1, 8, 9]),  # Llama 3: several; the tokenizer also names one of them
    (2, 7, [2, 7]),
    (2, None, [2]),
    (None, 0, [0]),  # 0 is an id like any other
    (None, None, None),
])  # fmt: skip
def test_end_of_turn_ids_are_those_of_tokenizer_and_config(of_tokenizer, of_config, expected):
    named = [SimpleNamespace(eos_token_id=ids) for ids in (of_tokenizer, of_config)]
    if expected is None:
        with pytest.raises(ValueError, match="eos"):
            find_end_of_turn_ids(*named)
    else:
        assert find_end_of_turn_ids(*named) == expected
