"""The grammar of prompts with instructions. It makes data; reinforcement learning does not use it.

Every fifth of the 200 topics is held out, and so are some kinds of instructions: training uses neither.
"""

import random
import re

from tasks.verdicts.instruction_kinds import KINDS

_TOPICS = """
bread butter pepper carrots tomatoes potatoes rivers music cats dogs trees rain snow tea coffee milk apples soup
rice eggs cheese salt sugar honey fish birds horses cows bees frogs sheep lions bears wolves ants flowers grass
leaves roses seeds gardens farms forests mountains deserts islands oceans lakes beaches caves clouds storms wind ice
fire stones sand gold silver iron glass wood paper paint books stories poems letters maps songs drums guitars pianos
dances films photos games chess football tennis running swimming walking hiking bicycles trains cars buses boats
ships planes roads bridges tunnels streets towns cities villages houses doors windows roofs kitchens beds chairs
tables lamps clocks mirrors boxes bags keys coins shoes hats coats gloves scarves shirts wool cotton silk buttons
needles knives spoons plates cups bottles ovens fridges brooms soap towels baths teeth hair hands eyes hearts bones
sleep dreams friends families babies children parents teachers doctors nurses bakers farmers sailors pilots artists
writers singers students schools libraries museums hospitals shops markets parks zoos castles towers churches
stations airports numbers colors shapes words names languages questions jokes secrets gifts holidays birthdays
weddings picnics summer winter spring autumn mornings evenings nights stars planets rockets robots computers phones
radios
"""
TOPICS = _TOPICS.split()
CHOICES = {
    "needed": "warm/old/new/good/small/big/water/day/time/home/red/light/long/hand/food/green/year/life/best/people",
    "avoided": "the/is/and/of/to/it/are/in/that/very/good/many/can/people",
    "phrases": "That is all./Thank you./I like it./See you soon./Try it today./The end./Is it not?",
    "letters": "a/e/i/n/o/r/s/t",
    "markers": "P.S./P.P.S",
}
OPENINGS = ("Write about", "Tell me about", "Write a short text about", "Describe", "Say something about")

# A kind, its arguments (< at most, > at least), how "Write about bread" continues, and sentences with the same meaning.
TRAINED = """\
number_words | num_words<6-20 | with at most {} words | Use at most {} words. | Write no more than {} words.
number_words | num_words>8-20 | with at least {} words | Use at least {} words. | Write {} words or more.
number_sentences | num_sentences<1-1 | in one sentence | Write only one sentence. | Use a single sentence.
number_sentences | num_sentences>2-3 | in {} or more sentences | Use {} sentences or more. | Use at least {} sentences.
existence | keywords=needed | with the word {} in it | Include the word {}. | Your answer contains the word {}.
forbidden_words | forbidden_words=avoided | without the word {} | Do not use the word {}. | Avoid the word {}.
english_lowercase | | in lower case only | Use only lower case letters. | Do not use capital letters.
no_comma | | without commas | Do not use commas. | Your answer has no commas.
number_bullet_lists | num_bullets=2-4 | as a list of {} points that begin with * | Write {} lines that begin with *.
end_checker | end_phrase=phrases | ending with {} | End with the words {}. | The last words of your answer are {}.
postscript | postscript_marker=markers | with a postscript that begins with {} | \
Add a postscript that begins with {}.
""".splitlines()
HELD_OUT = """\
english_capital | | in capital letters only | Use only capital letters. | Do not use lower case letters.
quotation | | inside double quotation marks | Put your whole answer in double quotation marks. | Begin and end with ".
title | | with a title in << and >> | Add a title, like this: <<title>> | Your answer has a title between << and >>.
frequency | frequency>2-3 keyword=needed | with {1} at least {0} times | Use {1} at least {0} times.
letter_frequency | let_frequency>5-9 letter=letters | with the letter {1} at least {0} times | \
Use the letter {1} {0} times or more.
number_highlighted_sections | num_highlights=2-3 | with {} parts in stars, like *this* | \
Put stars around {} parts, like *this*.
""".splitlines()
_IDS = {kind.partition(":")[2]: kind for kind in KINDS}
_APART = (  # a prompt has at most one kind of each group
    {"number_bullet_lists", "number_sentences", "end_checker", "postscript"},
    {"english_lowercase", "end_checker", "postscript"},
)


def draw_row(rng: random.Random, topics: list[str], rules: list[str], split: str, is_short: bool = False) -> dict:
    """A row with one to three kinds of instructions. A short row starts with limits on the number of words.

    >>> row = draw_row(random.Random(3), ["bread"], TRAINED, "train")
    >>> row["prompt"]
    'Say something about bread as a list of 4 points that begin with * and without the word "good".'
    >>> row["kwargs"], row["kind"]
    ([{'num_bullets': 4}, {'forbidden_words': ['good']}], 'number_bullet_lists')
    """
    topic, limits = rng.choice(topics), draw_limits(rng) if is_short else []
    drawn = list(limits)
    for rule in rng.sample(rules, rng.choice((1, 1, 2, 2, 3)) - is_short):
        kind = rule.split(" | ")[0]
        kinds = {other for other, *_ in drawn}
        if kind not in kinds and not any(kind in group and kinds & group for group in _APART):
            drawn.append((kind, *draw_instruction(rng, rule)))
    prompt = f"{rng.choice(OPENINGS)} {topic}"
    if rng.random() < 0.5:
        *first, last = [clause for _, _, clause, _ in drawn if clause]
        prompt += f" {', '.join(first)}{' and ' if first else ''}{last}."
    else:
        prompt = " ".join([f"{prompt}.", *(sentence for *_, sentence in drawn if sentence)])
    return {
        "prompt": prompt,
        "instruction_id_list": [_IDS[kind] for kind, *_ in drawn],
        "kwargs": [kwargs for _, kwargs, *_ in drawn],
        "topic": topic,
        "kind": (drawn[len(limits) :] or drawn)[0][0],
        "split": split,
    }


def draw_limits(rng: random.Random) -> list[tuple[str, dict, str, str]]:
    """A smallest and a largest number of words: two instructions in one clause or sentence.

    >>> draw_limits(random.Random(0))[0][2:]
    ('in 7 to 13 words', 'Use 7 to 13 words.')
    """
    least = rng.randint(4, 8)
    most = least + rng.randint(3, 8)
    return [
        (
            "number_words",
            {"num_words": least, "relation": "at least"},
            f"in {least} to {most} words",
            f"Use {least} to {most} words.",
        ),
        ("number_words", {"num_words": most + 1, "relation": "less than"}, "", ""),
    ]


def draw_instruction(rng: random.Random, rule: str) -> tuple[dict, str, str]:
    """An instruction drawn from a rule: its arguments, and its text as the end of a sentence and as a sentence.

    >>> draw_instruction(random.Random(0), TRAINED[0])
    ({'num_words': 20, 'relation': 'less than'}, 'with at most 19 words', 'Write no more than 19 words.')
    """
    _, arguments, clause, *sentences = (part.strip() for part in rule.split("|"))
    kwargs, shown = {}, []
    for name, sign, drawn_from in re.findall(r"(\w+)([<>=])(\S+)", arguments):
        if drawn_from in CHOICES:
            value = rng.choice(CHOICES[drawn_from].split("/"))
            kwargs[name] = [value] if name.endswith("words") else value
            shown.append(f'"{value}"')
            continue
        value = rng.randint(*map(int, drawn_from.split("-")))
        kwargs[name] = value + (sign == "<")
        shown.append(str(value))
        if sign != "=":
            relation = "let_relation" if name == "let_frequency" else "relation"
            kwargs[relation] = "less than" if sign == "<" else "at least"
    return kwargs, clause.format(*shown), rng.choice(sentences).format(*shown)
