"""Requests with a seed on CPU servers, whose prompts are prefilled in pieces.

After every piece but the last vLLM throws a sampled token away and takes its random numbers back by the generator's
offset, which generators of a CPU do not have: the server dies (vLLM 0.32, `GPUModelRunner._bookkeeping_sync`). It
happens to any prompt longer than what is left of `--max-num-batched-tokens`, above all when a refit has dropped keys
and values of many responses at once. Here the generators' states are kept instead, which comes to the same.
"""

from functools import cache
from typing import Any

from lightning_ppo.refit.compatibility import need


@cache
def keep_generators() -> None:
    """Have CPU workers put the generators of thrown-away tokens back. Without effect the second time.

    Raises:
        EngineError: this vLLM has other runners.
    """
    runner: Any = need("vllm.v1.worker.cpu_model_runner", "CPUModelRunner")
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in _thrown_away(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = _thrown_away(self)
        for index in hidden:
            del generators[index]
        try:
            return keep_books(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


def _thrown_away(runner: Any) -> dict[int, Any]:
    """Generators, by their requests' places, whose tokens of this step are thrown away."""
    mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return {index: generator for index, generator in runner.input_batch.generators.items() if mask[index]}
