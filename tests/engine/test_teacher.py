"""A teacher on a server: its log-probs are those of the same teacher here, and a wrong answer ends the run.

With VLLM_URL the first test asks a real server of data/policies/tiny_policy.
"""

import shutil

import pytest
import torch
from run_files import ROOT, metrics_of

from common.errors import EngineError, UserError
from common.experience import collate
from common.logprobs import token_log_probs
from common.sampling import sample

from harness.teachers.teacher_server import TeacherServer
from harness.teachers.teachers import TeacherConfig, load_teacher

SHORT = "--steps 2 --prompts-per-step 2 --group-size 2 --max-new-tokens 24 --eval-prompts 3 --device cpu --eval-every 0"


def rows_of(policy):
    prompts = [[1, 284, 201, 344, 223, 20, 21, 2, 201], [1, 284, 201, 344]]
    return collate(sample(policy, prompts, 3, max_new_tokens=20, key=(0,)), policy.pad_id)


def test_the_log_probs_of_a_server_are_the_models(engine_url, policy):
    experience = rows_of(policy)
    found = TeacherServer(engine_url, policy)(experience)
    torch.testing.assert_close(found, token_log_probs(policy, experience, 4), atol=1e-4, rtol=0)
    assert found.min() < -0.1


@pytest.fixture
def run(load_script, tmp_path):
    def call(*flags: str):
        load_script("imitation/distill/train.py").main(
            [*SHORT.split(), "--runs-dir", str(tmp_path), "--name", "x", *flags]
        )
        return tmp_path / "distill" / "x"

    return call


def drop_last(found: list) -> None:
    found.pop()


def rename(found: list) -> None:
    found[3] = {"7": next(iter(found[3].values()))}


def respell(found: list) -> None:
    next(iter(found[3].values()))["decoded_token"] = "other"


def spoil(found: list) -> None:
    next(iter(found[3].values()))["logprob"] = float("nan")


@pytest.mark.parametrize(("damage", "message"), [
    (drop_last, "log-probs for a row of"),
    (rename, "the log-prob of token 7 where token"),
    (respell, "that is 'other', and '.*' to the policy: it has another tokenizer"),
    (spoil, "a log-prob of nan for token"),
])  # fmt: skip
def test_a_wrong_answer_is_refused(stand_in, policy, damage, message):
    server = stand_in()
    teacher = TeacherServer(server.url, policy)
    server.damage = lambda choices: damage(choices[0]["prompt_logprobs"])
    with pytest.raises(EngineError, match=message):
        teacher(rows_of(policy))


@pytest.mark.slow
def test_a_server_that_dies_loses_no_step(stand_in, run, tmp_path):
    """The run resumes with another server; golden/ compares a resumed run with an uninterrupted one."""
    server, other = stand_in(), stand_in()

    def die(_: list[dict]) -> None:
        if len(server.requests) >= 6 and not server.is_dead:  # four rows a step: in the second one
            server.stop()

    server.damage = die
    with pytest.raises(UserError, match="has not answered") as raised:
        run("--teacher-url", server.url)
    directory = tmp_path / "distill" / "x"
    assert f"--resume {directory}" in str(raised.value)
    assert max(row["step"] for row in metrics_of(directory)) == 1
    run("--resume", str(directory), "--teacher-url", other.url)
    assert {row["step"] for row in metrics_of(directory)} == {0, 1, 2}


def test_a_server_with_another_template_is_refused(stand_in, policy, monkeypatch):
    server = stand_in()
    template = server.engine.tokenizer.chat_template.replace("<|im_start|>user", "<|im_start|>tool")
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="has another chat template than --model"):
        load_teacher(TeacherConfig(teacher_url=server.url), None, policy)


def test_a_program_that_is_no_teacher_is_refused(stand_in, policy):
    server = stand_in()
    server.fault("invalid_json", path="/tokenize")
    with pytest.raises(EngineError, match=r"the teacher at .* has answered POST /tokenize with something other than"):
        TeacherServer(server.url, policy)


# Teachers on this machine ---------------------------------------------------------------------------------------------


def edited(tmp_path, file: str, old: str, new: str) -> str:
    """A copy of the bundled policy in which one file is different."""
    folder = shutil.copytree(ROOT / "data" / "policies" / "tiny_policy", tmp_path / "other")
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(("file", "old", "new", "message"), [
    ("tokenizer.json", "<answer>", "<result>", "has another tokenizer than --model: token 1018 is '<result>' to the t"),
    ("chat_template.jinja", "<|im_start|>user", "<|im_start|>tool", "has another chat template than --model"),
    ("config.json", '"max_position_embeddings": 1024', '"max_position_embeddings": 40', "context of 40 tokens"),
])  # fmt: skip
def test_a_teacher_that_reads_otherwise_is_refused(run, tmp_path, file, old, new, message):
    with pytest.raises(UserError, match=message):
        run("--teacher", edited(tmp_path, file, old, new))
