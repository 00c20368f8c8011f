"""Every flag of experiment_base and of imitation/sft does something: a run with it differs as the flag promises.

Flags whose effects do not hide each other share a run: the checks of one run are registered with the same flags.
"""

import dataclasses
import gzip
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from run_files import json_of, metrics_of, read_lines, rows_of, write_rows
from safetensors.torch import load_file, save_file

import common.sampling
from common.policy import Policy
from tasks.arithmetic import TRAIN_DATA

from harness.base.config import TINY_POLICY

BASE, SFT, LESSONS = "experiment_base/train.py", "imitation/sft/train.py", "imitation/tiny_policy/make_policy.py"
# Small, with a learning rate (and two epochs) that make every update visible in the next one.
COMMON = "--lr 1e-4 --checkpoint-every 0 --seed 5 --device cpu --name x"
START = {
    BASE: f"{COMMON} --steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 10 --eval-prompts 2 "
    "--epochs-per-step 2",
    SFT: f"{COMMON} --warmup-steps 2 --model tiny --data files/chats.jsonl --tokens-per-batch 200",
    LESSONS: f"{COMMON} --warmup-steps 2 --model tiny --num-copying 8 --num-reasoning 6 --num-answering 4 "
    "--tokens-per-batch 2000 --eval-prompts 1",
}
A_TASK = """
from tasks.arithmetic import TRAIN_DATA
EVAL_DATA = TRAIN_DATA
REWARD_WEIGHTS = {"even": 1.0}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"] + " Please."}]
def reward(row, text):
    return {"even": len(text) % 2}
"""
REWARDS = """
import math  # not a reward

def short(completions, **kwargs):
    return [_score(completion[0]["content"]) for completion in completions]

async def asked(prompts, completions, answer, **kwargs):
    return [len(prompt[-1]["content"]) + len(gold) for prompt, gold in zip(prompts, answer, strict=True)]

def first(completions):
    texts = [completion[0]["content"] for completion in completions]
    return [float(text not in texts[:index]) for index, text in enumerate(texts)]

def _score(text):
    return 1 / math.exp(len(text) / 10)
"""
GENTLE = "--lr 1e-5"  # for runs that should agree: a large rate would also amplify rounding


@dataclasses.dataclass
class Outcome:
    """The files that a run leaves behind, and observations from while it ran."""

    directory: Path | None = None
    output: str = ""  # what it printed
    progress: str = ""  # stderr: the progress bar
    policy: Policy | None = None  # at the end of the run
    texts: list[str] = dataclasses.field(default_factory=list)  # the conversations of all optimizer steps (SFT)
    batch_sizes: list[int] = dataclasses.field(default_factory=list)  # tokens of each, padding included
    training_rows: list[int] = dataclasses.field(default_factory=list)  # in every forward pass with gradient
    scoring_rows: list[int] = dataclasses.field(default_factory=list)  # in every one without
    sampling_rows: list[int] = dataclasses.field(default_factory=list)  # completions sampled at once
    mlp_passes: int = 0  # of one layer, in training
    num_threads: int = 0  # after the run set them

    @property
    def metrics(self) -> list[dict]:
        return rows_of(self.directory)

    @property
    def samples(self) -> list[dict]:
        return rows_of(self.directory, "samples")

    def values(self, name: str) -> list[float]:
        """A metric's value at every step that has it."""
        return [entry[name] for entry in self.metrics if name in entry]

    def first(self, name: str) -> float:
        return self.values(name)[0]

    def last(self, name: str) -> float:
        return self.values(name)[-1]

    def has_key(self, name: str) -> bool:
        return any(name in entry for entry in self.metrics)

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def read(self, name: str) -> dict:
        return json_of(self.directory / name)

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.directory.glob("checkpoints/*")}

    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "final" / "model.safetensors")

    def final_weights(self) -> torch.Tensor:
        return torch.cat([weight.float().flatten() for weight in self.final().values()])

    def distance(self) -> float:
        """How far training has moved the weights of the bundled policy."""
        start = load_file(TINY_POLICY / "model.safetensors")
        return math.sqrt(sum(float((self.final()[name] - start[name].float()).square().sum()) for name in start))

    def prompts(self) -> list[str]:
        return [self.policy.tokenizer.decode(entry["ids"][: entry["prompt_length"]]) for entry in self.samples]

    def asked(self, field: str) -> list[int]:
        """A field of the bundled file, for every question that was sampled."""
        rows = {row["question"]: row for row in read_lines(TRAIN_DATA)}
        return [rows[entry["question"]][field] for entry in self.samples]

    def updates(self, name: str) -> set[int]:
        return {update[name] for entry in self.samples for update in entry["updates"]}

    def rows_of_steps(self) -> list[int]:
        """The number of completions sampled in each step: its tokens divided by the mean length of a completion."""
        steps = [entry for entry in self.metrics if "time/step" in entry]
        speed, seconds, length = "time/tokens_per_second", "time/step", "completion/length"
        return [round(entry[speed] * entry[seconds] / entry[length]) for entry in steps]

    def lessons(self) -> Counter:
        """How many conversations copy, and how many answer with and without reasoning."""
        kinds = ("think" if "<think>" in text else "answer" if "<answer>" in text else "copy" for text in self.texts)
        return Counter(kinds)


def assert_agree(new: Outcome, old: Outcome) -> None:
    """The flag changed memory or time, and no other metric."""
    for entry, expected in zip(metrics_of(new.directory), metrics_of(old.directory), strict=True):
        assert entry == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert new.texts == old.texts


def watched(train: ModuleType, argv: list[str], directory: Path, patch: pytest.MonkeyPatch, capture) -> Outcome:
    """Run train.py in `directory`, and record its calls."""
    seen = Outcome()
    set_num_threads, forward, complete = torch.set_num_threads, Policy.forward, common.sampling._complete

    def kept(make: Callable) -> Callable:
        def make_and_keep(*arguments):
            seen.policy = make(*arguments)
            layer = next(module for name, module in seen.policy.named_modules() if name.endswith("layers.0.mlp"))
            layer.register_forward_pre_hook(count)
            return seen.policy

        return make_and_keep

    def count(*_) -> None:
        seen.mlp_passes += torch.is_grad_enabled()

    def forward_and_count(policy, sequences, *arguments, **options):
        (seen.training_rows if torch.is_grad_enabled() else seen.scoring_rows).append(len(sequences))
        return forward(policy, sequences, *arguments, **options)

    def complete_and_count(policy, rows, *arguments):
        seen.sampling_rows.append(len(rows))
        return complete(policy, rows, *arguments)

    def set_threads_and_continue_with_one(number):  # two threads on busy cores were ten times slower
        set_num_threads(number)
        seen.num_threads = torch.get_num_threads()
        set_num_threads(1)

    patch.setattr(torch, "set_num_threads", set_threads_and_continue_with_one)
    patch.setattr(train, "load_policy", kept(train.load_policy))
    patch.setattr(Policy, "forward", forward_and_count)
    patch.setattr(common.sampling, "_complete", complete_and_count)
    sft = getattr(train, "sft", train)  # the module whose update takes conversations
    if hasattr(sft, "learning_rate"):
        update = sft.update

        def update_and_keep(config, policy, optimizer, batch):
            seen.batch_sizes.append(batch.sequences.numel())
            for ids, mask in zip(batch.sequences, batch.attention_mask.bool(), strict=True):
                seen.texts.append(policy.tokenizer.decode(ids[mask]))
            return update(config, policy, optimizer, batch)

        patch.setattr(sft, "update", update_and_keep)
    patch.setenv("WANDB_MODE", "offline")
    patch.chdir(directory)
    try:
        train.main(argv)
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()  # its service would keep this run's settings
    seen.directory = next(directory.glob("*/*/*/config.json")).parent
    seen.output, seen.progress = capture.readouterr()
    return seen


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The files that flags name: data, a task, and a model that differs from the bundled one."""
    place = tmp_path_factory.mktemp("files")
    for name, word in (("mine", "plus"), ("held", "and")):
        write_rows(
            place / f"{name}.jsonl", [{"question": f"What is {n} {word} {n}?", "answer": str(2 * n)} for n in range(8)]
        )
    for name, verb in (("chats", "Say"), ("others", "Write")):
        asked = [{"role": "user", "content": f"{verb} {n} {'please ' * (n % 4)}"} for n in range(20)]
        said = [{"role": "assistant", "content": f"{n} " * (1 + n % 3)} for n in range(20)]
        write_rows(place / f"{name}.jsonl", [{"messages": chat} for chat in zip(asked, said, strict=True)])
    (place / "task.py").write_text(A_TASK)
    (place / "rewards.py").write_text(REWARDS)
    (place / "settings.yaml").write_text("# of a colleague\nlr: 1e-2\nkeep-checkpoints: 1\n")
    template = (TINY_POLICY / "chat_template.jinja").read_text(encoding="utf-8")
    (place / "polite.jinja").write_text("{{- 'Please: ' }}" + template, encoding="utf-8")
    shutil.copytree(TINY_POLICY, place / "model")
    weights = load_file(place / "model" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 0.5
    save_file(weights, place / "model" / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Outcome]:
    """The runs so far, by their flags."""
    return {}


@pytest.fixture
def run(known, load_script, files, tmp_path_factory, capsys) -> Callable[..., Outcome]:
    """Run train.py with these flags after the flags of START; `files/` is the directory of that fixture."""

    def with_flags(setup: str, flags: str = "") -> Outcome:
        if (setup, flags) not in known:
            argv = [word.replace("files/", f"{files}/") for word in f"{START[setup]} {flags}".split()]
            with pytest.MonkeyPatch.context() as patch:
                capsys.readouterr()
                run = watched(load_script(setup), argv, tmp_path_factory.mktemp("run"), patch, capsys)
            known[setup, flags] = run
        return known[setup, flags]

    return with_flags


@dataclasses.dataclass
class Change:
    """The expected change from some flags of a run."""

    setup: str
    given: str
    also: str  # for both runs
    needs: str | None  # a package, or "cuda"
    check: Callable[[Outcome, Outcome], None]  # takes the run with `given` and the one without

    @property
    def flags(self) -> set[str]:
        return {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", self.given)}


CHANGES: list[Change] = []


def changes(given: str, of: tuple[str, ...] = (BASE,), also: str = "", needs: str | None = None):
    """Register a check of runs with the flags `given` against ones without."""

    def enter(check: Callable[[Outcome, Outcome], None]) -> Callable[[Outcome, Outcome], None]:
        CHANGES.extend(Change(setup, given, also, needs, check) for setup in of)
        return check

    return enter


BOTH = (BASE, SFT)
# The shared runs. First: where a run is, and what does not touch its numbers but the weight decay
PLACES = "--config files/settings.yaml --weight-decay 10 --name y --threads 2 --runs-dir elsewhere "
PLACES += "--checkpoint-every 1 --profile 1"
SHOWN = "--steps 4 --lr 3e-3 --max-new-tokens 30 --stop-when loss/kl>0 --keep-best eval/greedy/length "
SHOWN += "--eval-data files/held.jsonl --eval-prompts 3 --eval-every 1 --samples-every 2 "
SHOWN += "--eval-sets held=files/held.jsonl mine=files/mine.jsonl --progress policy/clipped loss/grad_norm"
STOPS = "--stop 7 --stop=9"
OTHERS = "--seed 1 --max-grad-norm 1e-9 --eval-every 2 --stop-when eval/sampled/accuracy>=2"
SPLIT = "--no-pack --tokens-per-micro-batch 60 --generation-batch-size 4"
SIZES = "--at-most num_terms=2 num_digits=1 "
SIZES += "--steps 1 --prompts-per-step 3 --group-size 2 --max-new-tokens 6 --temperature 2"
OWN = (
    "--task files/task.py --chat-template files/polite.jinja --kl-weight 0 --stop-when eval/accuracy>=0 --eval-every 2"
)
PROMPTS = "--data files/mine.jsonl --system-prompt Politely --completion-prefix <think> --top-p 0.3 "
PROMPTS += "--epochs-per-step 3 --minibatch-size 4 --micro-batch-size 3"
LONG = "--epochs 3 --max-prompts 4 --max-question-length 12 --lr-schedule linear --lr-warmup-steps 1"
PENALTIES = "--clip-eps 0.001 --kl-weight 1"
REWARDED = "--reward-functions files/rewards.py --reward-weight asked=0 first=0 format=0.5 --temperature 0.3"


# Policy and arithmetic


@changes("--model files/model")
def model(new, old):
    assert new.first("policy/entropy") > 1.5 * old.first("policy/entropy")


@changes("--model files/model --chat-template files/polite.jinja", of=(SFT,))
def sft_model(new, old):
    assert abs(new.first("loss/total") - old.first("loss/total")) > 0.1
    assert all(text.startswith("Please: ") for text in new.texts)
    assert not any(text.startswith("Please: ") for text in old.texts)


@changes(OTHERS)
def seed(new, old):
    assert new.samples[0]["question"] != old.samples[0]["question"]
    assert new.first("eval/sampled/length") != old.first("eval/sampled/length")  # also with other random numbers
    assert new.first("eval/greedy/length") == old.first("eval/greedy/length")


@changes("--seed 1", of=(SFT,))
def sft_seed(new, old):
    assert set(new.texts) != set(old.texts)  # other rows are held out


@changes("--device cuda", needs="cuda", of=BOTH)
def device(new, old):
    assert [run.policy.device.type for run in (new, old)] == ["cuda", "cpu"]


@changes("--dtype bfloat16", of=BOTH)
def dtype(new, old):
    assert new.last("loss/total") != pytest.approx(old.last("loss/total"), rel=1e-5)
    assert {weight.dtype for weight in new.policy.parameters()} == {torch.float32}  # the trained ones


ALONE = f"{GENTLE} --micro-batch-size 1"  # a row shares no prompt


@changes("--attn-implementation eager --gradient-checkpointing", also=ALONE, of=BOTH)
def arithmetic(new, old):
    assert [run.policy.packing for run in (new, old)] == [None, "sdpa"]
    assert new.mlp_passes == 2 * old.mlp_passes > 0
    assert_agree(new, old)


@changes("--no-pack", also=GENTLE, of=(SFT,))
@changes(SPLIT, also=GENTLE)
def pack(new, old):
    assert [run.policy.packing for run in (new, old)] == [None, "sdpa"]
    assert_agree(new, old)


ADAPTER = "--lora-rank 2 --save-merged"


@changes(ADAPTER, of=BOTH)
def adapter(new, old):
    assert new.read("final/adapter_config.json")["r"] == 2
    assert not new.has("final/model.safetensors")
    assert new.has("final_merged/model.safetensors")
    trained = [sum(weight.numel() for weight in run.policy.parameters() if weight.requires_grad) for run in (new, old)]
    assert 0 < trained[0] < 0.05 * trained[1]


@changes("--lora-alpha 40", also=ADAPTER, of=BOTH)
def lora_alpha(new, old):
    assert [run.read("final/adapter_config.json")["lora_alpha"] for run in (new, old)] == [40, 4]
    assert new.last("loss/total") != pytest.approx(old.last("loss/total"), rel=1e-5)


@changes("--lora-targets q_proj v_proj", also="--lora-rank 2", of=BOTH)
def lora_targets(new, old):
    assert sorted(new.read("final/adapter_config.json")["target_modules"]) == ["q_proj", "v_proj"]
    assert len(old.read("final/adapter_config.json")["target_modules"]) == 7
    adapted = {name.split(".")[-3] for name in load_file(new.directory / "final" / "adapter_model.safetensors")}
    assert adapted == {"q_proj", "v_proj"}


@changes("--load-in 4bit", also="--lora-rank 2", needs="bitsandbytes", of=BOTH)
def load_in(new, old):
    assert not new.has("final_merged")
    assert any(type(module).__name__ == "Linear4bit" for module in new.policy.modules())
    assert new.last("loss/total") != pytest.approx(old.last("loss/total"), rel=1e-3)


@changes("--save-dtype bfloat16", also="--lessons tools", of=(LESSONS,))
def save_dtype(new, old):
    assert {weight.dtype for weight in new.final().values()} == {torch.bfloat16}
    assert {weight.dtype for weight in old.final().values()} == {torch.float32}
    assert_agree(new, old)  # rounded at the end only
    losses = [run.read("summary.json")["tools/loss_of_copied_unseen_names"] for run in (new, old)]
    assert losses[0] != losses[1]  # it examines what it saves


# Where a run is, and its files and output


@changes(PLACES, of=BOTH)
def kept(new, old):
    assert (new.directory.name, old.directory.name) == ("y", "x")
    assert (new.num_threads, old.num_threads) == (2, 1)
    assert [run.directory.parent.parent.name for run in (new, old)] == ["elsewhere", "runs"]
    assert (new.checkpoints(), old.checkpoints()) == ({f"step_{new.metrics[-1]['step']}"}, set())


@changes(PLACES, of=BOTH)
def config(new, old):
    """The command line wins."""
    assert [new.read("config.json")[name] for name in ("lr", "keep_checkpoints")] == [1e-4, 1]


@changes(PLACES, of=BOTH)
def weight_decay(new, old):
    kept = new.final_weights().norm() / old.final_weights().norm()
    rates = old.values("lr") or [1e-4] * 4  # of all updates
    assert kept.item() == pytest.approx(math.prod(1 - 10 * rate for rate in rates), abs=5e-4)


@changes("--wandb --wandb-project ours --wandb-group seeds", needs="wandb", of=BOTH)
def wandb(new, old):
    (log,) = new.directory.glob("wandb/offline-run-*/*.wandb")
    assert b"ours" in log.read_bytes()
    assert b"seeds" in log.read_bytes()
    assert new.has("samples.jsonl") == bool(list(log.parent.glob("files/media/table/samples_*.json")))
    assert not old.has("wandb")


@changes(PLACES, of=BOTH)
def profile(new, old):
    assert not old.has("trace.json.gz")
    assert "trace.json.gz, to be opened at https://ui.perfetto.dev" in new.output
    trace = json.loads(gzip.decompress((new.directory / "trace.json.gz").read_bytes()))
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    begin, end = next((event["ts"], event["ts"] + event["dur"]) for event in found if event["name"] == "step 2")
    phases = ["sample", "reward", "log_probs", "update"] * new.has("samples.jsonl") + ["log, evaluate, checkpoint"]
    inside = [event for event in found if event["name"] in phases]
    assert [event["name"] for event in sorted(inside, key=lambda event: event["ts"])] == phases
    assert all(begin <= event["ts"] <= event["ts"] + event["dur"] <= end + 1 for event in inside)
    products = {"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"}  # which of them depends on the processor
    assert any(event["name"] in products for event in trace["traceEvents"])


@changes(SHOWN)
def shown(new, old):
    assert [{entry["step"] for entry in run.samples} for run in (new, old)] == [{2}, {1, 2}]
    assert re.search(r"step 2/4 .*  clipped 0\.?\d*  grad_norm \d", new.progress)
    assert "clipped" not in old.progress
    assert [len(run.read("before.json")[1]) for run in (new, old)] == [3, 2]
    assert [len(run.values("eval/greedy/accuracy")) for run in (new, old)] == [4, 2]  # before, at two steps, after
    assert "0 and 0" in new.output  # the closing table shows the questions
    assert "0 and 0" not in old.output


@changes(SHOWN)
def eval_sets(new, old):
    assert new.values("eval/held/greedy/length") == new.values("eval/greedy/length")  # the same file
    assert len(new.values("eval/mine/greedy/length")) == 4
    assert new.values("eval/mine/sampled/length") != new.values("eval/sampled/length")
    assert new.read("config.json")["sources"]["eval_sets held"]["source"].endswith("held.jsonl")
    assert new.read("config.json")["eval_sets"][0].startswith("held=/")  # for a resumed run
    assert "held/greedy/accuracy" in new.output
    assert "held/greedy/accuracy" not in old.output


@changes(SHOWN)
def keep_best(new, old):
    steps = {entry["step"]: entry["eval/greedy/length"] for entry in new.metrics if "time/step" in entry}
    best = max(steps, key=steps.get)
    assert len(set(steps.values())) == 2
    expected = {"step": best, "metric": "eval/greedy/length", "value": steps[best]}
    assert (new.read("summary.json")["best"], old.has("best")) == (expected, False)
    assert f"best: step {best}, with eval/greedy/length" in new.output
    kept = load_file(new.directory / "best" / "model.safetensors")
    assert all(torch.equal(kept[name], weight) for name, weight in new.final().items()) == (best == 2)


@changes(SHOWN)
def stop_when(new, old):
    """The first step, from the reference itself, has no KL."""
    assert new.read("summary.json")["steps"] == 2
    assert re.search(r"step 2: loss/kl is \S+: training ends \(--stop-when loss/kl>0\)", new.output)


@changes(OWN)
def stop_when_unknown(new, old):
    assert "--stop-when eval/accuracy>=0: step 0 has no such metric" in new.output
    assert new.read("summary.json")["steps"] == 2


@changes(OTHERS)
def stop_when_only_at_the_ends(new, old):
    assert "--stop-when eval/sampled/accuracy>=2: step 2 has no such metric" in new.output


# Data and prompts


@changes(OWN)
def task(new, old):
    assert {*new.samples[0]["rewards"]} == {"even"}
    assert new.last("reward/total") == new.last("reward/even")
    assert "eval/greedy/accuracy" not in new.metrics[0]
    assert new.samples[0]["question"] == f"{old.samples[0]['question']} Please."
    assert all(prompt.startswith("Please: ") for prompt in new.prompts())
    assert (new.directory / "final/chat_template.jinja").read_text(encoding="utf-8").startswith("{{- 'Please: ' }}")


@changes(PROMPTS)
def prompts(new, old):
    assert all("plus" in entry["question"] for entry in new.samples)
    assert all("Politely" in prompt for prompt in new.prompts())
    for entry in new.samples:
        assert entry["text"].startswith("<think>")
        assert entry["ids"][entry["prompt_length"] - 1] == new.policy.tokenizer.convert_tokens_to_ids("<think>")
        assert not any(entry["action_mask"][: entry["prompt_length"]])  # given, not trained
    assert all(text.startswith("<think>") for text, *_ in new.read("before.json")[1])  # greedy, before training


@changes(SIZES)
def at_most(new, old):
    assert max(new.asked("num_terms")) == 2 < max(old.asked("num_terms"))
    assert max(new.asked("num_digits")) == 1 < max(old.asked("num_digits"))


@changes(LONG)
def max_question_length(new, old):
    longest = [max(len(entry["question"]) for entry in run.samples) for run in (new, old)]
    assert longest[0] <= 12 < longest[1]


@changes(LONG)
def prompts_of_all_epochs(new, old):
    asked = Counter(question for _, question in {(entry["step"], entry["question"]) for entry in new.samples})
    assert list(asked.values()) == [3, 3, 3, 3]  # in six steps of two questions each
    assert (new.read("config.json")["steps"], old.read("config.json")["steps"]) == (6, 2)


# Sampling


@changes(SIZES)
def sizes(new, old):
    assert [run.metrics[-1]["step"] for run in (new, old)] == [1, 2]
    assert (new.rows_of_steps(), old.rows_of_steps()) == ([6], [8, 8])
    assert [max(entry["completion_index"] for entry in run.samples) for run in (new, old)] == [1, 3]
    assert [max(sum(entry["action_mask"]) for entry in run.samples) for run in (new, old)] == [6, 10]


@changes(SIZES)
def temperature(new, old):
    assert new.first("policy/entropy") > 1.5 * old.first("policy/entropy")
    assert new.first("policy/sampling_log_prob_difference") < 1e-4  # training scores at the same temperature


@changes(PROMPTS)
def top_p(new, old):
    assert "the gradient is biased" in new.output
    assert "the gradient is biased" not in old.output
    least = [min(min(entry["sampler_log_probs"]) for entry in run.samples) for run in (new, old)]
    assert least[0] > math.log(0.08) > least[1]


@changes(STOPS)
def stop(new, old):
    assert new.read("config.json")["stop"] == ["7", "9"]
    for run, ends_early in ((new, True), (old, False)):
        answers = [entry["text"] for entry in run.samples]
        assert any(set(text[:-1]) & set("79") for text in answers) != ends_early
        assert any(text.endswith(("7", "9")) for text in answers)
    assert new.first("eval/greedy/length") < old.first("eval/greedy/length")


@changes(SPLIT, also=GENTLE)
def batches(new, old):
    evaluation = [2, 4, 4, 4, 4]  # greedy, then eight answers per question
    assert new.sampling_rows == [*evaluation, 4, 4, 4, 4, *evaluation]
    assert old.sampling_rows == [2, 16, 8, 8, 2, 16]
    assert 1 <= max(new.training_rows) < max(old.training_rows) == 8


# Training


@changes(PROMPTS)
def updates(new, old):
    assert (new.updates("epoch"), old.updates("epoch")) == ({0, 1, 2}, {0, 1})
    assert (new.updates("minibatch"), old.updates("minibatch")) == ({0, 1}, {0})
    assert (new.training_rows, old.training_rows) == ([3, 1] * 12, [8] * 4)
    assert (max(new.scoring_rows), max(old.scoring_rows)) == (3, 8)


@changes("--lr 1e-5")
def lr(new, old):
    assert 0 < new.last("loss/kl") < 0.1 * old.last("loss/kl")


@changes(LONG)
def lr_schedule(new, old):
    assert new.values("lr") == pytest.approx([1e-4, 1e-4, 8e-5, 6e-5, 4e-5, 2e-5])
    assert not old.has_key("lr")


@changes(PENALTIES)
def penalties(new, old):
    assert new.first("policy/clipped") > old.first("policy/clipped")
    assert new.first("loss/grad_norm") > 2 * old.first("loss/grad_norm")  # in the second epoch the policy has changed


@changes(OWN)
def no_kl(new, old):
    """It needs no reference."""
    assert (len(new.values("loss/kl")), len(old.values("loss/kl"))) == (0, 2)
    assert (len(new.scoring_rows), len(old.scoring_rows)) == (0, 2)


@changes("--max-grad-norm 1e-9", of=(SFT,))
@changes(OTHERS)
def max_grad_norm(new, old):
    """Below AdamW's epsilon, so that the update becomes smaller."""
    assert new.distance() < 0.5 * old.distance()


@changes(REWARDED)
def reward_functions(new, old):
    texts = [entry["text"] for entry in new.samples if entry["step"] == 1]  # of all groups
    copies = [float(text not in texts[:index]) for index, text in enumerate(texts)]
    assert [entry["rewards"]["first"] for entry in new.samples if entry["step"] == 1] == copies
    assert new.first("reward/first") == sum(copies) / len(copies) < 1
    for entry in new.samples:
        rewards, length = entry["rewards"], len(entry["question"]) + len(entry["answer"])
        assert rewards.keys() - old.samples[0]["rewards"].keys() == {"short", "asked", "first"}
        assert rewards["short"] == pytest.approx(math.exp(-len(entry["text"]) / 10))
        assert rewards["asked"] == length
    assert new.has_key("reward/short")
    assert new.has_key("eval/greedy/reward_short")
    assert "reward_functions" in new.read("config.json")["sources"]


@changes(REWARDED)
def reward_weight(new, old):
    """Without a weight of its own a component is logged only, and a function counts."""
    for run, weights in ((new, {"correct": 1, "short": 1, "format": 0.5}), (old, {"correct": 1})):
        for entry in run.samples:
            expected = sum(weight * entry["rewards"][name] for name, weight in weights.items())
            assert entry["return"] == pytest.approx(expected)
    assert any(entry["rewards"]["format"] for entry in new.samples)


# What supervised fine-tuning learns


@changes("--data files/others.jsonl --eval-prompts 1", of=(SFT,))
def sft_data(new, old):
    for run, verb in ((new, "Write"), (old, "Say")):
        assert all(f"user\n{verb} " in text for text in run.texts)
    assert (len(new.texts), len(old.texts)) == (19, 18)  # a tenth of 20 rows is held out, if that is allowed


@changes("--eval-every 1", of=(SFT,))
def sft_eval_every(new, old):
    assert (len(new.values("eval/loss")), len(old.values("eval/loss"))) == (2 + len(new.values("loss/total")), 2)


@changes("--lessons tools", of=(LESSONS,))
def lessons(new, old):
    assert any("Tools: " in text for text in new.texts)
    assert not any("Tools: " in text for text in old.texts)
    assert new.read("summary.json").keys() > old.read("summary.json").keys()  # it also examines with its tools


@changes("--embeddings as_is", also="--lessons tools", of=(LESSONS,))
def embeddings(new, old):
    assert new.texts == old.texts
    assert new.first("loss/total") != pytest.approx(old.first("loss/total"), rel=1e-2)


@changes("--num-copying 12 --num-reasoning 20", also="--num-answering 0", of=(LESSONS,))
def num_copying(new, old):
    assert new.lessons()["copy"] - 4 == old.lessons()["copy"] == 8
    assert (new.lessons()["think"], old.lessons()["think"]) == (20, 6)


@changes("--num-answering 24", also="--num-reasoning 0", of=(LESSONS,))
def num_answering(new, old):
    assert (len(new.texts), len(old.texts)) == (32, 12)
    assert new.lessons()["answer"] > old.lessons()["answer"] > 0
    assert new.lessons()["copy"] == 8


@changes("--epochs 2", of=(SFT,))
def epochs(new, old):
    assert set(Counter(new.texts).values()) == {2}
    assert set(Counter(old.texts).values()) == {1}
    assert set(new.texts) == set(old.texts)


@changes("--tokens-per-batch 100 --max-length 20", of=(SFT,))
def tokens_per_batch(new, old):
    assert max(new.batch_sizes) <= 100 < max(old.batch_sizes) <= 200
    lengths = [[len(run.policy.tokenizer.encode(text)) for text in run.texts] for run in (new, old)]
    assert max(lengths[0]) <= 20 < max(lengths[1])


@changes("--micro-batch-size 2", of=(SFT,))
def sft_micro_batch_size(new, old):
    assert max(new.training_rows) == 2 < max(old.training_rows)
    assert_agree(new, old)


# How it learns


@changes("--lr 1e-5", of=(SFT,))
def sft_lr(new, old):
    assert new.values("lr") == pytest.approx([0.1 * rate for rate in old.values("lr")])
    assert new.distance() == pytest.approx(0.1 * old.distance(), rel=0.2)  # AdamW's steps are as long as their rate


@changes("--warmup-steps 20", of=(SFT,))
def warmup_steps(new, old):
    expected = [rate * (step / 20) / min(1, step / 2) for step, rate in enumerate(old.values("lr"), start=1)]
    assert new.values("lr") == pytest.approx(expected)
    assert new.distance() < 0.3 * old.distance()


@changes("--final-lr 1", of=(SFT,))
def final_lr(new, old):
    assert [run.last("lr") for run in (new, old)] == pytest.approx([1e-4, 1e-5])


@pytest.mark.parametrize("setup", [BASE, SFT, LESSONS])
def test_every_flag_has_an_entry(load_script, setup):
    """`estimate`, `gpus` and `gpu_memory` are in models/test_estimate.py, `watch` in test_watch.py.

    The flags of reward models are in test_reward_model_runs.py, those of a rubric in models/test_rubric.py.
    """
    flags = {field.name for field in dataclasses.fields(load_script(setup).Config)}
    flags |= {"data", "eval_every"} if setup == LESSONS else set()  # of its parent; it has none
    # those of the second line are in unit/test_data.py and golden/test_golden.py
    elsewhere = {"eval_suite", "optimizer"} & flags
    setups = (setup, SFT) if setup == LESSONS else (setup,)
    known = set().union(*(change.flags for change in CHANGES if change.setup in setups))
    judged = {"reward_model", "reward_model_url", "answer_begins", "strict", "no_answer_penalty"} & flags
    judged |= {"judge", "judge_model", "judge_url"} & flags
    known = known - {"no_pack"} | {"pack", "keep_checkpoints"}  # the latter is in settings.yaml
    refused = {"data", "device", "model", "resume"}  # what does not exist: refusals.txt
    assert known | judged | elsewhere | refused | {"estimate", "gpus", "gpu_memory", "watch", "verbose"} == flags


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [pytest.param(change, id=f"{Path(change.setup).parent.name} {change.check.__name__}") for change in CHANGES],
)
def test_a_flag_changes_what_it_promises(run, change):
    if change.needs == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    elif change.needs not in (None, "cuda"):
        pytest.importorskip(change.needs)
    change.check(run(change.setup, f"{change.also} {change.given}".strip()), run(change.setup, change.also))
