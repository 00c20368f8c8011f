"""A reward model: learn from pairs of answers which answer people, or a rule, prefer (Bradley-Terry).

    start with the layers of a language model, under a new head that gives a conversation one number, its score
    repeat
        take some pairs: one prompt, a chosen answer and a rejected one
        score both answers; the loss is -log sigmoid(score of the chosen - score of the rejected), mean over the pairs
        take an optimizer step
    measure on held-out pairs how often the chosen answer has the higher score, also where both have the same style

    python rewards/reward_model/train.py                                            # the bundled pairs
    python rewards/reward_model/train.py --data HuggingFaceH4/ultrafeedback_binarized:default:train_prefs \\
        --model Qwen/Qwen2.5-0.5B-Instruct
    torchrun --nproc-per-node 2 rewards/reward_model/train.py                        # the same update
    python experiment_base/train.py --reward-model runs/reward_model/<name>/final \\
        --reward-weight correct=0 preference=1                                          # train a policy against it

Parent: none; rewards/dpo is a diff of this file.

Shapes: a pair is a group of two rows, the chosen answer and the rejected one: B = 2 * pairs rows (of several processes,
each has its part), b rows per micro-batch, T tokens.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass

import torch

from common.experience import Experience, collate
from common.loss import bradley_terry_loss
from common.parallel import clip_grad_norm_, gather_rows, own_part
from common.preferences import preference_metrics, rightness
from common.reward_model import RewardModel, score_rows
from fast.sharded_weights import gathered_weights

from harness.base.config import Count, CountOrZero, EvaluatedConfig, InputPath, NotNegative, Positive
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.models.reward_loading import new_reward_model
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.pairs import PAIRS, Pair, load_pairs, read_pairs

RESOLVED = {"tiny": {"lr": 2e-4, "micro_batch_size": 32}, "full": {"lr": 1e-5, "micro_batch_size": 2}}


@dataclass(frozen=True, kw_only=True)
class Config(EvaluatedConfig):
    data: InputPath = str(PAIRS)  # file or hub dataset (docs/data.md): {"prompt": ..., "chosen": ..., "rejected": ...}
    eval_data: InputPath | None = None  # held-out pairs; None: found as in other experiments
    max_pairs: Count | None = None  # train on the first pairs only; None: on all
    # a judge that sees no thoughts: only the text after this tag, e.g. "</think>", a JSON file of tags, or a directory
    answer_begins: str | None = None
    epochs: Count = 1  # passes over the pairs; with more, a reward model soon knows them by heart
    pairs_per_step: Count = 32  # pairs per optimizer step, of all processes together
    # pairs per pass: memory and time, never the update; None: 32 for the bundled policy, else 2
    micro_batch_size: Count | None = None
    max_length: Count = 1024  # tokens of prompt and answer; longer pairs are left out, and counted
    lr: Positive | None = None  # learning rate of AdamW; None: 2e-4 for the bundled policy, else 1e-5
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    eval_prompts: Count = 400  # held-out pairs per evaluation
    eval_every: CountOrZero = 10  # steps between evaluations on the held-out pairs; 0: only at the end


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=RESOLVED)
    rows = read_pairs(config)  # before a model is loaded
    with start_run(config) as run:
        reward_model = new_reward_model(config)
        pairs, eval_pairs = load_pairs(config, reward_model, rows)
        train(config, run, reward_model, pairs, eval_pairs)
        run.save_final(reward_model)
        examination = examine(config, reward_model, eval_pairs)
        run.write_summary(examination)
        for name, value in examination.items():
            say(f"{name:30} {value:.3f}")
        say(f"reward model: {run.directory / 'final'}")


def train(config: Config, run: Run, reward_model: RewardModel, pairs: list[Pair], eval_pairs: list[Pair]) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(reward_model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(reward_model, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(reward_model, optimizer)
    for step in run.steps(config.epochs * (len(pairs) // config.pairs_per_step)):
        # 1 read: the step's pairs, in another order every epoch
        pair_index = prompts_of_step(len(pairs), config.pairs_per_step, step, config.seed)
        rows = [row for index in pair_index for row in pairs[index].rows]
        batch = collate(rows, reward_model.pad_id, reward_model.device)
        run.lap("read")

        # 2 update: one optimizer step
        metrics = update(config, model, optimizer, batch)
        run.lap("update")

        # 3 log, evaluate, checkpoint
        metrics |= run.costs(num_tokens=int(batch.attention_mask.sum()))
        if config.eval_every and step % config.eval_every == 0:
            metrics |= examine(config, reward_model, eval_pairs)
        run.log(step, metrics)
        run.checkpoint(step, reward_model, optimizer)


def pair_margins(scores: torch.Tensor, micro: Experience) -> torch.Tensor:
    """The score of the chosen answer minus the score of the rejected one: (b,) rows in, (b/2,) pairs out."""
    signs = 1 - 2 * micro.completion_index  # (b,): 1 for the chosen answer, -1 for the rejected one
    return (signs * scores).view(-1, 2).sum(dim=1)  # the rows of a pair are adjacent


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Experience
) -> dict[str, float]:
    """One optimizer step: the mean over the pairs."""
    optimizer.zero_grad()
    margins = []
    for micro in batch.split(2 * config.micro_batch_size):
        scores = model(micro.sequences, micro.attention_mask)  # (b,)
        margin = pair_margins(scores, micro)  # (b/2,)
        loss = bradley_terry_loss(margin).sum() / (batch.num_rows / 2)  # the pairs of this step
        loss.backward()
        margins += margin.tolist()
    grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
    if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
        optimizer.step()
    margins = torch.tensor(gather_rows(margins))
    return {
        "loss/total": bradley_terry_loss(margins).mean().item(),
        "loss/grad_norm": grad_norm.item(),
        "loss/skipped": float(not grad_norm.isfinite()),
        "preference/accuracy": torch.tensor([rightness(margin) for margin in margins]).mean().item(),
        "preference/margin": margins.mean().item(),
    }


def examine(config: Config, reward_model: RewardModel, pairs: list[Pair]) -> dict[str, float]:
    """How the held-out pairs are judged, see `preference_metrics`."""
    own = [row.ids for pair in own_part(pairs) for row in pair.rows]
    with gathered_weights(reward_model):
        scores = gather_rows(score_rows(reward_model, own, 2 * config.micro_batch_size))
    scored = list(zip(scores[::2], scores[1::2], strict=True))
    lengths = [tuple(row.num_action_tokens for row in pair.rows) for pair in pairs]
    found = preference_metrics(scored, lengths, [pair.same_style for pair in pairs])
    return {f"eval/{name}": value for name, value in found.items()}


if __name__ == "__main__":
    run_main(main)
