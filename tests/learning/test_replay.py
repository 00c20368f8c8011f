"""Two steps of every experiment, from its command line, computed again with plain transformers and slow loops.

The run's samples.jsonl gives ids, masks, returns, and the rows of each minibatch. Everything else is computed here, one
row at a time: draws, log-probs, advantages, terms, pushes, values, clipped gradients, learning rates, and weights.
"""

import copy
import math
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pytest
import torch
from oracle import FORMULAS, slow_row
from peft import PeftModel
from policies import read_plain
from run_files import ROOT, json_of, read_lines, rows_of, write_rows
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from common.keyed import keyed_generator

from harness.base.config import BUNDLED
from harness.base.places import in_experiments
from harness.data.order import prompts_of_step

EXPERIMENTS = {path.parent.name.removeprefix("experiment_"): path for path in in_experiments("train.py")}
# A run gets the flags that its experiment has. Of two groups, samples.jsonl has all rows
FLAGS = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 12, "epochs_per_step": 2, "minibatch_size": 4}
FLAGS |= {"micro_batch_size": 3, "temperature": 1.3, "lr": 3e-5, "weight_decay": 2.0, "max_grad_norm": 0.1, "steps": 2}
FLAGS |= {"clip_eps": 0.03, "kl_weight": 1.0, "lr_schedule": "cosine", "seed": 8, "max_prompts": 192, "epochs": None}
FLAGS |= {"pairs_per_step": 2, "max_pairs": 2, "eval_prompts": 1, "eval_every": 1, "checkpoint_every": 0, "name": "x"}
FLAGS_OF = {
    "reinforce": {"lr": 1e-5},
    "drgrpo": {"lr_warmup_steps": 2},
    "accelerate": {"lr_schedule": "linear"},
    "multiturn_tool_calling": {"max_new_tokens": 48},
    "multiturn_qa": {"max_new_tokens": 48},
    "world": {"max_new_tokens": 30, "max_turn_tokens": 4},
    "engine": {"importance_cap": 0.9},
    "asynchronous": {"lag": 1, "correction": "clip"},
    "dapo": {"reward_functions": None, "clip_eps_high": 0.05},
    "gspo": {"clip_eps": 0.01, "clip_eps_high": 0.02},
    "cispo": {"ratio_cap": 1.05},
    "ppo": {"gamma": 0.95, "gae_lambda": 0.9, "critic_lr_factor": 5.0, "value_clip": 0.02},
    "critic": {"gamma": 0.95, "gae_lambda": 0.9, "max_new_tokens": 30, "max_turn_tokens": 4},
    "likelihood": {"max_new_tokens": 40},
    "dpo": {"epochs": 2, "beta": 0.3},
    "reward_model": {"epochs": 2},
    "rejection": {"lr": 1e-5, "sft_batch_size": 2, "keep_per_question": 2, "keep_above": 0.2},
    "self_distill": {
        "model": "tiny",
        "success_threshold": 0.4,
        "divergence": "forward",
        "weight_cap": 1.5,
        "teacher_update_rate": 0.3,
        "lr": 1e-5,
    },
    "sft": {"model": "tiny", "epochs": 2, "warmup_steps": 2},
}
LIKE_OTHERS = {"accelerate", "accelerate_ddp", "mesh", "multiturn_qa"}  # with one process, or another tool
LIKE_OTHERS |= {"majority"}  # with another reward: unit/test_majority.py
LIKE_OTHERS |= {"world"}  # as in tool calling; its credits: unit/test_turn_credit.py
LIKE_OTHERS |= {"critic"}  # as PPO; its rewards: unit/test_turn_credit.py
LIKE_OTHERS |= {"self_distill"}  # as distillation, with another teacher
LIKE_OTHERS |= {"likelihood", "engine"}  # with another reward: unit/test_likelihood.py; with another sampler: engine/
CRITICS = {"ppo", "critic"}
GIVEN = {"sft", "dpo", "reward_model"}  # rows that are not sampled
# Returns that differ in every group: without them only rounding has a gradient, which AdamW enlarges
REWARD = "def varied(completions, **_):\n    return [sum(map(ord, str(text))) % 7 / 7 for text in completions]\n"
FORMULA = {Path(name).name.removeprefix("experiment_"): formulas[0][0] for name, formulas in FORMULAS.items()}
# DAPO's with a symmetric clip, and CISPO's at a ratio of 1, with rows in place of tokens
FORMULA |= {"distill": "dapo", "self_distill": "dapo", "reinforce": "cispo", "rejection": "cispo"}
ADVANTAGE = {  # of a return in a group; `baseline`: the running mean
    "reinforce": lambda reward, group, baseline: reward - baseline,
    "drgrpo": lambda reward, group, baseline: reward - fmean(group),
    "likelihood": lambda reward, group, baseline: reward - (sum(group) - reward) / (len(group) - 1),
    "rloo": lambda reward, group, baseline: reward - (sum(group) - reward) / (len(group) - 1),
    "maxrl": lambda reward, group, baseline: (reward - fmean(group)) / fmean(group),
    "others": lambda reward, group, baseline: (reward - fmean(group)) / (stdev(group) + 1e-4),
}


def conversation(prompt: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


ROWS = read_lines(ROOT / "data" / "preference_pairs.jsonl")[:2]
PAIRS = [[conversation(row["prompt"], row[name]) for name in ("chosen", "rejected")] for row in ROWS]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in EXPERIMENTS]
)
def test_two_steps_are_those_of_slow_loops(name, tmp_path, load_script, stand_in, monkeypatch):
    train = load_script(EXPERIMENTS[name].relative_to(ROOT).as_posix())
    given = FLAGS | {"device": "cpu", "runs_dir": tmp_path, "reward_functions": tmp_path / "rewards.py"}
    given["reward_functions"].write_text(REWARD)
    given |= {"engine_url": stand_in().url} if name == "engine" else {}
    given |= {"data": tmp_path / "chats.jsonl"} if name == "sft" else {}
    write_rows(tmp_path / "chats.jsonl", [{"messages": chosen} for chosen, _ in PAIRS])
    flags = {flag: value for flag, value in (given | FLAGS_OF.get(name, {})).items() if hasattr(train.Config, flag)}
    command = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items() if value is not None]
    directory = tmp_path / EXPERIMENTS[name].parent.name / "x"
    train.main(command)
    replay = Replay(name, directory)
    replay.check_metrics(1)
    replay.check_metrics(2)
    replay.check_weights()


class Replay:
    """The models of a run as they should be."""

    def __init__(self, name: str, directory: Path):
        self.name, self.directory, self.config = name, directory, json_of(directory / "config.json")
        path = BUNDLED[self.config["model"]]
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(path), read_plain(path)
        if name == "reward_model":
            self.model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
            generator = torch.Generator().manual_seed(self.config["seed"])
            nn.init.normal_(self.model.score.weight, std=0.02, generator=generator)
        self.trained = {"model": self.model}
        if name in CRITICS:
            head = nn.Linear(self.model.config.hidden_size, 1)
            nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
            self.trained["critic"] = nn.ModuleDict({"decoder": copy.deepcopy(self.model.model), "head": head})
        self.before = copy.deepcopy(self.trained)
        self.other = self.before["model"]  # whose log-probs are compared with the policy's
        if name == "distill":
            self.other = PeftModel.from_pretrained(copy.deepcopy(self.model), BUNDLED["tiny_teacher"])
        if name == "self_distill":
            self.other = copy.deepcopy(self.model)  # the teacher, whose weights are averaged
        groups = [{"params": module.parameters()} for module in self.trained.values()]
        betas = (0.9, 0.99 if name == "sft" else 0.999)
        self.optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=self.config["weight_decay"])
        self.baseline = 0.0

    def check_metrics(self, step: int) -> None:
        expected = (self.learn_given if self.name in GIVEN else self.learn_samples)(step)
        (found,) = (row for row in rows_of(self.directory) if row["step"] == step and "loss/total" in row)
        rel = 1e-4 if step == 1 else 1e-3  # after an update of AdamW, which enlarges the rounding of small gradients
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=rel, abs=1e-6)
        assert found["lr"] == pytest.approx(self.config["lr"] * self.share_of_rate(step))
        assert self.name == "sft" or any(key.startswith("eval/") for key in found)  # of two rows, none is held out
        assert (self.name in GIVEN) == ("policy/sampling_log_prob_difference" not in found)
        # the flags reach every limit
        assert step == 2 or all(found[key] for key in ("policy/clipped", "policy/capped") if key in found)
        assert self.name != "dapo" or found["sampling/groups"] > FLAGS["prompts_per_step"]

    def check_weights(self) -> None:
        for name, module in self.trained.items():
            found, before = load_file(self.directory / "final" / f"{name}.safetensors"), self.before[name].state_dict()
            expected = {key: weight.detach() for key, weight in module.named_parameters()}
            assert found.keys() == expected.keys()
            errors, moves = ([found[key] - start[key] for key in found] for start in (expected, before))
            assert max(error.abs().max().item() for error in errors) < 2.5e-5
            assert norm_of(errors) < 3e-3 * norm_of(moves)

    def share_of_rate(self, step: int) -> float:
        """The learning rate of a step, as a share of --lr."""
        if self.name == "sft":
            final, cosine = self.config["final_lr"], (1 + math.cos(math.pi * step / 2)) / 2
            return min(1, step / self.config["warmup_steps"]) * (final + (1 - final) * cosine)
        if step <= (warmup := self.config["lr_warmup_steps"]):
            return step / warmup
        share = (step - 1 - warmup) / (2 - warmup)
        return 1 - share if self.config["lr_schedule"] == "linear" else (1 + math.cos(math.pi * share)) / 2

    def update(self, step: int, loss: torch.Tensor) -> float:
        """Take a step down the clipped gradient; returns its norm before clipping."""
        self.optimizer.zero_grad()
        loss.backward()
        groups = self.optimizer.param_groups
        gradients = [weight.grad for group in groups for weight in group["params"]]
        norm = norm_of(gradients)
        for gradient in gradients:
            gradient *= min(1, self.config.get("max_grad_norm", math.inf) / (norm + 1e-6))
        for group, factor in zip(groups, (1, self.config.get("critic_lr_factor")), strict=False):
            group["lr"] = factor * self.config["lr"] * self.share_of_rate(step)
        self.optimizer.step()
        return norm

    # Of the n action tokens of a row

    def distribution(self, model: nn.Module, row: dict) -> torch.Tensor:
        """The log-probs (n, V) of all tokens of the vocabulary."""
        logits = model(input_ids=torch.tensor([row["ids"]])).logits[0].double() / self.config.get("temperature", 1.0)
        return logits.log_softmax(dim=-1)[[t - 1 for t in places(row)]]

    def log_probs(self, model: nn.Module, row: dict) -> torch.Tensor:
        return self.distribution(model, row)[range(len(places(row))), actions(row, "ids")]

    def values(self, row: dict) -> torch.Tensor:
        hidden = self.trained["critic"]["decoder"](input_ids=torch.tensor([row["ids"]])).last_hidden_state[0]
        return self.trained["critic"]["head"](hidden)[[t - 1 for t in places(row)], 0].double()

    # Steps, which return metrics

    def learn_given(self, step: int) -> dict[str, float]:
        """From all conversations or pairs at once."""
        pairs = [[self.encode(messages) for messages in pair] for pair in PAIRS]
        if self.name == "sft":
            loss, metrics = -torch.cat([self.log_probs(self.model, chosen) for chosen, _ in pairs]).mean(), {}
        else:
            margins = torch.stack([self.score(chosen) - self.score(rejected) for chosen, rejected in pairs])
            loss, metrics = (1 + (-margins).exp()).log().mean(), {"preference/margin": margins.mean().item()}
        return metrics | {"loss/total": loss.item(), "loss/grad_norm": self.update(step, loss)}

    def encode(self, messages: list[dict]) -> dict:
        ids = self.tokenizer.apply_chat_template(messages, return_dict=False)
        start = len(self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))
        end = len(ids) - ids[::-1].index(self.tokenizer.eos_token_id)
        return {"ids": ids, "action_mask": [int(start <= t < end) for t in range(len(ids))]}

    def score(self, row: dict) -> torch.Tensor:
        if self.name == "reward_model":
            return self.model.score(self.model.model(input_ids=torch.tensor([row["ids"]])).last_hidden_state[0, -1])[0]
        return self.config["beta"] * (self.log_probs(self.model, row) - self.log_probs(self.other, row)).sum()

    def learn_samples(self, step: int) -> dict[str, float]:
        rows = [row for row in rows_of(self.directory, "samples") if row["step"] == step]
        assert len(rows) == self.config["prompts_per_step"] * self.config["group_size"]
        for index, row in enumerate(rows):
            row["hinted"] = self.hinted(rows, index)
            self.score_and_draw(step, row)
        self.add_advantages(rows)
        minibatches: dict[tuple[int, int], list] = {}
        for row in rows:
            epochs = [update["epoch"] for update in row["updates"]]
            is_used = self.name != "rejection" or row["advantage"] > 0
            assert self.name == "reinforce" or epochs == [*range(self.config["epochs_per_step"] * is_used)]
            for update in row["updates"]:
                minibatches.setdefault((update["epoch"], update["minibatch"]), []).append((row, update))
        updates = [self.learn(step, minibatches[place], len(rows)) for place in sorted(minibatches)]
        losses, norms = zip(*updates, strict=True)
        if self.name == "self_distill":
            rate = self.config["teacher_update_rate"]
            for average, weight in zip(self.other.parameters(), self.model.parameters(), strict=True):
                average.data = (1 - rate) * average.data + rate * weight.data
        return {"loss/total": fmean(losses), "loss/grad_norm": fmean(norms)}

    def hinted(self, rows: list[dict], index: int) -> dict:
        """The row with another prompt: the first right other completion of its group is a hint."""
        row, size = rows[index], self.config["group_size"]
        group = rows[index // size * size :][:size] if self.name == "self_distill" else []
        right = [other["text"] for other in group if other["return"] >= self.config["success_threshold"]]
        demonstrations = [text for text in right if text != row["text"]]
        if not demonstrations:
            return row
        asked = f"{row['question']}\n\nA correct answer:\n{demonstrations[0]}\n\nNow write a correct answer."
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=False
        )
        completion = actions(row, "ids")
        mask = [0] * len(prompt) + [1] * len(completion)
        return {"ids": prompt + completion, "action_mask": mask}

    @torch.no_grad()
    def score_and_draw(self, step: int, row: dict) -> None:
        """A token is drawn if its part of [0, 1), where the probabilities lie end to end, has the keyed number."""
        drawn_by = self.before["model"] if self.name == "asynchronous" else self.model  # of its two steps both
        scores, seed, size = self.distribution(drawn_by, row), self.config["seed"], self.config["prompts_per_step"]
        row["old"] = scores[range(len(scores)), actions(row, "ids")].tolist()
        is_hinted = self.name != "self_distill" or row["hinted"] is not row
        row["other"] = self.log_probs(self.other, row["hinted"]).tolist() if is_hinted else row["old"]
        row["values"] = self.values(row).tolist() if self.name in CRITICS else None
        for name, expected in (("sampler_log_probs", "old"), ("old_log_probs", "old"), ("log_probs_ref", "other")):
            assert row[name] is None or actions(row, name) == pytest.approx(row[expected], abs=1e-4)
        if self.name == "engine":  # it has random numbers of its own
            return
        questions = prompts_of_step(FLAGS["max_prompts"], size * self.config.get("max_rounds", 1), step, seed)
        first = questions.index(row["prompt_index"]) // size * size  # of its round
        key = (seed, step, *((first,) if self.name == "dapo" else ()), row["prompt_index"], row["completion_index"])
        numbers = keyed_generator("tokens", *key).random(len(scores))
        drawn = len(scores) - self.num_given(row)
        for number, probs, token in list(zip(numbers, scores.exp(), actions(row, "ids"), strict=True))[:drawn]:
            end = probs[: token + 1].sum().item()
            assert end - probs[token].item() - 1e-5 < number < end + 1e-5

    def num_given(self, row: dict) -> int:
        """The tokens of the reference answer, which follows the one beginning of an answer."""
        begin, end = self.tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])
        if self.name != "likelihood" or begin not in actions(row, "ids"):
            return 0
        reference = [*self.tokenizer.encode(row["answer"], add_special_tokens=False), end]
        ids = actions(row, "ids")
        assert ids[ids.index(begin) + 1 :] == reference
        return len(reference)

    def add_advantages(self, rows: list[dict]) -> None:
        """Of each token; for a critic also its targets."""
        size, budget = self.config["group_size"], self.config["max_new_tokens"]
        returns = [row["return"] for row in rows]
        if self.name == "dapo":
            buffer = self.config["overlong_buffer"] * budget
            excess = [len(places(row)) - (budget - buffer) for row in rows]
            returns = [row["rewards"]["correct"] - max(0, x / buffer) for row, x in zip(rows, excess, strict=True)]
        for index, (row, reward) in enumerate(zip(rows, returns, strict=True)):
            group = returns[index // size * size :][:size]
            advantage = ADVANTAGE.get(self.name, ADVANTAGE["others"])(reward, group, self.baseline)
            row["advantages"] = [advantage] * len(places(row))
            if self.name == "likelihood":
                assert reward == pytest.approx(row["rewards"]["varied"] + row["rewards"]["likelihood"], abs=1e-5)
                assert (self.num_given(row) > 0) == (row["rewards"]["likelihood"] > 0)
            if count := self.num_given(row):
                product = math.exp(sum(row["old"][-count:]))
                assert row["rewards"]["likelihood"] == pytest.approx(product, rel=1e-3)
                row["advantages"][-count:] = [product] * count
            if self.name == "rejection":  # of equally good ones the first are kept
                better = sum(x > reward for x in group) + group[: index % size].count(reward)
                is_kept = reward > self.config["keep_above"] and better < self.config["keep_per_question"]
                row["advantages"] = [float(is_kept)] * len(places(row))
            if self.name == "distill":
                row["advantages"] = [teacher - old for teacher, old in zip(row["other"], row["old"], strict=True)]
            if self.name == "self_distill":
                weights = [math.exp(teacher - old) for teacher, old in zip(row["other"], row["old"], strict=True)]
                row["advantages"] = [min(w, self.config["weight_cap"]) - 1 for w in weights]
            if self.name in CRITICS:
                row["advantages"] = slow_gae(
                    earned(row), row["values"], self.config["gamma"], self.config["gae_lambda"]
                )
                row["targets"] = [a + value for a, value in zip(row["advantages"], row["values"], strict=True)]
        self.baseline += 0.1 * (fmean(returns) - self.baseline)
        of_all = [advantage for row in rows for advantage in row["advantages"]]
        for row in rows:
            if self.name in CRITICS:
                row["advantages"] = [(a - fmean(of_all)) / (pstdev(of_all) + 1e-4) for a in row["advantages"]]
            assert row["advantage"] == pytest.approx(fmean(row["advantages"]), abs=1e-5)
            if self.name == "engine":
                weighted = zip(row["advantages"], row["old"], actions(row, "sampler_log_probs"), strict=True)
                cap = self.config["importance_cap"]
                row["advantages"] = [min(math.exp(old - own), cap) * advantage for advantage, old, own in weighted]

    def learn(self, step: int, minibatch: list[tuple[dict, dict]], num_rows: int) -> tuple[float, float]:
        """One update; returns the loss and the norm of its gradient."""
        config, total, loss = self.config, 0.0, torch.zeros(())
        is_reinforce = self.name in ("reinforce", "rejection")
        num_rows = len(minibatch) if self.name == "rejection" else num_rows
        num_tokens = num_rows if is_reinforce else sum(len(places(row)) for row, _ in minibatch)
        settings = {"num_rows": len(minibatch), "num_tokens": num_tokens, "budget": config["max_new_tokens"]}
        settings |= {"kl_weight": config.get("kl_weight", 0.0)}
        settings |= {name: config[name] for name in ("clip_eps", "clip_eps_high", "ratio_cap") if name in config}
        for row, update in minibatch:
            log_probs, count = self.log_probs(self.model, row), len(places(row))
            old = None if is_reinforce else row["old"]
            given = ([1] * count, log_probs.tolist(), row["advantages"], old, row["other"])
            terms, pushes = slow_row(FORMULA[self.name], *given, **settings)
            total, loss = total + sum(terms), loss - (torch.tensor(pushes) * log_probs).sum()
            expected = {"terms": terms, "push": pushes}
            if self.name in CRITICS:
                losses = slow_value_losses(self.values(row), row["values"], row["targets"], config["value_clip"])
                expected["critic/loss"], loss = losses.tolist(), loss + losses.mean() / len(minibatch)
            logged = {"action_mask": row["action_mask"]} | update
            assert actions(logged, "log_probs") == pytest.approx(log_probs.tolist(), abs=5e-4)
            for name, values in expected.items():
                assert actions(logged, name) == pytest.approx(values, abs=1e-5), name
        return total, self.update(step, loss)


def earned(row: dict) -> list[float]:
    """The reward of each action token: a turn's comes with its last one, and a completion's with its last of all."""
    rewards, turns = [], list(row["episode"]["rewards"]) if "episode" in row else [row["return"]]
    for t in places(row):
        is_last = t + 1 == len(row["ids"]) or not row["action_mask"][t + 1]
        rewards.append(turns.pop(0) if is_last and ("episode" in row or t == places(row)[-1]) else 0.0)
    assert not turns
    return rewards


def slow_gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * gae_lambda * next_advantage
        advantages.insert(0, next_advantage)
        next_value = value
    return advantages


def slow_value_losses(values: torch.Tensor, old: list[float], targets: list[float], clip: float) -> torch.Tensor:
    losses = []
    for value, before, target in zip(values, old, targets, strict=True):
        limited = before + min(max(value - before, values.new_tensor(-clip)), values.new_tensor(clip))
        losses.append(max((value - target) ** 2, (limited - target) ** 2) / 2)
    return torch.stack(losses)


def places(row: dict) -> list[int]:
    return [t for t, is_action in enumerate(row["action_mask"]) if is_action]


def actions(row: dict, name: str) -> list:
    return [row[name][t] for t in places(row)]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
