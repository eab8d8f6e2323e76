"""Loading and saving causal language models: devices, precision, LoRA, Hugging Face folders.

Precision (design, section 6): compute in bfloat16 where the machine is fast at it (CUDA from Ampere on; CPUs with
AVX512-BF16 or AMX), float32 elsewhere; masters and optimiser state are float32. So load with dtype=torch.float32 what
is to be trained (the optimiser casts the compute copy), and with the default what is only sampled or scored.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forethought import files
from forethought.errors import ConfigError, MissingExtraError, ModelError, nearest
from forethought.models import registry

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_said: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)


# -- where and how precisely -----------------------------------------------------------------------------------------


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, or with None or "auto" the best present one: CUDA (LOCAL_RANK's), MPS, CPU.

    Raises:
        ConfigError: not the name of a device. ModelError: the device is not there; says what to do.
    """
    if device is None or device == "auto":
        if torch.cuda.is_available():
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            return torch.device("cuda", rank % torch.cuda.device_count())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kinds = ("auto", "cpu", "cuda", "mps")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in kinds:
        near = nearest(str(device), kinds)
        raise ConfigError(f"device={str(device)!r}: give one of {', '.join(kinds)} or cuda:N{near}")
    if chosen.type == "cuda":
        if not torch.backends.cuda.is_built():
            raise ModelError(
                f"device {chosen}: this torch was built without CUDA; install a CUDA build of torch, or use device=cpu"
            )
        if not torch.cuda.is_available():
            raise ModelError(
                f"device {chosen}: no CUDA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
                "or use device=cpu"
            )
        count = torch.cuda.device_count()
        if (chosen.index or 0) >= count:
            raise ModelError(f"device {chosen}: only {count} CUDA device(s) here, cuda:0 to cuda:{count - 1}")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"device {chosen}: needs a Mac with Apple silicon and a torch built for it; use device=cpu")
    return chosen


def _cpu_features() -> dict[str, Any]:
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    return {"avx512_bf16": torch.cpu._is_avx512_bf16_supported(), "amx_bf16": torch.cpu._is_amx_tile_supported()}


def choose_dtype(device: str | torch.device) -> tuple[torch.dtype, str]:
    """(compute dtype, reason) of a device."""
    kind = torch.device(device).type
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU multiplies bfloat16 matrices"
        return torch.float32, "the GPU has no bfloat16 units (older than Ampere)"
    if kind == "cpu":
        has = _cpu_features()
        names = [label for key, label in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")) if has.get(key)]
        if names:
            return torch.bfloat16, f"the CPU has {' and '.join(names)}"
        return torch.float32, "the CPU has neither AVX512-BF16 nor AMX, so bfloat16 would be slower"
    return torch.float32, f"{kind} is not known to be faster in bfloat16"


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype.lower() in _DTYPES:
        return _DTYPES[dtype.lower()]
    raise ConfigError(f"dtype={dtype!r}: give one of {', '.join(_DTYPES)}{nearest(str(dtype), _DTYPES)}")


# -- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters (Hu et al., arXiv 2106.09685), by peft."""

    rank: int = 16
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the adapted modules; "all-linear": every linear layer but the head."""
    dropout: float = 0.0

    def __post_init__(self):
        bad = []
        if self.rank < 1:
            bad.append(f"rank={self.rank}: give at least 1")
        if not self.alpha > 0:
            bad.append(f"alpha={self.alpha}: give a positive number")
        if not self.targets:
            bad.append(f"targets={self.targets!r}: give 'all-linear' or module names")
        if not 0 <= self.dropout < 1:
            bad.append(f"dropout={self.dropout}: give a number in [0, 1)")
        if bad:
            raise ConfigError("lora: " + "; ".join(bad))


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtraError("LoRA needs peft: pip install 'forethought[peft]'") from None
    return peft


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws bars while it loads and saves; not where nobody watches."""
    from transformers.utils import logging

    hide = not sys.stderr.isatty() and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    lora: LoRA | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of any causal language model, in evaluation mode.

    Args:
        name_or_path: see `registry.resolve`; a folder with a peft adapter loads its base model and the adapter.
        dtype: of the weights; None: `choose_dtype` of the device. Train float32 weights.
        device: see `choose_device`.
        lora: add a fresh adapter; the other weights are frozen.
        say: takes the lines that tell source, device and precision; by default they go to stderr, each once.

    A tokenizer without a pad token gets its end token (or the first token there is) as one: masks come from lengths, so
    padding is never mistaken for an end. The model's config gets the same pad id.

    Raises:
        ModelError: not found, not loadable, tokenizer and model do not fit, or the device is absent.
        ConfigError: an unknown device or dtype. MissingExtraError: LoRA without peft.
    """
    say = say or _say_once
    place = choose_device(device)
    if lora is not None:
        _peft()
    if dtype is None:
        chosen, reason = choose_dtype(place)
    else:
        chosen, reason = _dtype(dtype), "as asked"
    found = registry.resolve(name_or_path, say=say)
    adapter = found.path if (found.path / "adapter_config.json").is_file() else None
    base = _base_of(adapter, say) if adapter else found
    if adapter and lora is not None:
        raise ModelError(f"{adapter} holds an adapter already; load it without lora, or save it merged first")
    say(f"model {os.fspath(name_or_path)}: from {found.source}; {str(chosen).split('.')[-1]} on {place}: {reason}")
    model, tokenizer = _load(base.path, chosen, adapter)
    if lora is not None:
        model = _with_lora(model, lora)
    elif adapter:
        model = _peft().PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    return model.to(place).eval(), tokenizer


def _base_of(adapter: Path, say: Callable[[str], None]) -> registry.Found:
    try:
        base = json.loads((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError):
        base = None
    if not base:
        raise ModelError(f"{adapter}: adapter_config.json does not name its base model (base_model_name_or_path)")
    try:
        return registry.resolve(base, say=say)
    except ModelError as err:
        raise ModelError(f"{adapter}: the adapter's base model is missing: {err}") from err


def _load(path: Path, dtype: torch.dtype, adapter: Path | None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    where = adapter if adapter and (adapter / "tokenizer_config.json").is_file() else path
    try:
        tokenizer = _tokenizer(where)
    except Exception as err:  # transformers raises whatever its parsers do
        raise ModelError(f"{where}: the tokenizer cannot be loaded: {_first_line(err)}") from err
    try:
        with _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    except Exception as err:
        raise ModelError(f"{path}: the model cannot be loaded as a causal language model: {_first_line(err)}") from err
    have = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > have:
        raise ModelError(f"{path}: the tokenizer has {len(tokenizer)} tokens, the model {have} embeddings: not a pair")
    _set_pad(model, tokenizer)
    return model, tokenizer


def _tokenizer(folder: Path) -> Any:
    """The tokenizer as its own files describe it.

    AutoTokenizer takes for some model types (qwen2 and others) the type's tokenizer class whatever the folder says, and
    that class brings its own splitting rule; a tokenizer saved as a plain fast one must be loaded as such.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = folder / "tokenizer_config.json"
    declared = json.loads(config.read_bytes()).get("tokenizer_class") if config.is_file() else None
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
    return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(str(folder))


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0][:300]}" if lines else type(err).__name__


def _set_pad(model: Any, tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token or tokenizer.convert_ids_to_tokens(0)
    if model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def _with_lora(model: Any, lora: LoRA) -> Any:
    peft = _peft()
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout, task_type="CAUSAL_LM"
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as err:
        raise ModelError(f"lora: targets={lora.targets!r} do not fit this model: {_first_line(err)}") from err


# -- saving ----------------------------------------------------------------------------------------------------------


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters in place, and leave the buffers: rotary frequencies in bf16 are off by radians at position 3000."""
    for p in model.parameters():
        p.data = p.data.to(dtype)


def save_pretrained(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    merge: bool = False,
) -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads with the same logits.

    Config, generation config, safetensors, tokenizer and chat template; of a peft model the adapter alone. The model is
    left as it is. For a folder that must be whole at any moment, write into `files.whole_folder`.

    Args:
        folder: made if it does not exist.
        state: weights by parameter name that stand for the model's own (float32 masters of a bfloat16 model); the
            folder then has their precision.
        merge: of a peft model, write the base model with the adapter added in. Needs memory for a second copy.

    Raises:
        ConfigError: merge without an adapter, or a name in `state` that is no parameter.
        RunError: not writable, or the disk is full.
    """
    folder = Path(folder)
    adapted = hasattr(model, "peft_config")
    if merge and not adapted:
        raise ConfigError("merge=True: the model has no adapter; save it without merge")
    weights = _with_masters(model, state) if state is not None else None
    files.make_folder(folder)
    try:
        if merge:
            merged = copy.deepcopy(model)
            if weights is not None:
                merged.float().load_state_dict(weights)
            _save_base(merged.merge_and_unload(), folder, None)
        elif adapted:
            model.save_pretrained(str(folder), state_dict=weights)
        else:
            _save_base(model, folder, weights)
        tokenizer.save_pretrained(str(folder))
    except OSError as err:
        raise files.io_problem(err, folder) from err


def _save_base(model: Any, folder: Path, weights: dict[str, torch.Tensor] | None) -> None:
    with _quiet():
        # It empties the dict that it gets.
        model.save_pretrained(str(folder), state_dict=None if weights is None else dict(weights))
    if weights is not None:  # transformers writes down the precision of the model, not that of the weights
        config = json.loads((folder / "config.json").read_bytes())
        kinds = [t.dtype for t in weights.values() if t.is_floating_point()]
        config["dtype"] = str(max(kinds, key=lambda k: k.itemsize)).split(".")[-1]
        files.write_atomic(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _with_masters(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state dict with these parameters in place of its own, under all names of a tied one."""
    own = dict(model.named_parameters())
    unknown = [name for name in state if name not in own]
    if unknown:
        raise ConfigError(f"state: {unknown[0]!r} is not a parameter of the model{nearest(unknown[0], own)}")
    masters = {own[name].data_ptr(): tensor for name, tensor in state.items()}
    return {name: masters[t.data_ptr()] if t.data_ptr() in masters else t for name, t in model.state_dict().items()}
