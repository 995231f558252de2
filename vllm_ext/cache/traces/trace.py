"""Block traces: which blocks each request wanted, and when."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from vllm_ext.cache.order import Stop


class TraceError(ValueError):
    """A trace that cannot be read; the message begins with file and, where there is one, line."""


@dataclass(slots=True)
class Request:
    """One request of a trace.

    Attributes:
        time: arrival, seconds.
        prompt: keys of the prompt's blocks. Chained: equal keys mean equal contents from the first token on.
        output: keys of the blocks that decoding filled; empty where the trace does not say.
        finish: seconds; equal to `time` where the trace does not say.
        output_tokens: decoded tokens.
        tenant: name, or None.
        session: conversation, or None.
        stop: why it stopped.
        ended: the session ends with this request.
    """

    time: float
    prompt: Sequence[Hashable]
    output: Sequence[Hashable] = ()
    finish: float = 0.0
    output_tokens: int = 0
    tenant: str | None = None
    session: Hashable | None = None
    stop: Stop = Stop.UNKNOWN
    ended: bool = False


@dataclass(slots=True)
class Trace:
    """Requests in order of arrival, their keys replaced by dense numbers (0, 1, ... in order of appearance).

    Attributes:
        name: for tables.
        requests: prompts and outputs as lists of numbers below `num_keys`.
        num_keys: distinct blocks, prompts and outputs.
        num_prompt_keys: distinct blocks of prompts: what capacities are a share of.
        prompt_blocks: sum of the prompts' lengths.
    """

    name: str
    requests: list[Request]
    num_keys: int
    num_prompt_keys: int
    prompt_blocks: int

    def part(self, start: int, stop: int, name: str) -> Trace:
        """Requests `start` to `stop` as a trace of their own."""
        return make_trace(name, self.requests[start:stop])


def make_trace(name: str, requests: Iterable[Request]) -> Trace:
    """Sorts by arrival and numbers the keys.

    Raises:
        TraceError: there is no request, or none with a prompt block.
    """
    ordered = sorted(requests, key=lambda request: request.time)
    numbers: dict[Hashable, int] = {}
    sessions: dict[Hashable, int] = {}
    packed: list[Request] = []
    seen_in_prompts: set[int] = set()
    prompt_blocks = 0
    for request in ordered:
        prompt = [numbers.setdefault(key, len(numbers)) for key in request.prompt]
        output = [numbers.setdefault(key, len(numbers)) for key in request.output]
        seen_in_prompts.update(prompt)
        prompt_blocks += len(prompt)
        session = None
        if request.session is not None:
            session = sessions.setdefault(request.session, len(sessions) + 1)
        packed.append(
            Request(
                request.time,
                prompt,
                output,
                max(request.finish, request.time),
                request.output_tokens,
                request.tenant,
                session,
                request.stop,
                request.ended,
            )
        )
    if not prompt_blocks:
        raise TraceError(f"{name}: no request with a full block of prompt: nothing to replay")
    return Trace(name, packed, len(numbers), len(seen_in_prompts), prompt_blocks)
