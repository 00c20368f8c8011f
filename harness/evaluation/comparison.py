"""The difference between two evaluations of the same questions, and the questions behind it.

Two questions are the same if their rows have the same content, whatever file they come from. If two evaluations share
only some questions, only these are compared, and the program says how many.
"""

import json
from collections import Counter
from pathlib import Path

from common.errors import UserError
from common.evaluate import pass_at_k

from harness.base.checks import flag
from harness.base.terminal import printable, say
from harness.evaluation.figures import difference

SHOWN = 5  # questions of each kind on the terminal
# Settings other than the model that two evaluations should share
WITH_CONSEQUENCES = (
    *("task", "system_prompt", "stop", "completion_prefix", "max_new_tokens", "temperature", "top_p", "seed", "dtype"),
    *("load_in", "judge_model", "judge_url", "answer_begins", "strict"),
)
OLDER = {"stop": [], "strict": False}  # of older versions, which had no such flags


def read_results(source: str, rows: list[str]) -> dict:
    """The results.json of another evaluation, given by its path or directory, that asked some of the same `rows`."""
    path = Path(source).expanduser()
    path = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = "(is it complete?)" if isinstance(error, FileNotFoundError) else f"({printable(str(error), 100)})"
        raise UserError(f"--compare {source}: there is no results.json of an evaluation {reason}") from error
    if not isinstance(results, dict) or not results.get("questions"):
        raise UserError(f"--compare {source}: this is not results.json of an evaluation of one set of questions")
    if not {entry["row"] for entry in results["questions"]} & set(rows):
        asked = f"it asked {len(results['questions'])} other questions, none of these {len(rows)}"
        raise UserError(f"--compare {path}: {asked}: give the results of the same --task and --data")
    return OLDER | results | {"path": str(path)}


def compare(other: dict, own: dict, seed: int) -> dict:
    """The section `comparison` of results.json: our figures minus the other evaluation's, question by question."""
    there, here = _by_row(other), _by_row(own)
    pairs = [(there[key], here[key]) for key in here if key in there]
    before, after = zip(*pairs, strict=True)

    def gain(name: str) -> dict:
        return difference([entry[name] for entry in before], [entry[name] for entry in after], seed)

    has_right = all("greedy" in side[0] for side in (before, after))
    differences = {"greedy accuracy": gain("greedy")} if has_right else {}
    n_before, n_after = ((side.get("sampled") or {}).get("n", 0) for side in (other, own))
    if has_right and (k := min(n_before, n_after)):
        label = f"mean@{n_after}" if n_before == n_after else f"mean@{n_after} - mean@{n_before}"
        differences[label] = gain("mean")
        if k > 1:
            passed = (
                [pass_at_k(n, entry["right"], k) for entry in side]
                for n, side in ((n_before, before), (n_after, after))
            )
            differences[f"pass@{k}"] = difference(*passed, seed=seed)
    became = {
        kind: [new["question"] for old, new in pairs if (old["greedy"] == 1, new["greedy"] == 1) == change]
        for kind, change in (("became_right", (False, True)), ("became_wrong", (True, False)))
        if has_right
    }
    rubrics = [side.get("sources", {}).get("judge", {}).get("content", "")[:12] for side in (other, own)]
    if rubrics[0] == rubrics[1]:
        verdicts = [[entry.get("judged", {}) for entry in side] for side in (before, after)]
        for name in [name for name in verdicts[1][0] if name in verdicts[0][0]]:
            differences[name] = difference(*([entry[name] for entry in side] for side in verdicts), seed=seed)
    return {
        "with": other["path"],
        "questions": len(pairs),
        "only_here": len(here) - len(pairs),
        "only_there": len(there) - len(pairs),
        "other_settings": {
            name: [other.get(name), own.get(name)] for name in WITH_CONSEQUENCES if other.get(name) != own.get(name)
        }
        | ({"judge": rubrics} if rubrics[0] != rubrics[1] else {}),
        "differences": differences,
        **became,
    }


def _by_row(results: dict) -> dict[tuple[str, int], dict]:
    """The questions, keyed by the content of their row and by its position among equal rows."""
    seen: Counter[str] = Counter()
    found = {}
    for entry in results["questions"]:
        found[entry["row"], seen[entry["row"]]] = entry
        seen[entry["row"]] += 1
    return found


def show_comparison(comparison: dict) -> None:
    """Print the differences, and the first questions whose greedy answer became right or wrong."""
    say(f"\ndifference to {comparison['with']}, over {comparison['questions']} questions that both asked:")
    if comparison["only_here"] or comparison["only_there"]:
        say(f"  {comparison['only_here']} questions were asked only here, {comparison['only_there']} only there")
    for name, (there, here) in comparison["other_settings"].items():
        values = [printable(json.dumps(value), 60) for value in (here, there)]
        say(f"  another setting: {flag(name)} {values[0]}, there {values[1]}")
    for name, estimate in comparison["differences"].items():
        say("  {:28} {value:+.3f} [{low:+.3f}, {high:+.3f}]".format(name, **estimate))
    for kind in [kind for kind in ("became_right", "became_wrong") if kind in comparison]:
        questions = comparison[kind]
        say(f"  {len(questions)} greedy answers {kind.replace('_', ' ')}" + (", for example:" if questions else ""))
        for question in questions[:SHOWN]:
            say(f"    {printable(question, 100)}")
