"""Responses, scores and conversations: made in shards, killed and continued, of a policy and of a server."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import ROOT, read_lines, write_rows

from common.errors import UserError

from harness.base.config import PolicyConfig
from harness.engines import chat_server
from harness.models.reward_loading import new_reward_model

SAMPLE, SCORE = "rewards/reward_model/sample_responses.py", "rewards/reward_model/score_responses.py"
PAIRS, CHATS = "rewards/reward_model/make_pairs.py", "imitation/sft/make_chats.py"
# 8 prompts in batches of 2, the last shard of 3 with one batch more
SMALL = ["--limit", "8", "--num-samples", "4", "--generation-batch-size", "8", "--max-new-tokens", "64"]
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def empty_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make(load_script) -> Callable[..., bytes]:
    """Run a program in this process: make(program, output, *flags) returns what the output holds."""

    def run(program: str, output: str, *flags: str) -> bytes:
        load_script(program).main([*flags, "--output", output])
        return Path(output).read_bytes()

    return run


@pytest.fixture(scope="module")
def made(load_script, tmp_path_factory) -> dict[str, Path]:
    """By program, the complete file; its settings are beside it."""
    place, flags = tmp_path_factory.mktemp("whole"), {SAMPLE: SMALL, CHATS: [*SMALL, "--keep-right"]}
    paths = {program: place / f"{number}.jsonl" for number, program in enumerate(flags)}
    for program, path in paths.items():
        load_script(program).main([*flags[program], "--output", str(path)])
    return paths


def copied(path: Path, to: str) -> bytes:
    """Copies a complete file and its settings to the working directory."""
    shutil.copy(f"{path}.settings.json", f"{to}.settings.json")
    return Path(shutil.copy(path, to)).read_bytes()


@pytest.fixture
def whole(made) -> bytes:
    return copied(made[SAMPLE], "whole.jsonl")


def test_a_row_has_the_prompt_and_its_rewarded_responses(whole):
    rows = read_lines(Path("whole.jsonl"))
    assert [row["index"] for row in rows] == list(range(8))
    questions = [row["question"] for row in read_lines(ROOT / "data" / "math_tasks.jsonl")[:8]]
    assert [row["prompt"] for row in rows] == questions
    responses = [response for row in rows for response in row["responses"]]
    assert len(responses) == 8 * 4
    assert len({response["text"] for response in responses}) > 8
    for response in responses:
        assert set(response) == {"text", "finish_reason", "rewards", "style"}
        assert response["style"]["reasoned"] == float("</think>" in response["text"].partition("<answer>")[0])
    assert {response["rewards"]["correct"] for response in responses} == {0.0, 1.0}


@pytest.mark.slow
def test_shards_are_the_complete_file(make, made, whole):
    shards = [make(SAMPLE, f"part{n}.jsonl", *SMALL, "--shard", f"{n}/3") for n in (1, 2, 3)]
    assert b"".join(shards) == whole
    assert [shard.count(b"\n") for shard in shards] == [2, 2, 4]
    by = ["--by", "correct", "--generation-batch-size", "8"]
    scored = make(SCORE, "scored.jsonl", *by, "--responses", "whole.jsonl")
    parts = [make(SCORE, f"s{n}.jsonl", *by, "--responses", "whole.jsonl", "--shard", f"{n}/3") for n in (1, 2, 3)]
    assert b"".join(parts) == scored
    pairs = make(PAIRS, "pairs.jsonl", "--responses", "scored.jsonl")
    assert make(PAIRS, "pairs2.jsonl", "--responses", "s1.jsonl", "s2.jsonl", "s3.jsonl") == pairs
    parts = [make(CHATS, f"c{n}.jsonl", *SMALL, "--keep-right", "--shard", f"{n}/3") for n in (1, 2, 3)]
    assert b"".join(parts) == made[CHATS].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("program", [SAMPLE, CHATS])
def test_a_killed_command_is_continued(make, made, program, capsys):
    """Wherever the kill has cut the file: within a line, behind one, within a batch, or before the first row."""
    flags = [*SMALL, *(["--keep-right"] if program == CHATS else [])]
    whole = copied(made[program], "whole.jsonl")
    lines = whole.splitlines(keepends=True)
    cuts = (0, len(lines[0]), sum(map(len, lines[:4])), sum(map(len, lines[:5])) + 30, len(whole) - 1)
    for cut in cuts if program == SAMPLE else cuts[-2:]:
        Path("out.jsonl").write_bytes(whole[:cut])
        shutil.copy("whole.jsonl.settings.json", "out.jsonl.settings.json")
        capsys.readouterr()
        assert make(program, "out.jsonl", *flags) == whole
        assert ("the last line was incomplete" in capsys.readouterr().out) == (whole[:cut][-1:] not in (b"", b"\n"))
    assert make(program, "out.jsonl", *flags) == whole


def test_other_settings_or_another_file_are_refused(make, whole):
    for output, flags, reason in (
        ("whole.jsonl", ["--seed", "1"], "--seed 1 differs from 0 in whole.jsonl.settings.json"),
        ("whole.jsonl", ["--shard", "2/3"], '--shard "2/3" differs from "1/1"'),
    ):
        with pytest.raises(UserError, match=f"^{reason}"):
            make(SAMPLE, output, *SMALL, *flags)
    assert Path("whole.jsonl").read_bytes() == whole


TURNS = [{"role": role, "content": content} for role, content in (("user", "Add 1 and 2."), ("assistant", "3"))]


def test_wild_conversations_end_with_the_user(make):
    """What the assistant said last is dropped; the conversation's name is kept, and the system turn is not written."""
    asked = [*TURNS, {"role": "user", "content": "Add 5 and 6."}]
    write_rows("wild.jsonl", [
        {"prompt": "Add 1 and 2."}, {"prompt": [*asked, TURNS[1], TURNS[1]], "conversation": "c7"},
        {"prompt": [TURNS[1]]}, {"prompt": TURNS, "conversation": "c8"},
    ])  # fmt: skip
    make(SAMPLE, "out.jsonl", *SMALL, "--prompts", "wild.jsonl", "--system-prompt", "Be brief.")
    rows = read_lines(Path("out.jsonl"))
    assert [row["prompt"] for row in rows] == ["Add 1 and 2.", asked, "Add 1 and 2."]
    assert [row.get("conversation") for row in rows] == [None, "c7", "c8"]
    assert [row["index"] for row in rows] == [0, 1, 3]
    assert all(set(response) == {"text", "finish_reason"} for row in rows for response in row["responses"])


def test_splits_divide_conversations(make):
    write_rows("wild.jsonl", [{"prompt": f"Add {n} and 1.", "conversation": n // 4} for n in range(40)])
    flags = ["--prompts", "wild.jsonl", "--num-samples", "1", "--max-new-tokens", "1", "--splits", "sft=0.5", "rl=0.5"]
    sides = []
    for name in ("sft", "rl"):
        make(SAMPLE, f"{name}.jsonl", *flags, "--split", name)
        sides.append(Counter(row["conversation"] for row in read_lines(Path(f"{name}.jsonl"))))
    assert not sides[0].keys() & sides[1].keys()
    assert sides[0] + sides[1] == dict.fromkeys(range(10), 4)
    assert all(sides)


def test_a_judge_scores(make, whole):
    """It gets the answers without thoughts; a response without an answer gets the penalty."""
    judge = new_reward_model(PolicyConfig(device="cpu", dtype="float32", attn_implementation="sdpa"))
    judge.model.save_pretrained("judge")
    judge.tokenizer.save_pretrained("judge")
    rows = read_lines(Path("whole.jsonl"))
    rows[0]["responses"][0]["text"] = "<think>1+2"
    rows[0]["responses"][1]["text"] = "<think>1+2=3</think><answer>3</answer>"
    rows[0]["responses"][2]["text"] = "<answer>3</answer>"
    write_rows("responses.jsonl", rows)
    flags = ["--responses", "responses.jsonl", "--reward-model", "judge", "--answer-begins", "</think>"]
    make(SCORE, "scored.jsonl", *flags, "--no-answer-penalty", "7")
    scored = read_lines(Path("scored.jsonl"))
    without = [row | {"responses": [drop(response) for response in row["responses"]]} for row in scored]
    assert without == rows
    first = [response["score"] for response in scored[0]["responses"]]
    assert first[0] == -7
    assert first[1] == pytest.approx(first[2], abs=1e-6)
    assert len({round(response["score"], 4) for row in scored for response in row["responses"]}) > 10


def drop(response: dict) -> dict:
    return {name: value for name, value in response.items() if name != "score"}


# Conversations to imitate ---------------------------------------------------------------------------------------------


def test_only_right_answers_are_kept_with_or_without_thoughts(make, made):
    questions = {row["question"]: row["answer"] for row in read_lines(ROOT / "data" / "math_tasks.jsonl")[:8]}
    make(CHATS, "dropped.jsonl", *SMALL, "--keep-right", "--thoughts", "drop")
    for thoughts, path in (("keep", made[CHATS]), ("drop", Path("dropped.jsonl"))):
        rows = read_lines(path)
        assert 4 <= len(rows) <= 8
        for row in rows:
            user, assistant = row["messages"]
            assert (user["role"], assistant["role"]) == ("user", "assistant")
            assert assistant["content"].endswith(f"<answer>{questions[user['content']]}</answer>")
        assert any("<think>" in row["messages"][1]["content"] for row in rows) == (thoughts == "keep")


def test_answers_that_were_cut_off_are_not_kept(make):
    assert make(CHATS, "chats.jsonl", "--limit", "2", "--max-new-tokens", "2") == b""


# Servers --------------------------------------------------------------------------------------------------------------


def test_a_server_responds(make, stand_in):
    """With the same seeds whoever asks, and in one shard or several."""
    served = [*SMALL, "--system-prompt", "", "--url"]
    server = stand_in()
    whole = make(SAMPLE, "whole.jsonl", *served, server.url)
    assert [len(row["responses"]) for row in read_lines(Path("whole.jsonl"))] == [4] * 8
    assert len({request["seed"] for request in server.requests}) == 8 * 4
    assert {(request["max_tokens"], request["model"]) for request in server.requests} == {(64, "policy")}
    parts = [make(SAMPLE, f"part{n}.jsonl", *served, stand_in().url, "--shard", f"{n}/2") for n in (1, 2)]
    assert b"".join(parts) == whole


@pytest.mark.slow
@pytest.mark.parametrize("program", [SAMPLE, CHATS])
def test_a_server_that_dies_costs_one_batch(make, stand_in, program):
    served = [*SMALL, "--system-prompt", "", "--url"]
    whole = make(program, "whole.jsonl", *served, stand_in().url)
    server = stand_in()

    def die(_) -> None:
        if server.calls[CHAT] > 2 * 8:  # in the third of four batches
            threading.Thread(target=server.stop).start()
            raise ConnectionAbortedError  # no answer: otherwise the batch could be complete before the server stops

    server.damage = die
    with pytest.raises(UserError, match=r"has not answered|refused") as error:
        make(program, "out.jsonl", *served, server.url)
    assert "out.jsonl keeps the finished rows, and the same command continues it" in str(error.value)
    assert "\n" not in str(error.value)
    kept = Path("out.jsonl").read_bytes()
    assert whole.startswith(kept)
    assert json.loads(kept.splitlines()[-1])["index"] in (2, 3)
    other = stand_in()
    assert make(program, "out.jsonl", *served, other.url) == whole
    assert other.calls[CHAT] == 2 * 8


def test_responses_end_at_stop_texts(make, stand_in):
    """Of a policy and of a server, whose texts keep the stop text."""
    server = stand_in()
    for where in ([], ["--system-prompt", "", "--url", server.url]):
        flags = ["--limit", "4", "--num-samples", "4", "--max-new-tokens", "64", "--stop", "1", "--stop=7", *where]
        rows = map(json.loads, make(SAMPLE, f"{len(where)}.jsonl", *flags).splitlines())
        texts = [response["text"] for row in rows for response in row["responses"]]
        assert not any(set(text[:-1]) & set("17") for text in texts)
        assert sum(text.endswith(("1", "7")) for text in texts) > 5
    assert server.requests[-1]["stop"] == ["1", "7"]


def test_a_busy_server_is_asked_again(make, stand_in, monkeypatch):
    monkeypatch.setattr(chat_server, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(chat_server, "BUSY", (500,))
    served = ["--limit", "2", "--num-samples", "2", "--system-prompt", "", "--url"]
    whole = make(SAMPLE, "whole.jsonl", *served, stand_in().url)
    server = stand_in()
    server.fault("status_500", 1, CHAT)
    assert make(SAMPLE, "out.jsonl", *served, server.url) == whole
    server.fault("status_500", None, CHAT)
    with pytest.raises(UserError, match="status 500"):
        make(SAMPLE, "new.jsonl", *served, server.url)


def test_thoughts_that_a_server_has_taken_out_are_put_back(make, stand_in):
    server = stand_in()
    message = {"content": "It is 58.", "reasoning": "20+38=58"}
    server.chat = lambda _: {"choices": [{"message": message, "finish_reason": "stop"}]}
    flags = ["--limit", "1", "--url", server.url, "--thoughts"]
    answers = [json.loads(make(CHATS, f"{kind}.jsonl", *flags, kind))["messages"][-1] for kind in ("keep", "drop")]
    assert [answer["content"] for answer in answers] == ["<think>20+38=58</think>It is 58.", "It is 58."]
    server.chat = lambda _: {"choices": []}
    with pytest.raises(UserError, match=r"^the server at \S+ has answered with something other"):
        make(CHATS, "wrong.jsonl", *flags, "keep")
