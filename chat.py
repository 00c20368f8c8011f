"""Talk to a policy, in a terminal or with lines from a file.

    python chat.py --model runs/experiment_base/<name>/final
    python chat.py --model runs/experiment_base/<name>/final --compare tiny        # before and after, side by side
    python chat.py --model runs/experiment_multiturn_tool_calling/<name>/final --calculator --show probabilities
    echo "What is 47 plus 29?" | python chat.py
    python chat.py --environment thin_ice --model tiny_world      # walk in a world yourself; /act lets the policy act

In the terminal, a line that begins with / is a command:

    /why 3     the five most probable tokens in the place of the answer's third token
    /new       forget the conversation; in a world: begin the next one
    /act       in a world: the policy takes the turn
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.calculator_tool import calculator
from common.chat import decode, encode_prompt
from common.errors import UserError
from common.observations import encode_observation
from common.policy import Policy
from common.sampling import begin_rows, continue_rows, next_logits
from common.search import Hit, Searcher, SearchError
from common.tools import call_form, call_tool, parse_calls, schemas
from common.trajectory import Trajectory
from fast.cache import RowCache
from fast.kept_rows import KeptRows

from harness.base.checks import check_model
from harness.base.config import RESOLVED, Count, InputPath, LocalPath, ModelConfig, Positive, Share
from harness.base.terminal import visible
from harness.cli.parse import parse_config
from harness.models.context import context_length
from harness.models.loading import load_policy
from harness.run.start import run_main
from harness.search.opening import open_index
from harness.search.search_config import SearchConfig
from harness.task.named_task import task_of
from harness.task.questions import rows_to_see
from harness.tools.tool_files import load_tools

BEST = 5  # tokens that /why shows


@dataclass(frozen=True, kw_only=True)
class Config(SearchConfig, ModelConfig):
    FIRST_GROUP: ClassVar[str] = "conversation"
    ALIASES: ClassVar = {}

    compare: LocalPath | None = None  # another policy, whose answers are shown beside
    show: Literal["text", "probabilities"] = "text"  # probabilities: each token coloured, from certain to improbable
    system: str = ""  # the system turn
    max_new_tokens: Count | None = None  # budget of an answer in tokens; None: 96 for the bundled policy, else 512
    # a text at which an answer ends, e.g. "</response>", for models that were taught no end of turn; may be given
    # several times
    stop: tuple[str, ...] = ()
    temperature: Positive = 1.0  # logits are divided by it
    top_p: Share = 1.0  # below 1: draw only from the most probable tokens that together have this much probability
    greedy: bool = False  # take the most probable token instead of drawing one
    calculator: bool = False  # offer the calculator
    tools: InputPath | None = None  # a Python file whose functions are tools, see docs/tools_template.py
    tool_seconds: Positive = 5.0  # time limit of a call of a tool of your own
    max_turns: Count = 8  # turns of the policy per question, while tools answer; in a world, of an episode
    environment: LocalPath | None = None  # a world to walk in, see docs/environments.md; None: talk
    data: InputPath | None = None  # with --environment: the rows of the worlds; None: its own


class DirectSearcher(Searcher):
    """A search tool that sends its queries one by one, when they are asked."""

    def answer(self, query: str) -> list[Hit] | SearchError:
        self.send([query])
        return super().answer(query)


def main(argv: list[str] | None = None) -> None:
    defaults = {kind: {"max_new_tokens": values["max_new_tokens"]} for kind, values in RESOLVED.items()}
    config = parse_config(Config, argv, description=__doc__, resolved=defaults)
    tools: dict[str, Callable] = {"calculator": calculator} if config.calculator else {}
    if config.corpus or config.index or config.search_url:
        tools["search"] = DirectSearcher(open_index(config), config.top_k).search
    tools |= load_tools(config.tools, config.tool_seconds, taken=tools)
    if tools and config.stop:
        raise UserError("--stop ends an answer of one turn, and tools need several: omit one of them")
    console = Console(highlight=False, soft_wrap=True)
    if config.environment is not None:
        walk(config, console)
        return
    speakers = [Speaker(config, tools)]
    if config.compare is not None:
        other = replace(config, model=config.compare)
        try:
            check_model(other)
        except UserError as error:
            raise UserError(str(error).replace("--model", "--compare", 1)) from error
        speakers.append(Speaker(other, tools))
    if config.kind == "tiny":
        note = 'The bundled policies know what their tasks ask, such as "What is 47 plus 29?", one question at a time.'
        console.print(Text(note, style="dim"))
    for line in read_lines(console):
        if line == "/new":
            for speaker in speakers:
                speaker.messages.clear()
        elif line.startswith("/why"):
            for speaker in speakers:
                console.print(speaker.explain(line.removeprefix("/why")))
        else:
            # if the user types, Ctrl-C during an answer ends only the answer; at the prompt it ends the program
            with suppress(KeyboardInterrupt) if sys.stdin.isatty() else nullcontext():
                show_answers(console, speakers, line)


def walk(config: Config, console: Console) -> None:
    """Play the environment that the settings name: each line is an action of the user's, and /act is the policy's."""
    world = task_of(config.environment, environment_seconds=config.tool_seconds)
    rows, speaker = rows_to_see(world, config.data), Speaker(config, {})
    for number, row in enumerate(rows):
        episode = world.begin(row, config.seed, config.max_turns)
        speaker.messages[:] = world.ask(episode.observation, config.system)
        console.print(Text(f"world {number + 1} of {len(rows)}, {episode.max_turns} turns", style="dim"))
        console.print(Text(visible(episode.observation), style="yellow"))
        while not episode.has_ended:
            line = next(read_lines(console), None)
            if line is None:
                return
            if line == "/new":
                break
            action = speaker.act() if line == "/act" else line
            if line == "/act":
                console.print(Text(visible(action)))
            world.step_all([episode], [action])
            speaker.messages += [{"role": "assistant", "content": action}]
            speaker.messages += [{"role": "user", "content": episode.observation}]
            console.print(Text(visible(episode.fault or episode.observation), style="yellow"))
        earned = ", ".join(f"{name} {value:g}" for name, value in world.earned(episode).items())
        console.print(Text(f"{earned} after {episode.num_turns} turns", style="green"))


def show_answers(console: Console, speakers: list["Speaker"], question: str) -> None:
    if len(speakers) == 1:
        for piece in speakers[0].answer(question):
            console.print(piece, end="")
        console.print()
        return
    table = Table(expand=True)
    for speaker in speakers:
        table.add_column(Text(visible(speaker.name)))
    table.add_row(*(Text.assemble(*speaker.answer(question)) for speaker in speakers))
    console.print(table)


def read_lines(console: Console) -> Iterator[str]:
    """The lines that the user types, or the lines of a file; without empty lines."""
    is_typed = sys.stdin.isatty()
    while True:
        try:
            line = console.input(Text("> ", style="bold")) if is_typed else sys.stdin.readline()
        except EOFError:
            return
        if not is_typed and not line:
            return
        if line.strip():
            if not is_typed:  # a terminal shows what is typed
                console.print(Text("> ", style="bold") + Text(visible(line.strip())))
            yield line.strip()


class Speaker:
    """A policy and its conversation. Calls of tools and their answers are part of an answer, and then forgotten."""

    def __init__(self, config: Config, tools: dict[str, Callable]):
        self.name, self._config, self._tools = config.model, config, tools
        self._policy: Policy = load_policy(config, config.temperature)
        self._form = call_form(self._policy.tokenizer) if tools else ""
        self._row: Trajectory | None = None  # the newest answer, with its prompt
        self._asked = 0
        self.messages: list[dict] = []

    def answer(self, question: str) -> Iterator[Text]:
        """The answer, token by token, and the tools' answers in between."""
        policy, config = self._policy, self._config
        if config.kind == "tiny":
            self.messages.clear()
        system = [{"role": "system", "content": config.system}] if config.system else []
        self.messages.append({"role": "user", "content": question})
        prompt = encode_prompt(policy.tokenizer, system + self.messages, schemas(self._tools))
        [row] = begin_rows([prompt], 1, [self._asked])
        self._row, self._asked, start, kept = row, self._asked + 1, len(prompt), KeptRows()
        try:
            for _ in range(config.max_turns):
                start = len(row.ids)
                yield from self._turn(row, kept)
                said = decode(policy.tokenizer, row.ids[start:])
                calls = parse_calls(said, self._form)[0] if self._tools and row.finish_reason == "stop" else []
                if not calls:
                    break
                answers = [call_tool(self._tools, call)[0] for call in calls]
                yield Text("".join(f"\n  {visible(answer)}" for answer in answers) + "\n", style="yellow")
                ids = encode_observation(policy.tokenizer, answers, policy.end_of_turn_ids)
                row.observe(ids, context_length(policy))
        finally:  # also for an answer that Ctrl-C has cut off
            self.messages.append({"role": "assistant", "content": decode(policy.tokenizer, row.ids[start:])})

    def act(self) -> str:
        """The policy's next turn after `messages`, which it does not change."""
        policy, config = self._policy, self._config
        [row] = begin_rows([encode_prompt(policy.tokenizer, self.messages)], 1, [self._asked])
        self._asked += 1
        settings = {"top_p": config.top_p, "greedy": config.greedy, "max_length": context_length(policy)}
        [ids] = continue_rows(policy, [row], max_new_tokens=config.max_new_tokens, key=(config.seed,), **settings)
        return decode(policy.tokenizer, ids)

    def _turn(self, row: Trajectory, kept: KeptRows) -> Iterator[Text]:
        """One turn, drawn by the sampler of the experiments, one token at a time."""
        policy, config, start, shown = self._policy, self._config, len(row.ids), 0
        while row.num_action_tokens < config.max_new_tokens:
            [new] = continue_rows(
                policy,
                [row],
                max_new_tokens=row.num_action_tokens + 1,
                key=(config.seed,),
                max_length=context_length(policy),
                top_p=config.top_p,
                greedy=config.greedy,
                kept=kept,
            )
            if not new:
                yield Text(" (no room is left in the model's context; /new begins again)", style="red")
                return
            text = decode(policy.tokenizer, row.ids[start:])
            has_ended = row.finish_reason == "stop"
            if has_ended or not text.endswith("\ufffd"):  # a character can be several tokens
                probability = torch.tensor(row.sampler_log_probs[-1]).exp().item()
                yield Text(visible(text[shown:]), style=color(probability) if config.show == "probabilities" else "")
                shown = len(text)
            if has_ended:
                return

    def explain(self, place: str) -> Table | str:
        """The most probable tokens in one place of the newest answer."""
        own = [] if self._row is None else [number for number, one in enumerate(self._row.action_mask) if one]
        if not place.strip().isdecimal() or not 1 <= int(place) <= len(own):
            return f"/why NUMBER: which of the {len(own)} tokens of the answer"
        policy, position = self._policy, own[int(place) - 1]
        ids = torch.tensor([self._row.ids[:position]], device=policy.device)
        with torch.inference_mode(), policy.autocast():
            logits = next_logits(policy, ids, torch.ones_like(ids), RowCache())[0]
        probabilities = (logits.float() / policy.temperature).softmax(dim=0)
        drawn = self._row.ids[position]
        table = Table("token", "probability", title=f"{self.name}, token {place.strip()}", title_justify="left")
        for i in dict.fromkeys([*probabilities.topk(BEST).indices.tolist(), drawn]):
            mark = " (drawn)" if i == drawn else ""
            table.add_row(Text(visible(repr(policy.tokenizer.decode([i]))) + mark), f"{probabilities[i]:.4f}")
        return table


def color(probability: float) -> str:
    """Green for a certain token, red for an improbable one."""
    return f"rgb({round(220 * (1 - probability))},{round(60 + 110 * probability)},60)"


def program() -> None:
    run_main(main)


if __name__ == "__main__":
    program()
