"""Supervised fine-tuning: the trained tokens, their mean, the learning rate, the held-out rows.

Also its lessons: about tools, and about Countdown, in which every line is true.
"""

import itertools
import random
import re
import runpy
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from run_files import json_of, read_lines, rows_of, write_rows
from torch.nn.functional import cross_entropy

from common.errors import UserError
from common.evaluate import evaluate
from common.experience import Experience
from common.policy import Policy
from common.tools import ToolCall, calculator, parse_calls, schemas
from common.trajectory import Trajectory
from tasks import countdown
from tasks.grammars import arithmetic_grammar, world_grammar
from tasks.grammars.countdown_grammar import MAX_TARGET, Problem, pool, tries

from harness.base.config import BUNDLED, PolicyConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy

pytestmark = pytest.mark.all_questions

ROOT = Path(__file__).resolve().parents[2]


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
SEARCHES = [  # with the texts of the verdicts, which have larger weights
    (conversation("Make 37<55 from 1.", "(7*5)+2=35+2=37<100"), "37<100"),
    (
        conversation("Make it.", "<think>12-(5*2)=12-10=2<24 (12*5)-2=60-2=58=58</think><answer>(12*5)-2</answer>"),
        "2<2458=58",
    ),
    (conversation("Make it.", "<think>12-(5*2)=12-10=2<24 "), "2<24"),
]
# Each occurs once, and no two have the same loss.
MANY = [conversation(f"Say {n} {'please ' * (n % 4)}", f"{n} " * (1 + n % 3)) for n in range(30)]


@pytest.fixture(scope="module")
def train(load_script) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiment_sft")
        return load_script("experiment_sft/train.py")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(PolicyConfig(device="cpu"))


@pytest.fixture
def encode(train, policy):
    return lambda rows=CONVERSATIONS, **settings: train.encode_rows(train.Config(**settings), policy, rows)


@pytest.fixture
def update(train, policy):
    """One update that moves nothing: its metrics, and the gradient of the policy."""

    def update(rows: list[Trajectory], policy: Policy = policy, **settings) -> tuple[dict, torch.Tensor]:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        batch = train.collate_weighted(rows, policy.pad_id, "cpu")
        return train.update(train.Config(**settings), policy, optimizer, batch), gradient_of(policy)

    return update


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


def gradient_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in policy.parameters()])


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
            encode([{"messages": [user, answer | {"weight": weight}]}], data="my.jsonl")
    plain, *others = encode([{"messages": [user, answer | extra]} for extra in ({}, {"weight": 1}, {"weight": None})])
    assert [row.action_mask for row in others] == [plain.action_mask] * 2


@pytest.mark.parametrize("lessons", ["arithmetic", "countdown"])
@pytest.mark.parametrize("micro_batch_size", [2, 256])
def test_the_update_is_the_mean_over_all_spoken_tokens(policy, encode, update, micro_batch_size, lessons):
    """Loss and gradient equal a slow loop's, for every micro-batch; some tokens of Countdown have larger weights."""
    conversations = CONVERSATIONS if lessons == "arithmetic" else [row for row, _ in SEARCHES]
    rows = encode(conversations, lessons=lessons)
    spoken = [
        weight
        for row in rows
        for weight, flag in zip(row.weights or [1.0] * len(row.ids), row.action_mask, strict=True)
        if flag
    ]
    assert (set(spoken) == {1.0}) == (lessons == "arithmetic")
    policy.zero_grad()
    losses = torch.cat([losses_of(policy, row) for row in conversations])
    expected = (torch.tensor(spoken) * losses).sum() / sum(spoken)
    expected.backward()
    gradient = gradient_of(policy)
    for _ in range(2):  # the second update does not add to the gradient of the first
        metrics, found = update(rows, micro_batch_size=micro_batch_size, max_grad_norm=1e9)
    assert metrics["loss/total"] == pytest.approx(expected.item(), rel=1e-5)
    assert (found - gradient).norm() < 1e-5 * gradient.norm()
    assert metrics["loss/grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)


def test_weights_of_1_change_no_bit(encode, update):
    rows, results = encode([row for row, _ in SEARCHES], lessons="countdown"), []
    for are_given in (True, False):
        for row in rows:
            row.weights = [1.0] * len(row.ids) if are_given else []
        results.append(update(rows, micro_batch_size=2))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_verdicts_and_answers_are_emphasised(policy, encode):
    for messages, verdicts in SEARCHES:
        (row,) = encode([messages], lessons="countdown")
        pieces = [policy.tokenizer.decode([token]) for token in row.ids]
        weighted = list(zip(pieces, row.weights, row.action_mask, strict=True))
        text = {wanted: "".join(piece for piece, weight, _ in weighted if weight == wanted) for wanted in (5, 2, 0)}
        said = messages["messages"][1]["content"]
        assert text == {
            5: verdicts,
            2: "".join(re.findall("<answer>.*", said)),
            0: " <|im_end|>" if said.endswith(" ") else "",  # a search that was cut off does not end here
        }
        assert {weight for _, weight, flag in weighted if not flag} == {1}


def test_a_long_gradient_is_scaled_down(encode, update):
    metrics, gradient = update(encode(), max_grad_norm=0.5)
    assert metrics["loss/grad_norm"] > 1
    assert gradient.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_an_update_that_is_not_finite_is_skipped(train, encode):
    policy = load_policy(PolicyConfig(device="cpu"))
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] = torch.nan
    before = [weight.detach().clone() for weight in policy.parameters()]
    batch = train.collate_weighted(encode(), policy.pad_id, "cpu")
    metrics = train.update(train.Config(), policy, torch.optim.AdamW(policy.parameters(), lr=1e-3), batch)
    assert metrics["loss/skipped"] == 1.0
    after = [weight.detach() for weight in policy.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_the_learning_rate_rises_and_falls_as_it_says(train):
    """In a straight line to the peak, and down half a cosine wave to the share `final_lr` of the peak."""

    def rate(step: int, **settings) -> float:
        return train.learning_rate(train.Config(lr=2.0, **settings), step, num_steps=1000)

    assert rate(1, warmup_steps=50) == pytest.approx(2.0 / 50, rel=1e-3)
    assert rate(25, warmup_steps=50) == pytest.approx(1.0, rel=1e-2)
    assert rate(50, warmup_steps=50) == pytest.approx(2.0, rel=1e-2)
    assert rate(1, warmup_steps=0) == pytest.approx(2.0, rel=1e-4)
    for final_lr in (0.0, 0.1, 1.0):
        levels = [rate(step, final_lr=final_lr) for step in (500, 1000)]
        assert levels == pytest.approx([2.0 * (1 + final_lr) / 2, 2.0 * final_lr])
    falling = [rate(step) for step in range(50, 1001)]
    assert falling == sorted(falling, reverse=True)
    quarter = rate(250, warmup_steps=0, final_lr=0.0)
    assert quarter == pytest.approx(2.0 * (0.5 + 0.5**1.5))  # (1 + cos 45 degrees) / 2: above the straight line


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
        directory = Path("runs/experiment_sft/mine")
        return policies[0], batches, rows_of(directory), json_of(directory / "summary.json")

    return run


def test_rows_are_learned_once_or_held_out_and_examined(run):
    """The losses of the first update and of the examination together cover all rows, each once."""
    policy, batches, (metrics,), summary = run(MANY, "--tokens-per-batch", "100000", "--micro-batch-size", "4")
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
    assert of_others.mean().item() != pytest.approx(of_learned.mean().item(), rel=1e-3)


def test_the_number_of_rows_held_out_is_limited(train, encode):
    learned, held_out = train.hold_out(train.Config(data="chats.jsonl", eval_prompts=1), encode(MANY))
    assert (len(learned), len(held_out)) == (29, 1)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(train, encode, monkeypatch):
    """Different rows share a batch each time: a window's rows, which are sorted by length within the window."""
    monkeypatch.setattr(train, "WINDOW", 10)
    rows = encode(MANY)

    def epochs(**settings) -> list[list[int]]:
        config = train.Config(data="chats.jsonl", tokens_per_batch=60, epochs=2, **settings)
        order = [row.prompt_index for batch in train.batches(config, rows) for row in batch]
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
    monkeypatch.setattr(train, "WINDOW", 100)
    rows = [Trajectory([1] * (5 + n % 7), 2, [0, 0] + [1] * (3 + n % 7), [0.0] * (5 + n % 7), n) for n in range(1000)]

    def windows(data: str | None) -> list[int]:
        """For the rows in training order: which hundred of the file each row comes from."""
        config = train.Config(data=data, tokens_per_batch=50)
        return [row.prompt_index // 100 for batch in train.batches(config, rows) for row in batch]

    assert windows(None) == sorted(windows(None))
    counts = Counter(windows("chats.jsonl")[:100])
    assert len(counts) == 10


def test_batches_hold_at_most_so_many_tokens_padding_included(train, encode):
    rows = encode(MANY)
    for tokens in (40, 100, 10_000):
        batches = list(train.batches(train.Config(tokens_per_batch=tokens), rows))
        sizes = [len(batch) * max(len(row.ids) for row in batch) for batch in batches]
        assert max(size for size, batch in zip(sizes, batches, strict=True) if len(batch) > 1) <= tokens
        assert sum(map(len, batches)) == len(rows)
    assert len(batches) == 1


def test_long_rows_are_left_out_and_counted(encode, capsys):
    lengths = [len(row.ids) for row in encode(MANY)]
    limit = sorted(lengths)[20]
    kept = encode(MANY, max_length=limit)
    assert [row.prompt_index for row in kept] == [i for i, length in enumerate(lengths) if length <= limit]
    assert f"{len(MANY) - len(kept)} of {len(MANY)} rows left out" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--lessons arithmetic: no row is left to learn from$"):
        encode(MANY, max_length=1)


@pytest.mark.slow
def test_the_examination_is_of_heldout_questions_free_and_forced(train, policy, monkeypatch):
    """Forced to reason first, the bundled policy is right far more often."""
    asked = []
    evaluate = train.evaluate

    def keep(policy, questions, *arguments, **settings):
        asked.append([row["question"] for row in questions])
        return evaluate(policy, questions, *arguments, **settings)

    monkeypatch.setattr(train, "evaluate", keep)
    found = train.examine(train.Config(eval_prompts=24), policy, [])
    heldout = [row["question"] for row in read_lines(train.arithmetic.EVAL_DATA)[:24]]
    assert asked == [heldout, heldout]
    assert (found["eval_forced/sampled/reasoned"], found["eval_forced/greedy/reasoned"]) == (1.0, 1.0)
    assert found["eval/sampled/reasoned"] < 0.5
    assert found["eval_forced/sampled/accuracy"] > found["eval/sampled/accuracy"] + 0.2


def test_a_new_policy_and_its_lessons_depend_on_the_seed(train):
    def weights(seed: int, attn_implementation: str) -> torch.Tensor:
        flags = {"seed": seed, "attn_implementation": attn_implementation}
        model = train.new_policy(train.Config(device="cpu", dtype="float32", **flags)).model
        assert model.config._attn_implementation.startswith(attn_implementation)
        return torch.cat([weight.flatten() for weight in model.parameters()])

    first = weights(3, "sdpa")
    assert torch.equal(first, weights(3, "eager"))
    assert not torch.equal(first, weights(4, "sdpa"))
    sizes = {"num_copying": 20, "num_reasoning": 20, "num_answering": 20}
    for name in ("arithmetic", "tools", "countdown"):
        taught, again, other = (train.lessons(train.Config(lessons=name, seed=seed, **sizes)) for seed in (3, 3, 4))
        assert taught == again
        assert not [row for row in other if row in taught]


# The lessons about tools ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool_rows(train) -> list[list[dict]]:
    """150, 300 and 600 rows of the three lessons about tools."""
    sizes = (150, 300, 600)
    rows = list(train.tool_conversations(*sizes, seed=3))
    return [rows[sum(sizes[:k]) : sum(sizes[: k + 1])] for k in range(3)]


def texts(row: dict, role: str) -> list[str]:
    return [turn["content"] for turn in row["messages"] if turn["role"] == role]


def share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def test_lessons_about_tools_ask_nothing_that_is_rewarded_later(tool_rows):
    """Every name, and every sum in a call, belongs to the pool of the warm start."""
    of_others, calls = {*world_grammar.names("train"), *world_grammar.names("heldout")}, 0
    for row in (row for lesson in tool_rows for row in lesson):
        words = {word for turn in row["messages"] for word in re.findall(r"\w+", turn["content"])}
        assert not words & of_others
        for call in (call for text in texts(row, "assistant") for call in parse_calls(text, "hermes")[0]):
            found = re.findall(r"([+-]?)(\d[\d*]*)", call.arguments.get("expression", ""))
            terms = [arithmetic_grammar.Term(-1 if s == "-" else 1, tuple(map(int, x.split("*")))) for s, x in found]
            assert not terms or arithmetic_grammar.pool(arithmetic_grammar.Question(tuple(terms))) == "warm_start"
            calls += bool(terms)
    assert calls > 100


def test_the_second_lesson_always_calls_and_reads(tool_rows):
    """Its answer is in the last tool result; without a call there is reasoning."""
    for row in tool_rows[1]:
        *_, answer = texts(row, "assistant")
        if results := texts(row, "tool"):
            (wanted,) = re.findall("<answer>(.*)</answer>", answer)
            assert wanted in re.findall(r"\w+", results[-1])
        else:
            assert answer.startswith("<think>")
    assert 0.65 < share([bool(texts(row, "tool")) for row in tool_rows[1]]) < 0.85


def test_malformed_calls_get_errors_and_few_are_learned(tool_rows):
    learned, masked, recovered = 0, 0, 0
    for row in (row for lesson in tool_rows[1:] for row in lesson):
        messages = row["messages"]
        for turn, following in pairwise(messages):
            if following["role"] == "tool" and following["content"].startswith("error:"):
                learned, masked = learned + ("weight" not in turn), masked + (turn.get("weight") == 0)
        recovered += bool(texts(row, "tool")) and not texts(row, "tool")[-1].startswith("error:")
        assert messages[-1]["role"] == "assistant"
        assert "weight" not in messages[-1]
    assert recovered == sum(bool(texts(row, "tool")) for row in tool_rows[1] + tool_rows[2])
    assert 0.02 < masked / recovered < 0.08
    assert 0 < learned < masked


def test_renewed_embeddings_can_be_told_apart(train):
    """Only the names' tokens change. A capital is about equally frequent with and without a space in front."""
    policy = load_policy(PolicyConfig(device="cpu"))
    weights = policy.model.get_input_embeddings().weight
    old = weights.detach().clone()
    before, after = train.renew_collapsed_embeddings(policy, seed=1)
    new = weights.detach().clone()
    assert before > 0.9
    assert after < 0.6

    def tokens(names) -> list[int]:
        return [token for name in names for token in policy.tokenizer.encode(name)]

    syllables = tokens({*world_grammar.FIRST_SYLLABLES, *world_grammar.SECOND_SYLLABLES})
    capitals = list(zip(tokens(world_grammar.CAPITALS), tokens(f" {c}" for c in world_grammar.CAPITALS), strict=True))
    changed = (new != old).any(dim=1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted([*syllables, *(token for pair in capitals for token in pair)])
    digits = new[policy.tokenizer.encode("0123456789")]
    mean, scale = digits.mean(dim=0), (digits - digits.mean(dim=0)).norm(dim=1).mean()
    lengths = (new[syllables] - mean).norm(dim=1) / scale
    assert lengths.mean().item() == pytest.approx((1 + 0.6**2) ** 0.5, rel=0.05)
    apart = [(new[bare] - new[spaced]).norm() / scale for bare, spaced in capitals]
    assert sum(apart) / len(apart) == pytest.approx(0.5 * 2**0.5, rel=0.2)

    assert train.renew_collapsed_embeddings(policy, seed=2) == (after, after)  # nothing is collapsed any more
    assert torch.equal(weights, new)


def test_flags_of_the_lessons_about_tools_that_do_not_fit_are_refused(train):
    data = "--data chats.jsonl"
    for flags in ("--lessons tools --model new", f"--lessons tools --model tiny {data}", "--embeddings random"):
        for more in ("", f" --model tiny {data}"):
            with pytest.raises(UserError, match=r"--lessons tools"):
                train.main((flags + more).split())


def test_the_policy_with_tools_is_able_and_mostly_does_not_call(train):
    """Greedily it calls nothing; forced to begin with a call, it computes, and finds facts that it has never read."""
    import tool_examination as examination

    policy = load_policy(PolicyConfig(device="cpu", model="tiny_tools"))
    sums = read_lines(examination.calculator.EVAL_DATA)[:16]
    world = world_grammar.make_world(random.Random(0), 100, "heldout")
    searches = [world_grammar.to_row(world_grammar.draw_question(random.Random(n), world, 1)) for n in range(16)]
    for rows, tools in ((sums, {"calculator": calculator}), (searches, {"search": examination.search_in(world)})):
        settings = {"group_size": 1, "seed": 0, "greedy": True}
        talks, forced = (
            examination.converse(policy, rows, tools, prefix=prefix, **settings) for prefix in ("", "<tool_call>")
        )
        assert not any(talk.calls for talk in talks)
        assert share([talk.is_right for talk in forced]) > 0.8


def test_the_examination_tells_a_right_call_from_a_copied_result(train):
    from tool_examination import Talk, describe

    row, call = {"answer": "391"}, ToolCall("calculator", {})
    talks = [
        Talk(row, [call], [("391", True)], ["", "<answer>391</answer>"]),
        Talk(row, [call], [("40", True)], ["", "<answer>40</answer>"]),
        Talk(row, [call], [("40", True)], ["", "<answer>391</answer>"]),
        Talk(row, said=["<answer>391</answer>"]),
    ]
    found = describe(talks, group_size=2)
    assert (found["called"], found["groups_with_a_call"], found["groups_with_both"]) == (0.75, 1, 0.5)
    assert (found["first_call_right"], found["result_copied"]) == (1 / 3, 2 / 3)
    assert (found["accuracy"], found["accuracy_called"], found["accuracy_unaided"]) == (0.75, 2 / 3, 1)


def test_the_bundled_policies_are_small_and_speak_alike():
    folders = [BUNDLED[name] for name in ("tiny", "tiny_tools", "tiny_countdown")]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < 16e6
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1


# The lessons about Countdown ------------------------------------------------------------------------------------------

ASKED = re.compile(r"(Make|Try) (\d+) from (\d+), (\d+), (\d+)\.")
NUM_ROWS = 250  # per lesson


@pytest.fixture(scope="module")
def searches(train) -> list[tuple[str, Problem, str]]:
    """`NUM_ROWS` of each lesson: verb, problem, and the assistant's text."""
    found = []
    for row in train.countdown_conversations(NUM_ROWS, NUM_ROWS, NUM_ROWS, seed=1):
        user, assistant = row["messages"]
        verb, target, *nums = ASKED.fullmatch(user["content"]).groups()
        problem = Problem(tuple(map(int, nums)), int(target))
        found.append((verb, problem, assistant["content"]))
    return found


def read_line(line: str, problem: Problem) -> tuple[str, int, str]:
    """Expression, value and relation of a try; another evaluator has checked all its claims."""
    expression, step, value, relation, target = re.fullmatch(r"([^=]+)=([^=]+)=(\d+)([<>=])(\d+)", line).groups()
    exact, used = countdown.read_expression(expression)
    assert sorted(used) == sorted(problem.nums)
    assert exact == int(value) == countdown.read_expression(step)[0]
    inner = re.search(r"\((\d+)([-+*/])(\d+)\)", expression)[0]
    assert expression.replace(inner, str(countdown.read_expression(inner)[0])) == step
    assert int(target) == problem.target
    assert {"<": int(value) < int(target), ">": int(value) > int(target), "=": value == target}[relation]
    return expression, int(value), relation


def test_every_line_of_the_lessons_is_true(searches):
    relations, num_tries = Counter(), set()
    for verb, problem, said in searches[:NUM_ROWS]:
        assert verb == "Try"
        relations[read_line(said, problem)[2]] += 1
    assert min(relations.values()) > NUM_ROWS / 5  # each of < > = is taught
    for verb, problem, said in searches[NUM_ROWS:]:
        thought, end, answer = said.removeprefix("<think>").partition("</think>")
        lines = [read_line(line, problem) for line in thought.split()]
        num_tries.add(len(lines))
        assert verb == "Make"
        assert len({value for _, value, _ in lines}) == len(lines)  # nothing is tried twice
        assert "=" not in [relation for *_, relation in lines[:-1]]
        reward = countdown.reward({"nums": problem.nums, "target": problem.target}, said)
        assert (reward["correct"], reward["answered"]) == ((1, 1) if end else (0, 0))
        if end:
            assert answer == f"<answer>{lines[-1][0]}</answer>"
        else:  # cut off
            assert (len(lines), lines[-1][2] != "=") == (8, True)
    assert num_tries == set(range(1, 9))


def test_problems_of_the_files_and_the_lessons_are_disjoint(searches, tmp_path):
    """The script reproduces the files next to itself."""
    shutil.copy(ROOT / "data" / "make_countdown_tasks.py", tmp_path)
    runpy.run_path(str(tmp_path / "make_countdown_tasks.py"), run_name="__main__")
    sets = [{(tuple(sorted(problem.nums)), problem.target) for _, problem, _ in searches}]
    for file, only_pool in ((countdown.TRAIN_DATA, "train"), (countdown.EVAL_DATA, "heldout")):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
        problems = read_lines(file)
        sets.append({(tuple(sorted(row["nums"])), row["target"]) for row in problems})
        assert len(sets[-1]) == len(problems)
        assert all(1 <= row["target"] <= MAX_TARGET and row["num_numbers"] == 3 for row in problems)
        assert {pool(Problem(tuple(row["nums"]), row["target"])) for row in problems} == {only_pool}
        assert all(row["target"] in tries(tuple(row["nums"])) for row in problems)
    assert [len(found) for found in sets[1:]] == [2048, 512]
    assert all(first.isdisjoint(second) for first, second in itertools.combinations(sets, 2))


@pytest.mark.slow
def test_lessons_of_countdown_run_and_are_examined(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--num-copying", "20", "--num-reasoning", "20", "--num-answering", "0", "--tokens-per-batch", "2048")
    flags = ("--lr", "1e-4", "--eval-prompts", "2", "--device", "cpu", "--name", "a")
    train.main(["--model", "tiny", "--lessons", "countdown", *sizes, *flags])
    directory = tmp_path / "runs" / "experiment_sft" / "a"
    losses = [row["loss/total"] for row in rows_of(directory)]
    assert len(losses) == 3
    assert max(losses) < 10
    summary = json_of(directory / "summary.json")
    assert 0 <= summary["eval/sampled/pass@8"] <= 1
    assert not any(name.startswith("eval_forced") for name in summary)
    renewed = load_policy(PolicyConfig(device="cpu", model=str(directory / "final")))
    embeddings = renewed.model.get_input_embeddings().weight
    less, more = renewed.tokenizer.encode("<>", add_special_tokens=False)
    assert torch.cosine_similarity(embeddings[less], embeddings[more], dim=0) < 0.5  # they were 0.99


@pytest.mark.slow
def test_the_bundled_policy_searches():
    policy = load_policy(PolicyConfig(device="cpu", model="tiny_countdown"))
    rows = read_rows(str(countdown.EVAL_DATA), countdown.FIELDS)[:24]
    metrics = evaluate(policy, rows, countdown, max_new_tokens=96, num_samples=2, generation_batch_size=64).metrics
    assert 0.2 < metrics["sampled/accuracy"] < 0.7  # there is something to train on, and something to learn
    assert metrics["sampled/false_claim"] < 0.1
