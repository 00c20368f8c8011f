"""Self-distillation: both divergences, enumerated; the hints; the teacher's tokens, layout and weights."""

import math
from types import SimpleNamespace

import pytest
import torch

from common.chat import encode_prompt
from common.errors import UserError
from common.experience import collate
from common.logprobs import token_log_probs
from common.sampling import sample

SIZE = 7  # of the vocabulary
QUESTIONS = ("Add 1 and 2.", "Say 7.", "What is it?")
TASK = SimpleNamespace(
    file=SimpleNamespace(has=lambda function: True),
    train_rows=[SimpleNamespace(place=f"row {index}", text=text) for index, text in enumerate(QUESTIONS)],
    messages=lambda row, system_prompt: [{"role": "user", "content": row.text}],
    feedback=lambda row, text: "" if text.startswith("right") else f"Not {text}.",
)


def random_values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def train(load_script):
    return load_script("imitation/self_distill/train.py")


@pytest.fixture(scope="module")
def parts(train):
    import hinted_teacher  # train.py has imported it, from its own directory

    return hinted_teacher


@pytest.fixture
def make_teacher(train, parts, make_policy, tokenizer):
    def make(**settings):
        config = train.Config(group_size=2, micro_batch_size=4, **settings)
        return parts.HintedTeacher(config, TASK, make_policy(len(tokenizer), tokenizer=tokenizer))

    return make


# The divergences ------------------------------------------------------------------------------------------------------


def slow_gradient(divergence: str, p: list[float], q: list[float]) -> list[float]:
    """Of KL(p || q) or KL(q || p), by the logits of p: by the chain rule, one entry after the other."""
    if divergence == "forward":
        return [own - other for own, other in zip(p, q, strict=True)]
    kl = sum(own * math.log(own / other) for own, other in zip(p, q, strict=True))
    return [own * (math.log(own / other) - kl) for own, other in zip(p, q, strict=True)]


def enumerated_gradient(train, make_experience, divergence: str, student: torch.Tensor, teacher: torch.Tensor):
    """The gradient of train.py's loss by logits (n, V), for each token as often as the student draws it."""
    config = train.Config(divergence=divergence, weight_cap=math.inf)
    student = student.clone().requires_grad_()
    log_p, log_q = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    for token in range(SIZE):
        log_probs = log_p[None, :, token]  # (1, n)
        old = log_probs.detach()
        advantages = train.token_advantages(config, log_q[None, :, token] - old)
        micro = make_experience(torch.ones(old.shape, dtype=torch.long), advantages=advantages, old_log_probs=old,
                                log_probs_ref=log_q[None, :, token])  # fmt: skip
        terms, _ = train.policy_loss(config, log_probs, micro, 1)
        (terms * old.exp()).sum().backward(retain_graph=True)
    return student.grad


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_the_advantages_have_the_gradient_of_the_divergence(train, make_experience, divergence):
    student, teacher = random_values(3, SIZE, seed=0), random_values(3, SIZE, seed=1)
    found = enumerated_gradient(train, make_experience, divergence, student, teacher)
    rows = zip(student.softmax(dim=-1).tolist(), teacher.softmax(dim=-1).tolist(), strict=True)
    expected = torch.tensor([slow_gradient(divergence, *row) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert found.abs().max() > 0.1


@pytest.mark.parametrize(("divergence", "alpha"), [("reverse", 1.0), ("forward", 0.0)])
def test_the_gradient_equals_that_of_trl(train, make_experience, divergence, alpha):
    """Of its divergence over the vocabulary and, for the reverse one, of its loss from sampled tokens."""
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    student, teacher = random_values(1, 3, SIZE, seed=2).requires_grad_(), random_values(1, 3, SIZE, seed=3)
    trl.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha).sum().backward()
    found = enumerated_gradient(train, make_experience, divergence, student.detach()[0], teacher[0])
    torch.testing.assert_close(found, student.grad[0], atol=1e-10, rtol=0)
    if divergence == "reverse":
        student.grad = None
        for token in range(SIZE):
            ids = torch.full((1, 3), token)
            terms = trl.compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=alpha)
            (terms * student.log_softmax(dim=-1)[..., token].exp().detach()).sum().backward()
        torch.testing.assert_close(found, student.grad[0], atol=1e-10, rtol=0)


def test_the_two_agree_near_1_and_the_forward_one_is_capped(train):
    log_w = torch.tensor([-9.0, -1e-3, 0.0, 1e-3, 2.0, 9.0], dtype=torch.float64)
    reverse, forward = (train.token_advantages(train.Config(divergence=d), log_w) for d in ("reverse", "forward"))
    assert torch.equal(reverse, log_w)
    assert (forward - reverse)[1:4].abs().max() < 1e-6
    assert (forward[:5] >= reverse[:5]).all()
    assert forward[5] == train.Config().weight_cap - 1
    assert forward[0] > -1


# The hints ------------------------------------------------------------------------------------------------------------


def completions(*texts: str) -> list[SimpleNamespace]:
    rows = [
        SimpleNamespace(text=text, prompt_index=index // 2, completion_ids=[5] * 4) for index, text in enumerate(texts)
    ]
    for row in rows:
        row.description = {}
    return rows


@pytest.mark.parametrize(
    ("hint", "expected"),
    [  # demonstration and feedback of each completion; the last two are right, and the same text
        ("feedback", [(None, ""), (None, "Not b."), (None, "Not c."), (None, "Not d."), (None, ""), (None, "")]),
        ("demonstration", [(None, ""), ("right a", ""), (None, ""), (None, ""), (None, ""), (None, "")]),
        ("both", [(None, ""), ("right a", "Not b."), (None, "Not c."), (None, "Not d."), (None, ""), (None, "")]),
    ],
)
def test_each_completion_gets_its_own_hint(make_teacher, parts, tokenizer, hint, expected):
    teacher, rows = make_teacher(hint=hint), completions("right a", "b", "c", "d", "right e", "right e")
    prompts = teacher.hints(rows, torch.tensor([[1.0, 0.5], [0.0, 0.0], [1.0, 1.0]]))
    for row, prompt, given in zip(rows, prompts, expected, strict=True):
        question = parts.hinted_question(QUESTIONS[row.prompt_index], *given)
        asked = encode_prompt(tokenizer, [{"role": "user", "content": question}])
        assert prompt == (asked if any(given) else None)
        assert row.description == {"hinted": float(any(given)), "demonstrated": float(given[0] is not None)}


def test_a_hint_that_does_not_fit_is_left_out_and_told(make_teacher, capsys):
    teacher, rows = make_teacher(hint="feedback"), completions("a", "b")
    rows[0].completion_ids = [5] * 250  # the context has 256 tokens
    prompts = teacher.hints(rows, torch.zeros(1, 2))
    assert prompts[0] is None
    assert prompts[1] is not None
    assert rows[0].description["hinted"] == 0
    assert "context of 256" in capsys.readouterr().out


def test_a_task_without_feedback_or_a_group_of_one_is_refused(make_teacher, monkeypatch, capsys):
    monkeypatch.setattr(TASK.file, "has", lambda function: False)
    with pytest.raises(UserError, match="give --hint demonstration"):
        make_teacher(hint="feedback")
    make_teacher(hint="both")
    assert "hints are demonstrations only" in capsys.readouterr().out


# The teacher ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rollout(make_policy, tokenizer):
    policy = make_policy(len(tokenizer), tokenizer=tokenizer)
    prompts = [encode_prompt(tokenizer, TASK.messages(row, "")) for row in TASK.train_rows]
    experience = collate(sample(policy, prompts, 2, max_new_tokens=9, key=(0,)), policy.pad_id)
    experience.old_log_probs = token_log_probs(policy, experience, 4)
    return experience


def test_the_same_tokens_are_scored_under_longer_prompts(make_teacher, rollout, tokenizer):
    """Row by row, in the layout of the student's; some rows have no hint."""
    teacher = make_teacher(hint="feedback")
    policy = teacher._policy
    own = [rollout.sequences[row, : rollout.prompt_lengths[row]].tolist() for row in range(6)]
    assert torch.equal(teacher(rollout, own), rollout.old_log_probs)  # an empty hint
    texts = ["Add 1 and 2. It is 3.", None, "Say it.", "Say 7, which is what you were asked to say.", None, "What?"]
    prompts = [text and encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    found = teacher(rollout, prompts)
    for row, prompt in enumerate(prompts):
        start, end = int(rollout.prompt_lengths[row]), int(rollout.attention_mask[row].sum())
        completion, place = rollout.sequences[row, start:end], slice(start - 1, end - 1)
        if prompt is None:
            assert torch.equal(found[row], rollout.old_log_probs[row])
            continue
        logits = policy.model(torch.cat([torch.tensor(prompt), completion])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(dim=-1).gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(found[row, place], expected, atol=1e-5, rtol=0)
        assert (found - rollout.old_log_probs)[row, place].abs().max() > 0.01
    assert not found[rollout.action_mask == 0].any()


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_the_teacher_has_an_average_of_the_weights_and_the_policy_keeps_its_own(make_teacher, rollout, rate):
    teacher = make_teacher(hint="feedback", teacher_update_rate=rate)
    policy, average = teacher._policy, [weight.detach().clone() for weight in teacher._policy.parameters()]
    prompts = [rollout.sequences[row, : rollout.prompt_lengths[row]].tolist() for row in range(6)]
    for _ in range(3):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(0.9)
        newest = [weight.detach().clone() for weight in policy.parameters()]
        average = [(1 - rate) * mean + rate * weight for mean, weight in zip(average, newest, strict=True)]
        teacher.follow()
    student, found = token_log_probs(policy, rollout, 4), teacher(rollout, prompts)
    assert all(map(torch.equal, policy.parameters(), newest))
    assert len(teacher.state_dict()["teacher_weights"]) == (0 if rate == 1 else len(average))
    with torch.no_grad():
        for weight, mean in zip(policy.parameters(), average, strict=True):
            weight.copy_(mean)
    torch.testing.assert_close(found, token_log_probs(policy, rollout, 4), atol=1e-5, rtol=0)
    assert torch.equal(found, student) == (rate == 1)


def test_agreement_is_that_of_a_slow_loop(make_teacher):
    teacher = make_teacher(hint="both")
    log_w = torch.randint(-2, 3, (6, 4), generator=torch.Generator().manual_seed(1)).float()
    log_w[1] = 0  # without a hint
    teacher._config = SimpleNamespace(success_threshold=1.0)
    returns = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    wins = []
    for group in ((0, 1, 2), (3, 4, 5)):
        for right in group:
            for wrong in group:
                if returns.flatten()[right] == 1 and returns.flatten()[wrong] == 0 and 1 not in (right, wrong):
                    gap = log_w[right].sum() - log_w[wrong].sum()
                    wins.append(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0)
    expected = {"teacher/agreement": sum(wins) / len(wins), "teacher/weight_max": math.exp(2)}
    assert teacher.metrics(log_w, returns) == pytest.approx(expected)
    assert "teacher/agreement" not in teacher.metrics(log_w, torch.ones(2, 3))
