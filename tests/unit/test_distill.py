"""Distillation: the estimate from one token against the divergence, enumerated; its traps; the teacher's tokens."""

import pytest
import torch
from oracle import slow_row

from common.errors import UserError
from common.experience import collate
from common.sampling import sample

from harness.teachers.teachers import check_same_tokens

SIZE = 8  # of the vocabulary; an answer has two tokens


def random_values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def train(load_script):
    return load_script("imitation/distill/train.py")


@pytest.fixture(scope="module")
def runs(load_script):
    return load_script("benchmarks/distillation.py")


@pytest.fixture
def tables():
    """Logits of the student and the teacher: (1 + 8, 8) each, for the first token, and the second after each first."""
    return random_values(1 + SIZE, SIZE, seed=0).requires_grad_(), random_values(1 + SIZE, SIZE, seed=1)


FIRST, SECOND = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
HAS_ENDED = FIRST.flatten() == 0  # token 0 ends an answer: it has one token then
IS_ANSWER = ~HAS_ENDED | (SECOND.flatten() == 0)  # one row for an answer of one token
ANSWERS = torch.stack([FIRST.flatten(), SECOND.flatten()], dim=1)[IS_ANSWER]  # (57, 2)
MASK = torch.stack([torch.ones_like(HAS_ENDED), ~HAS_ENDED], dim=1)[IS_ANSWER].long()  # (57, 2)
STATES = torch.stack([torch.zeros(len(ANSWERS), dtype=torch.long), 1 + ANSWERS[:, 0]], dim=1)  # rows of a table


def scores_of(logits: torch.Tensor) -> torch.Tensor:
    """The log-probs (57, 2) of the tokens of all answers; 0 after the end."""
    return logits.log_softmax(dim=-1)[STATES, ANSWERS] * MASK


def kl_of(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The reverse KL divergence of the next token in each state: (9,)."""
    log_p, log_q = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def expected_gradient(train, make_experience, student, advantages) -> torch.Tensor:
    """The gradient of train.py's loss, averaged over all answers by their probability."""
    log_probs = scores_of(student)
    old = log_probs.detach()
    micro = make_experience(MASK, advantages=advantages, old_log_probs=old, log_probs_ref=old)
    terms, _ = train.policy_loss(train.Config(), log_probs, micro, 1)
    (terms * old.sum(dim=1, keepdim=True).exp()).sum().backward()
    gradient, student.grad = student.grad, None
    return gradient


def gradient_of_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The gradient of the divergence at both tokens, in states that the student reaches, which are held constant."""
    reached = student[0].detach().softmax(dim=-1) * (torch.arange(SIZE) > 0)
    (torch.cat([torch.ones(1), reached]) * kl_of(student, teacher)).sum().backward()
    gradient, student.grad = student.grad, None
    return gradient


def test_the_estimate_has_the_gradient_of_the_reverse_kl(train, make_experience, tables):
    student, teacher = tables
    advantages = scores_of(teacher) - scores_of(student).detach()
    found = expected_gradient(train, make_experience, student, advantages)
    torch.testing.assert_close(found, gradient_of_kl(student, teacher), atol=1e-9, rtol=0)
    assert found.abs().max() > 0.01


def test_terms_and_pushes_equal_a_slow_loop(train, make_experience):
    """DAPO's loss with one clip; tokens that are no actions have large ratios, and count for nothing."""
    mask, config = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]]), train.Config()
    old, advantages = random_values(3, 4, seed=4), random_values(3, 4, seed=5)
    log_probs = (old + random_values(3, 4, seed=6) / 2).requires_grad_()
    given = {"advantages": advantages, "old_log_probs": old, "log_probs_ref": old}
    terms, _ = train.policy_loss(config, log_probs, make_experience(mask, **given), 4)
    terms.sum().backward()
    settings = {"num_rows": 3, "num_tokens": 4, "kl_weight": 0.0, "budget": 1, "clip_eps": config.clip_eps}
    rows = zip(*(tensor.tolist() for tensor in (mask, log_probs, advantages, old)), strict=True)
    expected, pushes = zip(*(slow_row("dapo", *row, None, **settings) for row in rows), strict=True)
    torch.testing.assert_close(terms.detach(), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(log_probs.grad, -torch.tensor(pushes, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (log_probs.grad == 0)[mask == 1].any()  # the clip


def test_the_gradient_equals_trl_on_given_rows(train, make_experience):
    """TRL's divergence over the vocabulary with beta = 1, against the estimate averaged over each next token."""
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    rows, width = 3, 5
    student, teacher = (
        random_values(rows, width, SIZE, seed=2).requires_grad_(),
        random_values(rows, width, SIZE, seed=3),
    )
    labels = torch.zeros(rows, width, dtype=torch.long)
    trainer.generalized_jsd_loss(student, teacher, labels, beta=1.0).backward()
    expected, student.grad = student.grad, None

    log_p, log_q = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    for token in range(SIZE):
        old = log_p[..., token].detach()
        given = {"advantages": log_q[..., token] - old, "old_log_probs": old, "log_probs_ref": old}
        micro = make_experience(torch.ones(rows, width, dtype=torch.long), **given)
        terms, _ = train.policy_loss(train.Config(), log_p[..., token], micro, rows * width)
        (terms * old.exp()).sum().backward(retain_graph=True)
    torch.testing.assert_close(student.grad, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("max_logits", [10, 10**6])
def test_the_divergence_in_chunks_is_the_divergence(runs, make_policy, max_logits):
    student, teacher = make_policy(temperature=0.7), make_policy(seed=1, temperature=0.7)
    experience = collate(sample(student, [[5, 6, 7], [8, 9]], 3, max_new_tokens=6, key=(0,)), student.pad_id)
    found = runs.reverse_kl(student, teacher, experience.sequences, experience.action_mask, max_logits)
    logits = (policy.model(experience.sequences).logits[:, :-1] / 0.7 for policy in (student, teacher))
    expected = kl_of(*logits) * experience.action_mask
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weight = student.model.get_input_embeddings().weight
    gradients = (torch.autograd.grad(values.sum(), weight)[0] for values in (found, expected))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


# Teachers -------------------------------------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_by_the_first_difference():
    check_same_tokens("x", {"a": 0, "b": 1}, {"b": 1, "a": 0})
    with pytest.raises(UserError, match="token 1 is 'c' to the teacher, and 'b' to the policy"):
        check_same_tokens("x", {"a": 0, "c": 1}, {"a": 0, "b": 1, "d": 2})
    with pytest.raises(UserError, match="token 2 is None to the teacher, and 'd' to the policy"):
        check_same_tokens("x", {"a": 0, "b": 1}, {"a": 0, "b": 1, "d": 2})
