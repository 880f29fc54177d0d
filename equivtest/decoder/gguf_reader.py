"""Reads GGUF files: metadata, and tensors dequantised to float32.

The header is parsed here in one pass over the bytes: a tenth of a second, where the gguf package's reader, which keeps
arrays for every string, takes several. That package's dequantisation is used as it is.
Format: the GGUF specification of the ggml project, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from equivtest.errors import UnsupportedModel

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_NESTING = 8
"""Arrays within arrays that are still read. No model nests them; a damaged file may, without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies."""

    shape: tuple[int, ...]
    """Row-major, outermost first: the reverse of the file's order."""
    kind: GGMLQuantizationType
    offset: int
    """In bytes from the start of the file."""


class GgufFile:
    """An opened GGUF file. Raises UnsupportedModel when it is damaged or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, dtype=np.uint8)
        try:
            self.metadata, self.tensors = _parse(self._bytes.data)
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            raise UnsupportedModel(str(path), f"not a readable GGUF file: {error}; fetch it again") from error

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor dequantised to float32. Raises UnsupportedModel for a missing, truncated or unknown encoding."""
        if name not in self.tensors:
            raise UnsupportedModel(str(self.path), f"the tensor {name} is missing")
        info = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[info.kind]
        row_bytes, rest = divmod(info.shape[-1] * block_bytes, block)
        size = math.prod(info.shape[:-1]) * row_bytes
        raw = self._bytes[info.offset : info.offset + size]
        if rest or len(raw) != size:
            raise UnsupportedModel(str(self.path), f"the tensor {name} is cut short; fetch the file again")
        if info.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            plain = raw.view(np.float32 if info.kind is GGMLQuantizationType.F32 else np.float16)
            return plain.reshape(info.shape).astype(np.float32)
        try:
            values = dequantize(raw.reshape(*info.shape[:-1], row_bytes), info.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(str(self.path), f"the encoding {info.kind.name} of {name} cannot be read") from error
        return np.ascontiguousarray(values, dtype=np.float32)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        if self.at + size > len(self._data):
            message = "the file ends inside its header"
            raise ValueError(message)
        piece = self._data[self.at : self.at + size]
        self.at += size
        return piece

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value  # type: ignore[no-any-return]

    def count(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        return bytes(self.take(self.count())).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        if depth == _MAX_NESTING:
            message = f"arrays are nested more than {_MAX_NESTING} deep"
            raise ValueError(message)
        kind, length = self.count("I"), self.count()
        if kind in (_STRING, _ARRAY):
            return [self.value(kind, depth + 1) for _ in range(length)]
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize("<" + code))))


def _parse(data: memoryview) -> tuple[dict[str, object], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    if bytes(cursor.take(4)) != b"GGUF":
        message = "it does not start with GGUF"
        raise ValueError(message)
    version = cursor.count("I")
    if version not in (2, 3):
        message = f"version {version} (this decoder reads 2 and 3, little endian)"
        raise ValueError(message)
    num_tensors, num_entries = cursor.count(), cursor.count()
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.count("I"))
    found = {}
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.count() for _ in range(cursor.count("I")))[::-1]
        if not shape or 0 in shape:
            message = f"the tensor {name} has the shape {list(shape)}"
            raise ValueError(message)
        found[name] = (shape, GGMLQuantizationType(cursor.count("I")), cursor.count())
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        message = f"general.alignment = {alignment!r}"
        raise ValueError(message)
    start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: GgufTensor(shape=shape, kind=kind, offset=start + offset) for name, (shape, kind, offset) in found.items()
    }
