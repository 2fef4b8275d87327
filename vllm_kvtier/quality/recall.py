"""Recall test: codes in a chat, long files in between, then a question about each code.

The form is that of the training data of the recall models; most other chat models can do it too. If the raw cache gives
fewer than ``MIN_RIGHT_SHARE`` right answers, the test says nothing about a codec and is skipped.
"""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality.cache import LoadedModel, RoundTripCache
from vllm_kvtier.quality.record import RecallAt
from vllm_kvtier.quality.text import token_ids

MIN_RIGHT_SHARE = 0.9
SYSTEM = "You keep notes and answer from them."
ROUNDS = 5  # a file follows each
CODES_PER_ROUND = 2  # stated in each round
# Two plain nouns for each name: small models recall names of common words.
NOUNS = (
    "lantern cedar orchid tower river zebra willow robin bucket pine button cobalt bishop circle phoenix "
    "rabbit breeze lizard salmon ocean quartz pepper turtle sage lotus carbon hickory grape ivory gravel onyx "
    "owl mango sapphire ridge birch saddle thistle butter hazel bronze quill mirror umber pigeon shell heron "
    "fossil scarlet honey island flint crystal spider spruce falcon kettle jungle bridge otter marble apple "
    "blossom panther atlas plaza desert planet "
).split()


@dataclass(frozen=True)
class Chat:
    """One conversation and the questions at its end, each asked separately."""

    shared: list[int]  # tokens that all questions begin with
    questions: list[tuple[list[int], int]]  # (the rest with the right answer's beginning; its last tokens: the code)


def chats(tokenizer: Any, ids: Sequence[int], tokens: int, questions: int, seed: int = 0) -> Iterator[Chat]:
    """Conversations of about ``tokens`` tokens with files cut from ``ids``, until ``questions`` questions are asked.

    Raises KVTierError if the tokenizer has no chat template for such a conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KVTierError("the model has no chat template")
    rng = random.Random(f"{seed}/{tokens}")
    ids = list(ids) * (1 + tokens // len(ids))  # a short text comes again
    asked = 0
    while asked < questions:
        chat = _chat(tokenizer, ids, tokens, rng, min(ROUNDS * CODES_PER_ROUND, questions - asked))
        asked += len(chat.questions)
        yield chat


def _chat(tokenizer: Any, ids: Sequence[int], tokens: int, rng: random.Random, questions: int) -> Chat:
    nouns = rng.sample(NOUNS, 2 * ROUNDS * CODES_PER_ROUND)
    names = [f"{first} {second}" for first, second in zip(nouns[::2], nouns[1::2], strict=True)]
    codes = {name: f"{rng.randrange(100000):05d}" for name in names}
    start = rng.randrange(max(1, len(ids) - tokens))

    def messages(file_tokens: int) -> list[dict[str, str]]:
        made = [{"role": "system", "content": SYSTEM}]
        for i in range(ROUNDS):
            mine = names[CODES_PER_ROUND * i : CODES_PER_ROUND * (i + 1)]
            text = " ".join(f"The code for {name} is {codes[name]}." for name in mine)
            made += [_user(text), _assistant(f"Noted {CODES_PER_ROUND} codes.")]
            if file_tokens > 0:
                at = start + i * file_tokens
                made += [_user("Read this file:\n" + tokenizer.decode(ids[at : at + file_tokens]))]
                made += [_assistant("Done reading.")]
        return made

    bare = len(token_ids(tokenizer, _render(tokenizer, messages(1), False)))
    chat = messages((tokens - bare) // ROUNDS)
    whole = []
    for name in rng.sample(names, questions):
        opening = _render(tokenizer, [*chat, _user(f"What is the code for {name}?")], True) + f"The code for {name} is"
        full = token_ids(tokenizer, f"{opening} {codes[name]}")
        whole.append((full, len(full) - _common([token_ids(tokenizer, opening), full])))
    shared = _common([full for full, _ in whole] + [token_ids(tokenizer, _render(tokenizer, chat, False))])
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


def answers(loaded: LoadedModel, chat: Chat, formats: Mapping[str, Format]) -> list[bool]:
    """Whether the model's greedy answer after "The code for ... is" is right, for each code.

    The conversation is read once. K and V of the conversation, the question and the answer pass through ``formats``, as
    of ``RoundTripCache``.
    """
    model = loaded.model
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = RoundTripCache(model.config, formats, loaded.dtype)
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
    loaded: LoadedModel,
    ids: Sequence[int],
    tokens: int,
    questions: int,
    codecs: Mapping[str, Codec],
    step: Callable[[], None] = lambda: None,
) -> tuple[float, dict[str, RecallAt]]:
    """(share of right answers without a codec, changes by codec name; {} if that share is below MIN_RIGHT_SHARE).

    ``step`` is called after each conversation with each codec.
    """
    asked = list(chats(loaded.tokenizer, ids, tokens, questions))

    def all_answers(formats: Mapping[str, Format]) -> list[bool]:
        right = []
        for chat in asked:
            right += answers(loaded, chat, formats)
            step()
        return right

    plain = all_answers({})
    share = sum(plain) / len(plain)
    found: dict[str, RecallAt] = {}
    for name, codec in codecs.items() if share >= MIN_RIGHT_SHARE else ():
        right = all_answers(codec.formats)
        lost = sum(p and not r for p, r in zip(plain, right, strict=True))
        found[name] = RecallAt(tokens, len(plain), sum(plain), sum(right), lost)
    return share, found
