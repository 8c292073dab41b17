"""Makes the golden files of NF4 with bitsandbytes, which the tests then do without.

    PYTHONPATH=. python tests/core/golden/make_nf4.py

It needs torch, transformers, accelerate and bitsandbytes (0.50.2 was used). bitsandbytes' compiled library for
CPUs looks the scales' codes up in a table of 65,536 steps, which misses the nearest one now and then; its
portable code and its GPU kernels take the nearest, so the library is not used for `nf4.safetensors`.
"""

import os
import tempfile
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from bitsandbytes import functional
from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from tests.core.nf4_golden import DTYPES, SHAPES, digest, golden_name, golden_weight

HOME = Path(__file__).parent


def write_tensors():
    assert isinstance(lib, ErrorHandlerMockBNBNativeLibrary), "remove libbitsandbytes_cpu.so first"
    tensors = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            for nested in (False, True):
                codes, state = functional.quantize_4bit(
                    golden_weight(shape, dtype), compress_statistics=nested, quant_type="nf4"
                )
                made = {"codes": codes.flatten(), "absmax": state.absmax}
                if nested:
                    made |= {"nested_absmax": state.state2.absmax, "offset": state.offset}
                full = functional.dequantize_4bit(codes, state)
                made["sha256"] = torch.tensor(list(digest(full)), dtype=torch.uint8)
                name = golden_name(shape, dtype, nested)
                tensors |= {f"{name}.{part}": tensor.clone() for part, tensor in made.items()}
    tensors["nested_map"] = functional.create_dynamic_map()
    save_file(tensors, HOME / "nf4.safetensors")


def write_checkpoint():
    """A tiny Llama that `transformers` and bitsandbytes saved in 4 bits, and its weights in full."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    folder = HOME / "bnb_checkpoint"
    full_folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).bfloat16().save_pretrained(full_folder)
    form = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "o_proj"],
    )
    network = AutoModelForCausalLM.from_pretrained(
        full_folder, quantization_config=form, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    network.save_pretrained(folder)
    full = {
        name: functional.dequantize_4bit(weight.data, weight.quant_state)
        if hasattr(weight, "quant_state")
        else weight.data
        for name, weight in network.named_parameters()
    }
    save_file({name: tensor.contiguous() for name, tensor in full.items()}, folder / "expected.safetensors")


write_tensors()
write_checkpoint()
