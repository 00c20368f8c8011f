"""Preference pairs from scored responses: which response is chosen, which prompts have no pair, which are held out."""

from pathlib import Path
from types import ModuleType

import pytest
from run_files import ROOT, read_lines, write_rows

from harness.data.data import read_rows
from harness.task.named_task import task_of
from harness.task.pairs import FIELDS, HELD_OUT, PAIRS, _read_pair


@pytest.fixture(scope="module")
def script(load_script) -> ModuleType:
    return load_script("rewards/reward_model/make_pairs.py")


@pytest.fixture(autouse=True)
def empty_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def response(text: str, score: float | None, style: str = "direct", finish_reason: str = "stop") -> dict:
    styles = {"reasoned": 0.0, "direct": 0.0} | {style: 1.0}
    return {"text": text, "finish_reason": finish_reason, "score": score, "style": styles}


def scored(*responses: dict, index: int = 0, **fields) -> dict:
    return {"index": index, "prompt": f"Question {index}?", "responses": list(responses)} | fields


def make(script: ModuleType, rows: list[dict], *flags: str) -> list[dict]:
    write_rows("scored.jsonl", rows)
    script.main(["--responses", "scored.jsonl", "--output", "out/pairs.jsonl", *flags])
    return read_lines(Path("out/pairs.jsonl"))


def test_the_best_response_is_beside_the_worst(script):
    row = scored(response("b", 0.5), response("c", 2.5, "reasoned"), response("a", -1.0), response("d", 2.0))
    assert make(script, [row]) == [
        {
            "prompt": "Question 0?", "chosen": "c", "rejected": "a", "score_chosen": 2.5, "style_chosen": "reasoned",
            "score_rejected": -1.0, "style_rejected": "direct",
        }
    ]  # fmt: skip


def test_scores_of_a_verifier_and_mixed_styles_are_not_written(script):
    right, wrong = response("1", 1.0), response("2", 0.0)
    right["style"] = {"reasoned": 1.0, "checked": 1.0}
    wrong["style"] = {"words": 1.0, "lines": 4.0}
    assert make(script, [scored(right, wrong)]) == [{"prompt": "Question 0?", "chosen": "1", "rejected": "2"}]


@pytest.mark.parametrize("choose", ["best-worst", "random"])
def test_among_equal_scores_the_seed_chooses(script, choose):
    """A right response beside a wrong one; all of them are taken now and then."""
    responses = [response(f"{kind}{n}", float(kind == "right")) for n in range(3) for kind in ("right", "wrong")]
    rows = [scored(*responses, index=index) for index in range(60)]
    pairs = make(script, rows, "--choose", choose)
    assert {pair["chosen"] for pair in pairs} == {"right0", "right1", "right2"}
    assert {pair["rejected"] for pair in pairs} == {"wrong0", "wrong1", "wrong2"}
    assert make(script, rows, "--choose", choose) == pairs
    assert make(script, rows, "--choose", choose, "--seed", "1") != pairs
    alone = make(script, rows[20:], "--choose", choose)  # a choice does not depend on the other prompts
    assert alone == pairs[20:]


def test_random_pairs_are_not_only_the_best_and_the_worst(script):
    rows = [scored(*(response(str(n), float(n)) for n in range(4)), index=index) for index in range(60)]
    pairs = make(script, rows, "--choose", "random")
    assert all(pair["score_chosen"] > pair["score_rejected"] for pair in pairs)
    assert len({(pair["chosen"], pair["rejected"]) for pair in pairs}) == 6


@pytest.mark.parametrize(("responses", "flags", "reason"), [
    ([("a", 1.0), ("b", 1.0)], [], "a tie"), ([("a", 1.0), ("a", 0.0)], [], "a tie"),
    ([("a", 1.0)], [], "too few responses"), ([("a", 1.0), ("b", None)], [], "too few responses"),
    ([("a", 1.0), ("b", 0.0)], ["--min-responses", "3"], "too few responses"),
    ([("a", 1.0), ("b" * 21, 0.0)], ["--max-length", "20"], "too few responses"),
    ([("a", 1.0), ("b", 0.0, "direct", "length")], [], "too few responses"),
    ([("a" * 20, 1.0), ("b", 0.0)], ["--max-length", "20"], None),
])  # fmt: skip
def test_prompts_without_a_pair_are_left_out_and_counted(script, responses, flags, reason, capsys):
    good = scored(*(response(text, score) for text, score in (("x", 1.0), ("y", 0.0), ("z", 0.0))), index=1)
    pairs = make(script, [scored(*(response(*each) for each in responses)), good], *flags)
    assert len(pairs) == (2 if reason is None else 1)
    assert f"left out: {'none' if reason is None else f'{reason} 1'}\n" in capsys.readouterr().out


def some_rows(count: int, **fields) -> list[dict]:
    return [scored(response("a", 1.0), response("b", 0.0), index=index, **fields) for index in range(count)]


def test_held_out_pairs_are_about_other_prompts(script):
    flags = ["--eval-output", "held.jsonl", "--eval-share", "0.25"]
    rows = some_rows(200)
    rows += [row | {"index": 200 + row["index"]} for row in rows[:50]]  # asked twice
    train, held = ([pair["prompt"] for pair in pairs] for pairs in (make(script, rows, *flags), read("held.jsonl")))
    assert len(train) + len(held) == 250
    assert not set(train) & set(held)
    assert 0.15 < len(set(held)) / 200 < 0.35
    make(script, rows[100:], *flags)  # with other prompts the same ones are held out
    assert {pair["prompt"] for pair in read("held.jsonl")} <= set(held)
    assert make(script, rows, *flags, "--max-pairs", "10", "--max-eval-pairs", "5")[-1]["prompt"] == train[9]
    assert [pair["prompt"] for pair in read("held.jsonl")] == held[:5]


def test_a_conversation_is_not_divided(script):
    rows = [row | {"conversation": f"c{row['index'] // 5}"} for row in some_rows(200)]
    train = make(script, rows, "--eval-output", "held.jsonl", "--eval-share", "0.3")
    sides = [
        {row["index"] // 5 for row in rows if row["prompt"] in prompts_of(some)} for some in (train, read("held.jsonl"))
    ]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(range(40))


def prompts_of(pairs: list[dict]) -> set[str]:
    return {pair["prompt"] for pair in pairs}


def read(path: str) -> list[dict]:
    return read_lines(Path(path))


@pytest.mark.parametrize("flags", [[], ["--conversations"]])
def test_training_reads_the_pairs(script, flags):
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    make(script, [*some_rows(1), scored(response("x", 1.0), response("y", 0.0), index=1, prompt=prompt)], *flags)
    first, second = read_rows("out/pairs.jsonl", FIELDS)
    for row, history, answers in ((first, ["Question 0?"], ["a", "b"]), (second, ["a", "b", "c"], ["x", "y"])):
        *read, problem = [[turn["content"] for turn in turns] for turns in _read_pair(row)[:2]] + [_read_pair(row)[2]]
        assert (*read, problem) == (history, answers, None)


def test_the_bundled_pairs_are_right_beside_wrong_and_about_three_kinds_of_questions():
    """Training pairs, held-out pairs and the evaluation of policies ask different questions."""
    task = task_of("arithmetic")
    rows = {row["question"]: row for row in read_lines(ROOT / "data" / "math_tasks.jsonl")}
    evaluated = {row["question"] for row in read_lines(ROOT / "data" / "math_tasks_heldout.jsonl")}
    sides = [read_lines(path) for path in (PAIRS, HELD_OUT)]
    assert [len(pairs) for pairs in sides] == [3000, 400]
    for pair in sides[0][::10] + sides[1][::10]:
        row = rows[pair["prompt"]]
        assert [task.reward(row, pair[side])["correct"] for side in ("chosen", "rejected")] == [1, 0]
        assert pair.keys() == {"prompt", "chosen", "rejected"}
    train, held = map(prompts_of, sides)
    assert len(train) == 3000
    assert train | held <= rows.keys()
    assert not train & held
    assert not (train | held) & evaluated
