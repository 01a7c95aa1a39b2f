"""The labels' trie in few prompts, and their share of a batch."""

import asyncio
from types import SimpleNamespace

import pytest

from i2cl.interfaces.vllm.prompts import (
    BATCH_FRACTION,
    MIN_PROMPT_LOGPROBS,
    EngineLimits,
    LabelPrompts,
    PromptLimiter,
)

from .standins import in_a_loop, told_of, vllm_config

QUERY = tuple(range(100, 140))
LABELS = ((1, 2, 3), (1, 2, 4), (1, 5), (6,), (7, 8, 9, 2), (7, 8, 9, 3), (7, 8, 1, 1))
EDGES = {(ids[:place], token) for ids in LABELS for place, token in enumerate(ids)}


def limits(block=0, rows=100, prompts=4, tokens=1000):
    return EngineLimits(block, rows, prompts, tokens)


def answered(asked):
    """An engine's answer that tells of every edge from where it came: its prompt, by length."""
    own = [None, *({token: SimpleNamespace(logprob=-place)} for place, token in enumerate(asked.ids[1:], 1))]
    values = dict.fromkeys(asked.tokens, -len(asked.ids))
    logprobs = [told_of(values, asked.tokens)]
    output = SimpleNamespace(logprobs=logprobs, finish_reason="length")
    return SimpleNamespace(outputs=[output], prompt_logprobs=own)


def read(block, asked):
    """Tokens that an engine computes, prompt by prompt, whose cache shares whole blocks."""
    seen, computed = set(), 0
    for one in asked:
        blocks = [one.ids[:end] for end in range(block, len(one.ids), block)] if block else []
        hits = 0 if one.with_prefix else sum(1 for each in blocks if each in seen)
        seen |= set(blocks)
        computed += len(one.ids) - hits * block
    return computed


@pytest.mark.parametrize("block", [0, 4, 16, 128])
def test_every_edge_gets_its_own_log_probability(block):
    record = {}
    for asked in LabelPrompts(LABELS).prompts(QUERY, limits(block)):
        record |= asked.edges(answered(asked))
    assert record == {(before, token): -len(QUERY + before) for before, token in EDGES}


def test_one_prompt_per_label_without_shared_blocks():
    """Instead of one for every beginning: with twelve labels of several tokens 12 for 23."""
    alone, shared = (LabelPrompts(LABELS).prompts(QUERY, limits(block)) for block in (128, 4))
    assert (len(alone), len(shared)) == (5, 7)
    assert {one.before for one in shared} == {before for before, _ in EDGES}
    many = (*((number, number, 1) for number in range(11)), (50,))
    asked = LabelPrompts(many).prompts(QUERY, limits(128))
    assert len(asked) == 12
    assert len({ids[:place] for ids in many for place in range(len(ids))}) == 23
    assert sum(len(one.ids) for one in asked) == 12 * len(QUERY) + 22


@pytest.mark.parametrize("block", [0, 4, 16, 32, 128])
@pytest.mark.parametrize("size", [3, 20, 40, 90, 300])
def test_the_prompts_with_fewer_tokens_are_chosen(block, size):
    query, trie = tuple(range(1000, 1000 + size)), LabelPrompts(LABELS)
    taken = read(block, trie.prompts(query, limits(block, rows=1000)))
    ways = [read(block, trie.prompts(query, one)) for one in (limits(block, rows=0), limits(0, rows=1000))]
    assert taken <= min(ways)


def test_single_token_labels_share_a_prompt_and_long_prompts_have_no_prompt_logprobs():
    for block in (0, 16):
        (asked,) = LabelPrompts(((1,), (2,), (3,))).prompts(QUERY, limits(block))
        assert (asked.ids, asked.tokens, asked.with_prefix) == (QUERY, (1, 2, 3), False)
    for rows, with_prefix in ((len(QUERY) + 3, True), (len(QUERY) + 2, False)):
        assert (
            any(one.with_prefix for one in LabelPrompts(LABELS).prompts(QUERY, limits(rows=rows)))
            == with_prefix
        )


def test_limits_come_from_the_engine_config():
    config = vllm_config(scheduler_config__max_num_seqs=64, scheduler_config__max_num_batched_tokens=2048)
    assert EngineLimits.of(config) == EngineLimits(
        4, MIN_PROMPT_LOGPROBS, 64 // BATCH_FRACTION, 2048 // BATCH_FRACTION
    )
    assert EngineLimits.of(vllm_config(scheduler_config__max_num_seqs=1024)).rows == 1024
    assert EngineLimits.of(vllm_config(cache_config__enable_prefix_caching=False)).block == 0
    assert (
        EngineLimits.of(vllm_config(cache_config__kv_sharing_fast_prefill=True)).rows == 0
    )  # vLLM would end
    assert EngineLimits.of(vllm_config(scheduler_config__max_num_seqs=1)).prompts == 1


@in_a_loop
async def test_the_limiter_bounds_prompts_and_requests_take_turns():
    share, inside, most, ended = PromptLimiter(limits(prompts=4, tokens=100)), [], [0, 0], []

    async def run(name, size):
        inside.append(size)
        most[:] = max(most[0], len(inside)), max(most[1], sum(inside))
        await asyncio.sleep(0)
        inside.remove(size)
        share.leave(size)
        ended.append(name)

    async def client(name, sizes):
        async with asyncio.TaskGroup() as group:
            for size in sizes:
                await share.enter(size)
                group.create_task(run(name, size))

    async with asyncio.TaskGroup() as group:
        group.create_task(client("bulk", [30] * 500))
        await asyncio.sleep(0)
        for number in range(8):
            group.create_task(client(f"single {number}", [40]))
        group.create_task(client("long", [5000]))  # beyond the share: alone
    assert most == [3, 5000]
    assert len(ended) == 509
    assert max(place for place, name in enumerate(ended) if name != "bulk") < 60


@in_a_loop
async def test_a_cancelled_waiter_releases_its_place():
    share = PromptLimiter(limits(prompts=1, tokens=10))
    await share.enter(10)
    gone, stays = (asyncio.create_task(share.enter(10)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert not stays.done()
    share.leave(10)
    await asyncio.wait_for(stays, 60)
    share.leave(10)
    await asyncio.wait_for(share.enter(1), 60)
