"""What the metrics are called: one table for the progress line, curve.png, the page, and figures that compare runs.

docs/metrics.md explains the metrics. Nothing is imported here, so that the viewer can read the table.
"""

import math
from typing import NamedTuple


class Metric(NamedTuple):
    """A key of metrics.jsonl."""

    label: str = ""  # among the curves of its panel; "": the last part of the key
    title: str = ""  # in a figure of its own; "": its panel's if that has no other key, else the key
    is_share: bool = False  # in a panel of other values
    short: str = ""  # in the progress line
    form: str = ""  # of its value in the progress line; "": it is not there


class Panel(NamedTuple):
    """Curves that are drawn together. A key belongs to the first panel that takes it."""

    title: str
    keys: str  # regular expression
    about: str = ""  # below the title in the page; "": the unit
    unit: str = ""  # behind the title in a figure
    axis: tuple[float | None, float | None] = (None, None)  # its ends, where the data stay inside
    place: int = 0  # in curve.png; 0: only in the page
    is_more: bool = False  # shown on request
    is_of_questions: bool = False  # takes only names of kinds of questions: a task describes questions and answers
    most: float = math.inf  # leaves out keys with larger values
    again: str = ""  # a key that an earlier panel has taken, too
    scale: float = 1.0  # of the values


METRICS = {  # in the order of the progress line
    "reward/total": Metric(short="reward", form="{:.2f}"),
    "reward/correct": Metric("training questions, sampled", short="correct", form="{:.2f}",
                             title="sampled accuracy on training questions, each asked once"),
    "reward/agreement": Metric(title="agreement with the majority"),
    "group/majority_right": Metric("majority of each group", title="accuracy of the majority"),
    "reward/likelihood": Metric("probability of the reference answer", short="likelihood", form="{:.2f}",
                                title="probability of the reference answer", is_share=True),
    "completion/length": Metric(title="completion length", short="length", form="{:.1f}"),
    "preference/accuracy": Metric("training pairs", short="accuracy", form="{:.2f}"),
    "loss/kl": Metric(short="KL", form="{:.3f}"),
    "teacher/agreement": Metric(title="pairs in which the teacher prefers the right answer",
                                short="teacher agrees", form="{:.2f}"),
    "teacher/kl": Metric(short="KL to the teacher", form="{:.3f}"),
    "loss/total": Metric(short="loss", form="{:.4f}"),
    "time/tokens_per_second": Metric(form="{:,.0f} tokens/s"),
    "eval/greedy/accuracy": Metric("held-out questions, greedy", "greedy accuracy on held-out questions"),
    "eval/sampled/accuracy": Metric("held-out questions, sampled (mean@8)"),
    "eval/greedy/length": Metric("held-out questions, greedy"),
    "completion/length_right": Metric("right answers", "length of right completions"),
    "completion/length_wrong": Metric("wrong answers", "length of wrong completions"),
    "reward/calls": Metric(title="calls per answer"),
    "reward/retrieved": Metric(title="share of the supporting documents found", is_share=True),
    "eval/accuracy": Metric("held-out pairs"),
    "eval/accuracy_same_style": Metric("held-out pairs of equal style"),
    "eval/accuracy_same_length": Metric("held-out pairs of equal length"),
    "preference/margin": Metric("training pairs"),
    "eval/margin": Metric("held-out pairs", "margin of the scores (held-out pairs)"),
    "eval/log_prob_chosen": Metric("chosen", "log-prob of the chosen answer"),
    "eval/log_prob_rejected": Metric("rejected", "log-prob of the rejected answer"),
    "time/step": Metric("whole step"),
    "time/weights": Metric("weights into the engine"),
    "time/generation": Metric("answers of the engine"),
}  # fmt: skip
SHARE, POSITIVE = (0, 1), (0, None)
MORE = {"axis": POSITIVE, "is_more": True}
OF_QUESTIONS = {"axis": SHARE, "is_of_questions": True}
PANELS = (
    Panel("accuracy", r"reward/correct|group/majority_right|eval/\w+/accuracy",
          "Share of right answers.", axis=SHARE, place=4),
    Panel("accuracy: share of pairs whose chosen answer is preferred", "(preference|eval)/accuracy.*",
          "Its score is higher.", axis=SHARE, place=1),
    Panel("margin", "(preference|eval)/margin",
          "Score of the chosen answer minus score of the rejected one, mean.", axis=POSITIVE),
    Panel("log-prob of an answer", "eval/log_prob_.*",
          "Of held-out pairs, sum over its tokens, in nats.", "held-out pairs, nats", place=3),
    Panel("accuracy by kind of question", "eval/greedy/accuracy_.*",
          "Greedy answers to held-out questions.", "held out, greedy", place=10, **OF_QUESTIONS),
    Panel("accuracy by kind of answer", "eval/greedy/accuracy_.*",
          "Share of right answers among the greedy answers of each kind.", axis=SHARE),
    Panel("reward", "reward/(?!.*calls).*",
          "The total and its components, mean over completions.", place=4, again="reward/correct"),
    Panel("calls", "reward/.*calls", "Number, or share of a completion's calls.", axis=POSITIVE),
    Panel("completion length", "completion/length(_right|_wrong)?|eval/greedy/length",
          "Tokens that the policy wrote.", "tokens", axis=POSITIVE, place=5),
    Panel("trajectory length", "completion/trajectory_length",
          "Tokens of the prompt, the policy, and the tools or the world.", "tokens", axis=POSITIVE, is_more=True),
    Panel("kinds of questions asked", "completion/.*",
          "Share of a step's questions; no result of training.", is_more=True, **OF_QUESTIONS),
    Panel("share of completions", "completion/(?!truncated|stopped|turns|.*_(calls|searches)$).*",
          "What they do.", axis=SHARE, place=6, most=1),
    Panel("mean number per completion", "completion/(?!truncated|stopped).*",
          "Of turns, and of whatever else the task counts.", axis=POSITIVE, place=7),
    Panel("share of groups whose rewards are all equal", "group/zero_reward_variance",
          "They have no policy gradient where advantages compare a group.", axis=SHARE, place=11),
    Panel("truncation", "completion/truncated", "Share of completions cut off at the limit of tokens.", axis=SHARE),
    Panel("loss", "loss/total|eval/loss",
          "Mean over the updates of a step.", "nats per pair", place=2),  # curve.png of pairs; SFT has its own
    Panel("KL to the policy at the start", "loss/kl", unit="nats per token", axis=POSITIVE, place=8),
    Panel("KL to the teacher", "teacher/kl", unit="nats per token", axis=POSITIVE, place=9),
    Panel("policy: entropy", "policy/entropy", "How undecided it is about a token, in nats.", axis=POSITIVE),
    Panel("policy: clipped", "policy/clipped",
          "Share of tokens that the clip leaves without a policy gradient.", axis=POSITIVE),
    Panel("norm of the gradient before clipping", "loss/grad_norm",
          "A longer gradient is scaled down to --max-grad-norm.", axis=POSITIVE),
    Panel("importance weight, mean over tokens", "policy/importance_weight",
          "p(token) of the trainer / p(token) of the sampler."),
    Panel("effective sample size of the importance weights", "policy/effective_sample_size",
          "As a share of the tokens: 1 if all weights are equal.", axis=SHARE),
    Panel("staleness", "policy/staleness", "Age of the weights that drew a token, in steps, mean.", axis=POSITIVE),
    Panel("policy: masked", "policy/masked", "Share of tokens that the correction leaves out.", axis=POSITIVE),
    Panel("importance weight at its cap", "policy/importance_capped",
          "Share of tokens at --importance-cap.", axis=SHARE),
    Panel("critic: explained variance", "critic/explained_variance",
          "Share of the returns' variance that the critic predicts."),
    Panel("seconds by phase", "time/(?!tokens|waiting).*", "Of a step and of its parts.", axis=POSITIVE),
    Panel("accuracy by kind of question, sampled", "eval/sampled/accuracy_.*",
          "Held-out questions.", is_more=True, **OF_QUESTIONS),
    Panel("accuracy by kind of answer, sampled", "eval/sampled/accuracy_.*",
          "Held-out questions.", axis=SHARE, is_more=True),
    Panel("probability ratio", "policy/(first_)?ratio.*",
          "p(token) in the update / p(token) when sampled.", is_more=True),
    Panel("gradients scaled down, skipped", "loss/(grad_clipped|skipped)",
          "Share of updates, and number of updates.", **MORE),
    Panel("|log p - log p of the sampler|, mean", "policy/sampling_log_prob_difference", unit="nats", **MORE),
    Panel("|log p - log p of the sampler|, largest", "policy/sampling_log_prob_difference_max", unit="nats", **MORE),
    Panel("tokens per second", "time/tokens_per_second", "Sampled tokens.", **MORE),
    Panel("waiting for other processes", "time/waiting", "Share of a step.", **MORE),
    Panel("memory", "memory/peak_bytes", "The most so far, in GB.", "GB", scale=1e-9, **MORE),
    Panel("learning rate", "lr", "Of the optimizer.", **MORE),
)  # fmt: skip
