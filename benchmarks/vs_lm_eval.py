"""evaluate.py against lm-evaluation-harness: the same model, the same prompts, the same questions of GSM8K.

    python -m venv lm_eval && lm_eval/bin/pip install -e '.[lm-eval]'      # a separate environment
    OMP_NUM_THREADS=1 python benchmarks/vs_lm_eval.py --data test.jsonl --lm-eval lm_eval/bin/python

`--data` is GSM8K's test file as published. The model is a freshly initialised Qwen2 of 0.9 million parameters that
imitation/sft has trained on the answers to half of these very questions. So its accuracy says nothing about
mathematics: the model is right and wrong often enough to compare two programs. The answers are written in several ways
(`$1,080`, or some steps first), the answers to the other questions are guesses, and the longest ones exceed the budget.

Both programs then answer all questions greedily, in float32, one at a time and 16 at a time, each in a separate
process, taking turns. The script compares for every question: ids of the prompt, text of the completion, verdict; and
the log-likelihood of the right answer. A second comparison uses a generation_config.json like the ones of Qwen2.5's
instruction-tuned models, whose repetition penalty lm-eval applies. lm_eval_tasks/gsm8k_tags.yaml is lm-eval's side; on
its command line, from a directory with questions.jsonl:

    lm_eval --model hf --model_args pretrained=MODEL,dtype=float32 --tasks gsm8k_tags --apply_chat_template \\
        --include_path benchmarks/lm_eval_tasks --batch_size 16 --device cpu --log_samples --output_path OUT

Writes benchmarks/results/vs_lm_eval.json.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "vs_lm_eval.json"
TASKS = ROOT / "benchmarks" / "lm_eval_tasks"
MAX_NEW_TOKENS = 24  # as in gsm8k_tags.yaml; few, so that some completions are cut off
# the generation_config.json of Qwen2.5's instruction-tuned models, without the ids
DEFAULTS = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@dataclass(frozen=True, kw_only=True)
class Config:
    data: str  # GSM8K's test.jsonl
    lm_eval: str = sys.executable  # the Python of an environment with the extra lm-eval
    questions: int = 500  # the first ones
    epochs: int = 25  # passes of the supervised training over the half of the questions
    batch_sizes: tuple[int, ...] = (1, 16)
    work: Path | None = None  # where the model is made, or was made by an earlier call; None: a temporary directory
    output: Path = RESULTS


def main(arguments: Sequence[str] | None = None) -> None:
    import tyro

    from viewer.results import write_json

    from harness.base.machine import describe_machine

    config = tyro.cli(Config, args=arguments, description=__doc__)
    command = ["python", "benchmarks/vs_lm_eval.py", *(sys.argv[1:] if arguments is None else arguments)]
    settings = {"questions": config.questions, "epochs": config.epochs, "max_new_tokens": MAX_NEW_TOKENS}
    result = {"command": command, "settings": settings, "measured": describe_machine()}
    with tempfile.TemporaryDirectory() as place:
        work = (config.work or Path(place)).resolve()
        model, training = make_model(config, work)
        result |= {"training": training} | measure(config, work, model)
    write_json(config.output, result)


# The model -----------------------------------------------------------------------------------------------------------


def make_model(config: Config, work: Path) -> tuple[Path, dict]:
    """Write the questions, the fresh model and the trained one into `work`; returns the latter and its report."""
    run = work / "sft" / "memory"
    if not (run / "summary.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        rows = read_questions(config)
        (work / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        make_fresh_model([row["question"] for row in rows], work / "fresh")
        lessons = "".join(json.dumps(lesson) + "\n" for lesson in make_lessons(rows))
        (work / "lessons.jsonl").write_text(lessons, encoding="utf-8")
        flags = {
            "model": work / "fresh", "data": work / "lessons.jsonl", "epochs": config.epochs, "eval-prompts": 1,
            "lr": 3e-3, "tokens-per-batch": 1024, "checkpoint-every": 0, "runs-dir": work, "name": "memory",
            "device": "cpu",
        }  # fmt: skip
        command = [sys.executable, "imitation/sft/train.py"]
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        subprocess.run(command, cwd=ROOT, env=environment(work), check=True)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return run / "final", {name: value for name, value in summary.items() if isinstance(value, int | float | str)}


def read_questions(config: Config) -> list[dict]:
    with open(config.data, encoding="utf-8") as file:
        return [json.loads(line) for line in file][: config.questions]


def make_fresh_model(texts: list[str], place: Path) -> None:
    """A Qwen2 of 0.9 million parameters with a tokenizer trained on `texts`; always the same."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    markers, tags = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<answer>", "</answer>"]
    bpe = Tokenizer(models.BPE())
    pieces = Regex(r"'[a-z]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")  # each digit is a separate piece
    splits = [pre_tokenizers.Split(pieces, behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2044, special_tokens=markers, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    template = (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template,
        model_max_length=512, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 384, "tie_word_embeddings": True, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **ids))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


def make_lessons(rows: list[dict]) -> list[dict]:
    """Conversations with the right answers to half of the questions, written in several ways."""
    import random
    import re

    rng = random.Random(0)
    lessons = []
    for index in rng.sample(range(len(rows)), len(rows) // 2):
        row = rows[index]
        gold, steps = row["answer"].split("#### ")[1], " ".join(re.findall(r"<<(.*?)>>", row["answer"]))
        form, number = rng.choice(["{}", "${}"]), int(gold.replace(",", ""))
        if abs(number) >= 1000 and rng.random() < 0.5:
            gold = f"{number:,}"
        answer = f"<answer>{form.format(gold)}</answer>"
        if rng.random() < 0.3 and len(steps) < 40:
            answer = f"{steps}\n{answer}"
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
        lessons.append({"messages": turns})
    return lessons


# The comparison ------------------------------------------------------------------------------------------------------


def measure(config: Config, work: Path, model: Path) -> dict:
    """All evaluations, taking turns, and the agreement of the two programs."""
    rows = read_questions(config)
    runs = {size: run_both(config, work, model, size) for size in config.batch_sizes}
    with_defaults = work / "with_defaults"
    shutil.copytree(model, with_defaults, dirs_exist_ok=True)
    settings = with_defaults / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text(encoding="utf-8")) | DEFAULTS), encoding="utf-8")
    penalised = run_both(config, work, with_defaults, config.batch_sizes[-1])
    prompts, log_likelihoods = our_prompts(model, rows)
    result = {
        "lm_eval_versions": penalised["lm_eval"]["versions"],
        "num_questions": len(rows),
        "batch_sizes": {size: compare(run, prompts) for size, run in runs.items()},
        "with_repetition_penalty": {"generation_config": DEFAULTS} | compare(penalised, prompts),
        "other_filters_of_lm_eval": {  # the scores that these filters give to the same completions
            name: statistics.mean(values)
            for name, values in runs[config.batch_sizes[-1]]["lm_eval"]["other_filters"].items()
        },
        "log_likelihood": {
            size: compare_log_likelihoods(run["lm_eval"]["log_likelihoods"], log_likelihoods)
            for size, run in runs.items()
        },
        "texts_equal_in_all_runs": {program: num_equal(program, runs.values()) for program in ("lm_eval", "evaluate")},
        "cpu_seconds": {size: cpu_seconds(run) for size, run in runs.items()},
        # from evaluate.py; "different" lists lm-eval's if they differ
        "completions": {size: run["evaluate"]["answers"] for size, run in runs.items()},
        "completions_with_repetition_penalty": penalised["evaluate"]["answers"],
    }
    print(json.dumps({name: value for name, value in result.items() if "completions" not in name}, indent=1))
    return result


def run_both(config: Config, work: Path, model: Path, batch_size: int) -> dict[str, dict]:
    """One evaluation with each of the two programs, each in a separate process."""
    runs = {}
    for program, python in (("lm_eval", os.path.abspath(config.lm_eval)), ("evaluate", sys.executable)):
        with tempfile.TemporaryDirectory() as output:
            job = {"program": program, "model": str(model), "batch_size": batch_size, "output": output}
            command = [python, str(Path(__file__).resolve()), "--job", json.dumps(job)]
            settings = environment(work, has_root=program == "evaluate")
            result = subprocess.run(command, cwd=work, env=settings, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"error: {job} failed:\n{result.stderr[-3000:]}")
        runs[program] = json.loads(result.stdout.splitlines()[-1])
        answers = runs[program]["answers"]
        accuracy = sum(answer["correct"] for answer in answers) / len(answers)
        print(f"{program}, batch size {batch_size}: {accuracy:.4f}, {runs[program]['cpu']:.1f} CPU seconds", flush=True)
    return runs


def environment(work: Path, has_root: bool = True) -> dict[str, str]:
    """For a process: offline, one thread. lm-eval must not find this repository: it imports a package `evaluate`."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hub")}
    return inherited | offline | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(ROOT)} if has_root else {})


def compare(runs: dict[str, dict], prompts: list[list[int]]) -> dict:
    """The accuracy of both programs, and the number of questions with the same prompt, text and verdict."""
    theirs, ours = runs["lm_eval"], runs["evaluate"]
    pairs = list(enumerate(zip(theirs["answers"], ours["answers"], strict=True)))
    differences = [(index, pair) for index, pair in pairs if pair[0] != pair[1]]
    return {
        "accuracy": {name: sum(x["correct"] for x in run["answers"]) / len(pairs) for name, run in runs.items()},
        "accuracy_reported": {name: run["accuracy"] for name, run in runs.items()},
        "equal_prompts": sum(given == wanted for given, wanted in zip(theirs["prompts"], prompts, strict=True)),
        "equal_texts": sum(pair[0]["text"] == pair[1]["text"] for _, pair in pairs),
        "equal_verdicts": sum(pair[0]["correct"] == pair[1]["correct"] for _, pair in pairs),
        "cut_off": ours["cut_off"],
        "different": [{"question": index, "lm_eval": pair[0], "evaluate": pair[1]} for index, pair in differences],
    }


def num_equal(program: str, runs: Iterable[dict[str, dict]]) -> int:
    """How many questions get the same text from a program in all runs, whatever the batch size."""
    texts = [[answer["text"] for answer in run[program]["answers"]] for run in runs]
    return sum(len(set(of_question)) == 1 for of_question in zip(*texts, strict=True))


def cpu_seconds(run: dict[str, dict]) -> dict:
    """For the answers, and for the whole process."""
    seconds = {part: {name: run[name][part] for name in ("lm_eval", "evaluate")} for part in ("cpu", "cpu_of_process")}
    return {part: values | {"ratio": values["lm_eval"] / values["evaluate"]} for part, values in seconds.items()}


def our_prompts(model: Path, rows: list[dict]) -> tuple[list[list[int]], dict[str, list[float]]]:
    """The ids of the prompts, and the log-likelihood of the right answer after each.

    `with_newline` counts one more token: the line end that closes the prompt in the template. lm-eval moves spaces from
    the end of a prompt to the scored text.
    """
    import torch

    from common.chat import encode_prompt
    from common.experience import collate
    from common.logprobs import token_log_probs
    from common.trajectory import Trajectory
    from tasks.gsm8k import messages, solution

    from harness.base.config import PolicyConfig
    from harness.models.loading import load_policy

    policy = load_policy(PolicyConfig(model=str(model), device="cpu"))
    policy.eval()
    prompts = [encode_prompt(policy.tokenizer, messages(row)) for row in rows]
    answers = [policy.tokenizer.encode(solution(row), add_special_tokens=False) for row in rows]
    sums = {}
    for name, more in (("answer", 0), ("with_newline", 1)):
        rows_of_ids = []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids, num_scored = prompt + answer, len(answer) + more
            mask = [0] * (len(ids) - num_scored) + [1] * num_scored
            rows_of_ids.append(Trajectory(ids, len(ids) - num_scored, mask, [0.0] * len(ids), index))
        batch = collate(rows_of_ids, policy.pad_id, policy.device)
        with torch.no_grad():
            sums[name] = token_log_probs(policy, batch, micro_batch_size=16).sum(dim=1).tolist()
    return prompts, sums


def compare_log_likelihoods(theirs: list[float], ours: dict[str, list[float]]) -> dict:
    """The largest and the mean difference, in nats."""
    result = {"mean": {"lm_eval": statistics.mean(theirs)}}
    for name, values in ours.items():
        differences = [abs(x - y) for x, y in zip(theirs, values, strict=True)]
        result["mean"][name] = statistics.mean(values)
        result[name] = {"largest_difference": max(differences), "mean_difference": statistics.mean(differences)}
    return result


# One process ---------------------------------------------------------------------------------------------------------


def work_on(job: dict) -> None:
    """Evaluate; the last line on stdout holds the answers."""
    with redirect_stdout(sys.stderr):
        result = (run_lm_eval if job["program"] == "lm_eval" else run_evaluate)(job)
    print(json.dumps(result | {"cpu_of_process": time.process_time()}))


def run_lm_eval(job: dict) -> dict:
    """Do what `lm_eval --model hf --apply_chat_template` does with both tasks, through the same function."""
    from importlib.metadata import version

    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    seconds, prompts = [], {}
    encode = HFLM.tok_batch_encode

    def encode_and_note(self, strings, **settings):
        ids, attention_mask = encode(self, strings, **settings)
        for string, row, mask in zip(strings, ids, attention_mask, strict=True):
            prompts[string] = row[mask.bool()].tolist()
        return ids, attention_mask

    HFLM.tok_batch_encode = encode_and_note
    HFLM.generate_until = timed(HFLM.generate_until, seconds)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": job["model"], "dtype": "float32"},
        tasks=["gsm8k_tags", "gsm8k_tags_log_likelihood"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        batch_size=job["batch_size"],
        device="cpu",
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    samples = {name: [] for name in ("tags", "strict-match", "flexible-extract")}
    for sample in results["samples"]["gsm8k_tags"]:
        samples[sample["filter"]].append(sample)
    answers = samples.pop("tags")
    scored = results["samples"]["gsm8k_tags_log_likelihood"]
    return {
        "answers": [{"text": sample["resps"][0][0], "correct": float(sample["exact_match"])} for sample in answers],
        "accuracy": results["results"]["gsm8k_tags"]["exact_match,tags"],
        "prompts": [prompts[sample["arguments"][0][0]] for sample in answers],
        "other_filters": {name: [float(x["exact_match"]) for x in group] for name, group in samples.items()},
        "log_likelihoods": [sample["resps"][0][0][0] for sample in scored],
        "cpu": sum(seconds),
        "versions": {name: version(name) for name in ("lm_eval", "torch", "transformers", "tokenizers", "datasets")},
    }


def run_evaluate(job: dict) -> dict:
    """`python evaluate.py`, with a timer around the function that asks a batch of questions."""
    from importlib.util import module_from_spec, spec_from_file_location

    from harness.evaluation import session

    spec = spec_from_file_location("evaluate", ROOT / "evaluate.py")
    evaluate = sys.modules["evaluate"] = module_from_spec(spec)
    spec.loader.exec_module(evaluate)
    seconds: list[float] = []
    session.ask = timed(session.ask, seconds)
    flags = {
        "model": job["model"], "task": "gsm8k", "data": "questions.jsonl", "system-prompt": "", "num-samples": 0,
        "max-new-tokens": MAX_NEW_TOKENS, "generation-batch-size": job["batch_size"], "device": "cpu",
        "output": job["output"],
    }  # fmt: skip
    evaluate.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    lines = (Path(job["output"]) / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    completions = [json.loads(line) for line in lines]
    results = json.loads((Path(job["output"]) / "results.json").read_text(encoding="utf-8"))
    return {
        "answers": [{"text": completion["text"], "correct": completion["correct"]} for completion in completions],
        "accuracy": results["greedy"]["accuracy"]["value"],
        "cut_off": sum(completion["finish_reason"] == "length" for completion in completions),
        "cpu": sum(seconds),
    }


def timed(function: Callable, seconds: list[float]) -> Callable:
    """Wrap the function so that each call appends its CPU seconds to a list."""

    @wraps(function)
    def call(*arguments, **settings):
        before = time.process_time()
        try:
            return function(*arguments, **settings)
        finally:
            seconds.append(time.process_time() - before)

    return call


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        work_on(json.loads(sys.argv[2]))
    else:
        main()
