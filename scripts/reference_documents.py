"""Training documents and tokenizer (byte-level BPE with a token for every word) of the reference model."""

from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from i2cl.tasks.generated import (
    SEPARATOR,
    TASKS,
    TEMPLATE,
    ReferenceTask,
    render,
    sample_categories,
    sample_words,
)

END_OF_TEXT = "<|endoftext|>"
MAX_VOCABULARY = 4000
BARE_PATTERN = "{determiner} {mood} {job} {place} {weather}"  # only the words of the attributes


def sample_example(rng: Random, task: ReferenceTask, bare: bool = False) -> tuple[str, int]:
    """Draw a training sentence with uniform categories, and return it with its class in the task."""
    categories = sample_categories(rng)
    words = sample_words(rng, categories, held_out=False)
    return render(rng, words, BARE_PATTERN if bare else None), categories[task.attribute]


def fill(task: ReferenceTask, text: str, label: int) -> str:
    """Format a demonstration: the template with text and label word, followed by the separator."""
    return TEMPLATE.format(text=text, label=task.labels[label]) + SEPARATOR


def document(rng: Random, task: ReferenceTask, shots: int, named: bool, bare: bool = False) -> str:
    """Build a document of `shots` + 1 examples of one task; a named one begins with the task's name."""
    head = task.name + SEPARATOR if named else ""
    lines = [fill(task, *sample_example(rng, task, bare)) for _ in range(shots + 1)]
    return head + "".join(lines) + END_OF_TEXT


def corpus_sample(documents_per_task: int = 40, shots: int = 20) -> list[str]:
    """Return documents of every task, without the end-of-text token, that contain every word."""
    rng = Random(0)
    documents = [document(rng, task, shots, named=False) for task in TASKS for _ in range(documents_per_task)]
    return [text.removesuffix(END_OF_TEXT) for text in documents]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Train the merges on the corpus, and add a token for every task name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_sample(), trainer)
    tokenizer.add_tokens([task.name for task in TASKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
    )
