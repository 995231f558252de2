"""What is known about a block when a request gives it back, condensed to a small class number.

Blocks of one class are expected to be reused alike, so reuse is counted per class. What predicts reuse on
real traffic: how often the block was hit before, whether its request continued a conversation, how fast that
conversation goes, and why the request stopped. More features hardly help (the information is not there), so a
class is two small factors: *kind* of block and *mood* of its conversation.
"""

from __future__ import annotations

from bisect import bisect_right

from vllm_ext.cache.order import Arrival, Stop

AGES = (0, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
"""Lower edges of the age bands, seconds. Finer than powers of two where conversations pause (30 to 500 s)."""
BANDS = len(AGES)

HITS = 3  # 0, 1, 2 and more
REQUESTS = 6
LAST = HITS * REQUESTS
"""Kind of a prompt's last block: the next turn seldom agrees with all of it."""
DECODED = LAST + 1
"""Kind of a decoded block: the next turn has it if the client sends the answer back unchanged."""
KINDS = DECODED + 1

PACES = (8.0, 32.0, 128.0)  # upper edges, seconds between turns; no past is a class of its own
SIGNALS = 7
SHORT, LONG = 32, 200  # decoded tokens: a call or a yes, a few sentences, an essay that takes time to read
MOODS = (len(PACES) + 2) * SIGNALS

ENDED = KINDS * MOODS
"""Class of blocks whose only session is over."""
CLASSES = ENDED + 1


def request_kind(arrival: Arrival, num_prompt: int, typical: float) -> int:
    """0, 1: a prompt that nobody sent before (but for one block), shorter or longer than `typical`; 2, 3: a
    continuation that adds up to a quarter, early or late in its conversation; 4: up to a half; 5: more."""
    if arrival.known <= 1:
        return 0 if num_prompt <= typical else 1
    new = (num_prompt - arrival.known) / num_prompt
    if new <= 0.25:
        return 2 if arrival.turns <= 2 else 3
    return 4 if new <= 0.5 else 5


def signal(stop: Stop, output_tokens: int) -> int:
    """How the answer ended, 0 to SIGNALS - 1. Its length stands in for a reason that nobody gave: short
    answers are followed up sooner."""
    if stop is Stop.TOOL_CALL:
        return 3 if output_tokens < LONG else 4
    if stop is not Stop.UNKNOWN:
        return 5 if stop is Stop.END_TURN else 6
    return (output_tokens >= SHORT) + (output_tokens >= LONG)


def mood(arrival: Arrival, stop: Stop, output_tokens: int) -> int:
    """0 to MOODS - 1: pace of the conversation and how this turn ended."""
    pace = 0 if arrival.pace < 0 else 1 + bisect_right(PACES, arrival.pace)
    return pace * SIGNALS + signal(stop, output_tokens)


def smoothed_pace(pace: float, gap: float) -> float:
    """The pace after another turn `gap` seconds after the last: a geometric mean that forgets."""
    gap = max(gap, 0.5)
    return gap if pace < 0 else pace**0.7 * gap**0.3
