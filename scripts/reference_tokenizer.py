"""Tokenizer of the reference model: byte-level BPE with a token for every word of the corpus."""

from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from i2cl.tasks.generated import TASKS
from reference_documents import END_OF_TEXT, document

MAX_VOCABULARY = 4000


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
