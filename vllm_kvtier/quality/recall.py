"""Can a model still say what it was told? Codes told in a chat, long files in between, questions about each code.

The form is the one that the recall models were trained on; other chat models mostly manage it too. Where the cache as
it is gives fewer than ``WORTH`` right answers, a codec cannot be judged by this, and nothing is said.
"""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from vllm_kvtier.codecs.base import Codec
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality.cache import RoundTripCache
from vllm_kvtier.quality.record import RecallAt
from vllm_kvtier.quality.text import token_ids

WORTH = 0.9
SYSTEM = "You keep notes and answer from them."
ROUNDS = 5  # a file follows each
CODES = 2  # told in each round
# Plain nouns, two to a name: small models recall names made of words that they know well.
NOUNS = (
    "lantern cedar orchid tower river zebra willow robin bucket pine button cobalt bishop circle phoenix "
    "rabbit breeze lizard salmon ocean quartz pepper turtle sage lotus carbon hickory grape ivory gravel onyx "
    "owl mango sapphire ridge birch saddle thistle butter hazel bronze quill mirror umber pigeon shell heron "
    "fossil scarlet honey island flint crystal spider spruce falcon kettle jungle bridge otter marble apple "
    "blossom panther atlas plaza desert planet "
).split()


@dataclass(frozen=True)
class Chat:
    """One conversation, and what is asked at its end, each by itself."""

    shared: list[int]  # tokens that all questions begin with
    questions: list[tuple[list[int], int]]  # (the rest with the right answer's beginning; its last tokens: the code)


def chats(tokenizer: Any, ids: Sequence[int], tokens: int, questions: int, seed: int = 0) -> Iterator[Chat]:
    """Conversations of about ``tokens`` tokens with files cut from ``ids``, until ``questions`` questions are asked.

    Raises KVTierError where the tokenizer has no chat template, or none for such a conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KVTierError("the model has no chat template")
    rng = random.Random(f"{seed}/{tokens}")
    ids = list(ids) * (1 + tokens // len(ids))  # a short text comes again
    asked = 0
    while asked < questions:
        chat = _chat(tokenizer, ids, tokens, rng, min(ROUNDS * CODES, questions - asked))
        asked += len(chat.questions)
        yield chat


def _chat(tokenizer: Any, ids: Sequence[int], tokens: int, rng: random.Random, questions: int) -> Chat:
    nouns = rng.sample(NOUNS, 2 * ROUNDS * CODES)
    names = [f"{first} {second}" for first, second in zip(nouns[::2], nouns[1::2], strict=True)]
    codes = {name: f"{rng.randrange(100000):05d}" for name in names}
    start = rng.randrange(max(1, len(ids) - tokens))

    def messages(file_tokens: int) -> list[dict[str, str]]:
        said = [{"role": "system", "content": SYSTEM}]
        for i in range(ROUNDS):
            told = " ".join(f"The code for {name} is {codes[name]}." for name in names[CODES * i : CODES * (i + 1)])
            said += [_user(told), _assistant(f"Noted {CODES} codes.")]
            if file_tokens > 0:
                at = start + i * file_tokens
                said += [_user("Read this file:\n" + tokenizer.decode(ids[at : at + file_tokens]))]
                said += [_assistant("Done reading.")]
        return said

    bare = len(token_ids(tokenizer, _render(tokenizer, messages(1), False)))
    said = messages((tokens - bare) // ROUNDS)
    whole = []
    for name in rng.sample(names, questions):
        opening = _render(tokenizer, [*said, _user(f"What is the code for {name}?")], True) + f"The code for {name} is"
        full = token_ids(tokenizer, f"{opening} {codes[name]}")
        whole.append((full, len(full) - _common([token_ids(tokenizer, opening), full])))
    shared = _common([full for full, _ in whole] + [token_ids(tokenizer, _render(tokenizer, said, False))])
    return Chat(whole[0][0][:shared], [(full[shared:], code) for full, code in whole])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _render(tokenizer: Any, messages: list[dict[str, str]], prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates raise what they like, mostly at a system message
        raise KVTierError(f"the model's chat template refuses the conversation: {error}") from error


def _common(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the common beginning."""
    shortest = min(map(len, sequences))
    first = sequences[0]
    return next((i for i in range(shortest) if any(s[i] != first[i] for s in sequences)), shortest)


def answers(model: Any, chat: Chat, codec: Codec, dtype: torch.dtype) -> list[bool]:
    """Whether each code is what the model says greedily after "The code for ... is".

    The conversation is read once; K and V of it, of the question and of the answer all pass through the codec.
    """
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = RoundTripCache(model.config, codec.formats, dtype)
    right = []
    with torch.inference_mode():
        model(torch.tensor([chat.shared], device=model.device), past_key_values=cache, use_cache=True, **last)
        for tokens, code in chat.questions:
            # Not crop(): layers with a sliding window cannot take back.
            at_question: DynamicCache = copy.deepcopy(cache)
            ids = torch.tensor([tokens], device=model.device)
            logits = model(ids, past_key_values=at_question, use_cache=True).logits[0]
            right.append(bool((logits[-code - 1 : -1].argmax(-1) == ids[0, -code:]).all()))
    return right


def compare(
    model: Any,
    tokenizer: Any,
    ids: Sequence[int],
    tokens: int,
    questions: int,
    raw: Codec,
    codecs: dict[str, Codec],
    dtype: torch.dtype,
    step: Callable[[], None] = lambda: None,
) -> tuple[float, dict[str, RecallAt]]:
    """(share of right answers without a codec, by name what each codec does; {} where that share is below WORTH).

    ``step`` is called after each conversation with each codec.
    """
    asked = list(chats(tokenizer, ids, tokens, questions))
    plain = []
    for chat in asked:
        plain += answers(model, chat, raw, dtype)
        step()
    share = sum(plain) / len(plain)
    found: dict[str, RecallAt] = {}
    for name, codec in codecs.items() if share >= WORTH else ():
        right: list[bool] = []
        for chat in asked:
            right += answers(model, chat, codec, dtype)
            step()
        lost = sum(p and not r for p, r in zip(plain, right, strict=True))
        found[name] = RecallAt(tokens, len(plain), sum(plain), sum(right), lost)
    return share, found
