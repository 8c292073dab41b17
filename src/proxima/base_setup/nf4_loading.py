"""Networks whose linear layers are quantised to NF4 while they load, or were saved so by bitsandbytes.

`transformers` reads a checkpoint tensor by tensor into a network without memory behind it; `NF4Quantizer` is
asked for each. So no more than one matrix is ever there in full, and `bitsandbytes` is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from proxima.core.errors import first_line
from proxima.core.json_record import RecordView
from proxima.core.linear4bit import Linear4bit
from proxima.core.nf4 import BLOCK, NESTED_BLOCK, VALUES, NF4Weight, quantize
from proxima.runtime import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Quantize = Literal["none", "nf4"]
METHOD = "proxima_nf4"
PARTS = ("nested_absmax", "nested_quant_map", "quant_map", "absmax", "quant_state.bitsandbytes__nf4")
"""What bitsandbytes saves beside a weight's codes, each under `weight.` and this name."""


class QuantizeError(ValueError):
    """A network or checkpoint that cannot be had in 4 bits; the message says why and what to do."""


@register_quantization_config(METHOD)
class NF4Config(QuantizationConfigMixin):
    """What `transformers` is told of the quantisation while it loads."""

    def __init__(self, skip_modules: list[str] | None = None, **_: object):
        self.quant_method = METHOD
        self.skip_modules = skip_modules


@register_quantizer(METHOD)
class NF4Quantizer(HfQuantizer):
    """Puts `Linear4bit` in place of a network's linear layers and fills it from a checkpoint."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.skip_modules, model._keep_in_fp32_modules
        )
        _check_layers(model)
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and should_convert_module(name, kept):
                size = module.in_features, module.out_features, module.bias is not None
                made = Linear4bit(*size, device="meta", dtype=module.weight.dtype)
                model.set_submodule(name, made.requires_grad_(False))

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: object) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, Linear4bit) and name == "weight"

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        return 0.5 if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize()

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        sources = [*(f"weight.{part}" for part in PARTS), "weight"]
        return [WeightConverter(source_patterns=sources, target_patterns="weight", operations=[_Read()])]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> PreTrainedModel:
        layers = {name: part for name, part in model.named_modules() if isinstance(part, Linear4bit)}
        if problem := getattr(model, "nf4_problem", ""):
            raise QuantizeError(problem)
        if not layers:
            raise QuantizeError("it has no linear layers beside its head, so there is nothing to quantise")
        for name, layer in layers.items():
            if layer._nf4 is None:
                raise QuantizeError(
                    f"its layer {name!r} is not quantised in the checkpoint, though its config does not name "
                    "it in llm_int8_skip_modules; the checkpoint and its config.json do not belong together"
                )
        for name, weight in model.named_parameters():
            if name.rpartition(".")[0] not in layers and weight.shape != self.shapes[name]:
                raise QuantizeError(
                    f"its weight {name!r} has shape {tuple(weight.shape)}, where its config means "
                    f"{tuple(self.shapes[name])}; is it quantised, but named in llm_int8_skip_modules?"
                )
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse networks most of whose weights would stay as they are."""
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise QuantizeError(
                f"{model.config.model_type} keeps its weights transposed (Conv1D in {name!r}), which nf4 "
                "does not take; set quantize to none, or use another architecture"
            )
    for name, weight in model.named_parameters():
        if weight.ndim > 2 and "experts" in name:
            raise QuantizeError(
                f"the experts of {model.config.model_type} are one tensor ({name!r}), which nf4 does not "
                "take; set quantize to none, or use a model without experts"
            )


class _Quantize(ConversionOps):
    """A weight in full, as it comes from the file, to codes."""

    def convert(
        self, input_dict: Mapping[str, list[Tensor] | Tensor], model: PreTrainedModel, **_: object
    ) -> dict[str, Tensor]:
        made = {}
        for name, value in input_dict.items():
            module, _name = get_module_from_name(model, name)
            module.set_weight(quantize(value[0] if isinstance(value, list) else value))
            made[name] = module.weight
        return made


class _Read(ConversionOps):
    """What bitsandbytes saved of a weight, to the same codes."""

    def convert(
        self,
        input_dict: Mapping[str, list[Tensor] | Tensor],
        model: PreTrainedModel,
        full_layer_name: str,
        **_: object,
    ) -> dict[str, Tensor]:
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        module, _name = get_module_from_name(model, full_layer_name)
        if not isinstance(module, Linear4bit) or len(parts) == 1:
            return {"weight": parts["weight"]}
        shape = module.out_features, module.in_features
        try:
            module.set_weight(read_bitsandbytes(parts, shape, module.weight.dtype))
        except (KeyError, TypeError, ValueError) as error:  # `transformers` would print a stack trace
            model.nf4_problem = f"its layer {full_layer_name!r} cannot be read: {first_line(error)}"
        return {"weight": module.weight}


def read_bitsandbytes(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> NF4Weight:
    """A weight from what bitsandbytes saved: `weight`, `weight.absmax` and so on."""
    tensors = {name.removeprefix("weight."): value for name, value in parts.items()}
    codes, absmax = tensors["weight"], tensors["absmax"]
    state = json.loads(bytes(tensors["quant_state.bitsandbytes__nf4"].cpu().tolist()))
    nested = tensors.get("nested_absmax")
    _check_state(state, tensors["quant_map"], nested is not None)
    count = torch.Size(shape).numel()
    blocks = -(-count // BLOCK)
    sizes = {
        "codes": (codes, torch.uint8, -(-count // 2)),
        "absmax": (absmax, torch.float32 if nested is None else torch.uint8, blocks),
    }
    if nested is not None:
        sizes["nested_absmax"] = nested, torch.float32, -(-blocks // NESTED_BLOCK)
        sizes["nested_quant_map"] = tensors["nested_quant_map"], torch.float32, 256
    for name, (tensor, kind, size) in sizes.items():
        if tensor.dtype != kind or tensor.numel() != size:
            raise QuantizeError(
                f"its {name} of a weight {shape} are {tensor.numel()} of {tensor.dtype}, not {size} of {kind}"
            )
    flat = codes.flatten()
    if nested is None:
        return NF4Weight(flat, absmax, shape, dtype)
    offset = torch.tensor(float(state["nested_offset"]), device=codes.device)
    return NF4Weight(flat, absmax, shape, dtype, nested, tensors["nested_quant_map"], offset)


def _check_state(state: RecordView, values: Tensor, nested: bool) -> None:
    """Only the form that `core/nf4.py` computes."""
    known = {"quant_type": "nf4", "blocksize": BLOCK} | ({"nested_blocksize": NESTED_BLOCK} if nested else {})
    for name, value in known.items():
        if state.get(name) != value:
            raise QuantizeError(f"its {name} is {state.get(name)!r}, and only {value!r} is supported")
    if values.cpu().tolist() != list(VALUES):
        raise QuantizeError("its table of 16 values is not that of NF4")


@torch.no_grad()
def check_forward(network: PreTrainedModel, device: torch.device) -> None:
    """Refuse architectures whose code reads a linear layer's weight itself, by a pass over one token."""
    try:
        network(torch.zeros(1, 1, dtype=torch.long, device=device))
    except (RuntimeError, TypeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise QuantizeError(
            f"{network.config.model_type} does not run with its linear layers in 4 bits: its code may read "
            f"their weights directly ({first_line(error)}); set quantize to none, or use another architecture"
        ) from error


def quantization_of(config: PreTrainedConfig) -> RecordView | None:
    """What a checkpoint's config says of its quantisation; None where it is not quantised."""
    found = getattr(config, "quantization_config", None)
    found = found or getattr(config.get_text_config(), "quantization_config", None)
    return found.to_dict() if isinstance(found, QuantizationConfigMixin) else found


def check_quantization(name: str, saved: RecordView | None, wanted: str) -> None:
    """Refuse what a checkpoint's own quantisation does not allow."""
    if saved is None:
        return
    storage = saved.get("bnb_4bit_quant_storage") or ("uint8" if saved.get("load_in_4bit") else None)
    form = saved.get("quant_method"), saved.get("bnb_4bit_quant_type"), storage
    what = ", ".join(str(part) for part in form if part) or "an unknown method"
    if not (saved.get("load_in_4bit") and form in {("bitsandbytes", "nf4", "uint8"), (None, "nf4", "uint8")}):
        raise QuantizeError(
            f"{name!r} is quantised in a form that is not supported ({what}); use the model before "
            "quantisation, or its nf4 form by bitsandbytes (`...-bnb-4bit`)"
        )
    if wanted != "nf4":
        raise QuantizeError(f"{name!r} is quantised ({what}); set quantize to nf4 to use it")


def loading_arguments(
    config: PreTrainedConfig, saved: RecordView | None, device: torch.device
) -> dict[str, object]:
    """Arguments of `from_pretrained` that quantise, or read what is quantised, straight onto the device."""
    given: dict[str, object] = {"config": config, "device_map": {"": device}}
    if saved is None:
        return given | {"quantization_config": NF4Config()}
    config.quantization_config = NF4Config(saved.get("llm_int8_skip_modules")).to_dict()
    return given


def quantize_without_weights(network: PreTrainedModel, saved: RecordView | None) -> None:
    """Put 4-bit layers without values in place of the linear layers of a network on the meta device: those
    that loading would put there.

    Args:
        saved: what the checkpoint's config says of its quantisation.
    """
    skipped = None if saved is None else saved.get("llm_int8_skip_modules")
    nested = saved is None or bool(saved.get("bnb_4bit_use_double_quant"))
    NF4Quantizer(NF4Config(skipped))._process_model_before_weight_loading(network)
    for layer in network.modules():
        if isinstance(layer, Linear4bit):
            layer.set_weight(NF4Weight.without_values(tuple(layer.weight.shape), layer.weight.dtype, nested))
