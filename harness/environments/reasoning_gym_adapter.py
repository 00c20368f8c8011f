"""reasoning-gym's generated tasks, each with its own verifier: `--task reasoning_gym:chain_sum`.

A row is generated: its question, its answer, and the metadata that the verifier reads. Settings of the generator follow
the name: `reasoning_gym:chain_sum?min_terms=2&max_terms=3`.

https://github.com/open-thought/reasoning-gym (arXiv 2505.24760)
"""

import ast
import dataclasses
import functools
import inspect
import random
import re
from types import SimpleNamespace

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from common.errors import UserError

from harness.environments.other_packages import EVAL_SEED, one_line, pop_rows, split_settings, unknown

SYSTEM_PROMPT = SYSTEM_PROMPTS["default"]  # the package's own: it asks for <answer>

# What a text may consist of that a verifier evaluates
_VALUES = (ast.Expression, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load)
_FORMULAS = (*_VALUES, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Call)
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}
_LONGEST = 1000  # characters of such a text
_LARGEST_POWER = 100


def load(name: str) -> SimpleNamespace:
    """The generator with this name, as a task of one turn.

    Raises UserError for an unknown name and for settings that the generator does not have.
    """
    generator, settings = split_settings(name)
    numbers = pop_rows(settings)
    if generator not in DATASETS:
        raise unknown(generator, list(DATASETS))
    create = functools.partial(_create, generator, settings)
    verifier = create(size=1, seed=0)
    if score(verifier, dict(verifier[0]), "?") == 1:  # game_of_life_halting in version 0.1.25
        raise UserError("its verifier accepts any answer")

    @functools.cache
    def generate(split: str) -> list[dict]:
        size, seed = numbers[split], {"train": 0, "eval": EVAL_SEED}[split]
        outside = random.getstate()
        random.seed(seed)  # a few generators also draw from Python's global random numbers
        try:
            dataset = create(size=size, seed=seed)
            return [dict(dataset[index]) for index in range(size)]
        finally:
            random.setstate(outside)

    def rows(split: str) -> list[dict]:
        """Generated rows; those of training have no question of the evaluation."""
        held_out = {row["question"] for row in generate("eval")} if split == "train" else set()
        return [row for row in generate(split) if row["question"] not in held_out]

    def reward(row: dict, text: str) -> dict[str, float]:
        return {"correct": score(verifier, row, given_answer(text))}

    def solution(row: dict) -> str | None:
        """The generator's own answer, if it has one that its verifier accepts."""
        text = None if row["answer"] is None else f"<answer>{row['answer']}</answer>"
        return text if text is not None and reward(row, text)["correct"] == 1 else None

    return SimpleNamespace(
        messages=messages, reward=reward, solution=solution, vote=lambda row, text: given_answer(text), rows=rows,
        REWARD_WEIGHTS={"correct": 1.0}, SYSTEM_PROMPT=SYSTEM_PROMPT, FIELDS={"question": str},
    )  # fmt: skip


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation that asks `row["question"]`, with a system turn unless `system_prompt` is empty."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": row["question"]}]


def given_answer(text: str) -> str | None:
    """The last answer after the thought, read as the package reads it; None if there is none.

    >>> texts = ("<think><answer>1</answer></think><answer> 58 </answer>", "<think><answer>58</answer>")
    >>> [given_answer(text) for text in texts]
    ['58', None]
    """
    text = text.rpartition("</think>")[2]
    return None if "<think>" in text else extract_answer(text)


def score(verifier: object, row: dict, answer: str | None) -> float:
    """The package's score of an answer, from 0 to 1; 0 for no answer, and where its verifier raises an exception.

    Nine verifiers evaluate the answer as Python, with `eval` or SymPy's `parse_expr`: they get no text that could do
    more than a list of values or a formula does.
    """
    if answer is None or not _is_harmless(type(verifier), answer):
        return 0.0
    try:
        return float(verifier.score_answer(answer, row))
    except Exception:  # verifiers raise many kinds for a text of another form, such as a word for a number
        return 0.0


@functools.cache
def evaluator(kind: type) -> str | None:
    """The function with which a verifier evaluates answers: "eval", "parse_expr", or None."""
    found = re.search(r"\b(eval|parse_expr)\(answer", inspect.getsource(kind.score_answer))
    return found and found[1]


def _is_harmless(kind: type, text: str) -> bool:
    evaluates = evaluator(kind)
    if evaluates is None:
        return True
    try:
        tree = ast.parse(text.strip(), mode="eval") if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return evaluates == "eval"  # which raises the same; SymPy rewrites a text before it parses it
    if evaluates == "eval":
        return tree is not None and all(isinstance(node, _VALUES) for node in ast.walk(tree))
    return tree is not None and all(map(_is_formula, ast.walk(tree)))


def _is_formula(node: ast.AST) -> bool:
    """Whether a part of a formula is computed at once: no calls but of functions, no towers of powers."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        powers = [part for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
        is_tower = any(isinstance(part, ast.Pow) for side in (node.left, node.right) for part in ast.walk(side))
        return not is_tower and all(abs(part.value) <= _LARGEST_POWER for part in powers if _is_formula(part))
    return isinstance(node, _FORMULAS)


def _create(generator: str, settings: dict[str, object], size: int, seed: int):
    known = {field.name for field in dataclasses.fields(DATASETS[generator][1])} - {"size", "seed"}
    if wrong := settings.keys() - known:
        raise UserError(f"it has no setting {sorted(wrong)[0]!r}, but {', '.join(sorted(known))}, and rows")
    try:
        return reasoning_gym.create_dataset(generator, size=size, seed=seed, **settings)
    except Exception as error:  # its checks are assertions
        raise UserError(f"its settings are refused: {one_line(error)}") from error
