"""Supervised fine-tuning: the trained tokens, their mean, the learning rate, the held-out rows."""

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from run_files import json_of, read_lines, rows_of, write_rows
from torch.nn.functional import cross_entropy

from common.errors import UserError
from common.experience import Experience
from common.policy import Policy
from common.tools import calculator, schemas
from common.trajectory import Trajectory

from harness.base.config import PolicyConfig
from harness.models.loading import load_policy
from harness.task import conversations

pytestmark = pytest.mark.all_questions

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"  # beside the repository


def conversation(*turns: str) -> dict:
    """A row of --data: turns of the user and the assistant alternate."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


# The prompts and the answers differ in length, so that every wrong mask and every wrong denominator shows.
CONVERSATIONS = [
    conversation("Say 1", "1"),
    conversation("Say 23 very slowly please", "2 2 2 2 3 3 3 3"),
    conversation("What is 47 plus 29 minus 18?", "<answer>58</answer>"),
    conversation("Say 4", "4", "Now add 5 to it, and tell me what you get", "9 9 9", "Good", "Good"),
    conversation("Say 12345678901234567890", "No"),
]
# Each occurs once, and no two have the same loss.
MANY = [conversation(f"Say {n} {'please ' * (n % 4)}", f"{n} " * (1 + n % 3)) for n in range(30)]


@pytest.fixture(scope="module")
def train(load_script) -> ModuleType:
    return load_script("imitation/sft/train.py")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(PolicyConfig(device="cpu"))


@pytest.fixture
def encode(train, policy):
    return lambda rows=CONVERSATIONS, **settings: conversations.encode_rows(
        rows, "my.jsonl", policy, train.Config(**settings).max_length
    )


CALL = {"function": {"name": "calculator", "arguments": {"expression": "3*4"}}}
WITH_TOOLS = {
    "tools": schemas({"calculator": calculator}),
    "messages": [
        {"role": "user", "content": "What is 3 times 4?"},
        {"role": "assistant", "content": "<tool_call>3*4</tool_call>", "weight": 0},
        {"role": "tool", "content": "error: malformed call"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "<answer>12</answer>"},
    ],
}


def losses_of(policy: Policy, row: dict) -> torch.Tensor:
    """Minus the log-probability of every assistant token, from the text that the template renders."""
    parts = policy.tokenizer.apply_chat_template(row["messages"], tokenize=False).split("<|im_start|>assistant\n")
    ids, is_spoken = [], []
    for index, part in enumerate(parts):
        said, end, rest = part.partition("<|im_end|>") if index else ("", "", part)
        rest += "<|im_start|>assistant\n" if index + 1 < len(parts) else ""
        for text, flag in ((said + end, True), (rest, False)):
            new = policy.tokenizer.encode(text, add_special_tokens=False)
            ids, is_spoken = ids + new, is_spoken + [flag] * len(new)
    ids = torch.tensor(ids)
    losses = cross_entropy(policy.model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    return losses[torch.tensor(is_spoken)[1:]]


def learned(policy: Policy, row: Trajectory) -> str:
    return policy.tokenizer.decode([token for token, flag in zip(row.ids, row.action_mask, strict=True) if flag])


def test_what_is_learned_is_what_the_assistant_says(policy, encode):
    """All its turns and the tokens that end them; no user text, and nothing that the template adds."""
    encoded = encode()
    assert [row.prompt_index for row in encoded] == list(range(len(CONVERSATIONS)))
    for row, conversation in zip(encoded, CONVERSATIONS, strict=True):
        said = (turn["content"] + "<|im_end|>" for turn in conversation["messages"] if turn["role"] == "assistant")
        assert learned(policy, row) == "".join(said)
        assert row.prompt_length == row.action_mask.index(1)


def test_calls_are_learned_and_results_and_weight_0_are_not(policy, encode):
    """A turn with weight 0 is only read; so are the tools' answers, and the line that names them."""
    (row,) = encode([WITH_TOOLS])
    assert learned(policy, row) == (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call><|im_end|>'
        "<answer>12</answer><|im_end|>"
    )
    text = policy.tokenizer.decode(row.ids)
    for read in ("Tools: calculator(expression)", "<tool_call>3*4</tool_call>", "error: malformed call", ">12</tool_"):
        assert text.count(read) == 1


def test_tools_and_weights_that_mean_nothing_are_refused(encode):
    for tools in ("calculator", [1], {"name": "calculator"}, 3):
        with pytest.raises(UserError, match="row 1"):
            encode([CONVERSATIONS[0] | {"tools": tools}])
    user, answer = conversation("2", "2")["messages"]
    for weight in (0.5, -1, "0", []):
        with pytest.raises(UserError, match=r"^my\.jsonl, row 1: the weight of message 1"):
            encode([{"messages": [user, answer | {"weight": weight}]}])
    plain, *others = encode([{"messages": [user, answer | extra]} for extra in ({}, {"weight": 1}, {"weight": None})])
    assert [row.action_mask for row in others] == [plain.action_mask] * 2


def test_an_update_that_is_not_finite_is_skipped(train, encode):
    policy = load_policy(PolicyConfig(device="cpu"))
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] = torch.nan
    before = [weight.detach().clone() for weight in policy.parameters()]
    batch = train.read(policy, encode())
    metrics = train.update(train.Config(), policy, torch.optim.AdamW(policy.parameters(), lr=1e-3), batch)
    assert metrics["loss/skipped"] == 1.0
    after = [weight.detach() for weight in policy.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def run(train, tmp_path, monkeypatch):
    """Train the bundled policy on rows, at a tiny rate; returns policy, batches, metrics and summary."""
    policies, batches, update = [], [], train.update
    monkeypatch.setattr(train, "load_policy", lambda config: policies.append(load_policy(config)) or policies[-1])
    monkeypatch.setattr(train, "update", lambda *given: batches.append(given[3]) or update(*given))
    monkeypatch.chdir(tmp_path)

    def run(rows: list[dict], *flags: str) -> tuple[Policy, list[Experience], list[dict], dict]:
        write_rows("chats.jsonl", rows)
        common = ("--data", "chats.jsonl", "--lr", "1e-12", "--device", "cpu", "--name", "mine")
        train.main(["--model", "tiny", *common, *flags])
        directory = Path("runs/sft/mine")
        return policies[0], batches, rows_of(directory), json_of(directory / "summary.json")

    return run


def test_rows_are_learned_once_or_held_out_and_examined(run):
    """The losses of the first update and of the examination together cover all rows, each once."""
    flags = ("--tokens-per-batch", "100000", "--micro-batch-size", "4")
    policy, batches, (before, metrics, after), summary = run(MANY, *flags)
    texts = {policy.tokenizer.apply_chat_template(row["messages"], tokenize=False): row for row in MANY}
    seen = [pair for batch in batches for pair in zip(batch.sequences, batch.attention_mask, strict=True)]
    learned = sorted(policy.tokenizer.decode(ids[mask.bool()]) for ids, mask in seen)
    assert len(learned) == len(set(learned)) == 27  # a tenth is held out
    losses = {text: losses_of(policy, row).detach() for text, row in texts.items()}
    of_learned = torch.cat([losses[text] for text in learned])
    of_others = torch.cat([losses[text] for text in texts if text not in learned])
    assert metrics["loss/total"] == pytest.approx(of_learned.mean().item(), rel=1e-5)
    assert metrics["time/tokens_per_second"] * metrics["time/step"] == pytest.approx(len(of_learned))
    assert summary["eval/loss"] == pytest.approx(of_others.mean().item(), rel=1e-4)
    assert "eval/loss" not in metrics  # only every 50th step
    assert (before["step"], after) == (0, {"step": 1, "eval/loss": summary["eval/loss"]})
    assert before["eval/loss"] == pytest.approx(summary["eval/loss"], rel=1e-6)
    assert of_others.mean().item() != pytest.approx(of_learned.mean().item(), rel=1e-3)


def test_the_number_of_rows_held_out_is_limited(train, policy):
    learned, held_out = conversations.load_conversations(train.Config(eval_prompts=1), policy, MANY)
    assert (len(learned), len(held_out)) == (29, 1)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(train, encode, monkeypatch):
    """Different rows share a batch each time: a window's rows, which are sorted by length within the window."""
    monkeypatch.setattr(conversations, "WINDOW", 10)
    rows = encode(MANY)

    def epochs(**settings) -> list[list[int]]:
        config = train.Config(tokens_per_batch=60, epochs=2, **settings)
        order = [row.prompt_index for batch in conversations.batches(config, rows) for row in batch]
        return [order[: len(rows)], order[len(rows) :]]

    def windows(order: list[int]) -> list[set[int]]:
        return [set(order[start : start + 10]) for start in range(0, len(order), 10)]

    first, second = epochs()
    assert sorted(first) == sorted(second) == list(range(len(rows)))
    assert epochs() == [first, second]
    assert windows(first) != windows(second)
    assert windows(first) != windows(epochs(seed=1)[0])


def test_rows_of_a_file_are_shuffled_and_lessons_stay_in_order(train, monkeypatch):
    """Rows are batched by length within a window, and windows keep the order of the lessons."""
    monkeypatch.setattr(conversations, "WINDOW", 100)
    rows = [Trajectory([1] * (5 + n % 7), 2, [0, 0] + [1] * (3 + n % 7), [0.0] * (5 + n % 7), n) for n in range(1000)]

    def windows(shuffle: bool) -> list[int]:
        """For the rows in training order: which hundred of the file each row comes from."""
        config = train.Config(tokens_per_batch=50)
        return [row.prompt_index // 100 for batch in conversations.batches(config, rows, shuffle) for row in batch]

    assert windows(False) == sorted(windows(False))
    counts = Counter(windows(True)[:100])
    assert len(counts) == 10


def test_batches_hold_at_most_so_many_tokens_padding_included(train, encode):
    rows = encode(MANY)
    for tokens in (40, 100, 10_000):
        batches = list(conversations.batches(train.Config(tokens_per_batch=tokens), rows))
        sizes = [len(batch) * max(len(row.ids) for row in batch) for batch in batches]
        assert max(size for size, batch in zip(sizes, batches, strict=True) if len(batch) > 1) <= tokens
        assert sum(map(len, batches)) == len(rows)
    assert len(batches) == 1


def padding(train, policy, rows: list[dict]) -> float:
    """Its share of the tokens that the steps of one epoch count."""
    learned, _ = conversations.load_conversations(train.Config(), policy, rows)
    steps = list(conversations.batches(train.Config(), learned))
    counted = sum(len(step) * max(len(row.ids) for row in step) for step in steps)
    return 1 - sum(len(row.ids) for row in learned) / counted


def test_the_padding_is_what_the_readme_says(train, policy):
    rows = {"3.6 %": read_lines(ROOT / "data" / "reasoned_sums.jsonl")}
    if PUBLISHED.is_file():
        rows["0.3 %"] = [conversation(row["question"], row["answer"]) for row in read_lines(PUBLISHED)]
    for said, of_file in rows.items():
        assert f"{padding(train, policy, of_file):.1%}".replace("%", " %") == said
        assert said in (ROOT / "imitation" / "sft" / "README.md").read_text(encoding="utf-8")


def test_no_padding_is_computed(train, policy, encode):
    """The decoder sees each row up to the token that predicts its last one, and the padding of none."""
    seen, batch = [], train.read(policy, encode(MANY))
    embedding = policy.model.get_input_embeddings()
    before = embedding.register_forward_pre_hook(lambda module, ids: seen.append(ids[0].numel()))
    train.update(train.Config(), policy, torch.optim.AdamW(policy.parameters(), lr=0.0), batch)
    before.remove()
    assert sum(seen) < batch.attention_mask.sum() < 0.9 * batch.sequences.numel()


def test_long_rows_are_left_out_and_counted(encode, capsys):
    lengths = [len(row.ids) for row in encode(MANY)]
    limit = sorted(lengths)[20]
    kept = encode(MANY, max_length=limit)
    assert [row.prompt_index for row in kept] == [i for i, length in enumerate(lengths) if length <= limit]
    assert f"{len(MANY) - len(kept)} of {len(MANY)} rows left out" in capsys.readouterr().out
