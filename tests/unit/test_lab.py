"""The laboratory's JavaScript (viewer/lab) computes what the experiments' Python computes.

References are made here by running each experiment's own `train`; the JavaScript is what the page runs, in node.
"""

import copy
import json
import random
import shutil
import subprocess

import numpy as np
import pytest
from lab_reference import case_of, distance_of_draw, flat, load, record, run_lab

from benchmarks.planted import TRAPS
from common.chat import decode, encode_prompt
from common.keyed import keyed_generator
from tasks import arithmetic
from viewer.lab import data

from harness.data.order import all_prompts_of_step

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
SMALL = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 24, "steps": 2, "seed": 7}
UPDATES = {"epochs_per_step": 2, "minibatch_size": 8, "kl_weight": 0.1}
# Relative to the change. AdamW divides a gradient by its own size: where that is only rounding, so is the step, and
# PyTorch is as far from float64 as JavaScript is (see the gradient below). Where few rows have a gradient, as in the
# first step of REINFORCE, which trains on right answers alone, such weights are more.
WEIGHTS, WEIGHTS_OF_FEW_ROWS = 5e-4, 4e-3
CLIPPED = UPDATES | {"clip_eps": 0.02}
EXPERIMENTS = {  # of the menu: its train.py, and flags with which its clip and its several updates matter
    "reinforce": ("policy_gradients/reinforce", {}),
    "reinforce_baseline": ("policy_gradients/reinforce", {}),
    "grpo": ("experiment_base", CLIPPED),
    "drgrpo": ("experiment_drgrpo", CLIPPED),
    "rloo": ("policy_gradients/rloo", CLIPPED),
    "maxrl": ("policy_gradients/maxrl", CLIPPED),
    "gspo": ("policy_gradients/gspo", UPDATES | {"clip_eps": 0.01, "clip_eps_high": 0.02}),
    "cispo": ("policy_gradients/cispo", UPDATES | {"ratio_cap": 1.02}),
}
LAGS = {
    "grpo": ("none", "tis", "mask"),
    "reinforce_baseline": ("none",),
    "gspo": ("none", "tis"),
    "cispo": ("tis",),
}
OF_NODE = ["prompts_per_step", "group_size", "max_new_tokens", "seed", "epochs_per_step", "minibatch_size", "kl_weight"]
OF_NODE += ["clip_eps", "clip_eps_high", "ratio_cap", "lr", "temperature"]


def recorded(load_script, name, flags, train=None, lag=0, correction="none", mistake=None):
    """The steps of an experiment in Python, and the case that JavaScript computes again."""
    train = train or load_script(f"{EXPERIMENTS[name][0]}/train.py")
    own = {"baseline": "none" if name == "reinforce" else "mean"} if "reinforce" in name else {}
    setup, steps = record(train, flags | own, lag, correction)
    settings = {key: value for key, value in flags.items() if key in OF_NODE}
    settings |= {"algorithm": name, "lag": lag, "correction": correction, "mistake": mistake}
    return setup, steps, case_of(settings, setup, steps)


@pytest.fixture
def compare(load_script, tmp_path):
    """Run an experiment in Python and in JavaScript; returns what differs."""

    def call(name, flags, weights=WEIGHTS, **options):
        setup, steps, case = recorded(load_script, name, flags, **options)
        (found,) = run_lab([case], tmp_path)
        return list(differences(setup, steps, found, options.get("lag", 0), weights))

    return call


@pytest.fixture(scope="module")
def of_all(load_script, short_runs, tmp_path_factory):
    """What differs in each algorithm, and its steps in Python; one process of node computes them all."""
    runs = {name: recorded(load_script, name, SMALL | flags) for name, (_, flags) in EXPERIMENTS.items()}
    found = run_lab([case for *_, case in runs.values()], tmp_path_factory.mktemp("lab"))
    limits = {name: WEIGHTS_OF_FEW_ROWS if "reinforce" in name else WEIGHTS for name in runs}
    return {
        name: (list(differences(setup, steps, its, 0, limits[name])), steps)
        for (name, (setup, steps, _)), its in zip(runs.items(), found, strict=True)
    }


def differences(setup, steps, found, lag, tolerance):
    """One text for everything that is not the same."""
    before = flat(setup.before)
    for index, (step, other) in enumerate(zip(steps, found, strict=True)):
        earlier = max(0, index - lag)
        weights = steps[earlier - 1].weights if earlier else setup.before
        for row, own_ids, its in zip(step.trajectories, other["own_ids"], other["rows"], strict=True):
            name = f"step {index + 1}, prompt {row.prompt_index}, completion {row.completion_index}"
            if row.completion_ids != own_ids:
                key = (setup.config.seed, index + 1)
                if distance_of_draw(setup, weights, row, own_ids, key) > 1e-4:
                    yield f"{name}: other tokens"
            yield from differences_of_row(name, step, row, its)
        for name, value in step.metrics.items():
            if name in other["metrics"] and other["metrics"][name] != pytest.approx(value, rel=1e-4, abs=2e-5):
                yield f"step {index + 1}: {name} is {other['metrics'][name]}, not {value}"
        after = flat(step.weights)
        error = np.linalg.norm(after - other["weights"]) / np.linalg.norm(after - before)
        if not error < tolerance:
            yield f"step {index + 1}: weights differ by {error:.1e} of their change"


def differences_of_row(name, step, row, its):
    b = next(i for i, other in enumerate(step.trajectories) if other is row)
    advantage = step.experience.advantages[b]
    if advantage.numel() == 1 and its["advantage"] != pytest.approx(advantage.item(), abs=1e-6):
        yield f"{name}: advantage {its['advantage']}, not {advantage.item()}"
    updates = step.statistics.rows.get((row.prompt_index, row.completion_index), [])
    order = [(update.epoch, update.minibatch) for update in updates]
    if order != [(update["epoch"], update["minibatch"]) for update in its["updates"]]:
        yield f"{name}: in other minibatches"
        return
    for update, own in zip(updates, its["updates"], strict=True):
        for key in ("terms", "push", "ratio", "clipped", "capped", "kl"):
            if key in own or key in update.measurements:
                values = update.measurements[key].numpy()[row.prompt_length - 1 :][: len(row.completion_ids)]
                mask = step.experience.action_mask[b].numpy()[row.prompt_length - 1 :][: len(row.completion_ids)]
                atol = 1e-6 if key in ("terms", "push") else 1e-4
                if not np.allclose(np.array(own[key])[: len(mask)] * mask, values * mask, rtol=5e-4, atol=atol):
                    yield f"{name}: {key} {own[key]}, not {values}"


# The update ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_its_steps_are_those_of_its_train_py(of_all, name):
    found, steps = of_all[name]
    assert found == []
    assert len({row.completion_ids[0] for step in steps for row in step.trajectories}) > 1
    keys = {"grpo": "policy/clipped", "gspo": "policy/clipped", "cispo": "policy/capped"}
    assert name not in keys or any(step.metrics[keys[name]] for step in steps)  # the limit is reached


@pytest.mark.parametrize(
    ("name", "correction"),
    [
        pytest.param(name, correction, marks=() if (name, correction) == ("grpo", "none") else pytest.mark.slow)
        for name, corrections in LAGS.items()
        for correction in corrections
    ],
)
def test_steps_with_a_lag_are_those_of_old_weights(compare, name, correction):
    """More steps than the lag; the learning rate makes old weights matter."""
    flags = SMALL | EXPERIMENTS[name][1] | {"steps": 6, "lr": 1e-4, "prompts_per_step": 2}
    flags |= {"minibatch_size": 4} if "minibatch_size" in flags else {}
    found = compare(name, flags, lag=4, correction=correction, weights=WEIGHTS_OF_FEW_ROWS)
    assert found == []


MEAN_OF_ALL = ("group_advantages(returns) / (group_std(returns) + STD_EPS)",)
MEAN_OF_ALL += (
    "(group_advantages(returns.view(1, -1)) / (group_std(returns.view(1, -1)) + STD_EPS)).view_as(returns)",
)
CHANGES = {  # each mistake that can be switched on, as it is made in Python
    "batch": MEAN_OF_ALL,
    "no_baseline": (MEAN_OF_ALL[0], "returns.double()"),
    "sign": (MEAN_OF_ALL[0], f"-{MEAN_OF_ALL[0]}"),
    "mask": "off_by_one",  # of benchmarks/planted.py
    "kl_padding": "kl_over_padding",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", CHANGES)
def test_a_planted_mistake_is_the_one_in_python(compare, load_script, make_own, mistake):
    change, flags = CHANGES[mistake], SMALL | UPDATES | {"steps": 2}
    flags |= {"epochs_per_step": 1, "minibatch_size": 16} if mistake == "mask" else {}
    if isinstance(change, tuple):
        found = compare("grpo", flags, WEIGHTS_OF_FEW_ROWS, train=make_own(change), mistake=mistake)
    else:
        train = load_script("experiment_base/train.py")
        with TRAPS[change].plant(train):
            found = compare("grpo", flags, train=train, mistake=mistake, weights=WEIGHTS_OF_FEW_ROWS)
    assert found == []


@pytest.mark.parametrize(
    "change",
    [
        ("group_std(returns) + STD_EPS", "group_std(returns) + 1e-2"),
        ("mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows", "mask.sum() "),
        ("micro.advantages, config.clip_eps)  # (b", "micro.advantages, 2 * config.clip_eps)  # (b"),
    ],
)
def test_a_change_of_train_py_alone_is_noticed(compare, make_own, change):
    assert compare("grpo", SMALL | CLIPPED | {"steps": 1}, train=make_own(change)) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_five_full_steps_are_those_of_its_train_py(compare, name):
    """GSPO and CISPO make 16 updates a step, which enlarge rounding: two steps, and GSPO with a wider clip.

    At its clip of 3e-4 rounding decides who is clipped, in Python too when only its micro-batches are others.
    """
    flags = {"steps": 2 if name in ("gspo", "cispo") else 5, "max_new_tokens": 48}
    flags |= {"prompts_per_step": 16, "group_size": 8}
    flags |= {"clip_eps": 0.01, "clip_eps_high": 0.02} if name == "gspo" else {}
    found = compare(name, flags, weights=WEIGHTS_OF_FEW_ROWS if "reinforce" in name else 1e-3)
    assert found == []


def test_the_gradient_is_as_near_to_float64_as_pytorch_is(load_script, tmp_path):
    train, flags = load_script("experiment_base/train.py"), SMALL | {"steps": 1}
    setup, (step,) = record(train, flags)
    settings = {key: value for key, value in flags.items() if key != "steps"}
    run_lab([case_of(settings, setup, [step])], tmp_path)
    found = {"JavaScript": np.fromfile(tmp_path / "gradient.f32", dtype="<f4")}
    load(setup.policy, setup.before)
    for name, policy in (("PyTorch", setup.policy), ("exact", copy.deepcopy(setup.policy).double())):
        experience = copy.copy(step.experience)
        mask = experience.action_mask.bool()
        logits = policy.model(input_ids=experience.sequences, attention_mask=experience.attention_mask).logits[:, :-1]
        log_probs = logits.log_softmax(dim=-1).gather(-1, experience.sequences[:, 1:, None])[..., 0].where(mask, 0.0)
        experience.log_probs_ref = log_probs.detach()
        policy.zero_grad()
        train.policy_loss(setup.config, log_probs, experience, len(experience))[0].sum().backward()
        found[name] = flat({key: weight.grad for key, weight in policy.named_parameters()})
    exact = found.pop("exact")
    errors = {name: np.linalg.norm(gradient - exact) / np.linalg.norm(exact) for name, gradient in found.items()}
    assert errors["JavaScript"] < max(1e-5, 1.5 * errors["PyTorch"]), errors


# Its parts -----------------------------------------------------------------------------------------------------------


def in_node(tmp_path, expression: str, given) -> list:
    """The value of an expression of `lab`, the exports of the scripts, and `given`."""
    (tmp_path / "lab.mjs").write_text(data.worker_script(is_module=True), encoding="utf-8")
    (tmp_path / "given.json").write_text(json.dumps(given), encoding="utf-8")
    program = "globalThis.postMessage = () => {}; const lab = await import('./lab.mjs');"
    program += "const given = JSON.parse((await import('node:fs')).readFileSync('given.json'));"
    program += f"console.log(JSON.stringify({expression}));"
    command = ["node", "--input-type=module", "-e", program]
    return json.loads(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)


def test_keyed_numbers_and_orders_are_those_of_numpy(tmp_path):
    names = [["tokens", 0, 7], ["tokens", 3, 1, 4095, 7], ["minibatches", 2**40 + 5, 0], ["", 0]]
    orders = [(4096, 16, step, seed) for step in (1, 256, 257, 1000) for seed in (0, 7, 2**33 + 5)] + [(5, 2, 9, 1)]
    source = (
        "{ numbers: given[0].map((k) => { const g = lab.keyed_generator(...k); return [0, 0, 0, 0, 0, 0].map(() => "
    )
    source += "g.random()); }), orders: given[1].map((o) => lab.prompts_of_step(...o)) }"
    found = in_node(tmp_path, source, [names, orders])
    assert found["numbers"] == [keyed_generator(*name).random(6).tolist() for name in names]
    assert found["orders"] == [all_prompts_of_step(*order) for order in orders]


def texts_of_tags(count: int) -> list[str]:
    """Soups of what an answer is made of, in any order."""
    parts = ["<think>", "</think>", "<answer>", "</answer>", "58", "+58.0", "0,058", "1,234", " ", "\n", "\x1c", "\x85"]
    parts += ["<", "x", "-0", "58 ", "<think>a</think>", "<answer>58</answer>", "٥٨", "\ufeff", "\u2003", "é", "😀"]
    draw = random.Random(0)
    return ["".join(draw.choices(parts, k=draw.randint(0, 9))) for _ in range(count)]


def test_rewards_are_those_of_the_task(tmp_path):
    texts, answers = texts_of_tags(6000), ["58", "-0", "1234", "x", 58]
    pairs = [[text, answers[i % len(answers)]] for i, text in enumerate(texts)]
    source = "given.map(([t, a]) => ({...lab.arithmetic_reward(t, a), reasoned: +lab.is_reasoned(t)}))"
    found = in_node(tmp_path, source, pairs)
    for (text, answer), values in zip(pairs, found, strict=True):
        expected = arithmetic.reward({"answer": answer}, text)
        expected["reasoned"] = arithmetic.describe({}, text)["reasoned"]
        assert values == expected, text
    assert 50 < sum(values["correct"] for values in found) < len(found) / 2


def test_texts_become_the_ids_of_the_tokenizer_and_back(tmp_path, tokenizer):
    rows = [json.loads(line) for line in data.QUESTIONS.read_text(encoding="utf-8").splitlines()]
    asked = [row["question"] for row in rows[:300]] + [f"a{text}b<|im_end|>" for text in texts_of_tags(500)]
    draw = random.Random(1)
    ids = [[draw.randrange(1024) for _ in range(draw.randint(0, 12))] for _ in range(500)]
    source = (
        "(() => { const t = new lab.Tokenizer(given[0]); return { prompts: given[1].map((q) => t.encode_prompt(q)),"
    )
    source += "texts: given[2].map((ids) => t.decode(ids)) }; })()"
    found = in_node(tmp_path, source, [data.lab_data()["data"]["tokenizer"], asked, ids])
    assert found["texts"] == [decode(tokenizer, some) for some in ids]
    for question, prompt in zip(asked, found["prompts"], strict=True):
        assert prompt == encode_prompt(tokenizer, [{"role": "user", "content": question}]), question


def test_defaults_are_those_of_the_experiments(tmp_path, load_script):
    names = list(EXPERIMENTS)
    for name, settings in zip(
        names, in_node(tmp_path, "given.map((algorithm) => lab.settings_of({algorithm}))", names), strict=True
    ):
        train = load_script(f"{EXPERIMENTS[name][0]}/train.py")
        config = train.parse_config(train.Config, [], description="")
        own = {key: getattr(config, key) for key in OF_NODE if hasattr(config, key)}
        rows = own.pop("prompts_per_step") * own.pop("group_size")
        assert rows == settings["prompts_per_step"] * settings["group_size"]
        assert own == {key: settings[key] for key in own}, name


# The worker ----------------------------------------------------------------------------------------------------------


def test_the_worker_answers(tmp_path):
    """Steps, rewind, change, a question, rewards that cannot be used, and a learning rate that is far too large."""
    small = {key: value for key, value in SMALL.items() if key != "steps"} | {"kl_weight": 0, "prompts_per_step": 2}
    (tmp_path / "lab.mjs").write_text(data.worker_script(is_module=True), encoding="utf-8")
    (tmp_path / "input.json").write_text(json.dumps({"loaded": data.lab_data(), "settings": small}), encoding="utf-8")
    command = ["node", "--expose-gc", data.ROOT / "tests" / "lab_worker.mjs", tmp_path]
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert out["again"] == out["first"]  # the weights after seven steps, and after rewinding to six and one step
    assert out["changed"] != out["first"]
    assert out["answers"][0] != out["answers"][1] or out["first"] == out["changed"]
    assert out["after"] < 1e-9  # the log-probs after the newest step are those of the weights of now
    assert out["errors"][:5] == [
        "lr must be a number above 0, not NaN.",
        "minibatch_size must be complete groups, a multiple of 4, not 6.",
        "There is no algorithm x.",
        'The reward returned x, which is a string, at the completion "<think>20+38=58</think><answer>58</answer>": '
        "it must be a number.",
        'The reward failed at the completion "<think>20+38=58</think><answer>58</answer>": nothing is defined here.',
    ]
    assert "is no JavaScript" in out["errors"][5]
    assert "not finite" in out["errors"][6]
    assert out["growth"] < 4e6, "bytes, in 40 steps"


@pytest.mark.skipif(not all(map(shutil.which, ("clang", "wasm-ld"))), reason="needs clang and lld")
def test_the_kernels_are_compiled_from_their_source(tmp_path):
    version = subprocess.run(["clang", "--version"], capture_output=True, text=True).stdout
    source = (data.HERE / "kernels.c").read_text(encoding="utf-8")
    if (wanted := "clang version 14.0.6") not in version:
        pytest.skip(f"another compiler than {wanted} makes other bytes")
    command = source.split("//     clang ")[1].split("kernels.c\n")[0].replace("\\\n//", "").split()
    command = ["clang", *command[: command.index("-o")], "-o", tmp_path / "kernels.wasm", data.HERE / "kernels.c"]
    subprocess.run(command, check=True)
    assert (tmp_path / "kernels.wasm").read_bytes() == (data.HERE / "kernels.wasm").read_bytes()
