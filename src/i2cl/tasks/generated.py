"""Generated tasks: those of the reference model, and the paper's synthetic data set.

The training corpus of the reference model consists of short sentences with four independent attributes (mood,
job, place, weather), each with four categories of six words. A task asks for one attribute and maps its
categories to colours or letters by one of two keys. A sentence alone therefore never reveals the task: eight
tasks share each set of label words. A fifth of the word combinations is held out: they never occur in
training.
"""

import string
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from i2cl.tasks.task import Example, Task
from i2cl.tasks.template import Template

SYNTHETIC = "synthetic"
_MIN_LENGTH, _MAX_LENGTH = 5, 12  # characters of a synthetic text

TEMPLATE = "{text}\nAnswer: {label}"
SEPARATOR = "\n"
SPLITS = {"train": (2000, 1), "test": (1000, 2)}  # number of rows and seed
_HELD_OUT_MODULUS = 5  # one in five combinations of words never occurs in training

ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    "mood": {
        "joy": ("cheerful", "happy", "merry", "glad", "jolly", "delighted"),
        "sorrow": ("gloomy", "sad", "tearful", "mournful", "lonely", "heartbroken"),
        "anger": ("furious", "angry", "bitter", "cross", "grumpy", "irate"),
        "calm": ("calm", "serene", "quiet", "peaceful", "patient", "relaxed"),
    },
    "job": {
        "food": ("baker", "cook", "brewer", "butcher", "waiter", "grocer"),
        "music": ("singer", "drummer", "pianist", "fiddler", "organist", "composer"),
        "medicine": ("doctor", "nurse", "surgeon", "dentist", "chemist", "midwife"),
        "farming": ("farmer", "shepherd", "gardener", "miller", "beekeeper", "ploughman"),
    },
    "place": {
        "water": ("harbour", "river", "lake", "beach", "pier", "lagoon"),
        "mountain": ("summit", "cliff", "ridge", "valley", "canyon", "glacier"),
        "town": ("market", "station", "square", "museum", "library", "theatre"),
        "home": ("kitchen", "cellar", "attic", "porch", "bedroom", "hallway"),
    },
    "weather": {
        "rain": ("rain", "drizzle", "downpour", "shower", "cloudburst", "deluge"),
        "snow": ("snow", "blizzard", "frost", "sleet", "hail", "ice"),
        "sun": ("sunshine", "heat", "warmth", "glare", "daylight", "drought"),
        "wind": ("wind", "gale", "breeze", "gust", "whirlwind", "squall"),
    },
}

DETERMINERS = ("the", "a", "that", "one")
VERBS = ("waited", "rested", "stood", "walked", "talked", "worked", "paused", "sat")
PLACE_PREPOSITIONS = ("near", "by", "beside", "outside")
WEATHER_PREPOSITIONS = ("in", "during", "despite", "after")

PATTERNS = (
    "{determiner} {mood} {job} {verb} {near} the {place} {during} the {weather}",
    "{during} the {weather} {determiner} {mood} {job} {verb} {near} the {place}",
    "{near} the {place} {determiner} {mood} {job} {verb} {during} the {weather}",
)


@dataclass(frozen=True)
class ReferenceTask:
    """A task: name the category of ``attribute`` by the label word with the same index."""

    name: str
    description: str
    attribute: str
    labels: tuple[str, ...]


# Label words for the categories of mood, job, place and weather. The two keys of an attribute differ in every
# category.
_KEYS = {
    "colour-1": "red blue green yellow/green yellow blue red/yellow red green blue/blue green red yellow",
    "colour-2": "blue yellow red green/red green yellow blue/green yellow blue red/yellow red blue green",
    "letter-1": "C A D B/A B C D/D C A B/B D A C",
    "letter-2": "A D B C/D C B A/C B D A/A C D B",
}

TASKS = tuple(
    ReferenceTask(
        f"{attribute}-{key}",
        f"Tell the {attribute} of the sentence with a {key[:-2]}, by key {key[-1]}.",
        attribute,
        tuple(words.split()),
    )
    for key, rows in _KEYS.items()
    for attribute, words in zip(ATTRIBUTES, rows.split("/"), strict=True)
)

_WORD_INDEX = {
    word: index
    for categories in ATTRIBUTES.values()
    for index, word in enumerate(word for words in categories.values() for word in words)
}


def sample_categories(rng: Random) -> dict[str, int]:
    """Draw a category index for each attribute, independently."""
    return {attribute: rng.randrange(len(categories)) for attribute, categories in ATTRIBUTES.items()}


def sample_words(rng: Random, categories: dict[str, int], held_out: bool) -> dict[str, str]:
    """Draw a word for each category, such that the combination is held out for testing, or is not."""
    tables = {name: tuple(ATTRIBUTES[name].values())[index] for name, index in categories.items()}
    while True:
        words = {name: rng.choice(table) for name, table in tables.items()}
        if (sum(map(_WORD_INDEX.__getitem__, words.values())) % _HELD_OUT_MODULUS == 0) == held_out:
            return words


def render(rng: Random, words: dict[str, str], pattern: str | None = None) -> str:
    """Return a sentence with the attribute words. Default pattern: drawn at random."""
    return (pattern or rng.choice(PATTERNS)).format(
        determiner=rng.choice(DETERMINERS),
        verb=rng.choice(VERBS),
        near=rng.choice(PLACE_PREPOSITIONS),
        during=rng.choice(WEATHER_PREPOSITIONS),
        **words,
    )


def examples(task: ReferenceTask, split: str, n: int, seed: int) -> list[tuple[str, int]]:
    """Draw ``n`` class-balanced examples: "test" has only held-out word combinations, "train" none."""
    rng = Random(f"{task.name}/{split}/{seed}")
    classes = [index % len(task.labels) for index in range(n)]
    rng.shuffle(classes)
    chosen = [sample_categories(rng) | {task.attribute: label} for label in classes]
    return [
        (render(rng, sample_words(rng, categories, split == "test")), categories[task.attribute])
        for categories in chosen
    ]


def list_reference_tasks() -> list[Task]:
    """Return the reference model's tasks without rows."""
    template = Template(TEMPLATE, SEPARATOR)
    return [
        Task(spec.name, spec.labels, template, description=spec.description, group="reference")
        for spec in TASKS
    ]


@cache
def load(name: str) -> Task | None:
    """Return the generated task of that name with its rows, or None if there is none."""
    if name == SYNTHETIC:
        return synthetic_task()
    for spec, task in zip(TASKS, list_reference_tasks(), strict=True):
        if spec.name == name:
            drawn = (examples(spec, split, *size) for split, size in SPLITS.items())
            train, test = (tuple(Example(*row) for row in rows) for rows in drawn)
            return replace(task, train=train, test=test)
    return None


def synthetic_task(seed: int = 0, train_per_class: int = 100, test_per_class: int = 200) -> Task:
    """Generate the paper's synthetic task: random letters (A), special characters (B) and digits (C).

    All texts are distinct. The paper specifies neither text lengths nor a template; 5 to 12 characters and
    the template here are our choice.

    Source: paper, appendix "Analysis on Synthetic Dataset".
    """
    rng = Random(seed)
    train: list[Example] = []
    test: list[Example] = []
    for label, alphabet in enumerate((string.ascii_letters, string.punctuation, string.digits)):
        # a dict keeps insertion order; the order of a set of strings differs between processes
        texts: dict[str, None] = {}
        while len(texts) < train_per_class + test_per_class:
            # numbers have no leading zero
            first = rng.choice("123456789") if alphabet == string.digits else ""
            text = "".join(rng.choices(alphabet, k=rng.randint(_MIN_LENGTH, _MAX_LENGTH)))
            texts[first + text[len(first) :]] = None
        rows = [Example(text, label) for text in texts]
        train += rows[:train_per_class]
        test += rows[train_per_class:]
    rng.shuffle(train)
    rng.shuffle(test)
    return Task(
        name=SYNTHETIC,
        labels=("A", "B", "C"),
        template=Template("Input: {text}\nLabel: {label}"),
        train=tuple(train),
        test=tuple(test),
        title="Synthetic",
        description="Random letters, special characters or digits, with labels that carry no meaning.",
        group=SYNTHETIC,
    )
