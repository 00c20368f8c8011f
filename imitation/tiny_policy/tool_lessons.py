"""How the tiny policy learns to use tools, imperfectly: three more lessons for a policy that can already reason.

1. *copying*: repeat the names and sums in a question. Names are made of tokens that the policy has never learned to
   tell apart (`renew_collapsed_embeddings` makes that possible), and every later lesson relies on copying them.
2. *calling*: always with tools, until the policy calls and reads results correctly. A calculator's question is answered
   by one call, a question about an invented world by one search or two. The bundled arithmetic questions are among
   them, always reasoned.
3. *mixed*: most questions are answered at once, and some with tools, depending on the kind of question. Direct answers
   are correct, too; they are only too hard for a small network, or cannot be known without a search. Half of the
   searches for a question of two hops stop after the first one, and guess.

So the policy ends up able to use its tools but mostly does not use them. Now and then a call is malformed, and the turn
after the error message corrects it. Many of the malformed calls are read and not learned (`"weight": 0`), so that the
lesson teaches the recovery; the others are learned, so that malformed calls also occur before reinforcement learning.
No sum and no name from the files that reinforcement learning uses is asked here.
"""

import json
import random
from collections.abc import Callable, Iterator

import torch
import world_grammar
from arithmetic_grammar import KINDS, draw_question, render
from calculator_grammar import draw_calculator_question
from torch.nn.functional import normalize
from warm_start import COPY_FRAMES, answer_in_some_style, expression_as_asked, reasoned_answer, symbols
from world_grammar import CAPITALS, FIRST_SYLLABLES, SECOND_SYLLABLES, World

from common.policy import Policy
from common.tools import calculator, call_tool, parse_calls, schemas

# Lesson 1: the copied text
EXPRESSION_SHARE = 0.15  # sums of the calculator; the other rows copy one to three names

# Lessons 2 and 3: the questions
SUBJECTS = ("bundled", "calculator", "search")
CALLING_SUBJECTS = (0.25, 0.30, 0.45)
MIXED_SUBJECTS = (0.30, 0.33, 0.37)
CALCULATOR_KINDS = {"easy": 0.2, "product": 0.4, "chain": 0.4}
TWO_HOPS_SHARE = 0.3  # of the questions about worlds
BOTH_TOOLS_SHARE = 0.25  # of the rows with a tool: the other tool is offered, too
QUESTIONS_PER_WORLD, ENTITIES_PER_WORLD = 20, 40
SECOND_FIRST = 0.25  # of the searches: the best match is not on top

# Lesson 3: the answers
CALL_SHARE = {"easy": 0.16, "product": 0.20, "chain": 0.26, 1: 0.28, 2: 0.22}  # by kind of sum, or number of hops
GUESS_SHARE = 0.5  # of the searches for a question of two hops, after the first one
NO_TOOL_SHARE = 0.08  # of the questions that need a tool: no tool is offered, and the answer is direct

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
        asked, copied = expression_as_asked(question), symbols(question)
    else:
        asked = copied = " ".join(rng.sample(world_grammar.names(only_pool), rng.randint(1, 3)))
    return {"messages": [_user(rng.choice(COPY_FRAMES).format(asked)), _says(copied)]}


class _Lesson:
    """Draws the rows of lessons 2 and 3; a new world every few questions."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.num_asked = 0
        self.world: World = {}
        self.schemas = {schema["function"]["name"]: schema for schema in schemas(self._tools())}

    def _tools(self) -> dict[str, Callable[..., str]]:
        return {"calculator": calculator, "search": search_in(self.world, self.rng)}

    def row(self, subject: str, always: bool) -> dict:
        messages, tools = getattr(self, f"_{subject}")(always)
        return {"messages": messages, "tools": tools}

    def _bundled(self, always: bool) -> tuple[list[dict], list[dict]]:
        rng = self.rng
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        question = draw_question(rng, kind, "warm_start")
        answer = reasoned_answer(question, rng) if always else answer_in_some_style(question, kind, rng)
        tools = [] if rng.random() < 0.5 else self._offer(rng.choice(("calculator", "calculator", "search")))
        return [_user(render(question)), _says(answer)], tools

    def _calculator(self, always: bool) -> tuple[list[dict], list[dict]]:
        rng = self.rng
        kind = _calculator_kind(rng)
        question = draw_calculator_question(rng, kind, "warm_start")
        asked, answer = _user(render(question)), f"<answer>{question.answer}</answer>"
        if not always and rng.random() < NO_TOOL_SHARE:
            return [asked, _says(answer)], []
        tools, turns = self._offer("calculator"), []
        if always or rng.random() < CALL_SHARE[kind]:
            turns = self._call("calculator", {"expression": symbols(question)}, always)
        elif kind == "easy":  # in one of the styles of the bundled questions
            answer = answer_in_some_style(question, (question.num_terms, question.num_digits, False), rng)
        return [asked, *turns, _says(answer)], tools

    def _search(self, always: bool) -> tuple[list[dict], list[dict]]:
        rng = self.rng
        if self.num_asked % QUESTIONS_PER_WORLD == 0:
            self.world = world_grammar.make_world(rng, ENTITIES_PER_WORLD, "warm_start")
        self.num_asked += 1
        question = world_grammar.draw_question(rng, self.world, 1 + (rng.random() < TWO_HOPS_SHARE))
        asked, answer = _user(question.text), _says(f"<answer>{question.answer}</answer>")
        if not always and rng.random() < NO_TOOL_SHARE:
            return [asked, answer], []
        tools, turns, path = self._offer("search"), [], question.path
        if not always and rng.random() >= CALL_SHARE[len(path)]:
            path = ()
        elif not always and rng.random() < GUESS_SHARE:
            path = path[:1]
        for name in path:
            turns += self._call("search", {"query": name}, always)
        return [asked, *turns, answer], tools

    def _offer(self, name: str) -> list[dict]:
        """The schemas of a tool, and now and then of the other tool."""
        offered = list(self.schemas) if self.rng.random() < BOTH_TOOLS_SHARE else [name]
        self.rng.shuffle(offered)
        return [self.schemas[name] for name in offered]

    def _call(self, name: str, arguments: dict[str, str], always: bool) -> list[dict]:
        """The turn that calls a tool and the tool's answer; now and then after a malformed call and its error."""
        turns = []
        masked, learned = (MASKED_CALLING, 0.0) if always else (MASKED_MIXED, LEARNED_MIXED)
        drawn = self.rng.random()
        if drawn < masked + learned:
            text = malformed_call(name, next(iter(arguments.values())), self.rng)
            turns.append(_says(text) | ({"weight": 0} if drawn < masked else {}))
            turns.append(self._answer(text))
        text = call_text(name, arguments)
        return [*turns, _says(text), self._answer(text)]

    def _answer(self, text: str) -> dict:
        """The tools' answer to a turn with one call."""
        (call,), _ = parse_calls(text, "hermes")
        return {"role": "tool", "content": call_tool(self._tools(), call)[0]}


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


def search_in(world: World, rng: random.Random | None = None) -> Callable[[str], str]:
    """The tool that searches a world; with `rng`, the best match is not always on top."""

    def search(query: str) -> str:
        """Search the documents.

        Args:
            query: What to look for.
        """
        texts = world_grammar.find(world, query)
        if rng is not None and rng.random() < SECOND_FIRST:
            texts.reverse()
        return world_grammar.render_results(texts)

    return search


def _calculator_kind(rng: random.Random) -> str:
    return rng.choices(list(CALCULATOR_KINDS), list(CALCULATOR_KINDS.values()))[0]


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def mean_cosine(vectors: torch.Tensor) -> float:
    """The mean cosine of the angles between any two rows of (n, hidden)."""
    unit, n = normalize(vectors, dim=-1), len(vectors)
    return ((unit @ unit.T).sum().item() - n) / (n * (n - 1))


@torch.no_grad()
def renew_collapsed_embeddings(policy: Policy, seed: int, at_random: bool = False) -> tuple[float, float]:
    """Make the tokens of names distinguishable again, by giving them vectors like the ones that the policy can copy.

    Training still pushes a token that it never uses: the token is a wrong answer of every softmax, so the push always
    has about the same direction, and with tied embeddings it moves the input vector, too. After millions of steps all
    such tokens lie on one line (mean cosine 0.99 between the syllables of the bundled policy). The copying mechanism
    for digits then cannot see which of them to copy, and hardly any gradient drives them apart. Plain random vectors do
    not help: digits differ along a few directions, and the mechanism has learned to read and write only along these.

    So, with the embeddings d_0..d_9 of the digits, their mean m, and the mean length s of d_i - m:

        E[syllable] = m + r + 0.6 s e,          r in the span of d_i - m with length s

    with e of length 1; r and e are random and drawn for each syllable. A capital with and without a space before it is
    two tokens; they share one such vector, with 0.5 s of noise for each.

    With `at_random` all of these are random vectors as long as the digits' vectors, for comparison.

    Nothing is changed if these tokens are already apart (mean cosine below 0.5), as in a policy that was taught with
    them.

    Returns:
        the mean cosine between the syllables before and after.
    """
    embeddings, encode = policy.model.get_input_embeddings().weight, policy.tokenizer.encode
    syllables = [encode(text)[0] for text in sorted({*FIRST_SYLLABLES, *SECOND_SYLLABLES})]
    before = mean_cosine(embeddings[syllables])
    if before < 0.5:
        return before, before
    generator = torch.Generator().manual_seed(seed)
    digits = embeddings[encode("0123456789")].cpu()  # (10, hidden)
    mean = digits.mean(dim=0)
    deviations = digits - mean
    scale = deviations.norm(dim=-1).mean()

    def noise() -> torch.Tensor:
        return normalize(torch.randn(len(mean), generator=generator), dim=-1)

    def like_digits() -> torch.Tensor:
        if at_random:
            return digits.norm(dim=-1).mean() * noise()
        direction = normalize(torch.randn(10, generator=generator) @ deviations, dim=-1)
        return mean + scale * (direction + 0.6 * noise())

    for syllable in syllables:
        embeddings[syllable] = like_digits().to(embeddings)
    for capital in CAPITALS:
        shared = like_digits()
        for text in (capital, " " + capital):
            embeddings[encode(text)[0]] = (shared + 0.5 * scale * noise()).to(embeddings)
    return before, mean_cosine(embeddings[syllables])
