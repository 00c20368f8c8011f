"""The laboratory's JavaScript (viewer/lab) computes what the experiments' Python computes.

References are made here by running each experiment's own `train`; the JavaScript is what the page runs, in node.
"""

import copy
import json
import random
import shutil
import subprocess
from contextlib import nullcontext

import numpy as np
import pytest
from lab_reference import FULL, FULL_OF, LARGE, compare, differences, flat, in_node, load, record, relative

from benchmarks.planted import TRAPS
from common.chat import decode, encode_prompt
from common.keyed import keyed_generator
from tasks import arithmetic
from viewer.groups import series
from viewer.lab import contents
from viewer.lab.build import ALGORITHMS, CHECKSUM
from viewer.results import read_runs

from harness.data.order import all_prompts_of_step

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("node") is None, reason="needs node")]
SMALL = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 24, "steps": 1, "seed": 7}
UPDATES = {"epochs_per_step": 2, "minibatch_size": 8, "kl_weight": 0.1}
CLIPPED = UPDATES | {"clip_eps": 0.02}
FLAGS = {  # with which an algorithm's clip and its several updates matter
    "reinforce": {},
    "reinforce_baseline": {"steps": 2},  # in the second one, the baseline is not 0
    "gspo": UPDATES | {"clip_eps": 0.01, "clip_eps_high": 0.02},
    "cispo": UPDATES | {"ratio_cap": 1.02},
}
ADVANTAGES = "group_advantages(returns) / (group_std(returns) + STD_EPS)"
OF_ALL = ADVANTAGES.replace("returns", "returns.view(1, -1)")
MISTAKES = {  # that can be switched on, as they are made in experiment_base
    "batch": (ADVANTAGES, f"({OF_ALL}).view_as(returns)"),
    "no_baseline": (ADVANTAGES, "returns.double()"),
    "sign": (ADVANTAGES, f"-{ADVANTAGES}"),
    "mask": TRAPS["off_by_one"].plant,
    "kl_padding": TRAPS["kl_over_padding"].plant,
}
# Large weights: those whose gradients are more than rounding, nine of ten. AdamW divides a gradient by its own size, so
# where it is only rounding so is the change, in PyTorch too: see the test with float64. Later updates begin from there.
LIMITS = {"draw": 1e-6, "advantage": 1e-6, "terms": 1e-6, "push": 1e-6, "large_weights": 1e-4, "weights": 2e-3}
LIMITS |= {"later": 2e-3, "metrics": 1e-3, "clipped": 0, "capped": 0}


def excess(found: dict, **limits: float) -> dict:
    """The differences that are too large."""
    return {name: found[name] for name, limit in (LIMITS | limits).items() if not found.get(name, 0) <= limit}


@pytest.fixture(scope="module")
def of_all(load_script, short_runs, tmp_path_factory):
    """The runs of all algorithms in Python, and what differs in JavaScript; one process of node computes them all."""
    train = {name: load_script(f"{path}/train.py") for name, path in ALGORITHMS.items()}
    runs = {name: record(train[name], name, SMALL | FLAGS.get(name, CLIPPED)) for name in ALGORITHMS}
    folder = tmp_path_factory.mktemp("lab")
    return runs, dict(zip(runs, compare([*runs.values()], folder), strict=True)), folder


# The update ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_its_steps_are_those_of_its_train_py(of_all, name):
    runs, found, _ = of_all
    assert excess(found[name]) == {}, found[name]
    assert len({row.completion_ids[0] for step in runs[name].steps for row in step.rows}) > 1
    limit = {"grpo": "policy/clipped", "gspo": "policy/clipped", "cispo": "policy/capped"}.get(name)
    assert limit is None or any(step.metrics[limit] for step in runs[name].steps)


@pytest.mark.parametrize(
    "change",
    [
        ("group_std(returns) + STD_EPS", "group_std(returns) + 1e-2"),
        ("mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows", "mask.sum() "),
        ("micro.advantages, config.clip_eps)  # (b", "micro.advantages, 2 * config.clip_eps)  # (b"),
    ],
)
def test_a_change_of_train_py_alone_is_noticed(of_all, make_own, change):
    runs, _, folder = of_all
    changed = record(make_own(change), "grpo", SMALL | CLIPPED)
    place = [*runs].index("grpo")
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))[place]
    assert changed.case["given"] == runs["grpo"].case["given"]
    assert excess(differences(changed, found, f"{folder}/{place}")) != {}


def test_the_gradient_and_the_weights_are_as_near_to_float64_as_those_of_pytorch(of_all):
    """The first step of REINFORCE has one update, of which AdamW makes lr g / (|g| + eps)."""
    runs, _, folder = of_all
    run, place = runs["reinforce"], [*runs].index("reinforce")
    (step,) = run.steps
    before, lr = flat(run.before).astype(float), run.config.lr
    weights, gradient = np.fromfile(folder / f"{place}-0.f32", dtype="<f4").reshape(2, -1).astype(float)
    found = {"JavaScript": (gradient, weights - before)}
    load(run.policy, run.before)
    for name, policy in (("PyTorch", run.policy), ("exact", copy.deepcopy(run.policy).double())):
        sequences, mask = step.experience.sequences, step.experience.action_mask
        logits = policy.model(input_ids=sequences, attention_mask=step.experience.attention_mask).logits[:, :-1]
        log_probs = logits.log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0]
        policy.zero_grad()
        (-step.experience.advantages * log_probs * mask / len(mask)).sum().backward()
        exact = flat({key: weight.grad for key, weight in policy.named_parameters()}).astype(float)
        found[name] = (exact, flat(step.weights) - before)
    gradient, change = exact, -lr * exact / (np.abs(exact) + 1e-8)
    del found["exact"]
    errors = {name: (relative(g, gradient), relative(c, change)) for name, (g, c) in found.items()}
    assert errors["JavaScript"][0] < 1e-5, errors
    assert errors["JavaScript"][1] < max(1e-3, 2 * errors["PyTorch"][1]), errors
    large = np.abs(gradient) > LARGE * np.sqrt(np.mean(gradient**2))
    for _, its_change in found.values():
        assert relative(its_change[large], change[large]) < 5e-5  # the rounding of a weight to float32


# of the default size; what depends on it (batches, packed rows, the order of questions) is the same code for all
LONG = {name: (name, FULL | FULL_OF.get(name, {}), {}) for name in ("grpo", "cispo", "reinforce_baseline")}
LAGS = ("grpo none", "grpo tis", "grpo mask", "reinforce_baseline none", "gspo none", "gspo tis", "cispo tis")
for name, correction in map(str.split, LAGS):  # more steps than the lag; the learning rate makes old weights matter
    flags = FLAGS.get(name, CLIPPED) | {"steps": 6, "lr": 1e-4, "prompts_per_step": 2}
    flags |= {"minibatch_size": 4} if "minibatch_size" in flags else {}
    LONG[f"{name}-lag-{correction}"] = (name, SMALL | flags, {"lag": 4, "correction": correction})
for mistake in MISTAKES:
    own = {"epochs_per_step": 1, "minibatch_size": 16} if mistake == "mask" else {}
    LONG[mistake] = ("grpo", SMALL | UPDATES | {"steps": 2} | own, {"mistake": mistake})


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_several_steps_are_those_of_train_py(load_script, make_own, tmp_path, case):
    """Steps of the default size, old samples, and each planted mistake as it is made in Python."""
    name, flags, options = LONG[case]
    change = MISTAKES.get(case, nullcontext)
    train = load_script(f"{ALGORITHMS[name]}/train.py") if callable(change) else make_own(change)
    with change(train) if callable(change) else nullcontext():
        run = record(train, name, flags, **options)
    (found,) = compare([run], tmp_path)
    limits = {"large_weights": 3e-4} if case == "no_baseline" else {}  # four updates from the few right answers
    assert excess(found, **limits) == {}, found


@pytest.mark.slow
def test_ten_default_steps_are_those_of_the_published_run_and_have_the_promised_checksum(tmp_path):
    _, posted = in_node(tmp_path, "talk(given)", [("start", {"settings": {}}), ("run", {"until": 10})])
    assert [message["value"] for message in posted if message["type"] == "checksum"] == [CHECKSUM]
    steps = [message["metrics"] for message in posted if message["type"] == "step"]
    published = read_runs(contents.ROOT / "experiment_base" / "results")["seed0"]
    for name, tolerance in (("reward/correct", 0.02), ("completion/length", 0.5), ("policy/entropy", 0.01)):
        values = [series(published, name)[step] for step in range(1, 11)]
        assert [step[name] for step in steps] == pytest.approx(values, abs=tolerance), name


# Its parts -----------------------------------------------------------------------------------------------------------


def test_keyed_numbers_and_orders_are_those_of_numpy(tmp_path):
    names = [["tokens", 0, 7], ["tokens", 3, 1, 4095, 7], ["minibatches", 2**32 - 1, 0], ["", 0]]
    orders = [(4096, 16, step, seed) for step in (1, 256, 257, 1000) for seed in (0, 7, 2**32 - 1)] + [(5, 2, 9, 1)]
    numbers = "given[0].map((name) => ((g) => Array.from({length: 6}, () => g.random()))(lab.keyed_generator(...name)))"
    found = in_node(tmp_path, f"[{numbers}, given[1].map((order) => lab.prompts_of_step(...order))]", [names, orders])
    assert found[0] == [keyed_generator(*name).random(6).tolist() for name in names]
    assert found[1] == [all_prompts_of_step(*order) for order in orders]


def texts_of_tags(count: int) -> list[str]:
    """Soups of what an answer is made of, in any order."""
    parts = ["<think>", "</think>", "<answer>", "</answer>", "58", "+58.0", "0,058", "1,234", " ", "\n", "\x1c", "\x85"]
    parts += ["<", "x", "-0", "58 ", "<think>a</think>", "<answer>58</answer>", "٥٨", "\ufeff", "\u2003", "é", "😀"]
    draw = random.Random(0)
    return ["".join(draw.choices(parts, k=draw.randint(0, 9))) for _ in range(count)]


def test_rewards_are_those_of_the_task(tmp_path):
    texts, answers = texts_of_tags(6000), ["58", "-0", "1234", "x", 58]
    pairs = [[text, answers[i % len(answers)]] for i, text in enumerate(texts)]
    found = in_node(tmp_path, "given.map(([t, a]) => [lab.correct(t, a), +lab.is_reasoned(t)])", pairs)
    for (text, answer), values in zip(pairs, found, strict=True):
        correct = arithmetic.reward({"answer": answer}, text)["correct"]
        assert values == [correct, arithmetic.describe({}, text)["reasoned"]], text
    assert 50 < sum(correct for correct, _ in found) < len(found) / 2


def test_texts_become_the_ids_of_the_tokenizer_and_back(tmp_path, tokenizer):
    rows = [json.loads(line) for line in contents.QUESTIONS.read_text(encoding="utf-8").splitlines()]
    asked = [row["question"] for row in rows[:300]] + [f"a{text}b<|im_end|>" for text in texts_of_tags(500)]
    draw = random.Random(1)
    ids = [[draw.randrange(1024) for _ in range(draw.randint(0, 12))] for _ in range(500)]
    both = "((t) => [given[0].map((q) => t.encode_prompt(q)), given[1].map((ids) => t.decode(ids))])"
    prompts, texts = in_node(tmp_path, f"{both}(new lab.Tokenizer(load.data.tokenizer))", [asked, ids])
    assert texts == [decode(tokenizer, some) for some in ids]
    for question, prompt in zip(asked, prompts, strict=True):
        assert prompt == encode_prompt(tokenizer, [{"role": "user", "content": question}]), question


def test_defaults_are_those_of_the_experiments(tmp_path, load_script):
    found = in_node(tmp_path, "given.map((algorithm) => lab.settings_of({algorithm}))", [*ALGORITHMS])
    for (name, path), settings in zip(ALGORITHMS.items(), found, strict=True):
        train = load_script(f"{path}/train.py")
        config = vars(train.parse_config(train.Config, [], description=""))
        rows = [own.pop("prompts_per_step") * own.pop("group_size") for own in (config, settings)]
        assert rows[0] == rows[1]
        common = {*config} & {*settings}
        assert {key: config[key] for key in common} == {key: settings[key] for key in common}, name


def test_the_worker_answers(tmp_path):
    """Rewind, change, a question, a learning rate that is far too large, and the memory of short steps."""
    small = {"group_size": 4, "max_new_tokens": 24, "seed": 7, "kl_weight": 0, "prompts_per_step": 2}
    asked = [("start", {"settings": small}), ("run", {"until": 6}), ("rewind", {"step": 5}), ("step", {})]
    asked += [("after", {"group": 1}), ("rewind", {"step": 4}), ("change", {"settings": {"lr": 1e-3}})]
    asked += [("run", {"until": 6}), ("ask", {"question": "What is 20 plus 38?"})]
    asked += [("start", {"settings": small | {"lr": 1e38}}), ("run", {"until": 9})]
    asked += [("start", {"settings": small | {"max_new_tokens": 2, "prompts_per_step": 1}}), ("run", {"until": 10})]
    asked += [("used", {}), ("run", {"until": 30}), ("used", {})]
    posted = in_node(tmp_path, "talk(given)", asked)
    _, first, _, again, after, _, _, changed, answer, _, broken, _, _, used, _, later = posted
    groups = [[one["groups"] for one in some if one["type"] == "step"][-1] for some in (first, again, changed)]
    assert groups[0] == groups[1]  # the sixth step, and the one after rewinding to five
    assert groups[0] != groups[2]
    pushed = zip(groups[1][1]["rows"], after[0]["log_probs"], strict=True)
    moved = [np.array(log_probs) - row["updates"][0]["log_probs"] for row, log_probs in pushed]
    assert sum(np.dot(row["updates"][0]["push"], by) for row, by in zip(groups[1][1]["rows"], moved, strict=True)) > 0
    assert answer[0]["before"] != answer[0]["now"]
    assert "not finite" in broken[-1]["message"]
    assert later[0] - used[0] < 2e6, "bytes, in 20 steps"


def test_a_reward_of_the_reader_must_be_a_number(tmp_path):
    """In the browser: tests/browser/test_lab.py."""
    sources = ["return text.length > 1", "return 'x'", "throw new Error('nothing')", "return (", "return 1e300"]
    attempt = "given.map((s) => { try { return lab.own_reward(s)('<a>', '58') } catch (e) { return e.message } })"
    found = in_node(tmp_path, attempt, sources)
    end = 'at the completion "<a>"'
    assert found[:2] == [1, f'The reward returned "x", which is no number, {end}: give a finite number.']
    assert found[2] == f"The reward failed {end}: nothing."
    assert "is no JavaScript" in found[3]
    assert "1e+300" in found[4]


@pytest.mark.skipif(not all(map(shutil.which, ("clang", "wasm-ld"))), reason="needs clang and lld")
def test_the_kernels_are_compiled_from_their_source(tmp_path):
    version = subprocess.run(["clang", "--version"], capture_output=True, text=True).stdout
    source = (contents.HERE / "kernels.c").read_text(encoding="utf-8")
    if (wanted := "clang version 14.0.6") not in version:
        pytest.skip(f"another compiler than {wanted} makes other bytes")
    command = source.split("//     clang ")[1].split("kernels.c\n")[0].replace("\\\n//", "").split()
    command = ["clang", *command[: command.index("-o")], "-o", tmp_path / "kernels.wasm", contents.HERE / "kernels.c"]
    subprocess.run(command, check=True)
    assert (tmp_path / "kernels.wasm").read_bytes() == (contents.HERE / "kernels.wasm").read_bytes()
