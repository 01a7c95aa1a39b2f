"""Convert a transformers tokenizer to the vocabulary of a GGUF file, if llama.cpp encodes the same way.

llama.cpp supports two kinds that Llamas use: byte-level BPE with a known pre-tokenizer, and SentencePiece's
BPE with scores (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from i2cl.errors import I2CLError
from i2cl.models.encoding import Encoder

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_CASED = f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*"

# llama.cpp's name of each pre-tokenizer, and whether it then looks up whole words before it merges.
_PRE_TOKENIZERS = {
    ("ByteLevel",): ("gpt-2", False),
    ("Digits", "ByteLevel"): ("smollm", False),
    (_CONTRACTIONS + r"|\p{N}{1,3}" + _REST,): ("llama-bpe", True),
    (_CONTRACTIONS + r"|\p{N}" + _REST,): ("qwen2", False),
    (_CASED + r"|\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),): ("tekken", True),
}

_SPACE = "▁"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a GGUF file.

    Attributes:
        model: llama.cpp's name of the algorithm: gpt2 or llama.
        pre: its name of the pre-tokenizer.
        tokens: by id.
        kinds: of each token: a name of ``gguf.TokenType``.
        merges: of gpt2, best first.
        scores: of llama, one per token; the pair with the highest score merges first.
        space_prefix: whether a space is added before a text.
        strips: whether whitespace after added tokens is dropped, as Phi-3's tokenizer does.
        bos: id of the token that is added before a text, if any.
        special: ids by role: bos, eos, unk, pad.
        chat_template: of the tokenizer.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[str]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False
    strips: bool = False
    bos: int | None = None
    special: dict[str, int] = field(default_factory=dict)
    chat_template: str | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, size: int) -> "Vocabulary":
        """Convert a tokenizer, padded to ``size`` tokens, the number of rows of the embedding.

        Raises I2CLError if llama.cpp would encode differently.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _refusal("the tokenizer has no tokenizer.json")
        state = json.loads(backend.to_str())
        model = state["model"]
        names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        unsupported = [name for name in names if model.get(name)]
        if model["type"] != "BPE" or unsupported:
            more = f" with {unsupported[0]}" if unsupported else ""
            raise _refusal(f"the tokenizer is {model['type']}{more}")
        tokens, kinds = _tokens(state, size)
        shared = {"tokens": tokens, "kinds": kinds, "strips": _strips(state), **_special_tokens(tokenizer)}
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        if model["byte_fallback"]:
            shared |= {"space_prefix": _adds_space(state), "scores": _scores(tokens, kinds, pairs)}
            return cls("llama", "default", **shared)
        return cls("gpt2", _pre_tokenizer(state), merges=[" ".join(pair) for pair in pairs], **shared)

    def write(self, writer: Any, types: Any) -> None:
        """Add it to a ``gguf.GGUFWriter``; ``types`` is ``gguf.TokenType``."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types([types[kind] for kind in self.kinds])
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for role, token in self.special.items():
            getattr(writer, f"add_{role}_token_id")(token)
        writer.add_add_space_prefix(self.space_prefix)
        writer.add_add_bos_token(self.bos is not None)
        writer.add_add_eos_token(False)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def _refusal(what: str) -> I2CLError:
    hint = "leave the tokenizer out (--no-tokenizer) and send token ids"
    return I2CLError(f"{what}, which llama.cpp does not support: {hint}")


def _tokens(state: dict[str, Any], size: int) -> tuple[list[str], list[str]]:
    """Return text and kind of every row of the embedding; tokens without a row are left out."""
    model = state["model"]
    texts = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(texts, "NORMAL")
    if model["byte_fallback"]:
        kinds |= {model["vocab"][name]: "BYTE" for name in _BYTES if name in model["vocab"]}
    if model.get("unk_token") in model["vocab"]:
        kinds[model["vocab"][model["unk_token"]]] = "UNKNOWN"
    for added in state["added_tokens"]:
        texts[added["id"]] = added["content"]
        if kinds.get(added["id"]) != "UNKNOWN":
            kinds[added["id"]] = "CONTROL" if added["special"] else "USER_DEFINED"
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    if len(set(tokens)) < size:
        raise _refusal("the tokenizer has two ids for one text")
    return tokens, [kinds.get(number, "UNUSED") for number in range(size)]


def _strips(state: dict[str, Any]) -> bool:
    """Return whether added tokens drop the whitespace after them, as Phi-3's do.

    Raises I2CLError if they treat whitespace in another way.
    """
    added = state["added_tokens"]
    texts = {token["content"] for token in added}
    stripping = {token["content"] for token in added if token["rstrip"]}
    known, of_phi3 = texts | state["model"]["vocab"].keys(), _UNSTRIPPED | {"</s>"}
    if any(token["lstrip"] or token["single_word"] for token in added):
        raise _refusal("the tokenizer has added tokens that depend on the text before them")
    if stripping and stripping != texts - _UNSTRIPPED:
        raise _refusal("the tokenizer drops whitespace after some of its added tokens")
    if stripping and not of_phi3 <= known:
        raise _refusal("the tokenizer drops whitespace after its added tokens and is not Phi-3's")
    return bool(stripping)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    front = Encoder.of(tokenizer).front
    if len(front) > 1:
        raise _refusal(f"the tokenizer adds {len(front)} tokens before a text")
    roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "unk", "pad")}
    if front:
        roles["bos"] = front[0]
    return {
        "bos": front[0] if front else None,
        "special": {role: number for role, number in roles.items() if number is not None},
        "chat_template": getattr(tokenizer, "chat_template", None),
    }


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _pre_tokenizer(state: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer. Raises I2CLError if it has none."""
    others = [step["type"] for step in _steps(state["normalizer"], "normalizers") if step["type"] != "NFC"]
    if others:
        raise _refusal(f"the tokenizer normalizes with {others[0]}")
    steps = _steps(state["pre_tokenizer"], "pretokenizers")
    name, ignore_merges = _PRE_TOKENIZERS.get(tuple(_described(steps)), (None, False))
    if name is None or ignore_merges != bool(state["model"].get("ignore_merges")):
        raise _refusal("the tokenizer has an unknown pre-tokenizer")
    return name


def _described(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the key of each step in `_PRE_TOKENIZERS`."""
    for step in steps:
        kind = step["type"]
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            yield step["pattern"].get("Regex", "")
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            if step["use_regex"]:
                yield kind
        elif kind == "Digits" and step["individual_digits"]:
            yield kind
        else:
            yield f"unknown {kind}"


def _adds_space(state: dict[str, Any]) -> bool:
    """Return whether a space is added before a text. Raises I2CLError if this is not SentencePiece."""
    prefix = escaped = False
    steps = _steps(state["normalizer"], "normalizers") + _steps(state["pre_tokenizer"], "pretokenizers")
    for step in steps:
        if step == {"type": "Prepend", "prepend": _SPACE}:
            prefix = True
        elif step == {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}:
            escaped = True
        elif step["type"] == "Metaspace" and step["replacement"] == _SPACE and not step["split"]:
            escaped, prefix = True, prefix or step["prepend_scheme"] != "never"
        else:
            raise _refusal(f"the tokenizer has the step {step['type']}")
    model = state["model"]
    if not escaped or not model["vocab"].keys() >= {*_BYTES} or model.get("ignore_merges"):
        raise _refusal("the tokenizer has SentencePiece's bytes, but is not SentencePiece")
    return prefix


def _scores(tokens: Sequence[str], kinds: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return the score of each token: minus the rank of the first merge that makes it.

    SentencePiece merges any two adjacent pieces that form a token, highest score first. That equals the list
    of merges if the list holds every such pair, and the pairs of one token are adjacent.
    """
    ranks: dict[str, int] = {}
    for made, _ in groupby(map("".join, merges)):
        if made in ranks:
            raise _refusal("the tokenizer's merges have several ranks for one token")
        ranks[made] = len(ranks)
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind == "NORMAL"}
    pairs = set(merges)
    for token in known:
        for pair in ((token[:cut], token[cut:]) for cut in range(1, len(token))):
            if known.issuperset(pair) and pair not in pairs:
                what = f"the tokenizer does not merge {pair[0]!r} and {pair[1]!r}"
                raise _refusal(f"{what}, unlike SentencePiece")
    return [-float(ranks.get(token, len(ranks))) for token in tokens]
