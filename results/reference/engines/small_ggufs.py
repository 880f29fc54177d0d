"""Two models out of one GGUF file, for engines that read GGUF: its weights in float16, and its first layers.

    python small_ggufs.py SmolLM2-135M-Instruct.Q4_1.gguf model-f16.gguf
    python small_ggufs.py SmolLM2-135M-Instruct.Q4_1.gguf draft-f16.gguf --layers 26

The first is the same model without the quantisation that engines read in ways of their own; the second a draft model
that shares its tokenizer.
"""

from __future__ import annotations

import argparse
import re

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize


def rewrite(source: str, target: str, layers: int | None) -> None:
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value = layers if layers and name == f"{architecture}.block_count" else field.contents()
        element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=element)
    writer.add_file_type(1)  # mostly float16
    for tensor in reader.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if layers and block and int(block[1]) >= layers:
            continue
        weights = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in tensor.shape[::-1]])
        kept = tensor.tensor_type is GGMLQuantizationType.F32  # norms
        writer.add_tensor(tensor.name, weights if kept else weights.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    rewrite(arguments.source, arguments.target, arguments.layers)
