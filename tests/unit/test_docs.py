"""The files, lines, keys, flags and tests that the documentation names exist.

The mistakes that benchmarks/traps.py plants take effect, and leave nothing behind; the page describes them.
"""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
import tyro
import yaml

import common.policy
import common.sampling
from common.chat import encode_prompt
from common.experience import Experience
from common.policy import Policy
from common.sampling import sample
from viewer.results import read_runs

from harness.base.checks import flag
from harness.base.config import RunConfig
from harness.base.places import CHAPTERS, in_experiments
from harness.models.loading import load_policy

ROOT = Path(__file__).resolve().parents[2]
# Neither outputs of runs nor environments
NOT_OURS = {"runs", "exports", *(path.parent.name for path in ROOT.glob("*/pyvenv.cfg"))}
PAGES = sorted(
    path
    for path in [*ROOT.glob("**/*.md"), ROOT / "llms.txt"]
    if not any(part in NOT_OURS or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
SOURCES = ("common", "fast", "doctor", "harness", "tasks", "viewer", "benchmarks", "docs", "experiment_*", *CHAPTERS)
# They take directories, or nothing
PLAIN_SCRIPTS = {
    "viewer/lab/__main__.py",
    "viewer/curve.py",
    "imitation/tiny_policy/make_gsm8k_easy.py",
    "docs/notebooks/execute.py",
    "docs/book_pdf.py",
    "tests/lab_reference.py",
}


@pytest.fixture(autouse=True)
def beside_scripts(monkeypatch):
    """Some scripts import modules next to them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_links_lead_to_files_that_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted(in_experiments("README.md")), ids=lambda page: page.parent.name)
def test_numbered_steps_point_at_the_numbered_comments(page):
    lines = (page.parent / "train.py").read_text(encoding="utf-8").splitlines()
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"^(?:\*\*Step )?(\d)[.,] .*\[line (\d+)\]\(train\.py#L(\d+)\)", text, re.MULTILINE)
    listed = re.findall(r"^(\d)\. .*\[line", text, re.MULTILINE)
    assert len({int(number) - index for index, number in enumerate(listed)}) <= 1  # Markdown numbers without gaps
    assert len(links) == text.count("](train.py#L")
    numbered = [line for line in lines if re.match(r" +# \d ", line)]
    assert len(links) == len(numbered) or "Parent: none" not in text
    for number, shown, target in links:
        assert shown == target
        assert lines[int(target) - 1].strip().startswith(f"# {number} ")


def test_the_first_page_is_short():
    """Words as in wc -w: everything between spaces, so that tables, addresses and commands count, too."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200


@pytest.mark.parametrize("language", ["ru", "zh"])
def test_a_translation_has_the_commands_links_and_numbers_of_the_readme(language):
    names = ("README.md", f"docs/README.{language}.md")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in names]
    for pattern in (r"^```.*?^```$", r"`[^`\n]+`", r"\d+(?:\.\d+)*", r"^(?=#|\|)"):
        english, other = (sorted(re.findall(pattern, text, re.MULTILINE | re.DOTALL)) for text in texts)
        assert other == english
        assert len(english) >= 3
    links = [
        sorted(os.path.normpath(Path(name).parent / target) for target in re.findall(r"\]\(([^)]+)\)", text))
        for name, text in zip(names, texts, strict=True)
    ]
    languages = {"README.md", "docs/README.ru.md", "docs/README.zh.md"}
    english, other = ([link for link in page if link not in languages] for page in links)
    assert other == english
    assert [sorted(languages - {*page}) for page in links] == [[name] for name in names]  # each links the other two


def test_every_cited_paper_is_listed_and_every_listed_one_is_cited():
    number = re.compile(r"\b\d{4}\.\d{5}\b")
    listed = re.findall(
        rf"^\| \[({number.pattern})\]", (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    sources = [path for folder in SOURCES for path in ROOT.glob(f"{folder}/**/*.py")]
    pages = [page for page in PAGES if page.name != "papers.md"]
    cited = {each for path in [*sources, *pages] for each in number.findall(path.read_text(encoding="utf-8"))}
    assert listed == sorted(cited)


def test_every_letter_of_a_shape_is_in_the_glossary():
    letters = re.findall(r"^\| (\S+) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    paths = [
        path for folder in ("common", "fast", "experiment_*", *CHAPTERS) for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    shapes = [each for path in paths for each in re.findall(r"# .*?\(([\w, -]+)\)", path.read_text(encoding="utf-8"))]
    used = {
        name
        for shape in shapes
        if "," in shape
        for name in re.split(", ?", shape)
        if re.fullmatch("[A-Z](-1)?|b", name)
    }
    assert {"Q", "G", "B", "b", "T", "T-1"} <= used <= set(letters)


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """The commands `python <script> <arguments>` on a page; a copied script gets the original's name."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for original, copy in re.findall(r"^cp (experiment_\w+/)train\.py ((?:\w+/)+)$", text, re.MULTILINE):
        text = text.replace(copy, original)
    found = re.findall(
        r"python (?:-m (viewer)\.(\w+)|((?:\w+/)+\w+\.py|evaluate\.py|export\.py))((?: [^`\n&#)]*)?)", text
    )
    scripts = [file or f"{package}/{module}.py" for package, module, file, _ in found]
    scripts = [name if (ROOT / name).is_file() else f"{name.removesuffix('.py')}/__main__.py" for name in scripts]
    return [(name, shlex.split(arguments)) for name, (*_, arguments) in zip(scripts, found, strict=True)]


@each_page
def test_commands_are_understood_by_their_scripts(page, load_script):
    for script, arguments in commands_of(page):
        assert (ROOT / script).is_file(), script
        if script in PLAIN_SCRIPTS or arguments in ([], ["--help"]):
            continue
        module = load_script(script)
        config_class = getattr(module, "Config", None) or module.Command
        arguments = [*map(flag, getattr(config_class, "POSITIONAL", ())), *arguments]  # as a flag, the way tyro sees it
        others = getattr(config_class, "ALIASES", {})  # names of flags
        aliases = {alias: flag(name) for name, names in others.items() for alias in names}
        try:
            tyro.cli(config_class, args=[aliases.get(word, word) for word in arguments])
        except SystemExit:
            pytest.fail(f"{script} {shlex.join(arguments)}")


def test_the_page_of_options_has_every_option_of_every_program(load_script):
    """Each in the table of a program, or of a class of settings that is named above it."""
    tables = dict(re.findall(r"(?m)^### (.+)\n((?:(?!#).*\n)+)", load_script("docs/options.py").page()))
    options = {name: set(re.findall(r"(?m)^\| `(--[\w-]+)", table)) for name, table in tables.items()}
    assert tables.keys() > {"evaluate.py", "viewer/compare.py", "doctor/__main__.py", "ModelConfig"}
    for path in in_experiments("train.py"):
        name = path.relative_to(ROOT).as_posix()
        (links,) = re.findall(r"Also the options of (.*)\.", tables[name])
        found = options[name].union(*(options[other] for other in re.findall(r"[`\[]([\w/.]+)[`\]]", links)))
        assert found == {flag(field.name) for field in dataclasses.fields(load_script(name).Config)}, name


def test_versions_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation, hooks = (
        yaml.safe_load((ROOT / name).read_text("utf-8")) for name in ("CITATION.cff", ".pre-commit-config.yaml")
    )
    assert citation["version"] == project["version"] == common.__version__
    used = {package for hook in hooks["repos"][0]["hooks"] for package in hook["additional_dependencies"]}
    assert used == {package for package in project["optional-dependencies"]["test"] if package.startswith("ruff")}


def test_the_tests_of_the_table_of_traps_exist():
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", page)
    missing = [name for file, name in found if f"def {name}(" not in (ROOT / "tests" / file).read_text("utf-8")]
    assert missing == []
    assert len(found) > 100


def test_every_logged_key_is_explained():
    explained = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = set()
    for folder in ROOT.glob("experiment_[bm]*/results"):
        runs = [run for name, run in read_runs(folder).items() if name.startswith("seed")]
        keys |= {key for run in runs for row in run.metrics.rows for key in row}
    assert len(keys) > 20
    for key in keys - {"step"}:
        family, *middle, name = key.split("/")
        places = [f"`{key}`", f"`{family}/*/{name}`"] if middle else [f"`{key}`"]
        assert any(place in explained for place in places), key


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("patch", sorted(in_experiments("*.patch")), ids=lambda path: path.parent.name)
def test_the_broken_variant_applies_to_the_file_as_it_is(tmp_path, patch):
    scripts = re.findall(r"^\+\+\+ b/([\w/]+/\w+\.py)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    (tmp_path / patch.parent.relative_to(ROOT)).mkdir(parents=True)
    for script in scripts:
        shutil.copy(ROOT / script, tmp_path / script)
    result = subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert scripts
    for script in scripts:
        assert (tmp_path / script).read_bytes() != (ROOT / script).read_bytes()
        compile((tmp_path / script).read_bytes(), script, "exec")


def test_the_table_of_hyperparameters_matches_its_data(load_script):
    benchmark = load_script("benchmarks/hyperparameters.py")
    assert benchmark.table(*benchmark.read_results()) in (ROOT / "docs" / "hyperparameters.md").read_text("utf-8")


def test_the_tables_of_takeaways_match_their_data(load_script):
    page = (ROOT / "docs" / "takeaways.md").read_text(encoding="utf-8")
    tables = load_script("benchmarks/takeaways.py").tables()
    assert [name for name, table in tables.items() if table not in page] == []


def test_the_tables_of_asynchronous_samples_match_their_data(load_script):
    benchmark, page = load_script("benchmarks/asynchronous.py"), (ROOT / "docs" / "asynchronous.md").read_text("utf-8")
    rows = benchmark.read_rows()
    assert benchmark.lag_table(rows) in page


# The page of traps ----------------------------------------------------------------------------------------------------

GROUP_SIZE = 8
NAMES = (
    "end_of_turn_masked", "mask_from_pad", "off_by_one", "prompt_trained", "tool_output_in_loss", "no_temperature",
    "right_padding_generation", "equal_rewards_noise", "std_wrong_axis", "micro_batch_mean", "kl_over_padding",
    "reference_dropout",
)  # fmt: skip


@pytest.fixture(scope="module")
def traps(load_script):
    return load_script("benchmarks/traps.py")


@pytest.fixture(scope="module")
def gradient_of(traps, load_script, update):
    """The gradient of a small step's update, with a mistake in it or with the correct code of a setting."""
    policy = load_policy(RunConfig(device="cpu"), 0.7)
    correct: dict[tuple, torch.Tensor] = {}  # by the parts of a setting that matter here, where flags have no effect

    def gradient(name: str) -> torch.Tensor:
        setting = traps.setting_of(name)
        key = (setting.experiment, setting.plant)
        if name in traps.TRAPS or key not in correct:
            train = load_script(f"{setting.experiment}/train.py")
            with traps.planted(name, train):
                values = step(train, update, None if name == "mask_from_pad" else policy)
            if name in traps.TRAPS:
                return values
            correct[key] = values
        return correct[key]

    return gradient


def step(train, update, policy: Policy | None) -> torch.Tensor:
    """Steps 1 to 5 of `train`, on two groups of rows with a hole in their masks; the rewards of the first are equal.

    None: the policy is loaded as `train` does.
    """
    config = train.Config(device="cpu", group_size=GROUP_SIZE, micro_batch_size=4, kl_weight=0.5, max_grad_norm=1e9)
    policy = policy or train.load_policy(config, 0.7)
    reference = train.make_reference(policy)
    for weight in reference.parameters():
        weight.mul_(1.02)
    end = policy.end_of_turn_ids[0]
    questions = [[{"role": "user", "content": question}] for question in ("12 + 3 + 45 = ?", "7 + 8 = ?")]
    prompts = [encode_prompt(policy.tokenizer, question) for question in questions]
    rows = sample(policy, prompts, GROUP_SIZE, max_new_tokens=3, key=(0,))
    for index, row in enumerate(rows):
        row.observe([20, 21])
        row.ids += [30] * (index % 3) + [end]
        row.action_mask += [1] * (index % 3 + 1)
        row.sampler_log_probs += [-1.0] * (index % 3 + 1)
        row.finish_reason = "stop"
    returns = torch.tensor([[0.9] * GROUP_SIZE, [0.9, 0.2, 0.0, 0.9, 0.9, 0.2, 0.0, 0.9]])
    advantages = train.group_advantages(returns) / (train.group_std(returns) + train.STD_EPS)
    experience = train.collate(rows, policy.pad_id, policy.device)
    experience.advantages = advantages.view(-1, 1).float()
    experience.log_probs_ref = train.token_log_probs(reference, experience, config.micro_batch_size)
    update(train, config, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, 1)
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_mistake_changes_the_gradient_and_is_gone(traps, gradient_of, load_script, name):
    train = load_script(f"{traps.setting_of(name).experiment}/train.py")
    changed = (train, common.policy, common.policy.Policy, common.sampling, Experience)
    before = [dict(vars(target)) for target in changed]
    right, wrong = gradient_of(traps.TRAPS[name].setting), gradient_of(name)
    assert (wrong - right).norm() > 0.01 * right.norm()
    assert [dict(vars(target)) for target in changed] == before


def test_an_update_after_all_mistakes_is_as_before(gradient_of, load_script, update):
    assert gradient_of("default").equal(step(load_script("experiment_base/train.py"), update, None))


def test_noise_needs_rewards_that_are_not_exact(traps, load_script):
    train = load_script("experiment_base/train.py")
    with traps.planted("equal_rewards_noise", train):
        returns = torch.tensor([[total] * GROUP_SIZE for total in (0.9, 0.2, 1.0, 0.0)])
        advantages = train.group_advantages(returns) / (train.group_std(returns) + train.STD_EPS)
    assert advantages[:, 0].tolist() == pytest.approx([-0.809, -0.575, 0.0, 0.0], abs=2e-3)


def test_the_page_is_about_the_mistakes_that_are_planted(traps):
    page = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    assert traps.table(*traps.read_results()) in page
    assert tuple(traps.TRAPS) == NAMES == tuple(re.findall(r'^<a id="(\w+)"></a>', page, re.MULTILINE))
    for trap in traps.TRAPS.values():
        file, _, name = trap.test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
