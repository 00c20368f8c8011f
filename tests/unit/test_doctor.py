"""The loss doctor: our own code passes, and only the right check finds each planted mistake."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from oracle import FORMULAS
from rich.console import Console

import doctor.apart
from doctor.__main__ import main, print_report
from doctor.examine import examine
from doctor.findings import GALLERY, NOT_EXAMINED, NOTE, OK, TRAP, Report

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "docs/loss_template.py").read_text(encoding="utf-8")

# Parts of the template that get planted mistakes
RATIO = "    ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).exp()\n"
SURROGATE = "-torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)"
LENGTH = "mask.sum(dim=1).clamp(min=1)"
RETURN = f"return (token_loss.sum(dim=1) / {LENGTH}).sum() / num_rows"
K3 = "(log_r.exp() - log_r - 1)"
WITH_KL = f"torch.where(mask.bool(), token_loss + kl_weight * {K3}, 0.0)"
STD = "returns.std(dim=1, keepdim=True)"
GUARDED = f"torch.where(has_variance, centered / ({STD} + 1e-4), 0.0)"
SCORES = "torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)"
MASK = "return (is_completion & tool_mask.bool())[:, 1:]"
LEFT = "[pad_id] * (width - len(prompt)) + prompt"

SPAN = """place = torch.arange(mask.shape[1])
    last = (mask.long() * place).amax(dim=1, keepdim=True)
    span = (place >= mask.long().argmax(dim=1)[:, None]) & (place <= last) & mask.bool().any(dim=1)[:, None]
    """
MEAN_OVER_SPAN = "token_loss.sum() / span.sum()"
KL_OVER_THE_WIDTH = f"torch.where(mask.bool(), token_loss, 0.0) + kl_weight * {K3}.mean(1, True) * mask"
KL_OUTSIDE = "torch.where(mask.bool(), token_loss, 0.0) + kl_weight * (log_probs - log_probs_ref) ** 2"
WRITES = f"result = {RETURN[7:]}\n    mask.zero_()\n    return result"
NO_ENDS = "is_completion &= ~torch.isin(sequences, torch.tensor(end_of_turn_ids))\n    "
NO_GRAD = "model.eval()\n    with torch.no_grad()"
WITH_GRAD = "model.eval()\n    with torch.enable_grad()"

FIRST_LINES = {  # name: (expected traps, a line before the first line of the loss)
    "no end of turn": ("end_of_turn_masked", "mask = mask.bool() & mask.bool().roll(-1, dims=1)"),
    "mask to the right": ("off_by_one", "mask = mask.roll(1, dims=1)"),
    "tool output": ("tool_output_in_loss", SPAN + "mask = span"),
    "a token is missing": ("tokens_left_out", "mask = mask * (torch.arange(mask.shape[1]) != 4)"),
    "padding": ("padding_trained kl_over_padding", "mask = mask.bool() | (torch.arange(mask.shape[1]).flip(0) < 2)"),
    "prompt": ("prompt_trained", "mask = mask.bool() | (torch.arange(mask.shape[1]) < 3)"),
    "no_grad": ("zero_gradient", "log_probs = log_probs.detach()"),
    "whitened advantages": ("advantages_rescaled", "advantages = advantages / (advantages.std() + 0.1)"),
}
BUGS = {name: (found, RATIO, f"    {line}\n{RATIO}") for name, (found, line) in FIRST_LINES.items()} | {
    # name: (expected traps, old text, new text)
    "mean of micro-batches": ("micro_batch_mean", "/ num_rows", "/ len(mask)"),
    "token mean": ("micro_batch_mean declared", RETURN, "return token_loss.sum() / mask.sum()"),
    "length with tool output": ("tool_output_in_loss", RETURN, SPAN + RETURN.replace("mask", "span")),
    "length with prompt": ("prompt_trained", LENGTH, f"({LENGTH} + 3)"),
    "tokens with tool output": ("tool_output_in_loss micro_batch_mean", RETURN, f"{SPAN}return {MEAN_OVER_SPAN}"),
    "KL over the width": ("kl_over_padding", WITH_KL, KL_OVER_THE_WIDTH),
    "KL outside the mask": ("kl_over_padding", WITH_KL, KL_OUTSIDE),
    "maximum": ("clip", "torch.minimum", "torch.maximum"),
    "no clip": ("clip", SURROGATE, "-ratio * advantages"),
    "another clip range": ("clip", "1 + clip_eps", "1 + 2 * clip_eps"),
    "sign": ("sign", "-torch.minimum", "torch.minimum"),
    "old over new": ("sign", "log_probs - old_log_probs", "old_log_probs - log_probs"),
    "detached": ("zero_gradient", "log_probs - old_log_probs", "log_probs.detach() - old_log_probs"),
    "width": ("padded_width", RETURN, "return token_loss.sum() / mask.shape[1] / num_rows"),
    "another denominator": ("declared", RETURN, "return token_loss.sum() / max_new_tokens / num_rows"),
    "empty row": ("empty_row", LENGTH, "mask.sum(dim=1)"),
    "k1": ("kl_gradient", K3, "(-log_r)"),
    "sign of the KL": ("kl_gradient", "token_loss + kl_weight", "token_loss - kl_weight"),
    "detached KL": ("kl_gradient", "log_probs_ref - log_probs", "log_probs_ref - log_probs.detach()"),
    "KL off policy": ("whole_loss", K3, f"{K3} * ratio.detach() ** 2"),
    "writes to the mask": ("inputs_changed", RETURN, WRITES),
    "std of the batch": ("std_wrong_axis", STD, "returns.std()"),
    "rounding": ("equal_rewards_noise", GUARDED, f"centered / ({STD} + 1e-8)"),
    "no baseline": ("baseline equal_rewards_noise", "returns - returns.mean", "returns + 0 * returns.mean"),
    "upside down": ("advantage_sign", "returns - returns.mean", "-returns + returns.mean"),
    "no temperature": ("no_temperature", " / temperature", ""),
    "logits at the token": ("off_by_one", "logits[:, :-1]", "logits[:, 1:]"),
    "bfloat16": ("log_probs_in_bfloat16", "logits[:, :-1].float()", "logits[:, :-1]"),
    "log of softmax": ("log_of_softmax", SCORES, SCORES.replace("log_softmax", "softmax") + ".log()"),
    "detached log-probs": ("gradient_of_log_probs", SCORES, SCORES + ".detach()"),
    "mask from pad": ("mask_from_pad", "(place < lengths[:, None])", "(sequences != pad_id)"),
    "mask without ends": ("end_of_turn_masked", MASK, NO_ENDS + MASK),
    "mask with prompt": ("prompt_trained", "(place >= prompt_lengths[:, None]) & ", ""),
    "mask not shifted": ("off_by_one", MASK, MASK.replace("1:", ":-1")),
    "mask with tools": ("tool_output_in_loss", " & tool_mask.bool()", ""),
    "mask with padding": ("padding_trained", " & (place < lengths[:, None])", ""),
    "right padding": ("right_padding_generation", LEFT, "prompt + [pad_id] * (width - len(prompt))"),
    "attention from ids": ("prompt_attention", "return ids, torch", "return ids, (ids != pad_id).long()\n    torch"),
    "dropout": ("reference_dropout", "model.eval()", "pass"),
}
IN_ADVANTAGES = "    advantages = advantages - kl_weight * (log_probs - log_probs_ref).detach()\n    kl_weight = 0\n"
BONUS = "    advantages = advantages - 0.01 * torch.where(mask.bool(), log_probs.detach(), 0.0)\n"
OF_SUMS = "kl_weight * mask.sum(dim=1, keepdim=True) / 8 *"
OF_SEQUENCES = f"    ratio = ratio.log().sum(dim=1)[:, None].div({LENGTH}[:, None]).exp() + 0 * mask\n"
DUAL = f"torch.where(advantages < 0, ({SURROGATE}).minimum(-3 * advantages), {SURROGATE})"
VARIANTS = {  # name: (check, part of its sentence, old text, new text); other losses, but no mistakes
    "Dr. GRPO": ("normalisation", "Dr. GRPO", RETURN, "return token_loss.sum() / max_new_tokens / num_rows"),
    "token mean": ("normalisation", "DAPO", RETURN, "return token_loss.sum() / num_tokens"),
    "k2": ("kl_gradient", "of k2", K3, "(log_r**2 / 2)"),
    "k3 times ratio": ("whole_loss", "by the ratio", "kl_weight *", "kl_weight * ratio *"),
    "KL in the advantages": ("whole_loss", "of the advantages", RATIO, IN_ADVANTAGES + RATIO),
    "a KL of sums": ("kl_gradient", "weighs the rows", "kl_weight *", OF_SUMS),
    "SAPO": ("clip", "another surrogate", SURROGATE, "-torch.sigmoid(4 * (ratio - 1)) * advantages"),
    "CISPO": ("clip", "CISPO", SURROGATE, "-ratio.clamp(max=1 + clip_eps).detach() * advantages * log_probs"),
    "policy gradient": ("clip", "does not depend on the ratio", SURROGATE, "-log_probs * advantages"),
    "GSPO": ("clip", "of a sequence", RATIO, RATIO + OF_SEQUENCES),
    "entropy bonus": ("kl_gradient", "such as an entropy bonus", RATIO, BONUS + RATIO),
    "dual clip": ("clip", "dual clip at 3", SURROGATE, DUAL),
    "writes to log-probs": ("inputs_changed", ": log_probs.", RETURN, WRITES.replace("mask.", "log_probs.detach().")),
    "no std": ("divisor", "Dr. GRPO", f" / ({STD} + 1e-4)", ""),
    "little noise": ("equal_rewards_noise", "but for at most", GUARDED, f"centered / ({STD} + 1e-4)"),
    "reference with gradient": ("reference_gradient", "have a gradient", NO_GRAD, WITH_GRAD),
}


@pytest.fixture
def examine_text(tmp_path):
    """Examine a file with the given text."""

    def run(text: str) -> Report:
        (tmp_path / "my_loss.py").write_text(text, encoding="utf-8")
        return examine(tmp_path / "my_loss.py")

    return run


def traps(report: Report) -> set[str]:
    return {finding.check for finding in report.findings if finding.status == TRAP}


def planted(old: str, new: str) -> str:
    """The template with a change, without the functions that are not concerned."""
    assert old in TEMPLATE
    head, *functions = TEMPLATE.split("\n\n\ndef ")
    needed = [text for text in functions if old in text or ("model.eval()" in old and text.startswith("log_probs("))]
    return "\n\n\ndef ".join([head, *needed]).replace(old, new)


OURS = {"docs/loss_template.py": 37, "docs/loss_ours.py": 38}  # the number of checks; one is for terms
# Their clips are other ones, so the whole loss is not compared
NOT_PPO = {"policy_gradients/gspo", "policy_gradients/cispo"}
TRAIN = {f"{name}/train.py": 18 - 2 * (name in NOT_PPO) for name in FORMULAS}


@pytest.mark.parametrize(("path", "count"), (OURS | TRAIN).items())
def test_our_own_code_passes_all_checks(path, count):
    report = examine(ROOT / path)
    assert report.errors == []
    left_out = {finding.check for finding in report.findings if finding.status not in (OK, NOTE)}
    assert left_out <= ({"clip", "whole_loss"} if str(Path(path).parent) in NOT_PPO else set())
    assert report.count(TRAP) == 0
    assert report.count(OK) == count


@pytest.mark.parametrize(("returned", "found"), [
    ("terms", set()),
    ("(terms, {})", set()),
    ('{"loss": terms.sum(), "terms": terms}', set()),
    ('{"loss": terms.sum(), "terms": terms / 2}', {"terms"}),
    ("terms + (~mask.bool()) * log_probs", {"terms"}),
])  # fmt: skip
def test_a_function_may_return_a_loss_or_terms_or_both(examine_text, returned, found):
    text = "def policy_loss(log_probs, advantages, mask, num_rows):\n    "
    report = examine_text(f"{text}terms = -log_probs * advantages * mask / num_rows\n    return {returned}")
    assert report.errors == []
    assert traps(report) >= found if found else not traps(report)
    assert "terms" in {finding.check for finding in report.findings}


@pytest.mark.parametrize(("found", "old", "new"), BUGS.values(), ids=BUGS)
def test_a_planted_mistake_is_found_by_its_check(examine_text, found, old, new):
    report = examine_text(planted(old, new))
    assert report.errors == []
    assert traps(report) == set(found.split())
    numbers = [(f.expected, f.got) for f in report.findings if f.status == TRAP and f.check != "inputs_changed"]
    assert all(None not in pair and pair[0] != pair[1] for pair in numbers)


OF_PAIRS = """
def policy_loss(log_probs, log_probs_ref, mask):
    scores = ((log_probs - log_probs_ref) * mask).sum(dim=1)
    return -torch.nn.functional.logsigmoid(0.1 * (scores[0::2] - scores[1::2])).mean()
"""


@pytest.mark.parametrize(("old", "new", "found"), [
    ("", "", set()),
    (" * mask)", ")", {"prompt_trained", "tool_output_in_loss", "padding_trained", "padded_width"}),
    (" * mask)", " * mask.roll(1, 1))", {"off_by_one"}),
    (".sum(dim=1)", ".mean(dim=1)", {"padded_width"}),
    ("(log_probs -", "(log_probs.detach() + 0 * log_probs -", {"zero_gradient"}),
])  # fmt: skip
def test_a_loss_of_pairs_is_examined_as_far_as_it_has_no_advantages(examine_text, old, new, found):
    report = examine_text("import torch\n" + (OF_PAIRS.replace(old, new) if old else OF_PAIRS))
    assert report.errors == []
    assert traps(report) == found
    reasons = {finding.check: finding.sentence for finding in report.findings if finding.status == NOT_EXAMINED}
    assert {"sign", "clip", "whole_loss"} < reasons.keys()
    assert all(reason.startswith("The loss takes no advantages (as one of pairs") for reason in reasons.values())


def test_the_loss_of_dpo_has_no_trap_and_one_reason_is_shown_once(capsys):
    report = examine(ROOT / "rewards/dpo/train.py")
    assert (report.errors, report.count(TRAP), report.count(OK)) == ([], 0, 10)
    print_report(report, Console(width=200))
    shown = capsys.readouterr().out
    assert shown.count("The loss takes no advantages") == 1
    assert re.search("10 checks .*sign, .*whole_loss", shown.replace("\n", " "))


def test_every_trap_of_the_gallery_is_planted():
    assert set(GALLERY.split()) <= {check for found, _, _ in BUGS.values() for check in found.split()}


@pytest.mark.parametrize(("check", "part", "old", "new"), VARIANTS.values(), ids=VARIANTS)
def test_other_right_losses_are_named_and_no_traps(examine_text, check, part, old, new):
    text = planted(old, new).replace('LOSS = "grpo"', "").replace("num_rows: int,", "num_rows: int, num_tokens: int,")
    report = examine_text(text)
    assert report.errors == []
    assert traps(report) == set()
    assert part in next(finding.sentence for finding in report.findings if finding.check == check)


# Names, shapes and adapters ------------------------------------------------------------------------------------------

WITH_TRL_NAMES = """
def policy_loss(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask, tool_mask,
                num_items_in_batch, epsilon_low, epsilon_high, beta):
    mask, advantages = completion_mask * tool_mask, advantages[:, :1]
    ratio = (per_token_logps - old_per_token_logps).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    log_r = ref_per_token_logps - per_token_logps
    loss = -(ratio * advantages).minimum(clipped * advantages) + beta * (log_r.exp() - log_r - 1)
    return (loss * mask).sum() / num_items_in_batch
"""
ADAPTER = """
def compute_loss(old, new, advantages, mask, config):  # of a library, with the completion only
    ratio = (new - old).exp()
    loss = -(ratio * advantages).minimum(ratio.clamp(1 - config["low"], 1 + config["high"]) * advantages)
    return (loss * mask).sum() / mask.shape[1] / config["rows"], {"clipped": 0.0}
def policy_loss(log_probs, old_log_probs, advantages, mask, clip_low, clip_high, num_rows, prompt_length):
    tensors = (x[:, prompt_length:] for x in (old_log_probs, log_probs, advantages, mask))
    return compute_loss(*tensors, {"low": clip_low, "high": clip_high, "rows": num_rows})
"""
OWN_NAMES = """
def policy_loss(lp, lp_old, lp_ref, adv, m, eps=0.1):
    ratio = (lp - lp_old).exp()
    loss = -(ratio * adv).minimum(ratio.clamp(1 - eps, 1 + eps) * adv) + 0.01 * ((lp_ref - lp).exp() - lp_ref + lp - 1)
    return sum(row[used].mean() for row, used in zip(loss, m) if used.any()) / len(m)
"""
OLD_OR_NONE = """
def policy_loss(log_probs, advantages, mask, old_log_probs=None):
    old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs
    loss = -((log_probs - old_log_probs).exp() * advantages).masked_fill(~mask, 0.0)
    return (loss.sum(1) / mask.sum(1).clamp(min=1)).mean()
"""
MODULE = """
import torch
class Loss(torch.nn.Module):
    def forward(self, logprobs, old_logprobs, ref_logprobs, advantages, action_mask, kl_coef):
        ratio, advantages = (logprobs - old_logprobs).exp(), advantages.expand(-1, 1).repeat(1, logprobs.shape[1])
        loss = -(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages)
        log_r = ref_logprobs - logprobs
        loss = (loss + kl_coef * (log_r.exp() - log_r - 1)) * action_mask
        return (loss.sum(1) / action_mask.sum(1).clamp(min=1)).mean(), ratio
policy_loss, SETTINGS = Loss(), {"kl_coef": 0.04}
def advantages(rewards):
    rewards = rewards.numpy()
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
"""
BY_ROW = """
def policy_loss(logps, rollout_logps, adv, mask):
    return -((logps * adv[:, None] * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
"""


@pytest.mark.parametrize(("text", "name"), [
    pytest.param(WITH_TRL_NAMES, "DAPO", id="TRL's names"),
    pytest.param(OWN_NAMES, "GRPO", id="names of one's own"),
    pytest.param(MODULE, "GRPO", id="module with (B, 1)"),
    pytest.param(BY_ROW, "GRPO", id="advantages (B,)"),
])  # fmt: skip
def test_names_and_shapes_are_found(examine_text, text, name):
    report = examine_text(text)
    assert report.errors == []
    assert traps(report) == set()
    assert name in next(finding.sentence for finding in report.findings if finding.check == "normalisation")
    assert "as heavy" not in str(report.findings)  # the weight that the function received


@pytest.mark.parametrize(("text", "found", "old", "new"), [
    (WITH_TRL_NAMES, "tool_output_in_loss", "completion_mask * tool_mask", "completion_mask"),
    (WITH_TRL_NAMES, "micro_batch_mean", "/ num_items_in_batch", "/ mask.sum()"),
    (OLD_OR_NONE, "zero_gradient", "log_probs.detach() if", "1.1 * log_probs.detach() if"),
    (ADAPTER, "clip padded_width", 'config["high"]', 'config["low"]'),
])  # fmt: skip
def test_mistakes_are_found_through_other_names_and_adapters(examine_text, text, found, old, new):
    assert old in text
    assert traps(examine_text(text.replace(old, new))) == set(found.split())


@pytest.mark.parametrize(("library", "constant", "found"), [
    ("trl", "dapo", set()),
    ("trl", "bnpo", {"micro_batch_mean"}),
    ("verl", "token-mean", {"equal_rewards_noise"}),
    ("verl", "seq-mean-token-sum-norm", {"equal_rewards_noise", "padded_width"}),
])  # fmt: skip
def test_libraries_are_examined_through_adapters(examine_text, library, constant, found):
    if not find_spec(library):
        pytest.skip(f"{library} is not installed")
    text = (ROOT / f"docs/loss_{library}.py").read_text(encoding="utf-8")
    report = examine_text(re.sub(r'^(LOSS_\w+) = ".*?"', rf'\1 = "{constant}"', text, flags=re.MULTILINE))
    assert report.errors == []
    assert traps(report) == found


# What cannot be examined --------------------------------------------------------------------------------------------

LOSS = "import torch\ndef policy_loss(log_probs, old_log_probs, advantages, mask):\n    "
INPUTS = "def generate_inputs(prompts, pad_id): return "
UNUSABLE = {
    "syntax": ("x = 1\ndef policy_loss(:\n", "SyntaxError: invalid syntax (line 2 of my_loss.py)"),
    "no function": ("x = 1", "docs/loss_template.py"),
    "another name": ("def grpo_loss(): pass", "is it grpo_loss? Then add: policy_loss = grpo_loss"),
    "unknown check": ("SKIP = ['clip', 'nope']\n" + LOSS + "pass", "SKIP names nope, which is no check; they are: "),
    "unknown loss": ("LOSS = 'ppo'\n" + LOSS + "pass", "LOSS must be one of grpo, dapo"),
    "unknown parameter": ("def policy_loss(x, batch): pass", "a parameter x that the doctor does not know"),
    "no parameter": ("def policy_loss(*args): pass", "no parameters with names"),
    "logits": ("def policy_loss(logits, input_ids, advantages, completion_mask): pass", "the doctor has no model"),
    "raises": (LOSS + "raise ValueError('a\\x1b\\nb')", "ValueError: a\ufffd b (line 3 of my_loss.py)"),
    "raises what nobody catches": (LOSS + "raise BaseException('no')", "policy_loss raised BaseException: no (line 3"),
    "is no Exception": ("raise BaseException('no')", "my_loss.py cannot be run: BaseException: no (line 1 of"),
    "float": (LOSS + "return log_probs.sum().item()", "returned a float instead of a tensor with a gradient"),
    "matrix": (LOSS + "return (log_probs * mask)[:, 1:]", "a tensor of shape (6, 13), not one number"),
    "NaN": (LOSS + "return log_probs.sum() * float('nan')", "returned nan"),
    "chance": (LOSS + "return (log_probs * torch.rand_like(log_probs)).sum()", "depends on chance"),
    "advantages": ("def advantages(returns): return returns.mean()", "a tensor of shape (3, 4), not ()"),
    "mask": ("def action_mask(sequences, prompt_lengths): return sequences > 0", "(3, 8), (B, T-1): entry t"),
    "inputs": (INPUTS + "prompts", "two tensors of shape (3, 4)"),
    "other inputs": (f"import torch\n{INPUTS}(torch.ones(2, 4),) * 2", "two tensors of shape (3, 4)"),
    "log-probs": ("def log_probs(logits, sequences, temperature): return logits", "(2, 5), (B, T-1), not (2, 6, 11)"),
}


@pytest.mark.parametrize(("text", "sentence"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_cannot_be_examined_is_said_in_one_line(examine_text, text, sentence):
    report = examine_text(text)
    (error,) = report.errors
    assert sentence in error
    assert "\n" not in error
    assert report.status == 2
    assert "is no file" in examine(report.path.with_name("nowhere.py")).errors[0]


def test_a_neighbour_is_imported_from_the_search_path_only(examine_text, tmp_path, monkeypatch):
    (tmp_path / "beside_my_loss.py").write_text("def advantages(returns): return returns - returns.mean(1, True)")
    before = list(sys.path)
    assert examine_text("from beside_my_loss import advantages").errors[0].endswith(f"found with PYTHONPATH={tmp_path}")
    assert sys.path == before
    monkeypatch.syspath_prepend(tmp_path)
    assert examine_text("from beside_my_loss import advantages").count(OK) == 4


def test_skipped_checks_are_not_examined_and_other_functions_are_after_an_error(examine_text):
    report = examine_text('SKIP = ["clip", "whole_loss"]\n' + planted("torch.minimum", "torch.maximum"))
    assert (report.status, report.count(NOT_EXAMINED)) == (0, 2)
    report = examine_text(TEMPLATE.replace(RATIO, "    1 / 0\n"))
    assert len(report.errors) == 1
    assert report.status == 2
    assert report.count(OK) == 19
    assert report.unfinished == ["policy_loss"]


# The command --------------------------------------------------------------------------------------------------------


def test_the_example_of_the_docs_is_what_it_prints(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    text, output = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "console"))
    Path("my_loss.py").write_text("print('what a file prints is left out')\n" + text)
    assert main(["my_loss.py"]) == 1
    printed, errors = capfd.readouterr()
    assert errors == ""
    rounding = r"expected 0, got [\d.]+"  # the rounding of a sum in float32 depends on the processor
    assert re.sub(rounding, "", printed) == re.sub(rounding, "", output)


@pytest.mark.parametrize(("text", "sentence"), [
    ("import os\nos._exit(0)", "my_loss.py ended the process, with exit status 0"),
    ("import time\n" + LOSS + "time.sleep(3); 1 / 0", "policy_loss did not return within 0.5 seconds"),
], ids=["ends the process", "endless"])  # fmt: skip
def test_a_file_that_ends_the_process_or_never_returns_is_no_success(tmp_path, capfd, monkeypatch, text, sentence):
    monkeypatch.setattr(doctor.apart, "CALL_LIMIT", 0.5)
    monkeypatch.setattr(os, "_exit", pytest.fail)  # in this process it would end all tests, with status 0
    path = tmp_path / "my_loss.py"
    path.write_text("def advantages(returns): return returns - returns.mean(1, True)\n" + text)
    assert main([str(path)]) == 2
    out, error = capfd.readouterr()
    assert re.fullmatch(rf"error: .*{sentence}\n", error)
    if "policy_loss" in sentence:
        assert "not examined, because of an error\n  policy_loss: zero_gradient, " in out
