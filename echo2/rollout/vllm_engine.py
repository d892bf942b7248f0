"""Generation with vLLM, in this process, on one GPU or with vLLM's CPU build.

Invariants: a log-probability is that of the distribution which the token was drawn from; a token carries the version of the
weights that drew it; what is begun after new weights were taken reads no key or value that former ones computed; an engine
whose weights were not taken whole has no version, and generates nothing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

# Read by vLLM when it is imported. What crosses between processes would be copies of all weights; two workers on one machine
# would be bound to the same cores; and nothing is to be reported to its makers.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from echo2.config_sections import WorkerSection
from echo2.dissemination.manifest import Content
from echo2.errors import ConfigError
from echo2.models.adapted import AdaptedModel
from echo2.models.loading import Dtype, build_model, matched_weights, untied_weights
from echo2.models.tensors import tensors_in
from echo2.protocol import Sampling
from echo2.rollout.engine import Engine
from echo2.rollout.members import Group, Member, refusal, temperature_of
from echo2.rollout.memory import shortage_as_such
from echo2.rollout.randomness import member_generator
from echo2.rollout.vllm_weights import SpareWeights, hush_weightless_layers, pack_heads

CPU_CACHE_BYTES = 256 * 1024 * 1024
LEAST_TEMPERATURE = 0.01
"""vLLM takes this one in place of a lower one, but 0."""
SEEDS = 2**63
NEWEST_MEMBERS = 512
"""Whose mean length says how many groups the cache holds."""


class _Request(NamedTuple):
    """A member that grows: vLLM's own name of its request."""

    internal_id: str
    group: Group
    member: Member
    sampling: Sampling


class VllmEngine(Engine):
    """Continuous batching: every member is a request of its own, and members of a group share their prompt's cache."""

    def __init__(self, model_folder: Path, dtype: Dtype, settings: WorkerSection, members: int, longest_tokens: int) -> None:
        """`model_folder` needs no weights; groups have `members` members of at most `longest_tokens`.

        Raises ConfigError if it describes no model, or one that vLLM or the device cannot take.
        """
        super().__init__()
        _check_device(settings.device)
        torch.set_num_threads(settings.threads)
        hush_weightless_layers()
        self._folder, self._dtype = model_folder, dtype
        described = build_model(model_folder, dtype, torch.device("meta"))
        self._expected = untied_weights(described)
        self._engine = _make_engine(model_folder, described, dtype, settings, members)
        model = self._engine.model_config
        self._max_positions: int = model.max_model_len
        self._vocabulary_size: int = model.get_vocab_size()
        self._adapted: AdaptedModel | None = None
        self._merged: dict[str, Tensor] = {}
        self._spare: SpareWeights | None = None
        if settings.update_mode == "in_flight":
            (self._spare,) = self._engine.apply_model(partial(SpareWeights, self._engine.vllm_config, self._expected))
        self._staged: Content | None = None
        self._loads = 0
        self._members = members
        self._lengths = deque([longest_tokens], maxlen=NEWEST_MEMBERS)
        self._numbers = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._arrived: dict[str, RequestOutput] = {}

    def adapt(self, base: Content, scale: float) -> None:
        """From now on snapshots hold adapters of `base`, which are scaled so; see `AdaptedModel`. Raises SnapshotError.

        They are merged in host memory, which holds the base and the merged weights.
        """
        model = build_model(self._folder, self._dtype, torch.device("cpu"))
        self._adapted, self._merged = AdaptedModel(model, base, scale), untied_weights(model)

    def stage(self, snapshot: Content) -> None:
        """As `Engine.stage`: in flight, so that generation waits for the last step alone, a copy in memory."""
        if self._spare is not None:
            self._spare.load(self._weights_in(snapshot))
            self._staged = snapshot

    def load_weights(self, snapshot: Content, version: int) -> None:
        """As `Engine.load_weights`; where something is under way, `worker.update_mode` must be `in_flight`.

        An error after the first weight leaves the engine without a version until a snapshot was taken whole.
        """
        if self._spare is None:
            weights = self._weights_in(snapshot)
            self.version = None
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
            self._engine.apply_model(pack_heads)
        else:
            if self._staged is not snapshot:
                self.stage(snapshot)
            self.version = self._staged = None
            self._engine.apply_model(self._spare.give)
        self._loads += 1
        self._engine.set_weight_version(str(version))
        self.version = version

    def _weights_in(self, snapshot: Content) -> Mapping[str, Tensor]:
        if self._adapted is not None:
            self._adapted.load(snapshot)
            return self._merged
        weights = tensors_in(snapshot)
        matched_weights(self._expected, weights)
        return weights

    def prompt_log_probs(self, token_ids: Sequence[int]) -> np.ndarray:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id, _ = self._add(token_ids, params)
        while request_id not in self._arrived:
            self._step()
        # The first token is given, and has none.
        pairs = list(zip(token_ids, self._arrived.pop(request_id).prompt_logprobs, strict=True))[1:]
        return np.array([entry[token_id].logprob for token_id, entry in pairs], np.float32)

    @property
    def open_tokens(self) -> int:
        """As `Engine.open_tokens`; what vLLM has not delivered counts as well."""
        undelivered = 0
        for request in self._requests.values():
            state = self._engine.output_processor.request_states[request.internal_id]
            undelivered += state.detokenizer.num_output_tokens() - len(request.member.token_ids)
        return super().open_tokens + undelivered

    def limit(self, slots: int) -> int:
        """As `Engine.limit`: as many groups as the cache holds if all members are as long as the newest were on average.

        Before the first one they are taken to be as long as can be. Where the cache is too small all the same, vLLM computes
        some anew.
        """
        cache = self._engine.vllm_config.cache_config
        member_blocks = math.ceil(fmean(self._lengths) / cache.block_size) + 1
        return min(slots, max(1, (cache.num_gpu_blocks or 0) // (self._members * member_blocks)))

    def room(self, slots: int) -> int:
        """As `Engine.room`: groups may join those under way."""
        return max(0, self.limit(slots) - self.under_way)

    def _start(self, group: Group, sampling: Sampling) -> str | None:
        lease = group.lease
        reason = refusal(lease, sampling, self._max_positions, self._vocabulary_size)
        if reason is not None:
            return reason
        if 0.0 < (temperature := temperature_of(lease, sampling)) < LEAST_TEMPERATURE:
            return f"vLLM does not sample at the temperature {temperature:g}: set it to 0 or at least {LEAST_TEMPERATURE}"
        begun = {}
        try:
            for member in group.members:
                params = _sampling_params(group, member, sampling)
                request_id, internal_id = self._add([*lease.prompt_token_ids, *member.prefix], params)
                begun[request_id] = _Request(internal_id, group, member, sampling)
        except (VLLMClientError, ValueError) as error:
            self._engine.abort_request(list(begun))
            return f"vLLM refused the prompt: {error}"
        self._requests |= begun
        return None

    def _advance(self) -> list[Group]:
        with shortage_as_such():
            self._step()
        touched: dict[Group, None] = {}
        for request_id in [known for known in self._arrived if known in self._requests]:
            request, completion = self._requests.pop(request_id), self._arrived.pop(request_id).outputs[0]
            _take(request, completion)
            self._lengths.append(len(request.member.prefix) + len(request.member.token_ids))
            if not request.member.finished:
                request.member.failure = f"vLLM ended it after {len(completion.token_ids)} tokens: {completion.finish_reason}"
            touched[request.group] = None
        return [group for group in touched if group.finished]

    def _gather(self, groups: Sequence[Group]) -> None:
        for request in [each for each in self._requests.values() if each.group in groups]:
            state = self._engine.output_processor.request_states[request.internal_id]
            # What vLLM would deliver if the request ended now, which it does not.
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            _take(request, output.outputs[0])

    def _abandon(self, groups: Sequence[Group]) -> None:
        ids = [request_id for request_id, request in self._requests.items() if request.group in groups]
        self._engine.abort_request(ids)
        for request_id in ids:
            del self._requests[request_id]
            self._arrived.pop(request_id, None)

    def _add(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[str, str]:
        """Our name and vLLM's own of a new request."""
        request_id = str(next(self._numbers))
        # Blocks of keys and values are shared among requests of the same salt only.
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": str(self._loads)}
        return request_id, self._engine.add_request(request_id, prompt, params)

    def _step(self) -> None:
        """One token for each request that runs; those that are done arrive."""
        self._arrived |= {output.request_id: output for output in self._engine.step() if output.finished}


def _make_engine(model_folder: Path, described: Any, dtype: Dtype, settings: WorkerSection, members: int) -> LLMEngine:
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        # Without this permission of the system, matrix products in bfloat16 are illegal instructions on some processors.
        torch.cpu._init_amx()
    arguments = EngineArgs(
        model=str(model_folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        # A configuration that does not say what the model is for is taken for one of embeddings.
        hf_overrides={"architectures": described.config.architectures or [type(described).__name__]},
        generation_config="vllm",
        dtype=dtype,
        seed=0,
        # As long as the memory for keys and values allows.
        max_model_len=-1,
        # One more for the proof of an exchange in flight, which waits for no member to end.
        max_num_seqs=settings.slots * members + 1,
        gpu_memory_utilization=settings.memory_share,
        kv_cache_memory_bytes=settings.cache_bytes or (CPU_CACHE_BYTES if on_cpu else None),
        enable_prefix_caching=True,
        # On CPUs vLLM cannot take back the random numbers of a request whose prompt it computes in pieces.
        enable_chunked_prefill=not on_cpu,
        enforce_eager=on_cpu,
        logprobs_mode="processed_logprobs",
        # A batch that is on its way while weights change would be taken for the work of the new ones.
        async_scheduling=False if settings.update_mode == "in_flight" else None,
        disable_log_stats=True,
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except ValueError as error:
        raise ConfigError(
            f"vLLM cannot run the model in {model_folder} ({str(error).splitlines()[0]}): set worker.engine=transformers, or "
            f"worker.memory_share and worker.cache_bytes to what this machine has"
        ) from error


def _check_device(device: str) -> None:
    """vLLM has the device that it was built for."""
    own = current_platform.device_type
    if device not in ("auto", own):
        raise ConfigError(f"worker.device = {device!r}, but the vLLM that is installed is built for {own!r}: set it to auto")


def _sampling_params(group: Group, member: Member, sampling: Sampling) -> SamplingParams:
    begun = len(member.prefix)
    random = member_generator(sampling.seed, group.lease.group_id, member.number)
    return SamplingParams(
        temperature=temperature_of(group.lease, sampling),
        max_tokens=sampling.max_completion_tokens - begun,
        # A member that goes on must not use the random numbers of its first tokens again.
        seed=int(random.integers(SEEDS, size=begun + 1, dtype=np.uint64)[begun]),
        stop_token_ids=list(sampling.stop_token_ids),
        # The run's stop tokens alone end a completion, whatever the model's folder says.
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _take(request: _Request, completion: CompletionOutput) -> None:
    """Give the member what was drawn for it since the last time."""
    member, sampling = request.member, request.sampling
    greedy = temperature_of(request.group.lease, sampling) == 0.0
    spans = completion.weight_versions or []
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    drawn = list(zip(completion.token_ids, completion.logprobs or [], versions, strict=True))
    for token_id, entry, version in drawn[len(member.token_ids) :]:
        log_prob = entry[token_id].logprob
        # The most probable token was drawn with certainty.
        member.append(token_id, 0.0 if greedy and math.isfinite(log_prob) else log_prob, version, sampling)
        if member.finished:
            return
