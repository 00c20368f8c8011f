"""Every flag of a sibling does something: its own flags here, inherited ones the same as in experiment_base.

Each sibling can equal experiment_base bit for bit. Dr. GRPO needs `--critic-type grpo`, the three for many processes
run in one process, and the two with several turns run without tools. The one with an inference engine runs without
importance weights, with the policy itself as its engine. So a flag that does not reach the sibling makes the two
differ. test_flags.py shows the effect of each inherited flag. Without `--critic-type grpo`, Dr. GRPO omits two
divisions.
"""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_files import digest, json_of, metrics_of, rows_of

from common.errors import UserError
from common.sampling import sample
from common.trajectory import Trajectory
from tasks.arithmetic import EVAL_DATA

from harness.base.config import TINY_POLICY

# Every value differs from the default by enough to change the run; --max-grad-norm is near AdamW's epsilon, so that the
# length of the gradient matters. The data have few rows, which are read faster.
ALL_WEIGHTS = (
    f"--name x --seed 5 --device cpu --model files/tiny --attn-implementation eager --no-pack --data {EVAL_DATA} "
    f"--eval-data {EVAL_DATA} --eval-sets again={EVAL_DATA} --keep-best eval/greedy/length "
    "--reward-functions files/rewards.py --reward-weight format=0.5 --at-most num_terms=3 num_digits=2 "
    "--max-question-length 26 "
    "--system-prompt Briefly. --completion-prefix <think> --eval-prompts 3 --eval-every 1 --samples-every 2 "
    "--progress policy/clipped --checkpoint-every 1 --keep-checkpoints 1 --generation-batch-size 4 --steps 9 "
    "--epochs 1 --max-prompts 6 --prompts-per-step 3 --group-size 4 --max-new-tokens 10 "
    "--temperature 1.3 --top-p 0.9 --epochs-per-step 2 --minibatch-size 8 --micro-batch-size 3 --lr 1e-4 "
    "--lr-schedule cosine --lr-warmup-steps 1 --weight-decay 10 --clip-eps 0.01 --kl-weight 0.5 --max-grad-norm 1e-7"
)
AN_ADAPTER = (
    "--name x --device cpu --steps 1 --prompts-per-step 2 --group-size 3 --max-new-tokens 4 --eval-prompts 1 "
    "--epochs-per-step 2 --lr 1e-2 --task files/task.py --chat-template files/polite.jinja --dtype bfloat16 "
    f"--data {EVAL_DATA} --gradient-checkpointing --lora-rank 2 --lora-alpha 40 --lora-targets q_proj v_proj "
    "--save-merged --threads 1 --runs-dir elsewhere --tokens-per-micro-batch 60"
)
# Flags that act before any algorithm and need a package, a stopped run, or another test: test_flags.py,
# resume/test_resume.py and models/test_estimate.py cover them; test_reward_model_runs.py covers those of reward models.
ELSEWHERE = {
    "load_in",
    "wandb",
    "wandb_project",
    "wandb_group",
    "profile",
    "config",
    "resume",
    "estimate",
    "gpus",
    "gpu_memory",
    "eval_suite",
}
ELSEWHERE |= {"optimizer"}  # below
ELSEWHERE |= {"watch"}  # test_watch.py
ELSEWHERE |= {"reward_model", "reward_model_url", "answer_begins", "strict", "no_answer_penalty", "stop_when"}
EIGHT_BITS = "--optimizer adamw_8bit"
WITHOUT_TOOLS = "--no-tool --max-turns 1 --task arithmetic --model tiny"
AS_THE_PARENT = {  # each sibling's own flags that make it equal to experiment_base
    "experiment_drgrpo": "--critic-type grpo",
    "experiment_accelerate": "",
    "experiment_accelerate_ddp": "",
    "scale/engine": "--importance-cap 0 --engine-url http://127.0.0.1:1",
    "scale/mesh": "",
    "experiment_multiturn_tool_calling": WITHOUT_TOOLS,
    "experiment_multiturn_qa": WITHOUT_TOOLS,
}
OTHER_DEFAULTS = {
    "experiment_multiturn_tool_calling": {"task", "model"},
    "experiment_multiturn_qa": {"task", "model", "prompts_per_step", "steps"},
}
# smoke/test_multiturn.py and smoke/test_multiturn_qa.py cover the flags that do nothing without tools
SEARCH_FLAGS = {"top_k", "corpus", "index", "encoder", "search_url", "search_seconds", "chunk_words", "chunk_overlap"}
ELSEWHERE_OF = {
    "scale/engine": {"engine_start", "engine_dtype", "push_every", "steps_ahead"},  # engine/test_run.py
    "scale/mesh": {"tensor_parallel", "engine"},  # gloo/test_mesh.py
    "experiment_multiturn_tool_calling": {"tools", "tool_seconds"},
    "experiment_multiturn_qa": {"tools", "tool_seconds"} | SEARCH_FLAGS,
}
A_TASK = """
REWARD_WEIGHTS = {"even": 1.0}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"] + " Please."}]
def reward(row, text):
    return {"even": len(text) % 2}
"""


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


@pytest.fixture
def run(load_script, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Run an experiment with some flags; returns the directory of the run. `files/` is a directory of files."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tiny").symlink_to(TINY_POLICY)
    (tmp_path / "files" / "task.py").write_text(A_TASK)
    reward = "def short(completions, **columns): return [1 / (1 + len(text[0]['content'])) for text in completions]"
    (tmp_path / "files" / "rewards.py").write_text(reward)
    template = (TINY_POLICY / "chat_template.jinja").read_text(encoding="utf-8")
    (tmp_path / "files" / "polite.jinja").write_text("{{- 'Please: ' }}" + template, encoding="utf-8")
    monkeypatch.setattr(load_script("scale/engine/train.py"), "start_engine", TheSampler)

    def run(place: str, experiment: str, flags: str) -> Path:
        folder = tmp_path / place.replace("/", "_")
        folder.mkdir()
        monkeypatch.chdir(folder)
        load_script(f"{experiment}/train.py").main(flags.replace("files/", "../files/").split())
        (directory,) = Path.cwd().glob(f"*/{Path(experiment).name}/*")
        return directory

    return run


def contents(directory: Path) -> dict[str, object]:
    """The files of a run, without values that vary between runs: time, memory, and the experiment's name."""
    summary = json_of(directory / "summary.json")
    files = {
        path.relative_to(directory).with_suffix("").as_posix(): digest(path)
        for path in directory.glob("**/*")
        if path.is_file() and path.suffix in (".safetensors", ".pt", ".bin")
    }
    return files | {
        "samples": rows_of(directory, "samples"),
        "metrics": metrics_of(directory),
        "evaluations": [summary["before"], summary["after"]],
    }


def like(value: object, expected: object) -> object:
    """A value without the parts that `expected` lacks, where calls could be counted."""
    if isinstance(expected, list):
        assert len(value) == len(expected)
        return [like(*pair) for pair in zip(value, expected, strict=True)]
    return {name: like(value[name], expected[name]) for name in expected} if isinstance(expected, dict) else value


def assert_close(value: object, expected: object) -> None:
    if isinstance(expected, list | dict):
        names = expected if isinstance(expected, dict) else range(len(expected))
        for name in names:
            assert_close(value[name], expected[name])
    elif float in (type(value), type(expected)):  # samples.jsonl writes 1.0 as 1
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-4)
    else:
        assert value == expected


def names_in(flags: str) -> set[str]:
    return {name.replace("-", "_") for name in re.findall(r"--(?:no-)?([a-z-]+)", flags)}


def fields_of(script) -> dict[str, object]:
    return {field.name: field.default for field in dataclasses.fields(script.Config)}


@pytest.mark.parametrize("sibling", AS_THE_PARENT)
def test_every_flag_has_an_entry(load_script, sibling):
    """The inherited ones equal experiment_base's, with the same defaults."""
    own, parents = (fields_of(load_script(f"{name}/train.py")) for name in (sibling, "experiment_base"))
    flags = names_in(AS_THE_PARENT[sibling]) | ELSEWHERE_OF.get(sibling, set())
    assert own.keys() == names_in(f"{ALL_WEIGHTS} {AN_ADAPTER}") | ELSEWHERE | flags
    changed = OTHER_DEFAULTS.get(sibling, set())
    assert {name for name in parents if own[name] != parents[name]} == changed
    assert own.keys() - parents.keys() == flags - changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "siblings"),
    [(ALL_WEIGHTS, AS_THE_PARENT), (AN_ADAPTER, ("experiment_accelerate_ddp", "experiment_multiturn_qa"))],
    ids=["all weights", "an adapter"],
)
def test_inherited_flags_do_what_they_do_in_the_parent(run, flags, siblings):
    """Metrics, samples, weights and the optimizer's state are equal, bit for bit; with an engine up to rounding."""
    base = contents(run("base", "experiment_base", flags))
    for sibling in siblings:
        same = contents(run(sibling, sibling, f"{AS_THE_PARENT[sibling]} {flags}"))
        in_parts = "checkpoints/" if sibling == "scale/mesh" else None  # written by torch.distributed.checkpoint
        expected = {name: content for name, content in base.items() if not (in_parts and name.startswith(in_parts))}
        assert same.keys() == expected.keys()
        for name, content in expected.items():
            found = like(same[name], content)
            if sibling != "scale/engine":
                assert found == content, (sibling, name)
            elif not isinstance(content, str):  # its old log-probs are recomputed, not the sampler's: rounding differs
                assert_close(found, content)


@pytest.mark.slow
def test_moments_in_8_bits(run, load_script):
    """Nearly the same update, from a checkpoint that is smaller and can be resumed."""
    pytest.importorskip("bitsandbytes")
    flags = "--name x --device cpu --steps 4 --prompts-per-step 4 --max-new-tokens 24 --eval-prompts 2 --lr 1e-4"
    flags += " --checkpoint-every 2"
    old, new = run("old", "experiment_base", flags), run("new", "experiment_base", f"{flags} {EIGHT_BITS}")
    last = [metrics_of(directory)[4] for directory in (new, old)]
    assert last[0]["loss/grad_norm"] == pytest.approx(last[1]["loss/grad_norm"], rel=0.2)
    assert last[0] != last[1]
    sizes = [sum(path.stat().st_size for path in at.glob("checkpoints/step_4/optimizer.*")) for at in (new, old)]
    assert 0 < sizes[0] < 0.3 * sizes[1]
    expected = contents(new)
    shutil.rmtree(new / "checkpoints" / "step_4")
    shutil.rmtree(new / "final")
    load_script("experiment_base/train.py").main(["--resume", str(new)])
    assert contents(new) == expected
    with pytest.raises(UserError, match=r"--optimizer adamw_8bit is not for an experiment that divides its work by it"):
        run("ddp", "experiment_accelerate_ddp", f"{flags} {EIGHT_BITS}")


# Dr. GRPO -------------------------------------------------------------------------------------------------------------

QUICK = (
    *("--steps", "2", "--prompts-per-step", "3", "--group-size", "4", "--max-new-tokens", "16", "--eval-prompts", "2"),
    *("--epochs-per-step", "2", "--minibatch-size", "4", "--lr", "1e-4", "--device", "cpu", "--name", "x"),
)
KINDS = ("grpo", "std", "length", "drgrpo")
FILES = ("final/model.safetensors", "samples.jsonl")


@pytest.fixture
def quick_run(load_script, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Run an experiment with some flags; returns the directory of the run."""
    monkeypatch.chdir(tmp_path)

    def quick_run(experiment: str, *flags: str) -> Path:
        place = flags[-1] if flags else "as_it_is"
        load_script(f"{experiment}/train.py").main([*QUICK, "--runs-dir", place, *flags])
        return tmp_path / place / Path(experiment).name / "x"

    return quick_run


def test_with_grpo_it_is_experiment_base_bit_for_bit(quick_run):
    base, other = quick_run("experiment_base"), quick_run("experiment_drgrpo")
    same = quick_run("experiment_drgrpo", "--critic-type", "grpo")
    assert metrics_of(same) == metrics_of(base) != metrics_of(other)
    assert [row["ids"] for row in rows_of(other, "samples")][:8] == [row["ids"] for row in rows_of(same, "samples")][:8]
    assert metrics_of(same)[1]["loss/grad_norm"] > 2 * metrics_of(other)[1]["loss/grad_norm"]
    for name in FILES:
        digests = [digest(directory / name) for directory in (base, same, other)]
        assert digests[0] == digests[1] != digests[2], name


def test_one_of_the_two_divisions_can_be_made_alone(quick_run):
    """Of the advantage by the standard deviation, and of the loss by the length."""
    one_update = ("--steps", "1", "--epochs-per-step", "1", "--minibatch-size", "12")
    runs = {kind: quick_run("experiment_drgrpo", *one_update, "--critic-type", kind) for kind in KINDS}
    advantages = {kind: [row["advantage"] for row in rows_of(run, "samples")] for kind, run in runs.items()}
    assert advantages["grpo"] == advantages["std"] != advantages["length"] == advantages["drgrpo"]
    norms = {kind: metrics_of(run)[1]["loss/grad_norm"] for kind, run in runs.items()}
    assert norms["grpo"] > norms["std"] > norms["drgrpo"]
    assert norms["grpo"] > norms["length"] > norms["drgrpo"]


def test_the_gradient_is_shorter_by_the_completion_budget(quick_run):
    """If no completion is cut off, doubling `--max-new-tokens` halves the first gradient and changes nothing else."""
    one_update = ("--steps", "1", "--epochs-per-step", "1", "--minibatch-size", "12")
    first = {}
    for budget in ("96", "192"):
        first[budget] = metrics_of(quick_run("experiment_drgrpo", *one_update, "--max-new-tokens", budget))[1]
    assert first["96"]["completion/truncated"] == first["192"]["completion/truncated"] == 0
    assert first["192"]["loss/grad_norm"] == pytest.approx(first["96"]["loss/grad_norm"] / 2, rel=1e-4)
    assert first["192"]["policy/entropy"] == first["96"]["policy/entropy"]
