"""Unambiguous byte framing for everything that is fed to a MAC.

Joining fields with a separator lets two different field lists give the same bytes (`"org_1" + "2345"` and
`"org_12" + "345"`). Here every field carries its length, and the number of fields comes first, so a frame
decodes to exactly one field list.
"""

from __future__ import annotations

_LENGTH_BYTES = 4
_MAX_FIELD = (1 << (8 * _LENGTH_BYTES)) - 1

Field = str | bytes


def frame(*fields: Field) -> bytes:
    """Encode `fields` injectively: a count, then each field as length (4 bytes, big-endian) and bytes. Text
    is UTF-8.

    Lone surrogates (which JSON strings may carry) are kept by `surrogatepass`, so no input can make this fail
    on encoding.

    Raises:
        ValueError: a field is 4 GiB or longer.
    """
    parts = [len(fields).to_bytes(_LENGTH_BYTES, "big")]
    for field in fields:
        data = field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field
        if len(data) > _MAX_FIELD:
            raise ValueError(f"a framed field has {len(data)} bytes; at most {_MAX_FIELD} fit")
        parts.append(len(data).to_bytes(_LENGTH_BYTES, "big"))
        parts.append(data)
    return b"".join(parts)


def unframe(data: bytes) -> list[bytes]:
    """Decode what `frame` made.

    Raises:
        ValueError: `data` is not exactly one frame (cut short, or with bytes left over).
    """
    count, rest = _take_length(memoryview(data))
    fields: list[bytes] = []
    for _ in range(count):
        length, rest = _take_length(rest)
        if length > len(rest):
            raise ValueError("frame is cut short inside a field")
        fields.append(bytes(rest[:length]))
        rest = rest[length:]
    if rest:
        raise ValueError(f"frame has {len(rest)} bytes after its last field")
    return fields


def _take_length(data: memoryview) -> tuple[int, memoryview]:
    if len(data) < _LENGTH_BYTES:
        raise ValueError("frame is cut short inside a length")
    return int.from_bytes(data[:_LENGTH_BYTES], "big"), data[_LENGTH_BYTES:]
