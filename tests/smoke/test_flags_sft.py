"""Every flag of experiment_sft does something: a run with it differs from the run without it as the flag promises."""

import dataclasses
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.policy import Policy

from common.plumbing.config import TINY_POLICY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Small, with a learning rate that makes every update visible in the next one.
BASE = ("--lr", "1e-4", "--warmup-steps", "2", "--checkpoint-every", "0", "--device", "cpu", "--seed", "5")
DATA = (*BASE, "--model", "tiny", "--data", "files/chats.jsonl", "--tokens-per-batch", "200", "--name", "x")
LESSONS = (
    *(*BASE, "--model", "tiny", "--num-copying", "8", "--num-reasoning", "6", "--num-answering", "4"),
    *("--tokens-per-batch", "2000", "--eval-prompts", "1", "--name", "x"),
)
LORA = ("--lora-rank", "2")


@dataclasses.dataclass
class Outcome:
    """What a run leaves behind, and what was observed while it ran."""

    directory: Path
    policy: Policy  # as it was at the end
    texts: list[str]  # of the conversations of all optimizer steps, in their order
    batch_sizes: list[int]  # tokens of each, padding included
    training_rows: list[int]  # of every forward pass with gradient
    mlp_passes: int  # of one layer, while training
    num_threads: int  # after it had set them

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def values(self, name: str) -> list[float]:
        return [entry[name] for entry in self.metrics]

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def read(self, name: str) -> dict:
        return json.loads((self.directory / name).read_text())

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

    def num_trained(self) -> int:
        return sum(weight.numel() for weight in self.policy.parameters() if weight.requires_grad)


def assert_agree(new: Outcome, old: Outcome) -> None:
    """The flag has changed memory or time, and no other metric."""
    for name in ("loss/total", "loss/grad_norm", "lr"):
        assert new.values(name) == pytest.approx(old.values(name), rel=1e-4)
    assert new.texts == old.texts


def watched(train: ModuleType, argv: list[str], directory: Path, patch: pytest.MonkeyPatch) -> Outcome:
    """Run train.py in `directory`, and record its calls."""
    policies, texts, batch_sizes, training_rows, mlp_passes, num_threads = [], [], [], [], [], []
    set_num_threads, update, make_policy, forward = (
        torch.set_num_threads,
        train.update,
        train.make_policy,
        Policy.forward,
    )
    load_policy = train.load_policy

    def keep(make):
        def make_and_keep(*arguments):
            policies.append(make(*arguments))
            layer = next(module for name, module in policies[0].named_modules() if name.endswith("layers.0.mlp"))
            layer.register_forward_pre_hook(lambda *_: mlp_passes.append(torch.is_grad_enabled()))
            return policies[0]

        return make_and_keep

    def update_and_keep(config, policy, optimizer, batch):
        batch_sizes.append(batch.sequences.numel())
        for ids, mask in zip(batch.sequences, batch.attention_mask.bool(), strict=True):
            texts.append(policy.tokenizer.decode(ids[mask]))
        return update(config, policy, optimizer, batch)

    def forward_and_count(policy, sequences, *arguments, **options):
        if torch.is_grad_enabled():
            training_rows.append(len(sequences))
        return forward(policy, sequences, *arguments, **options)

    def set_threads_and_continue_with_one(number):  # two on busy cores were measured ten times slower
        set_num_threads(number)
        num_threads.append(torch.get_num_threads())
        set_num_threads(1)

    patch.setattr(torch, "set_num_threads", set_threads_and_continue_with_one)
    patch.setattr(train, "load_policy", keep(load_policy))
    patch.setattr(train, "make_policy", keep(make_policy))
    patch.setattr(train, "update", update_and_keep)
    patch.setattr(Policy, "forward", forward_and_count)
    patch.setenv("WANDB_MODE", "offline")
    patch.chdir(directory)
    try:
        train.main(argv)
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()  # its service would keep this run's settings
    (place,) = directory.glob("*/experiment_sft/*")
    return Outcome(place, policies[0], texts, batch_sizes, training_rows, sum(mlp_passes), num_threads[-1])


@pytest.fixture(scope="module")
def train(load_script) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiment_sft")
        return load_script("experiment_sft/train.py")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Files that flags name: two of conversations, and a model that differs from the bundled one."""
    place = tmp_path_factory.mktemp("files")
    for name, verb in (("chats", "Say"), ("others", "Write")):
        rows = [
            [
                {"role": "user", "content": f"{verb} {n} {'please ' * (n % 4)}"},
                {"role": "assistant", "content": f"{n} " * (1 + n % 3)},
            ]
            for n in range(20)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    template = (TINY_POLICY / "chat_template.jinja").read_text(encoding="utf-8")
    (place / "polite.jinja").write_text("{{- 'Please: ' }}" + template, encoding="utf-8")
    shutil.copytree(TINY_POLICY, place / "model")
    weights = load_file(place / "model" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 0.5
    save_file(weights, place / "model" / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], Outcome]:
    """The runs so far, by their flags."""
    return {}


@pytest.fixture
def run(known, train, files, tmp_path_factory) -> Iterator[Callable[..., Outcome]]:
    """Run train.py with the given flags; `files/` is the directory of that fixture."""

    def with_flags(*argv: str) -> Outcome:
        if argv not in known:
            given = [word.replace("files/", f"{files}/") for word in argv]
            with pytest.MonkeyPatch.context() as patch:
                known[argv] = watched(train, given, tmp_path_factory.mktemp("run"), patch)
        return known[argv]

    return with_flags


@dataclasses.dataclass
class Change:
    """What a flag should change."""

    given: tuple[str, ...]
    base: tuple[str, ...]  # flags of both runs
    needs: str | None  # a package, or "cuda"
    check: Callable[[Outcome, Outcome], None]  # of the run with `given`, and of the one without


CHANGES: dict[str, Change] = {}  # by the flag's name in Config


def changes(*given: str, base: tuple[str, ...] = DATA, needs: str | None = None) -> Callable:
    """Register a check of a run with the flags `base` and `given` against one with `base` alone."""

    def enter(check: Callable[[Outcome, Outcome], None]) -> Callable:
        CHANGES[check.__name__] = Change(given, base, needs, check)
        return check

    return enter


# Policy and arithmetic


@changes("--model", "files/model")
def model(new, old):
    assert abs(new.values("loss/total")[0] - old.values("loss/total")[0]) > 0.1


@changes("--chat-template", "files/polite.jinja")
def chat_template(new, old):
    assert all(text.startswith("Please: ") for text in new.texts)
    assert not any(text.startswith("Please: ") for text in old.texts)


@changes("--seed", "1")
def seed(new, old):
    assert set(new.texts) != set(old.texts)  # other rows are held out
    assert new.texts != old.texts


@changes("--threads", "2")
def threads(new, old):
    assert (new.num_threads, old.num_threads) == (2, 1)


@changes("--device", "cuda", needs="cuda")
def device(new, old):
    assert [run.policy.device.type for run in (new, old)] == ["cuda", "cpu"]


@changes("--dtype", "bfloat16")
def dtype(new, old):
    first, expected = new.values("loss/total")[0], old.values("loss/total")[0]
    assert 1e-5 < abs(first / expected - 1) < 0.02
    assert {weight.dtype for weight in new.policy.parameters()} == {torch.float32}  # those that are trained


@changes("--attn-implementation", "eager")
def attn_implementation(new, old):
    assert [run.policy.model.config._attn_implementation for run in (new, old)] == ["eager", "sdpa"]
    assert_agree(new, old)


@changes("--gradient-checkpointing")
def gradient_checkpointing(new, old):
    assert new.mlp_passes == 2 * old.mlp_passes > 0
    assert_agree(new, old)


@changes("--lora-rank", "2")
def lora_rank(new, old):
    assert new.read("final/adapter_config.json")["r"] == 2
    assert not new.has("final/model.safetensors")
    assert 0 < new.num_trained() < 0.05 * old.num_trained()


@changes("--lora-alpha", "40", base=(*DATA, *LORA))
def lora_alpha(new, old):
    assert [run.read("final/adapter_config.json")["lora_alpha"] for run in (new, old)] == [40, 4]
    assert new.values("loss/total")[-1] != pytest.approx(old.values("loss/total")[-1], rel=1e-5)


@changes("--load-in", "4bit", base=(*DATA, *LORA), needs="bitsandbytes")
def load_in(new, old):
    assert any(type(module).__name__ == "Linear4bit" for module in new.policy.modules())
    assert new.values("loss/total")[0] != pytest.approx(old.values("loss/total")[0], rel=1e-3)


@changes("--save-merged", base=(*DATA, *LORA))
def save_merged(new, old):
    assert new.has("final_merged/model.safetensors")
    assert not old.has("final_merged")


@changes("--save-dtype", "bfloat16")
def save_dtype(new, old):
    assert {weight.dtype for weight in new.final().values()} == {torch.bfloat16}
    assert {weight.dtype for weight in old.final().values()} == {torch.float32}
    assert_agree(new, old)  # rounded at the end only
    assert new.read("summary.json")["eval/loss"] != old.read("summary.json")["eval/loss"]  # what is saved is examined


# Where a run is and what it keeps


@changes("--name", "y")
def name(new, old):
    assert (new.directory.name, old.directory.name) == ("y", "x")


@changes("--runs-dir", "elsewhere")
def runs_dir(new, old):
    assert [run.directory.parent.parent.name for run in (new, old)] == ["elsewhere", "runs"]


@changes("--checkpoint-every", "2")
def checkpoint_every(new, old):
    assert (new.checkpoints(), old.checkpoints()) == ({"step_2", "step_3"}, set())


@changes("--keep-checkpoints", "1", base=(*DATA, "--checkpoint-every", "1"))
def keep_checkpoints(new, old):
    assert (new.checkpoints(), old.checkpoints()) == ({"step_3"}, {"step_2", "step_3"})


@changes("--wandb", needs="wandb")
def wandb(new, old):
    assert list(new.directory.glob("wandb/offline-run-*/*.wandb"))
    assert not old.has("wandb")


# What is learned


@changes("--data", "files/others.jsonl")
def data(new, old):
    for run, verb in ((new, "Write"), (old, "Say")):
        assert all(f"user\n{verb} " in text for text in run.texts)


@changes("--eval-prompts", "1")
def eval_prompts(new, old):
    assert (len(new.texts), len(old.texts)) == (19, 18)  # a tenth of 20 rows is held out, if it is allowed to be


def lessons_of(run: Outcome) -> Counter:
    """How many conversations copy, and how many answer with and without reasoning."""
    return Counter("think" if "<think>" in text else "answer" if "<answer>" in text else "copy" for text in run.texts)


@changes("--lessons", "tools", base=LESSONS)
def lessons(new, old):
    assert any("Tools: " in text for text in new.texts)
    assert not any("Tools: " in text for text in old.texts)
    assert new.read("summary.json").keys() > old.read("summary.json").keys()  # it is examined with its tools as well


@changes("--embeddings", "as_is", base=(*LESSONS, "--lessons", "tools"))
def embeddings(new, old):
    assert new.texts == old.texts
    assert new.values("loss/total")[0] != pytest.approx(old.values("loss/total")[0], rel=1e-2)


@changes("--num-copying", "12", base=LESSONS)
def num_copying(new, old):
    assert lessons_of(new)["copy"] - 4 == lessons_of(old)["copy"] == 8
    assert (len(new.texts), len(old.texts)) == (22, 18)


@changes("--num-reasoning", "20", base=(*LESSONS, "--num-answering", "0"))
def num_reasoning(new, old):
    assert lessons_of(new) - lessons_of(old) == {"think": 14}
    assert lessons_of(old) == {"think": 6, "copy": 8}


@changes("--num-answering", "24", base=(*LESSONS, "--num-reasoning", "0"))
def num_answering(new, old):
    assert (len(new.texts), len(old.texts)) == (32, 12)
    assert lessons_of(new)["answer"] > lessons_of(old)["answer"] > 0
    assert lessons_of(new)["copy"] == 8


@changes("--epochs", "2")
def epochs(new, old):
    assert set(Counter(new.texts).values()) == {2}
    assert set(Counter(old.texts).values()) == {1}
    assert set(new.texts) == set(old.texts)


@changes("--tokens-per-batch", "100")
def tokens_per_batch(new, old):
    assert max(new.batch_sizes) <= 100 < max(old.batch_sizes) <= 200
    assert len(new.metrics) > len(old.metrics)


@changes("--micro-batch-size", "2")
def micro_batch_size(new, old):
    assert max(new.training_rows) == 2 < max(old.training_rows)
    assert_agree(new, old)


@changes("--max-length", "20")
def max_length(new, old):
    lengths = [[len(run.policy.tokenizer.encode(text)) for text in run.texts] for run in (new, old)]
    assert max(lengths[0]) <= 20 < max(lengths[1])


# How it is learned


@changes("--lr", "1e-5")
def lr(new, old):
    assert new.values("lr") == pytest.approx([0.1 * rate for rate in old.values("lr")])
    assert new.distance() == pytest.approx(0.1 * old.distance(), rel=0.2)  # AdamW's steps are as long as their rate


@changes("--warmup-steps", "20")
def warmup_steps(new, old):
    expected = [rate * (step / 20) / min(1, step / 2) for step, rate in enumerate(old.values("lr"), start=1)]
    assert new.values("lr") == pytest.approx(expected)
    assert new.distance() < 0.3 * old.distance()


@changes("--final-lr", "1")
def final_lr(new, old):
    assert new.values("lr")[-1] == pytest.approx(1e-4)
    assert old.values("lr")[-1] == pytest.approx(1e-5)


@changes("--weight-decay", "100")
def weight_decay(new, old):
    kept = new.final_weights().norm() / old.final_weights().norm()
    assert kept.item() == pytest.approx(math.prod(1 - 100 * rate for rate in old.values("lr")), rel=1e-3)


@changes("--max-grad-norm", "1e-9")  # below AdamW's epsilon, so that the update becomes smaller
def max_grad_norm(new, old):
    assert new.distance() < 0.5 * old.distance()


# Flags that name what must exist already.
REFUSED = {
    "resume": (("--resume", "nowhere"), "no config.json of a run can be read there"),
    "model": (("--model", "./nowhere"), "there is no such directory"),
    "data": (("--model", "tiny", "--data", "nowhere.jsonl"), "there is no such file"),
    "device": (("--device", "cuda:99"), "this machine has"),
}


def test_every_flag_has_an_entry(train):
    assert CHANGES.keys() | REFUSED.keys() | {"estimate"} == {field.name for field in dataclasses.fields(train.Config)}


def test_every_experiment_has_such_a_test():
    """Siblings in test_flags_siblings.py, the others in files of their own."""
    tests = Path(__file__).parent
    siblings = (tests / "test_flags_siblings.py").read_text(encoding="utf-8")
    for path in ROOT.glob("experiment_*/train.py"):
        own = tests / f"test_flags{path.parent.name.removeprefix('experiment').replace('_base', '')}.py"
        text = own.read_text(encoding="utf-8") if own.exists() else ""
        is_tested = "\ndef test_every_flag_has_an_entry(" in text or f'    "{path.parent.name}": {{' in siblings
        assert is_tested, path.parent.name


def test_the_same_flags_give_the_same_metrics(run):
    """Without this no difference would mean anything."""
    again = run(*DATA, "--runs-dir", "elsewhere")
    for name in ("loss/total", "loss/grad_norm", "lr"):
        assert again.values(name) == run(*DATA).values(name)
    assert torch.equal(again.final_weights(), run(*DATA).final_weights())


@pytest.mark.parametrize("flag", CHANGES)
def test_a_flag_changes_what_it_promises(run, flag):
    change = CHANGES[flag]
    if change.needs == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    elif change.needs not in (None, "cuda"):
        pytest.importorskip(change.needs)
    change.check(run(*change.base, *change.given), run(*change.base))


def test_a_new_model_knows_nothing(run):
    """Its first loss is that of guessing among all tokens of the vocabulary."""
    new = run(*LESSONS, "--model", "new", "--num-reasoning", "0", "--num-answering", "0")
    assert new.values("loss/total")[0] == pytest.approx(math.log(1024), abs=0.3)


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_refuses_what_does_not_exist(tmp_path, monkeypatch, train, flag):
    argv, sentence = REFUSED[flag]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        train.main(list(argv))
    assert not list(tmp_path.iterdir())
