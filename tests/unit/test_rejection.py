"""imitation/rejection is REINFORCE: the same gradient; what a filter per question changes; steps that keep nothing."""

import itertools
import math

import pytest
import torch
from run_files import metrics_of, rows_of
from safetensors.torch import load_file
from torch import nn

from common.experience import Experience, collate
from common.trajectory import Trajectory

from harness.base.config import TINY_POLICY

SIZE, ACTIONS = 5, 4  # of the vocabulary; tokens of an answer, at most
# A question in each row. The third one is never answered right
RETURNS = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).float()


@pytest.fixture(scope="module")
def train(load_script):
    return load_script("imitation/rejection/train.py")


class Bigrams(nn.Module):
    """The logits of a token depend on the token before it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = nn.Parameter(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))

    def forward(self, sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = self.logits.log_softmax(dim=-1)[sequences[:, :-1]]  # (b, T-1, V)
        return log_p.gather(-1, sequences[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(dim=-1).detach()


@pytest.fixture
def rollout() -> Experience:
    """The completions of RETURNS, of different lengths."""
    generator, rows = torch.Generator().manual_seed(1), []
    for index in range(RETURNS.numel()):
        ids = torch.randint(SIZE, (3 + index % ACTIONS,), generator=generator).tolist()
        place = {"prompt_index": index // 4, "completion_index": index % 4}
        rows.append(Trajectory(ids, 2, [0, 0] + [1] * (len(ids) - 2), [0.0] * len(ids), **place))
    return collate(rows, pad_id=0)


def gradient_of(update, config, experience: Experience, *step: int) -> torch.Tensor:
    model = Bigrams()
    update(config, model, torch.optim.SGD(model.parameters(), lr=0.1), experience, *step)
    return model.logits.grad


def test_the_first_update_is_reinforce_without_a_baseline(train, load_script, rollout):
    """Times the number of sampled completions / the number of kept ones."""
    reinforce = load_script("policy_gradients/reinforce/train.py")
    rollout.advantages = RETURNS.view(-1, 1).double()
    expected = gradient_of(reinforce.update, reinforce.Config(baseline="none", micro_batch_size=5), rollout)
    rollout.advantages = train.choose(train.Config(), RETURNS).view(-1, 1).double()
    kept = rollout.select(rollout.advantages[:, 0].nonzero()[:, 0])
    found = gradient_of(train.update, train.Config(micro_batch_size=3), kept, 1)
    assert found.abs().max() > 0.1
    torch.testing.assert_close(found, expected * RETURNS.numel() / RETURNS.sum().double(), atol=1e-12, rtol=0)


def test_every_epoch_imitates_each_kept_row_once(train, rollout):
    """In batches of three, the last one smaller; a batch's terms add up to its mean."""
    rollout.advantages = RETURNS.view(-1, 1).double()
    kept, model = rollout.select(RETURNS.flatten().nonzero()[:, 0]), Bigrams()
    config = train.Config(epochs_per_step=2, sft_batch_size=3, micro_batch_size=2)
    statistics = train.update(config, model, torch.optim.SGD(model.parameters(), lr=0.0), kept, 1)
    places, terms = [[(x.epoch, x.minibatch) for x in row] for row in statistics.rows.values()], {}
    assert [[epoch for epoch, _ in place] for place in places] == [[0, 1]] * len(kept)
    for update in itertools.chain(*statistics.rows.values()):
        batch = terms.setdefault((update.epoch, update.minibatch), [])
        batch.append((update.measurements["terms"].sum(), update.measurements["log_probs"].sum()))
    assert sorted(len(batch) for batch in terms.values()) == [2, 2, 3, 3, 3, 3]
    for batch in terms.values():
        assert [float(term) for term, _ in batch] == pytest.approx([-float(total) / len(batch) for _, total in batch])


@pytest.mark.parametrize("most", [None, 1, 2])
def test_the_expected_gradient_of_a_filter_per_question(train, most):
    """One completion of a question: MaxRL's, nabla p sum_k (1 - p)^k; all: G nabla p. Every rollout is enumerated."""
    group, is_right = 3, torch.tensor([True, False, True, False])
    logits = torch.tensor([0.3, 1.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(dim=-1)
    p = log_p.exp()[is_right].sum()
    total, config = 0.0, train.Config(group_size=group, keep_per_question=most)
    for answers in itertools.product(range(4), repeat=group):
        drawn = torch.tensor(answers)
        kept = train.choose(config, is_right[drawn][None].float())[0]
        total = total + log_p[drawn].sum().exp().detach() * (log_p[drawn] * kept).sum()
    (found,) = torch.autograd.grad(total, logits, retain_graph=True)
    (of_p,) = torch.autograd.grad(p, logits)
    share = p.item()  # how many of G completions are kept on average, divided by p
    counts = [math.comb(group, k) * share**k * (1 - share) ** (group - k) for k in range(group + 1)]
    factor = sum(min(k, most or group) * chance for k, chance in enumerate(counts)) / share
    torch.testing.assert_close(found, factor * of_p, atol=1e-12, rtol=0)
    if most == 1:
        assert factor == pytest.approx(sum((1 - share) ** k for k in range(group)))


def test_the_best_of_a_question_are_kept_above_the_limit(train):
    returns = torch.tensor([[0.5, 2.0, 0.5, 1.0], [-1.0, -2.0, -1.5, -1.0], [1.0, 1.0, 1.0, 1.0]])
    kept = train.choose(train.Config(group_size=4, keep_per_question=3, keep_above=0.0), returns)
    assert kept.long().tolist() == [[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert train.choose(train.Config(group_size=4, keep_above=0.5), returns)[0].tolist() == [False, True, False, True]


def test_kept_rows_from_easy_questions_are_counted(train):
    config = train.Config(group_size=4)
    metrics = train.kept_metrics(config, RETURNS, train.choose(config, RETURNS))
    assert metrics == {"kept/share": 0.5, "kept/easy": 7 / 8}  # three and four of four
    config = train.Config(group_size=4, keep_per_question=1)
    metrics = train.kept_metrics(config, RETURNS, train.choose(config, RETURNS))
    assert metrics == {"kept/share": 3 / 16, "kept/easy": pytest.approx(2 / 3)}


def test_a_step_that_keeps_nothing_says_so_and_changes_nothing(train, tmp_path, monkeypatch, capsys):
    """The first of two steps earns nothing; the second one learns as usual."""
    earned = iter([0.0, 1.0])
    choose = train.choose
    monkeypatch.setattr(train, "choose", lambda config, returns: choose(config, returns * 0 + next(earned)))
    flags = "--steps 2 --prompts-per-step 2 --group-size 2 --max-new-tokens 8 --eval-prompts 1 --eval-every 0 --name x "
    train.main([*flags.split(), "--checkpoint-every", "1", "--weight-decay", "9", "--runs-dir", str(tmp_path)])
    directory = tmp_path / "rejection" / "x"
    first, second = (row for row in metrics_of(directory) if "kept/share" in row)
    assert (first["kept/share"], first["loss/total"], first["loss/grad_norm"], first["loss/skipped"]) == (0, 0, 0, 0)
    assert second["kept/share"] == 1
    assert second["loss/grad_norm"] > 1
    before, after = (load_file(directory / f"checkpoints/step_{step}/model.safetensors") for step in (1, 2))
    start = load_file(TINY_POLICY / "model.safetensors")
    assert all(torch.equal(weight, start[name].float()) for name, weight in before.items())
    assert not any(torch.equal(weight, after[name]) for name, weight in before.items())
    assert [row["updates"] for row in rows_of(directory, "samples") if row["step"] == 1] == [[]] * 4
    assert "".join(capsys.readouterr()).count("this step imitates nothing and changes no weight") == 1
