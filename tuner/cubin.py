"""What a cubin says of its kernels. A cubin is an ELF64 file; its section .nv.info lists attributes (the names are those that
`cuobjdump -elf` prints) as records of format, attribute and size, here those whose value is a symbol and a number."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_EIFMT_SVAL = 4  # a record with a payload of `size` bytes; other formats carry their value in the size field
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F


class CubinError(ValueError):
    """The bytes are not a cubin this module can read."""


@dataclass(frozen=True)
class Usage:
    """registers: of a thread; stack_bytes: local memory of a thread: spilled registers, and arrays that found no registers."""

    registers: int
    stack_bytes: int


def usage(cubin: bytes) -> dict[str, Usage]:
    """Kernel name -> what a thread of it uses. Raises CubinError."""
    try:
        return _usage(cubin)
    except (struct.error, LookupError, ValueError) as error:
        raise CubinError(f"not a cubin: {error}") from None


def _usage(cubin: bytes) -> dict[str, Usage]:
    if cubin[:5] != b"\x7fELF\x02":
        raise CubinError("no ELF64 header")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + size * i) for i in range(count)]

    def content(index: int) -> bytes:
        return cubin[headers[index][4] : headers[index][4] + headers[index][5]]

    sections = {_text(content(names), header[0]): index for index, header in enumerate(headers)}
    symbols, strings = content(sections[".symtab"]), content(headers[sections[".symtab"]][6])
    values: dict[int, dict[str, int]] = {_EIATTR_REGCOUNT: {}, _EIATTR_FRAME_SIZE: {}}
    for attribute, payload in _records(content(sections[".nv.info"])):
        if attribute in values and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            values[attribute][_text(strings, struct.unpack_from("<I", symbols, 24 * symbol)[0])] = value
    return {name: Usage(registers, values[_EIATTR_FRAME_SIZE].get(name, 0)) for name, registers in values[_EIATTR_REGCOUNT].items()}


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _EIFMT_SVAL:
            yield attribute, info[at : at + size]
            at += size


def _text(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode()
