"""Train the bundled reference model: a small decoder that learns hidden tasks from examples in its context.

The corpus is `i2cl.tasks.generated`. Training follows a curriculum (`reference_lessons.py`): few tasks and
bare sentences first, then all tasks, then full sentences, and finally documents of 1 to 24 shots with a
decaying learning rate. In addition to the next token, the model predicts the task at the end of each
demonstration (the naming loss), so a single demonstration already represents the task.

    PYTHONPATH=src python scripts/train_reference.py --output src/i2cl/models/reference
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from i2cl.tasks.generated import SEPARATOR, TASKS, TEMPLATE, ReferenceTask, examples
from reference_documents import build_tokenizer, fill
from reference_lessons import LESSONS, Batch, Course, draw_batch

LAYERS, WIDTH, HEADS = 4, 96, 4
MAX_POSITIONS = 1024
WEIGHT_DECAY = 0.05
OTHER_TOKENS_WEIGHT, OTHER_TOKENS_STRIDE, NAMING_WEIGHT = 0.1, 8, 1.0
TEST_QUERIES, TEST_BATCH = 200, 25
MIN_ACCURACY_SHOTS = 4


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that the loss needs."""

    names: Tensor
    is_label: Tensor
    separator: int
    padding: int


def label_ids(tokenizer: PreTrainedTokenizerFast, task: ReferenceTask) -> list[int]:
    """Return the token of every label word after the template."""
    return [tokenizer(f" {label}").input_ids[0] for label in task.labels]


def look_up(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    """Look up the ids of task names, label words, separator and padding."""
    is_label = torch.zeros(len(tokenizer), dtype=torch.bool)
    is_label[[index for task in TASKS for index in label_ids(tokenizer, task)]] = True
    names = torch.tensor(tokenizer.convert_tokens_to_ids([task.name for task in TASKS]))
    return Vocabulary(names, is_label, tokenizer(SEPARATOR).input_ids[0], tokenizer.pad_token_id)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build an untrained Llama of the reference size."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Build AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def objective(
    model: LlamaForCausalLM, batch: Batch, vocabulary: Vocabulary, tasks: int
) -> tuple[Tensor, Tensor]:
    """Return the training loss, and the accuracy at every position of a document (the first has no shots)."""
    inputs, targets = batch.ids[:, :-1], batch.ids[:, 1:]
    hidden = model.model(input_ids=inputs).last_hidden_state
    is_label = vocabulary.is_label[targets]
    label_logits = model.lm_head(hidden[is_label])
    loss = functional.cross_entropy(label_logits, targets[is_label])
    is_other = ~is_label & ((targets != vocabulary.padding) | (inputs == vocabulary.separator))
    is_other[torch.arange(len(inputs)) % OTHER_TOKENS_STRIDE != 0] = False
    loss = loss + OTHER_TOKENS_WEIGHT * functional.cross_entropy(
        model.lm_head(hidden[is_other]), targets[is_other]
    )
    if not batch.named:
        after_label = functional.pad(vocabulary.is_label[inputs[:, :-1]], (1, 0))
        wanted = batch.tasks[:, None].expand_as(inputs)[after_label]
        name_logits = functional.linear(hidden[after_label], model.lm_head.weight[vocabulary.names[:tasks]])
        loss = loss + NAMING_WEIGHT * functional.cross_entropy(name_logits, wanted)
    correct = (label_logits.argmax(-1) == targets[is_label]).view(-1, batch.shots + 1)
    return loss, correct.float().mean(0)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, last_steps: int) -> None:
    """Train the model on the curriculum, and print the log."""
    rng, vocabulary, optimizer = Random(seed), look_up(tokenizer), new_optimizer(model)
    course, started = Course(last_steps), time.time()
    while not course.finished:
        for group in optimizer.param_groups:
            group["lr"] = course.learning_rate
        batch = draw_batch(rng, tokenizer, course)
        loss, accuracy = objective(model, batch, vocabulary, course.lesson.tasks)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        many_shots = not batch.named and batch.shots >= MIN_ACCURACY_SHOTS
        course.advance(accuracy[MIN_ACCURACY_SHOTS:].mean().item() if many_shots else None)
        if course.step % 50 == 0 or course.finished:
            print(
                f"step {course.step} lesson {course.lesson_index + 1} of {len(LESSONS)}",
                f"accuracy {course.accuracy:.3f} loss {loss.item():.3f} seconds {time.time() - started:.0f}",
                flush=True,
            )


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: ReferenceTask, shots: int
) -> float:
    """Return the accuracy among the label words on held-out queries, after `shots` demonstrations."""
    demonstrations = examples(task, "train", shots, seed=0)
    context = "".join(fill(task, *example) for example in demonstrations)
    queries = examples(task, "test", TEST_QUERIES, seed=0)
    candidates, right = label_ids(tokenizer, task), 0
    for start in range(0, len(queries), TEST_BATCH):
        chunk = queries[start : start + TEST_BATCH]
        prompts = [context + TEMPLATE.format(text=text, label="").rstrip() for text, _ in chunk]
        encoded = tokenizer(prompts, padding=True, padding_side="right", return_tensors="pt")
        last = encoded.attention_mask.sum(-1) - 1
        logits = model(encoded.input_ids).logits[torch.arange(len(chunk)), last]
        right += (
            (logits[:, candidates].argmax(-1) == torch.tensor([label for _, label in chunk])).sum().item()
        )
    return right / len(queries)


def evaluate(folder: Path) -> dict[str, dict[str, float]]:
    """Load the saved model, and evaluate every task with and without demonstrations."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {
        task.name: {f"{shots}-shot": accuracy(model, tokenizer, task, shots) for shots in (0, 1, 4, 20)}
        for task in TASKS
    }


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled reference model.")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write the model and tokenizer to"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and documents (default 0)")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the last lesson (default 1200)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    return parser.parse_args()


def main() -> None:
    """Train, round to bfloat16, save as float32 (both precisions have equal weights), and evaluate."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer(MAX_POSITIONS)
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, arguments.seed, arguments.steps)
    model.bfloat16().float().save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    results = evaluate(arguments.output)
    for name, row in results.items():
        print(f"{name:18s}", *(f"{shots} {value:.3f}" for shots, value in row.items()))


if __name__ == "__main__":
    main()
