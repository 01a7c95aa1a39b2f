"""Minimal stand-ins for vLLM: only what the plugin uses."""

import asyncio
from functools import wraps
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from fitting import random_injection
from i2cl.interfaces.vllm import frontend
from i2cl.interfaces.vllm.engine import LOAD
from i2cl.interfaces.vllm.support import DIGEST
from i2cl.interfaces.vllm.worker import PackedEdit
from i2cl.models.edits import AffineEdit
from i2cl.models.scoring import next_token_log_probabilities


def in_a_loop(test):
    """Run an async test in its own event loop."""

    @wraps(test)
    def run(*args, **kwargs):
        return asyncio.run(test(*args, **kwargs))

    return run


def injection_for(decoder, task, seed=0, **more):
    """Return an injection that changes the answers of a tiny model."""
    return random_injection(decoder, task, seed, shown=4, fields=more, factor=0.3, around=(0.0, 1.0))


class Linear(nn.Linear):
    """``RowParallelLinear``: its forward pass returns a pair."""

    reduce_results = True
    skip_bias_add = False

    def forward(self, states):
        return super().forward(states), None


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.o_proj, self.mlp.down_proj = Linear(d, d), Linear(d, d)


class Llama(nn.Module):
    """``LlamaForCausalLM`` with nothing but its blocks and constructor."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        d = vllm_config.model_config.get_hidden_size()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Block(d) for _ in range(2)])


def vllm_config(**changes):
    """Return a supported ``VllmConfig``, with changes to fields; ``__`` in their names means a dot."""
    model = {"architecture": "LlamaForCausalLM", "logprobs_mode": "raw_logprobs"}
    kinds = ("decode_context", "prefill_context", "pipeline", "data")
    parallel = {f"{kind}_parallel_size": 1 for kind in kinds} | {"_api_process_count": 1}
    parallel |= {"enable_dbo": False, "ubatch_size": 0}
    config = SimpleNamespace(
        additional_config={},
        **dict.fromkeys(("kv_transfer_config", "lora_config", "speculative_config")),
        model_config=SimpleNamespace(**model, get_hidden_size=lambda: 8),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16, max_num_seqs=4),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(block_size=4, enable_prefix_caching=True, kv_sharing_fast_prefill=False),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, last)
        setattr(owner, last, value)
    return config


def params(digest=None, **extra):
    """``SamplingParams``, as a worker gets them."""
    result = extra | ({} if digest is None else {DIGEST: digest})
    return SimpleNamespace(extra_args=result or None)


def batch_v2(idx_mapping, lengths, padded, requests_padded):
    """``InputBatch`` of model runner V2, with padding after its requests as for captured graphs."""
    starts = np.zeros(requests_padded + 1, dtype=np.int32)
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    starts[len(lengths) + 1 :] = sum(lengths)
    return SimpleNamespace(
        num_reqs=len(lengths),
        idx_mapping_np=np.array(idx_mapping, dtype=np.intp),
        query_start_loc_np=starts,
        num_tokens_after_padding=padded,
    )


def runner_v1(model, requests, order, lengths, most=8):
    """``GPUModelRunner`` with known ``requests``; ``order`` lists those of the current batch."""
    starts = np.full(most + 1, sum(lengths), dtype=np.int32)
    starts[0] = 0
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    return SimpleNamespace(
        model=model,
        input_batch=SimpleNamespace(num_reqs=len(order), req_ids=list(order)),
        requests={name: SimpleNamespace(sampling_params=params) for name, params in requests.items()},
        query_start_loc=SimpleNamespace(np=starts),
    )


def parameters(task, prompt):
    """``SamplingParams``, as `frontend.ServedTask.parameters` makes them."""
    version = frontend.TaskVersion(task.name, task.edit.digest)
    return SimpleNamespace(extra_args={"i2cl": version}, logprob_token_ids=list(prompt.tokens))


class LLM:
    """``vllm.LLM``: the decoder answers, under the edit of the digest that a request was admitted with.

    As in the engine core, a dropped edit stays until its slot is reused, which does not happen here.
    """

    def __init__(self, decoder, folder):
        text = decoder.model.config
        self.decoder, self.sent, self.edits, self.loaded = decoder, [], {}, set()
        model = {"dtype": torch.float32, "max_model_len": 64, "hf_config": text, "hf_text_config": text}
        config = SimpleNamespace(model=str(folder), revision=None, served_model_name="base", **model)
        self.llm_engine = SimpleNamespace(model_config=config, vllm_config=vllm_config())

    def get_tokenizer(self):
        return self.decoder.tokenizer

    def collective_rpc(self, method, args):
        self.sent.append(method)
        if method == LOAD:
            edit = PackedEdit(*args)
            self.edits[edit.digest] = edit
            self.loaded.add(edit.digest)
        else:
            self.loaded.remove(args[0])

    def generate(self, prompts, parameters, *, use_tqdm):
        ids = (tuple(prompt["prompt_token_ids"]) for prompt in prompts)
        return [self.answer(*request) for request in zip(ids, parameters, strict=True)]

    def answer(self, ids, parameters):
        frontend.TASKS.admit(parameters)
        assert isinstance(parameters.extra_args["i2cl"], str)  # can be sent to any process
        rows, scales = self.edits[parameters.extra_args[DIGEST]].tensors(self.decoder.d_model)
        layers = self.decoder.layers
        edit = AffineEdit(rows.view(layers, 2, -1), scales.view(layers, 2))
        (values,) = next_token_log_probabilities(self.decoder, [ids], edit=edit)
        tokens = parameters.logprob_token_ids
        assert len(tokens) <= frontend.MAX_LABEL_TOKENS
        logprobs = {token: SimpleNamespace(logprob=float(values[token])) for token in tokens}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[logprobs], finish_reason="length")])
