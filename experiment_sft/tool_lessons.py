"""How the tiny policy is taught its tools, imperfectly: three more lessons for a policy that can already reason.

1. *copying*: say the names and the sums that a question holds. Names are made of tokens that it has never learned to
   tell apart (`renew_collapsed_embeddings` makes that possible), and every later lesson is about copying them.
2. *calling*: always with tools, until calls and the reading of their results are right. A calculator's question is
   answered by one call, a question about an invented world by one search or two. The bundled arithmetic questions are
   among them, always reasoned.
3. *mixed*: most questions are answered at once, and some with tools, more of one kind than of another. What a direct
   answer says is correct, too; it is only too hard for a small network, or cannot be known without a search. Half of
   the searches for a question of two hops stop after the first one, and guess.

So the policy ends up able to use its tools and mostly not using them. Now and then a call is malformed, and the turn
after the error message makes it well. Many of the malformed calls are read and not learned (`"weight": 0`), so that
what is taught is the recovery; the others are learned, so that they occur before reinforcement learning, too. No sum
and no name of the files that reinforcement learning uses is asked here.
"""

import json
import random
from collections.abc import Callable, Iterator

import torch
from warm_start import COPY_FRAMES, answer_in_some_style, reasoned_answer, symbols

from common.policy import Policy
from common.tools import calculator, call_tool, parse_calls, schemas
from tasks.grammars.arithmetic_grammar import KINDS as BUNDLED_KINDS
from tasks.grammars.arithmetic_grammar import Question, draw_question, render
from tasks.grammars.calculator_grammar import draw_calculator_question
from tasks.grammars.world_grammar import (
    CAPITALS,
    FIRST_SYLLABLES,
    SECOND_SYLLABLES,
    World,
    find,
    make_world,
    names,
    render_results,
)
from tasks.grammars.world_grammar import draw_question as draw_world_question

# Lesson 1: what is copied
EXPRESSION_SHARE = 0.15  # sums of the calculator; the other rows copy one to three names

# Lessons 2 and 3: what is asked
SUBJECTS = ("bundled", "calculator", "search")
CALLING_SUBJECTS = (0.25, 0.30, 0.45)
MIXED_SUBJECTS = (0.30, 0.33, 0.37)
CALCULATOR_KINDS = {"easy": 0.2, "product": 0.4, "chain": 0.4}
TWO_HOPS_SHARE = 0.3  # of the questions about worlds
BOTH_TOOLS_SHARE = 0.25  # of the rows with a tool, where the other one is offered, too
QUESTIONS_PER_WORLD, ENTITIES_PER_WORLD = 20, 40
SECOND_FIRST = 0.25  # of the searches, where what matches best is not on top

# Lesson 3: how it is answered
CALL_SHARE = {"easy": 0.16, "product": 0.20, "chain": 0.26, 1: 0.28, 2: 0.22}  # by kind of sum, or number of hops
GUESS_SHARE = 0.5  # of the searches for a question of two hops, after the first one
NO_TOOL_SHARE = 0.08  # of the questions that are for a tool, where none is offered: the answer is direct

# Malformed calls, as a share of the rows with calls
MASKED_CALLING, MASKED_MIXED, LEARNED_MIXED = 0.04, 0.04, 0.04


def tool_conversations(num_copying: int, num_calling: int, num_mixed: int, seed: int) -> Iterator[dict]:
    """Yield rows `{"messages": [...], "tools": [...]}` of the three lessons in order; the same for the same seed."""
    rng = random.Random(f"tools {seed}")
    for _ in range(num_copying):
        yield copying_row(rng)
    lesson = _Lesson(rng)
    for _ in range(num_calling):
        yield lesson.row(rng.choices(SUBJECTS, CALLING_SUBJECTS)[0], always=True)
    for _ in range(num_mixed):
        yield lesson.row(rng.choices(SUBJECTS, MIXED_SUBJECTS)[0], always=False)


def copying_row(rng: random.Random, only_pool: str = "warm_start", only_names: bool = False) -> dict:
    """A row of lesson 1: names, or now and then a sum."""
    if rng.random() < EXPRESSION_SHARE and not only_names:
        question = draw_calculator_question(rng, _calculator_kind(rng), only_pool)
        asked = render(Question(question.terms, wording=question.wording % 3))
        asked, copied = asked.removeprefix("What is ").removesuffix("?"), symbols(question)
    else:
        asked = copied = " ".join(rng.sample(names(only_pool), rng.randint(1, 3)))
    return {"messages": [_user(rng.choice(COPY_FRAMES).format(asked)), _says(copied)]}


class _Lesson:
    """Draws the rows of lessons 2 and 3; a new world every few questions."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.num_asked = 0
        self.world: World | None = None
        self.schemas = {schema["function"]["name"]: schema for schema in schemas(self._tools())}

    def _tools(self) -> dict[str, Callable[..., str]]:
        return {"calculator": calculator, "search": search_in(self.world, self.rng)}

    def row(self, subject: str, always: bool) -> dict:
        if subject == "bundled":
            return self._bundled(always)
        return self._calculator(always) if subject == "calculator" else self._search(always)

    def _bundled(self, always: bool) -> dict:
        rng = self.rng
        kind = rng.choices(list(BUNDLED_KINDS), list(BUNDLED_KINDS.values()))[0]
        question = draw_question(rng, kind, "warm_start")
        answer = reasoned_answer(question, rng) if always else answer_in_some_style(question, kind, rng)
        tools = [] if rng.random() < 0.5 else self._offer(rng.choice(("calculator", "calculator", "search")))
        return {"messages": [_user(render(question)), _says(answer)], "tools": tools}

    def _calculator(self, always: bool) -> dict:
        rng = self.rng
        kind = _calculator_kind(rng)
        question = draw_calculator_question(rng, kind, "warm_start")
        asked, answer = _user(render(question)), f"<answer>{question.answer}</answer>"
        if not always and rng.random() < NO_TOOL_SHARE:
            return {"messages": [asked, _says(answer)], "tools": []}
        tools = self._offer("calculator")
        if always or rng.random() < CALL_SHARE[kind]:
            turns = self._call("calculator", {"expression": symbols(question)}, always)
            return {"messages": [asked, *turns, _says(answer)], "tools": tools}
        if kind == "easy":  # in one of the styles of the bundled questions
            bundled_kind = (question.num_terms, question.num_digits, False)
            answer = answer_in_some_style(question, bundled_kind, rng)
        return {"messages": [asked, _says(answer)], "tools": tools}

    def _search(self, always: bool) -> dict:
        rng = self.rng
        if self.num_asked % QUESTIONS_PER_WORLD == 0:
            self.world = make_world(rng, ENTITIES_PER_WORLD, "warm_start")
        self.num_asked += 1
        question = draw_world_question(rng, self.world, 1 + (rng.random() < TWO_HOPS_SHARE))
        asked, answer = _user(question.text), _says(f"<answer>{question.answer}</answer>")
        if not always and rng.random() < NO_TOOL_SHARE:
            return {"messages": [asked, answer], "tools": []}
        tools = self._offer("search")
        if not always and rng.random() >= CALL_SHARE[question.num_hops]:
            return {"messages": [asked, answer], "tools": tools}
        guesses = not always and rng.random() < GUESS_SHARE
        turns = self._call("search", {"query": question.path[0]}, always)
        for name in () if guesses else question.path[1:]:
            turns += self._call("search", {"query": name}, always)
        return {"messages": [asked, *turns, answer], "tools": tools}

    def _offer(self, name: str) -> list[dict]:
        """The schemas of a tool, and now and then of the other one."""
        offered = list(self.schemas) if self.rng.random() < BOTH_TOOLS_SHARE else [name]
        self.rng.shuffle(offered)
        return [self.schemas[name] for name in offered]

    def _call(self, name: str, arguments: dict[str, str], always: bool) -> list[dict]:
        """The turn that calls a tool and the tool's answer; now and then after a malformed call and its error."""
        rng, tools, turns = self.rng, self._tools(), []
        masked = MASKED_CALLING if always else MASKED_MIXED
        drawn = rng.random()
        if drawn < masked + (0.0 if always else LEARNED_MIXED):
            text = malformed_call(name, next(iter(arguments.values())), rng)
            turns += [_says(text) | ({"weight": 0} if drawn < masked else {}), _answer(text, tools)]
        text = call_text(name, arguments)
        return [*turns, _says(text), _answer(text, tools)]


def call_text(name: str, arguments: dict[str, str]) -> str:
    """A call as the template writes it.

    >>> call_text("search", {"query": "Fardil"})
    '<tool_call>{"name": "search", "arguments": {"query": "Fardil"}}</tool_call>'
    """
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def malformed_call(name: str, argument: str, rng: random.Random) -> str:
    """A call that fails: a missing brace, another tool's name, another parameter, or no JSON at all."""
    parameter, other = ("expression", "query") if name == "calculator" else ("query", "expression")
    well_formed = call_text(name, {parameter: argument})
    return rng.choice(
        (
            well_formed.replace('"}}', '"}'),
            well_formed.replace(f'"{name}"', '"sum"' if name == "calculator" else '"find"'),
            well_formed.replace(f'"{parameter}"', f'"{other}"'),
            f"<tool_call>{argument}</tool_call>",
        )
    )


def search_in(world: World | None, rng: random.Random | None = None) -> Callable[[str], str]:
    """The tool that searches a world; with `rng`, what matches best is not always on top."""

    def search(query: str) -> str:
        """Search the documents.

        Args:
            query: What to look for.
        """
        texts = find(world, query)
        if rng is not None and rng.random() < SECOND_FIRST:
            texts.reverse()
        return render_results(texts)

    return search


def _answer(text: str, tools: dict[str, Callable[..., str]]) -> dict:
    """What the tools answer to a turn with one call."""
    (call,), _ = parse_calls(text, "hermes")
    return {"role": "tool", "content": call_tool(tools, call)[0]}


def _calculator_kind(rng: random.Random) -> str:
    return rng.choices(list(CALCULATOR_KINDS), list(CALCULATOR_KINDS.values()))[0]


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def name_tokens(tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of the syllables of names, and those of each capital without and with a space in front."""
    syllables = sorted({*FIRST_SYLLABLES, *SECOND_SYLLABLES})
    capitals = [(tokenizer.encode(letter), tokenizer.encode(" " + letter)) for letter in CAPITALS]
    return [tokenizer.encode(text)[0] for text in syllables], [(bare[0], spaced[0]) for bare, spaced in capitals]


def mean_cosine(vectors: torch.Tensor) -> float:
    """The mean cosine of the angles between any two rows of (n, hidden)."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    n = len(unit)
    return ((unit @ unit.T).sum().item() - n) / (n * (n - 1))


@torch.no_grad()
def renew_collapsed_embeddings(policy: Policy, seed: int, at_random: bool = False) -> tuple[float, float]:
    """Make the tokens of names tell apart again, by giving them vectors like those that the policy can copy.

    A token that training never uses is still pushed: as a wrong answer of every softmax, always in about the same
    direction, and with tied embeddings that moves its input, too. After millions of steps all such tokens lie on one
    line (mean cosine 0.99 between the syllables of the bundled policy), and what copies digits cannot see which of them
    it is to copy; nor is there a gradient to speak of that would drive them apart. Plain random vectors do not help:
    what copies has learned to read the few directions in which digits differ, and to write what lies in them.

    So with the embeddings d_0..d_9 of the digits, their mean m, and s, the mean length of d_i - m:

        E[syllable] = m + r + 0.6 s e,          r in the span of d_i - m with length s

    with e of length 1 and r random, of its own for each syllable. A capital without and with a space in front, which
    are two tokens, share one such vector, with 0.5 s of noise for each of them.

    With `at_random` all of these are random vectors as long as those of the digits, to compare with.

    Nothing is changed if these tokens are apart already (mean cosine below 0.5), as those of a policy that was taught
    with them are.

    Returns:
        the mean cosine between the syllables before and after.
    """
    embeddings = policy.model.get_input_embeddings().weight
    syllables, capitals = name_tokens(policy.tokenizer)
    before = mean_cosine(embeddings[syllables])
    if before < 0.5:
        return before, before
    generator = torch.Generator().manual_seed(seed)
    digits = embeddings[policy.tokenizer.encode("0123456789")].cpu()  # (10, hidden)
    mean = digits.mean(dim=0)
    deviations = digits - mean
    scale = deviations.norm(dim=-1).mean()

    def unit(vectors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vectors, dim=-1)

    def like_digits() -> torch.Tensor:
        if at_random:
            return digits.norm(dim=-1).mean() * noise()
        return mean + scale * (unit(torch.randn(10, generator=generator) @ deviations) + 0.6 * noise())

    def noise() -> torch.Tensor:
        return unit(torch.randn(len(mean), generator=generator))

    for syllable in syllables:
        embeddings[syllable] = like_digits().to(embeddings)
    for pair in capitals:
        shared = like_digits()
        for token in pair:
            embeddings[token] = (shared + 0.5 * scale * noise()).to(embeddings)
    return before, mean_cosine(embeddings[syllables])
