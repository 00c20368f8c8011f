"""The lessons of the bundled policies: those about tools, and those about Countdown, in which every line is true.

Tokens that decide a search weigh more; how the policies are examined, and what the bundled ones can do.
"""

import hashlib
import json
import random
import re
import runpy
from pathlib import Path
from types import ModuleType

import data_files
import pytest
import tool_examination as examination
import torch
import world_grammar
from countdown_grammar import MAX_TARGET, Problem, pool, tries
from countdown_lessons import EMPHASIS
from emphasis import WeightedRow, emphasise, read_weighted
from run_files import json_of, read_lines, rows_of
from tool_examination import Talk, describe

from common.policy import Policy
from common.tools import ToolCall, calculator
from tasks import countdown

from harness.base.config import BUNDLED, PolicyConfig
from harness.models.loading import load_policy

pytestmark = pytest.mark.all_questions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def make(load_script) -> ModuleType:
    return load_script("imitation/tiny_policy/make_policy.py")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(PolicyConfig(device="cpu"))


def asked_and_said(asked: str, said: str) -> dict:
    """A row of one question and its answer."""
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


# Some tokens weigh more ----------------------------------------------------------------------------------------------

SEARCHES = [  # with the texts of the verdicts, which have larger weights
    (asked_and_said("Make 37<55 from 1.", "(7*5)+2=35+2=37<100"), "37<100"),
    (
        asked_and_said("Make it.", "<think>12-(5*2)=12-10=2<24 (12*5)-2=60-2=58=58</think><answer>(12*5)-2</answer>"),
        "2<2458=58",
    ),
    (asked_and_said("Make it.", "<think>12-(5*2)=12-10=2<24 "), "2<24"),
]


@pytest.fixture
def rows(make, policy) -> list[WeightedRow]:
    """The searches as rows with weights."""
    encoded = make.encode_rows([row for row, _ in SEARCHES], "", policy, make.Config().max_length)
    return [emphasise(policy.tokenizer, row, EMPHASIS) for row in encoded]


@pytest.fixture
def update(make, policy):
    """One update that moves nothing: its metrics, and the gradient of the policy."""

    def update(rows: list[WeightedRow], **settings) -> tuple[dict, list[torch.Tensor]]:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        metrics = make.sft.update(make.Config(**settings), policy, optimizer, read_weighted(policy, rows))
        return metrics, [parameter.grad.clone() for parameter in policy.parameters()]

    return update


@pytest.mark.parametrize("micro_batch_size", [2, 256])
def test_the_loss_is_the_weighted_mean_over_all_spoken_tokens(policy, rows, update, micro_batch_size):
    """Loss and gradient equal a slow loop's."""
    policy.zero_grad()
    loss = weight_sum = 0.0
    for row in rows:
        log_probs = policy.model(torch.tensor([row.ids])).logits[0].log_softmax(dim=-1)
        for position, (token, weight, flag) in enumerate(zip(row.ids, row.weights, row.action_mask, strict=True)):
            if flag:
                loss, weight_sum = loss - weight * log_probs[position - 1, token], weight_sum + weight
    (loss / weight_sum).backward()
    expected = [parameter.grad.clone() for parameter in policy.parameters()]
    metrics, found = update(rows, micro_batch_size=micro_batch_size, max_grad_norm=1e9)
    assert metrics["loss/total"] == pytest.approx((loss / weight_sum).item(), rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_verdicts_and_answers_are_emphasised(policy, rows):
    for row, (messages, verdicts) in zip(rows, SEARCHES, strict=True):
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


# The examination, and a new policy ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examination_is_of_heldout_questions_free_and_forced(make, policy, monkeypatch):
    """Forced to reason first, the bundled policy is right far more often."""
    asked = []
    evaluate = make.evaluate

    def keep(policy, questions, *arguments, **settings):
        asked.append([row["question"] for row in questions])
        return evaluate(policy, questions, *arguments, **settings)

    monkeypatch.setattr(make, "evaluate", keep)
    found = make.examine(make.Config(eval_prompts=24), policy)
    heldout = [row["question"] for row in read_lines(make.arithmetic.EVAL_DATA)[:24]]
    assert asked == [heldout, heldout]
    assert (found["eval_forced/sampled/reasoned"], found["eval_forced/greedy/reasoned"]) == (1.0, 1.0)
    assert found["eval/sampled/reasoned"] < 0.5
    assert found["eval_forced/sampled/accuracy"] > found["eval/sampled/accuracy"] + 0.2


def test_a_new_policy_depends_on_the_seed(make):
    def weights(seed: int, attn_implementation: str) -> torch.Tensor:
        flags = {"seed": seed, "attn_implementation": attn_implementation}
        model = make.new_policy(make.Config(device="cpu", dtype="float32", **flags)).model
        assert model.config._attn_implementation.startswith(attn_implementation)
        return torch.cat([weight.flatten() for weight in model.parameters()])

    first = weights(3, "sdpa")
    assert torch.equal(first, weights(3, "eager"))
    assert not torch.equal(first, weights(4, "sdpa"))


DIGESTS = {  # of lessons in which every sum, equation, call, result and line was checked when the policies learned them
    "arithmetic": "9bd73c461cb6bfa3", "tools": "412a268881be077a", "countdown": "d9ac5be5d880e53b",
}  # fmt: skip


@pytest.mark.parametrize("name", DIGESTS)
def test_the_lessons_are_those_that_the_bundled_policies_learned(make, name):
    rows, other = (
        make.make_rows(make.Config(lessons=name, seed=seed, num_copying=150, num_reasoning=300, num_answering=600))
        for seed in (3, 4)
    )
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == DIGESTS[name]
    assert not [row for row in other if row in rows[:20]]


# The lessons about tools ----------------------------------------------------------------------------------------------


def share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def test_renewed_embeddings_can_be_told_apart(make):
    """Only the names' tokens change. A capital is about equally frequent with and without a space in front."""
    policy = load_policy(PolicyConfig(device="cpu"))
    weights = policy.model.get_input_embeddings().weight
    old = weights.detach().clone()
    before, after = make.renew_collapsed_embeddings(policy, seed=1)
    new = weights.detach().clone()
    assert before > 0.9
    assert after < 0.6

    def tokens(names) -> list[int]:
        return [token for name in names for token in policy.tokenizer.encode(name)]

    syllables = tokens({*world_grammar.FIRST_SYLLABLES, *world_grammar.SECOND_SYLLABLES})
    capitals = list(zip(tokens(world_grammar.CAPITALS), tokens(f" {c}" for c in world_grammar.CAPITALS), strict=True))
    changed = (new != old).any(dim=1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted([*syllables, *(token for pair in capitals for token in pair)])
    assert make.renew_collapsed_embeddings(policy, seed=2) == (after, after)  # nothing is collapsed any more
    assert torch.equal(weights, new)


@pytest.mark.slow
def test_the_policy_with_tools_is_able_and_mostly_does_not_call():
    """Greedily it calls nothing; forced to begin with a call, it computes, and finds facts that it has never read."""
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


def test_the_examination_tells_a_right_call_from_a_copied_result():
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


def test_the_problems_of_the_files_are_reproduced_possible_and_disjoint(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "DATA", tmp_path)
    runpy.run_path(str(ROOT / "imitation" / "tiny_policy" / "make_countdown_tasks.py"), run_name="__main__")
    sets = []
    for file, only_pool in ((countdown.TRAIN_DATA, "train"), (countdown.EVAL_DATA, "heldout")):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
        problems = read_lines(file)
        sets.append({(tuple(sorted(row["nums"])), row["target"]) for row in problems})
        assert len(sets[-1]) == len(problems)
        assert all(1 <= row["target"] <= MAX_TARGET and row["num_numbers"] == 3 for row in problems)
        assert {pool(Problem(tuple(row["nums"]), row["target"])) for row in problems} == {only_pool}
        assert all(row["target"] in tries(tuple(row["nums"])) for row in problems)
    assert [len(found) for found in sets] == [2048, 512]
    assert sets[0].isdisjoint(sets[1])


@pytest.mark.slow
def test_lessons_of_countdown_run_and_are_examined(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--num-copying", "20", "--num-reasoning", "20", "--num-answering", "0", "--tokens-per-batch", "2048")
    flags = ("--lr", "1e-4", "--eval-prompts", "2", "--device", "cpu", "--name", "a")
    make.main(["--model", "tiny", "--lessons", "countdown", *sizes, *flags])
    directory = tmp_path / "runs" / "tiny_policy" / "a"
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
