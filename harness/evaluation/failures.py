"""failures.txt: the questions with a wrong greedy answer, for people to read."""

from collections import Counter
from collections.abc import Iterator

from harness.base.terminal import printable, visible
from harness.evaluation.figures import Answer, Answers
from harness.task.task import Task

LONGEST = 4000  # characters of a completion that are shown; completions.jsonl has the rest
KINDS = {"cut off": "ended by the budget", "no answer": "nothing that can be read as an answer", "wrong answer": ""}


def failures(task: Task, answers: Answers) -> str:
    """The page: first how many failures there are of each kind, then every failure."""
    wrong = [index for index, answer in enumerate(answers.greedy) if answer.correct != 1]
    kinds = Counter(kind_of(answers.greedy[index]) for index in wrong)
    lines = [f"{len(wrong)} of {len(answers.greedy)} questions: the greedy answer is wrong", ""]
    lines += [f"{count:6}  {kind}" + (f": {KINDS[kind]}" if KINDS[kind] else "") for kind, count in kinds.most_common()]
    disagreeing = [index for index in wrong if any(answer.correct == 1 for answer in answers.sampled[index])]
    if answers.sampled[0]:
        lines.append(f"{len(disagreeing):6}  of them with a right answer among the samples")
    for index in wrong:
        lines += _failure(task, answers, index)
    return "\n".join(lines) + "\n"


def kind_of(answer: Answer) -> str:
    """The kind of a wrong answer."""
    if answer.is_cut_off:
        return "cut off"
    return "no answer" if answer.given is None else "wrong answer"


def _failure(task: Task, answers: Answers, index: int) -> Iterator[str]:
    row, answer, text = task.eval_rows[index], answers.greedy[index], answers.greedy_texts[index]
    yield from ("", "-" * 80, f"question {index} ({printable(row.place, 200)}): {kind_of(answer)}", "")
    yield from _indented(row.question)
    wanted = task.file.right_answer(row)
    wanted = "(see the row)" if wanted is None else printable(str(wanted), 200)
    yield from ("", f"wanted: {wanted}", f"given:  {_given(answer.given)}")
    if group := answers.sampled[index]:
        counts = Counter(_given(sample.given) for sample in group)
        num_right = sum(sample.correct == 1 for sample in group)
        shown = ", ".join(f"{given} ({count})" for given, count in counts.most_common(5))
        more = f", {len(counts) - 5} others" if len(counts) > 5 else ""
        yield f"samples: {num_right} of {len(group)} right; {shown}{more}"
    yield from ("", f"completion ({answer.length} tokens):", "")
    yield from _indented(text)


def _given(given: str | None) -> str:
    return "none" if given is None else printable(given, 100)


def _indented(text: str) -> Iterator[str]:
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n... {len(text) - LONGEST} characters ...\n{text[-half:]}"
    for line in visible(text).split("\n"):
        yield f"    {line}"
