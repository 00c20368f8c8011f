"""rewards/likelihood: by enumeration the verifier's objective with less noise; where an answer begins; what is paid."""

import itertools
import math
import random

import pytest
import reference_answers
import torch
from policies import load, read_plain
from run_files import rows_of

from common.chat import encode_prompt
from common.errors import UserError
from common.trajectory import Trajectory

from harness.base.config import TINY_POLICY
from harness.data.rows import Row
from harness.task.named_task import task_of
from harness.task.scorer import Scorer
from harness.task.task import Task

SCRIPT = "rewards/likelihood/train.py"
# A policy that is a table: the logits of three tokens after each beginning of at most three. MARKER begins the answer,
# DIGIT and END are the reference answer, and all completions of at most four tokens can be enumerated
MARKER, DIGIT, END = TOKENS = range(3)
LENGTH, REFERENCE = 4, (DIGIT, END)
PREFIXES = [prefix for n in range(LENGTH) for prefix in itertools.product(TOKENS, repeat=n)]


@pytest.fixture(scope="module")
def train(load_script):
    return load_script(SCRIPT)


def thought_length(ids: tuple[int, ...]) -> int | None:
    return ids.index(MARKER) + 1 if MARKER in ids else None


def completions(ids: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """All that the policy can sample after `ids`: up to the end of an answer, or of the budget."""
    if len(ids) == LENGTH or (ids and ids[-1] == END and MARKER in ids[:-1]):
        return [ids]
    return [row for token in TOKENS for row in completions((*ids, token))]


def log_probs_of(table: torch.Tensor, rows: list[tuple[int, ...]]) -> torch.Tensor:
    """(B, T-1) of the tokens of rows, of which column 0 is the first; 0 after their end."""
    scores = table.log_softmax(dim=-1)
    found = [[scores[PREFIXES.index(row[:t]), row[t]] for t in range(len(row))] for row in rows]
    return torch.stack([torch.stack([*row, *[scores.new_zeros(())] * (LENGTH - len(row))]) for row in found])


def gradients(train, make_experience, config, table, rows, weights) -> torch.Tensor:
    """Minus the gradient of each row's loss by the table, (B, parameters): its pushes times the slopes of log-probs."""
    mask = torch.tensor([[t < len(row) for t in range(LENGTH)] for row in rows]).long()
    leaf = log_probs_of(table, rows).detach().requires_grad_()
    terms, _ = train.policy_loss(config, leaf, make_experience(mask, advantages=weights), 1)
    terms.sum().backward()
    probs, found = table.detach().softmax(dim=-1), torch.zeros(len(rows), *table.shape, dtype=table.dtype)
    for number, row in enumerate(rows):
        for t, token in enumerate(row):
            slope = torch.nn.functional.one_hot(torch.tensor(token), len(TOKENS)) - probs[PREFIXES.index(row[:t])]
            found[number, PREFIXES.index(row[:t])] -= leaf.grad[number, t] * slope
    return found.flatten(start_dim=1)


def of_pairs(probabilities, returns, of_thought, of_answer) -> tuple[torch.Tensor, float]:
    """Mean and total variance of the gradient of one group of two, each compared with the other."""
    advantage = returns[:, None] - returns
    both = advantage[..., None] * (of_thought[:, None] - of_thought) + of_answer[:, None] + of_answer
    weight = (probabilities[:, None] * probabilities)[..., None]
    mean = (weight * both / 2).sum(dim=(0, 1))
    return mean, (weight * (both / 2 - mean) ** 2).sum().item()


@pytest.mark.parametrize("kind", ["product", "mean"])
def test_by_enumeration_it_is_the_verifiers_objective_with_less_noise(train, make_experience, kind):
    table = torch.randn(len(PREFIXES), len(TOKENS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table.requires_grad_()
    config = train.Config(likelihood=kind, max_new_tokens=1, group_size=2)

    # the verifier: all completions, of which an answer is right that is the reference
    sampled = completions()
    chances = log_probs_of(table, sampled).sum(dim=1).exp()
    cut = [thought_length(ids) for ids in sampled]
    right = torch.tensor([k is not None and ids[k:] == REFERENCE for ids, k in zip(sampled, cut, strict=True)]).double()
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    accuracy = (chances * right).sum()
    (exact,) = torch.autograd.grad(accuracy, table, retain_graph=True)
    ones = torch.ones(len(sampled), 1, dtype=torch.float64)
    scores = gradients(train, make_experience, config, table, sampled, ones)
    verified, noise = of_pairs(chances.detach(), right, scores, torch.zeros_like(scores))
    torch.testing.assert_close(verified, exact.flatten(), atol=1e-12, rtol=0)

    # the likelihood: a thought with the reference in place of what was sampled, where the budget has room for it
    chance_of: dict[tuple[int, ...], torch.Tensor] = {}
    for ids, k, chance in zip(sampled, cut, chances, strict=True):
        row = ids if k is None or k + len(REFERENCE) > LENGTH else (*ids[:k], *REFERENCE)
        chance_of[row] = chance_of.get(row, 0) + chance
    rows, chances = list(chance_of), torch.stack([*chance_of.values()])
    starts = [k if (k := thought_length(row)) and row[k:] == REFERENCE else LENGTH for row in rows]
    is_answer = torch.tensor(
        [[start <= t < len(row) for t in range(LENGTH)] for start, row in zip(starts, rows, strict=True)]
    )
    log_probs = log_probs_of(table, rows)
    rewards, slopes = train.likelihood(config, log_probs, is_answer)
    slow = [[math.exp(x) for x in row[start:]] for row, start in zip(log_probs.tolist(), starts, strict=True)]
    slow = [probs[: len(REFERENCE)] for probs in slow]
    slow = [(math.prod(p) if kind == "product" else sum(p) / len(p)) if p else 0.0 for p in slow]
    assert rewards.tolist() == pytest.approx(slow, abs=1e-12)
    objective = (chances * rewards).sum()
    (wanted,) = torch.autograd.grad(objective, table, retain_graph=True)  # through thoughts and rewards
    thought = gradients(train, make_experience, config, table, rows, (~is_answer).double())
    answer = gradients(train, make_experience, config, table, rows, slopes.detach() * is_answer)
    found, less = of_pairs(chances.detach(), rewards.detach(), thought, answer)
    torch.testing.assert_close(found, wanted.flatten(), atol=1e-12, rtol=0)
    alone, _ = of_pairs(chances.detach(), rewards.detach(), thought, torch.zeros_like(answer))
    assert (alone - wanted.flatten()).norm() > 0.1 * wanted.norm()  # one part alone is another gradient
    is_same = kind == "product"
    assert (abs(objective - accuracy).item() < 1e-12) == is_same
    assert ((wanted - exact).abs().max().item() < 1e-12) == is_same
    print(kind, noise, less)
    assert less < 0.5 * noise or not is_same


PIECES = ["<", "answer", ">", "<answer>", "r>4", ">5", "answe", "7", "x<an", "swer>", "<answer>5"]


def test_a_thought_ends_at_the_last_token_that_holds_nothing_after_the_marker(monkeypatch):
    """Against a search of all beginnings, over random tokens."""
    monkeypatch.setattr(reference_answers, "decode", lambda _, ids: "".join(PIECES[i] for i in ids))
    generator, marker, num_cut = random.Random(0), "<answer>", 0
    for _ in range(2000):
        ids = generator.choices(range(len(PIECES)), k=generator.randrange(2, 10))
        pieces = [PIECES[i] for i in ids]
        text = "".join(pieces)
        found = reference_answers.thought_of(None, ids, marker)
        if marker not in text:
            assert found is None
            continue
        end = text.index(marker) + len(marker)
        length = max(n for n in range(len(ids) + 1) if len("".join(pieces[:n])) <= end)
        assert found == (length, text[len("".join(pieces[:length])) : end])
        num_cut += found[1] != ""
    assert num_cut > 50


@pytest.fixture(scope="module")
def policy():
    return load()


def row_of(policy, question: str, text: str) -> Trajectory:
    prompt = encode_prompt(policy.tokenizer, [{"role": "user", "content": question}])
    row = Trajectory(list(prompt), len(prompt), [0] * len(prompt), [0.0] * len(prompt), finish_reason="stop", text=text)
    ids = [*policy.tokenizer.encode(text, add_special_tokens=False), policy.tokenizer.eos_token_id]
    row.act(ids, [-0.5] * len(ids))
    return row


def scored(train, policy, question: str, text: str, answer: str, **flags) -> tuple[Trajectory, torch.Tensor, float]:
    """The row that is trained on in place of a completion, its tokens of the reference, and its reward."""
    config = train.Config(**{"max_new_tokens": 96, "micro_batch_size": 4, "device": "cpu"} | flags)
    task = Task(Scorer(task_of("arithmetic")), train_rows=[Row({"question": question, "answer": answer})])
    (row,), is_answer = reference_answers.with_references(config, task, policy, [row_of(policy, question, text)])
    rewards, _ = train.likelihood(config, torch.tensor([row.sampler_log_probs[1:]]), is_answer)
    return row, is_answer[0], rewards.item()


def test_the_reference_takes_the_place_of_the_sampled_answer(train, policy):
    """Its log-probs are those of plain transformers; a row may not write a control token; the budget has to suffice."""
    question, thought = "What is 47 plus 29?", "<think>47+29=76</think><answer>"
    sampled = row_of(policy, question, thought + "75</answer>")
    row, is_answer, reward = scored(train, policy, question, sampled.text, "76")
    start = len(sampled.ids) - 4  # 7, 5, </answer> and the end of the turn
    assert policy.tokenizer.decode(row.ids[start:]) == "76</answer>"
    assert row.ids[:start] == sampled.ids[:start]
    assert row.sampler_log_probs[:start] == sampled.sampler_log_probs[:start]
    assert (row.text, row.logged, row.finish_reason) == (thought + "76</answer>", {"sampled": "75</answer>"}, "given")
    assert row.action_mask == [0] * row.prompt_length + [1] * (len(row.ids) - row.prompt_length)
    assert is_answer.tolist() == [False] * (start - 1) + [True] * 3
    with torch.no_grad():
        scores = read_plain(TINY_POLICY)(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(dim=-1)
    expected = [scores[t - 1, row.ids[t]].item() for t in range(start, start + 3)]
    assert row.sampler_log_probs[start:] == pytest.approx(expected, abs=1e-4)
    assert reward == pytest.approx(math.exp(sum(expected)), abs=1e-4)

    end_of_turn = policy.tokenizer.eos_token_id
    assert end_of_turn not in scored(train, policy, question, sampled.text, "76<|im_end|>")[0].ids[row.prompt_length :]
    length = len(row.ids) - row.prompt_length
    for budget, is_given in ((length, True), (length - 1, False)):
        found, is_answer, reward = scored(train, policy, question, sampled.text, "76", max_new_tokens=budget)
        assert (found.finish_reason == "given", is_answer.any().item(), reward > 0.9) == (is_given,) * 3
    without, is_answer, reward = scored(train, policy, question, "<think>47+29=76</think>", "76", likelihood="mean")
    assert (without.finish_reason, is_answer.any().item(), reward) == ("stop", False, 0)


RIGHT, WRONG = "89+74=163 163+27=190", "89+74=163 163+27=180"
PAID = {  # by completion and reference: the product and the mean of the probabilities, as the README has them
    (f"<think>{RIGHT}</think><answer>190</answer>", "190"): (1.0, 1.0),
    (f"<think>{RIGHT}</think><answer>180</answer>", "190"): (1.0, 1.0),  # a slip of the sampler costs nothing
    (f"<think>{WRONG}</think><answer>180</answer>", "190"): (0.0, 0.75),
    ("<answer>190</answer>", "190"): (0.03, 0.62),
    ("<think>190</think><answer>190</answer>", "190"): (0.0, 0.71),
    ("<think>180 190</think><answer>190</answer>", "190"): (1.0, 1.0),  # two guesses, no reasoning
    (f"<think>190 {WRONG}</think><answer>180</answer>", "190"): (0.0, 0.75),  # stated early, then lost
    (f"<think>{RIGHT}<answer>190</answer>", "190"): (1.0, 1.0),  # where the verifier pays 0
    (f"<think>{RIGHT}</think><answer>190</answer>", "190.0"): (0.0, 0.5),  # equal for the verifier
    (f"<think>{RIGHT}</think><answer>190</answer>", "190 "): (0.0, 0.6),
    (f"<think>{RIGHT}</think><answer>190</answer>", "19"): (0.0, 0.67),
}


@pytest.mark.parametrize(("text", "answer"), PAID)
def test_what_is_paid(train, policy, text, answer):
    found = [
        scored(train, policy, "Work out 89 + 74 + 27.", text, answer, likelihood=k)[2] for k in ("product", "mean")
    ]
    assert found == pytest.approx(PAID[text, answer], abs=0.01)


def test_without_its_end_the_beginning_of_an_answer_is_paid(train, policy):
    text = f"<think>{RIGHT}</think><answer>190</answer>"
    rewards = [
        scored(train, policy, "Work out 89 + 74 + 27.", text, "19", after_answer=end)[2] for end in ("", "</answer>")
    ]
    assert rewards == pytest.approx([1, 0], abs=0.01)


UNTAGGED = {"prompt": "?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "topic": "?"}


@pytest.mark.parametrize(("name", "row", "expected"), [
    ("arithmetic", {"question": "?", "answer": 58}, "58"),
    ("gsm8k", {"question": "?", "answer": "20+38=<<20+38=58>>58\n#### 58"}, "58"),
    ("math", {"problem": "?", "answer": r"\frac{1}{2}"}, r"\frac{1}{2}"),
    ("countdown", {"nums": [3, 5], "target": 8}, "3+5"),
    ("qa", {"question": "?", "answer": ["Jo", "Joseph"]}, "Jo"),
    ("prompts", {"prompt": "Why?", "answer": [["Jo"]]}, "no reference answer"),
    ("prompts", {"prompt": "Why?"}, 'no reference answer: a row needs a field "answer", or its task a solution'),
    ("instructions", UNTAGGED, "has no '<answer>': give another --before-answer"),
])  # fmt: skip
def test_the_reference_of_a_row(train, name, row, expected):
    """Or the sentence that refuses the row."""
    task = Task(Scorer(task_of(name)))
    if "answer" in expected:
        with pytest.raises(UserError, match=expected):
            reference_answers.reference_answer(train.Config(), task, Row(row))
    else:
        assert reference_answers.reference_answer(train.Config(), task, Row(row)) == expected


def test_a_run_pays_for_the_likelihood_alone(train, tmp_path):
    """And what --reward-weight names; the sampled answers are only judged."""
    flags = "--steps 1 --prompts-per-step 2 --group-size 4 --max-new-tokens 30 --eval-prompts 1 --eval-every 0"
    for name, more, weights in (
        ("a", "", {}),
        ("b", "--reward-weight likelihood=2 format=0.5", {"likelihood": 2, "format": 0.5}),
    ):
        train.main([*flags.split(), *more.split(), "--name", name, "--runs-dir", str(tmp_path)])
        rows = rows_of(tmp_path / "likelihood" / name, "samples")
        for row in rows:
            rewards, count = row["rewards"], 3 if row["finish_reason"] == "given" else 0
            expected = sum(value * (weights or {"likelihood": 1}).get(key, 0) for key, value in rewards.items())
            assert row["return"] == pytest.approx(expected)
            (update,) = row["updates"]
            pushes = update["push"][len(row["ids"]) - count :] if count else []
            wanted = weights.get("likelihood", 1) * rewards["likelihood"] / 30 / len(rows)
            assert pushes == pytest.approx([wanted] * count, rel=1e-3, abs=1e-6)
        assert {row["rewards"]["correct"] for row in rows} == {0, 1}
        assert 0 < max(row["rewards"]["likelihood"] for row in rows) < 1
