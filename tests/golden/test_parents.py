"""A sibling that is given its parent's algorithm is its parent, bit for bit: every inherited flag reaches it.

Dr. GRPO needs `--critic-type grpo`, the majority's reward other weights, the three for many processes run in one
process, and the two with several turns run without tools. The one with an inference engine runs without importance
weights, with the policy itself as its engine.
smoke/test_flags.py shows the effect of each flag of the parent.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_files import contents

from common.sampling import sample
from common.trajectory import Trajectory
from tasks.arithmetic import EVAL_DATA

from harness.base.config import TINY_POLICY

WITHOUT_TOOLS = "--no-tool --max-turns 1 --task arithmetic --model tiny"
AS_THE_PARENT = {  # the flags with which a sibling is experiment_base
    "experiment_drgrpo": "--critic-type grpo",
    "experiment_accelerate": "",
    "experiment_accelerate_ddp": "",
    "scale/engine": "--importance-cap 0 --engine-url http://127.0.0.1:1",
    "scale/mesh": "",
    "scale/asynchronous": "--lag 0",
    "rewards/majority": "--reward-weight correct=1 agreement=0",
    "experiment_multiturn_tool_calling": WITHOUT_TOOLS,
    "experiment_multiturn_qa": WITHOUT_TOOLS,
}
OTHER_DEFAULTS = {
    "experiment_multiturn_tool_calling": {"task", "model"},
    "experiment_multiturn_qa": {"task", "model", "prompts_per_step", "steps"},
}
# Every value differs from the default by enough to change the run; --max-grad-norm is near AdamW's epsilon, so that the
# length of the gradient matters. The data have few rows, which are read faster.
ALL_WEIGHTS = (
    f"--name x --seed 5 --device cpu --model files/tiny --attn-implementation eager --no-pack --data {EVAL_DATA} "
    f"--eval-data {EVAL_DATA} --eval-sets again={EVAL_DATA} --keep-best eval/greedy/length "
    "--reward-functions files/rewards.py --reward-weight format=0.5 --at-most num_terms=3 num_digits=2 "
    "--max-question-length 26 --system-prompt Briefly. --completion-prefix <think> --eval-prompts 3 --eval-every 1 "
    "--samples-every 2 --progress policy/clipped --checkpoint-every 1 --keep-checkpoints 1 --generation-batch-size 4 "
    "--steps 9 --epochs 1 --max-prompts 6 --prompts-per-step 3 --group-size 4 --max-new-tokens 10 "
    "--temperature 1.3 --top-p 0.9 --epochs-per-step 2 --minibatch-size 8 --micro-batch-size 3 --lr 1e-4 "
    "--lr-schedule cosine --lr-warmup-steps 1 --weight-decay 10 --clip-eps 0.01 --kl-weight 0.5 --max-grad-norm 1e-7"
)
AN_ADAPTER = (
    "--name x --device cpu --steps 1 --prompts-per-step 2 --group-size 3 --max-new-tokens 4 --eval-prompts 1 "
    "--epochs-per-step 2 --lr 1e-2 --task files/task.py --chat-template files/polite.jinja --dtype bfloat16 "
    f"--data {EVAL_DATA} --gradient-checkpointing --lora-rank 2 --lora-alpha 40 --lora-targets q_proj v_proj "
    "--save-merged --threads 1 --runs-dir elsewhere --tokens-per-micro-batch 60"
)
# Flags that act before any algorithm, or need a server, a package or a run that was stopped
ELSEWHERE = {"load_in", "wandb", "wandb_project", "wandb_group", "profile", "config", "resume", "estimate", "gpus"}
ELSEWHERE |= {
    "gpu_memory",
    "eval_suite",
    "optimizer",
    "watch",
    "verbose",
    "reward_model",
    "reward_model_url",
    "answer_begins",
}
ELSEWHERE |= {"strict", "no_answer_penalty", "stop_when", "judge", "judge_model", "judge_url", "stop"}
RUNS = [(ALL_WEIGHTS, sibling) for sibling in AS_THE_PARENT]
RUNS += [(AN_ADAPTER, sibling) for sibling in ("experiment_accelerate_ddp", "experiment_multiturn_qa")]
A_TASK = """
REWARD_WEIGHTS = {"even": 1.0}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"] + " Please."}]
def reward(row, text):
    return {"even": len(text) % 2}
"""
A_REWARD = "def short(completions, **_): return [1 / (1 + len(text[0]['content'])) for text in completions]"


class TheSampler:
    """The sampler of experiment_base, as an engine."""

    def __init__(self, config, *_):
        self.settings = {"generation_batch_size": config.generation_batch_size}

    def begin(self, *arguments, push: bool, **settings) -> SimpleNamespace:
        rows = sample(*arguments, **settings, **self.settings)
        return SimpleNamespace(result=lambda: rows)

    def sample(self, *arguments, **settings) -> list[Trajectory]:
        return sample(*arguments, **settings)

    def costs(self) -> dict[str, float]:
        return {}


@pytest.fixture(scope="module")
def run(load_script, tmp_path_factory) -> Callable[[str, str], Path]:
    """The directory of a run; `files/` is a directory of files."""
    place = tmp_path_factory.mktemp("runs")
    files = place / "files"
    files.mkdir()
    (files / "tiny").symlink_to(TINY_POLICY)
    (files / "task.py").write_text(A_TASK)
    (files / "rewards.py").write_text(A_REWARD)
    template = (TINY_POLICY / "chat_template.jinja").read_text(encoding="utf-8")
    (files / "polite.jinja").write_text("{{- 'Please: ' }}" + template, encoding="utf-8")

    @functools.cache
    def run(experiment: str, flags: str) -> Path:
        folder = place / f"{Path(experiment).name}{len(flags)}"
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(load_script("scale/engine/train.py"), "start_engine", TheSampler)
            load_script(f"{experiment}/train.py").main(flags.replace("files/", "../files/").split())
        (directory,) = folder.glob(f"*/{Path(experiment).name}/*")
        return directory

    return run


def like(value: object, expected: object) -> object:
    """A value without the parts that `expected` lacks, where calls could be counted."""
    if isinstance(expected, list):
        return [like(*pair) for pair in zip(value, expected, strict=True)]
    return {name: like(value[name], expected[name]) for name in expected} if isinstance(expected, dict) else value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sibling"),
    [pytest.param(*run, id=f"{run[1]}{' adapter' * (run[0] == AN_ADAPTER)}") for run in RUNS],
)
def test_a_sibling_with_the_parents_algorithm_is_its_parent(run, flags, sibling):
    """Metrics, samples, weights and the optimizer's state."""
    base = contents(run("experiment_base", flags))
    own = AS_THE_PARENT[sibling]  # `--reward-weight` is given once
    is_weight = own.startswith("--reward-weight") and "--reward-weight" in flags
    same = contents(run(sibling, flags.replace("--reward-weight", own) if is_weight else f"{own} {flags}"))
    for run_of in (base, same):
        run_of["summary"] = {name: run_of["summary"][name] for name in ("before", "after")}
    parts = "checkpoints/" if sibling == "scale/mesh" else "no"  # written by torch.distributed.checkpoint
    ends = ("kept.pt",)  # of scale/asynchronous: no weights, without a lag
    files = (".safetensors", ".pt", ".bin", "samples", "metrics", "summary")
    names, others = (
        {n for n in of if n.endswith(files) and not n.startswith(parts) and not n.endswith(ends)} for of in (base, same)
    )
    assert names == others
    for name in names:
        found, expected = like(same[name], base[name]), base[name]
        if sibling != "scale/engine":
            assert found == expected, name
        elif name == "metrics":  # its old log-probs are recomputed, not the sampler's: rounding differs
            assert found == [pytest.approx(row, rel=1e-4, abs=1e-4) for row in expected]


@pytest.mark.parametrize("sibling", AS_THE_PARENT)
def test_every_flag_is_in_these_runs_or_tested_elsewhere(load_script, sibling):
    """The inherited ones equal experiment_base's, with the same defaults."""
    own, parents = (
        {field.name: field.default for field in dataclasses.fields(load_script(f"{name}/train.py").Config)}
        for name in (sibling, "experiment_base")
    )
    used = re.findall(r"--(?:no-)?([a-z-]+)", f"{ALL_WEIGHTS} {AN_ADAPTER}")
    assert parents.keys() == {name.replace("-", "_") for name in used} | ELSEWHERE
    changed = OTHER_DEFAULTS.get(sibling, set())
    assert {name for name in parents if own[name] != parents[name]} == changed
