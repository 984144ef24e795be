"""Language models on disk: what ``zfunc train`` leaves, and folders of Hugging Face.

Parameters are read a tensor at a time, and quantised before the next one is read, so that nobody
holds the model in full precision who asked for low bits.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zfunc as zf
from zfunc import quant
from zfunc.errors import CheckpointError, PlacementError
from zfunc.files.conversion import kind_of, open_source
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.modules.empty_weights import without_parameters
from zfunc.quant.choice import accepts
from zfunc.quant.files import stored_bits
from zfunc.quant.grids import Format
from zfunc.quant.model_files import quantize_files, read_files
from zfunc.quant.qtensor import QTensor

__all__ = [
    "CONFIG",
    "DTYPES",
    "LOW_BIT",
    "Storage",
    "TextModel",
    "Words",
    "causal_module",
    "ends",
    "open_text_model",
    "our_shape",
    "read_config",
    "words",
    "write_config",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
Words = tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]
OURS = "zfunc-gpt"  # the model_type of the built-in GPT
CONFIG = "config.json"
LOW_BIT = "low-bit.safetensors"  # what training into low bits leaves beside its checkpoints
SHAPE = tuple(field.name for field in dataclasses.fields(GPTConfig))
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class Storage:
    """How the parameters of a model are to be held.

    Attributes:
        bits: 8, 4, or None for as they are.
        group_size: weights of a row that share a scale.
        dynamic: whether products round their inputs to 8 bits too.
        dtype: of what stays unrounded; None: as in the files.
        device: where.
        tensor: how many ranks have parts of each layer.
        pipe: how many have other layers.
    """

    bits: int | None = None
    group_size: int | None = 128
    dynamic: bool = False
    dtype: torch.dtype | None = None
    device: torch.device = CPU
    tensor: int = 1
    pipe: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks have the model together."""
        return self.tensor * self.pipe

    @property
    def format(self) -> Format | None:
        """Of the rounded weights."""
        return None if self.bits is None else Format(self.bits, self.group_size, True, self.dynamic)

    def held(self, x: Tensor) -> Tensor:
        """A leaf, rounded already or not, where and as it is to lie."""
        if x.is_meta:  # another stage's
            return x if self.dtype is None else x.to(self.dtype)
        return x.to(self.device) if self.dtype is None else x.to(self.device, self.dtype)


@dataclass(frozen=True)
class TextModel:
    """A language model with its words.

    Attributes:
        decoder: what ``zf.generate`` takes first: a ``Functional``, or a decoder.
        params: its parameters.
        encode: text -> ids.
        decode: ids -> text.
        stop: ids that end a text.
        said: in a few words, what it is and how it is held.
    """

    decoder: Any
    params: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    stop: tuple[int, ...]
    said: str


def write_config(folder: Path, config: GPTConfig, context: int) -> None:
    """Write the ``config.json`` that :func:`open_text_model` reads beside the built-in GPT."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"model_type": OURS, **dataclasses.asdict(config), "context": context}
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def open_text_model(path: Path, storage: Storage) -> TextModel:
    """Read a language model.

    Args:
        path: the folder that ``zfunc train`` wrote, or its checkpoints; or a folder with a
            ``config.json`` and ``*.safetensors``, of Hugging Face or of the built-in GPT; or a
            safetensors file in such a folder.
        storage: how its parameters are to be held. Weights that training has rounded to these
            bits (``low-bit.safetensors``) are taken as they are.

    Raises:
        CheckpointError: there is no model, or a part of it is missing, damaged or misfits.
        PlacementError: it is no causal language model.
    """
    home, document = read_config(path)
    if (shape := our_shape(home, document)) is not None:
        return _ours(path, home, *shape, storage)
    return _theirs(path, home, document, storage)


def read_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with the ``config.json`` that belongs to a path, and what is in it.

    Raises:
        CheckpointError: there is none.
    """
    home = _home(path)
    return home, _document(home / CONFIG)


def our_shape(home: Path, document: dict[str, Any]) -> tuple[GPTConfig, int] | None:
    """Of a configuration of the built-in GPT its shape and context; ``None`` of another one.

    Raises:
        CheckpointError: it lacks something.
    """
    if document.get("model_type") != OURS:
        return None
    try:
        config = GPTConfig(**{name: document[name] for name in SHAPE if name in document})
        return config, int(document["context"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{home / CONFIG} describes no GPT: {error!r}.") from None


def _home(path: Path) -> Path:
    """The folder with the model's configuration: at the path, or up to two levels above it."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder. `zfunc train --out DIR` writes a model to DIR; a "
            "folder with config.json and *.safetensors is one, too."
        )
    around = [path, *path.parents[:2]] if path.is_dir() else [*path.parents[:2]]
    for folder in around:
        if (folder / CONFIG).is_file():
            return folder
    raise CheckpointError(
        f"{path} has no {CONFIG}, so the shape of its model is not known. Put the one that belongs "
        f'to it there: Hugging Face\'s, or for the built-in GPT {{"model_type": "{OURS}", "width": '
        '..., "depth": ..., "heads": ..., "context": ...} as `zfunc train` was told.'
    )


def _document(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is no model configuration: {error}.") from None


def _low_bit_file(path: Path, storage: Storage) -> Path | None:
    """The weights that are in low bits already, if they are meant.

    Raises:
        CheckpointError: the file that was named has other bits than those asked for.
    """
    if path.is_dir():
        named, there = path / LOW_BIT, path / "model.safetensors"
        if storage.bits is not None and stored_bits(named) == storage.bits:
            return named
        return None if stored_bits(there) is None else _low_bit_file(there, storage)
    stored = stored_bits(path)
    if storage.bits not in (None, stored) and stored is not None:
        raise CheckpointError(
            f"{path} holds weights of {stored} bits: leave --bits out. For {storage.bits} bits "
            "name the folder, so that the unrounded parameters are read."
        )
    return None if stored is None else path


# --- the built-in GPT ---------------------------------------------------------------------------


def _ours(path: Path, home: Path, config: GPTConfig, context: int, storage: Storage) -> TextModel:
    params, origin = _our_params(path, home, config, storage)
    return TextModel(
        decoder=GPTDecoder(config, window=context),
        params=params,
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        stop=(),
        said=f"GPT of {gpt.count(config):,} parameters, {origin}",
    )


def _our_params(path: Path, home: Path, config: GPTConfig, storage: Storage) -> tuple[Any, str]:
    like = gpt.shapes(config)
    if file := _low_bit_file(path, storage):
        held = zf.tree.map(storage.held, quant.load(file, like=like))
        return _our_parts(config, held, storage), f"as {file.name} has them"
    where = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    kind_of(where)  # says what a checkpoint is, if there is none
    source = open_source(where)
    prefix = "params." if any(name.startswith("params.") for name in source.tensors) else ""
    form, rounded = storage.format, accepts(None)

    def read(name: str, guide: Tensor) -> Tensor:
        found = source.tensors.get(prefix + name)
        if found is None or torch.Size(found.shape) != guide.shape:
            there = "nothing of that name" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"{where} does not fit {home / CONFIG}: {name} should have shape "
                f"{list(guide.shape)}, the checkpoint has {there}."
            )
        x = source.read(prefix + name) if mine(name) else guide
        if form is not None and rounded(name, x.ndim):
            x = QTensor.absent(x, form) if x.is_meta else QTensor.quantize(x, form, False, name)
        held = storage.held(x)
        return held if parts is None else parts.local(name, held, copy=True)

    step = _our_step(config, None if form is None else form.group_size, storage)
    by_name = {transform.name: transform for transform in getattr(step, "transforms", ())}
    parts = by_name["split"].cutter(like) if storage.tensor > 1 else None
    mine = by_name["pipeline"].choose(like) if storage.pipe > 1 else lambda name: True
    params = zf.tree.map_with_path(read, like)
    params = params if storage.ranks == 1 else step.place(params)
    step = "" if source.step is None else f"step {source.step}, "
    return params, f"{step}weights in {form or 'full precision'}"


def _our_step(config: GPTConfig, group_size: int | None, storage: Storage) -> Any:
    """What places a rank's parameters, of which these many weights of a row share a scale."""
    apply = zf.evaluate(partial(gpt.apply, config=config))
    if storage.tensor > 1:
        apply = zf.split(apply, rules=gpt.rules(config, group_size), tensor=storage.tensor)
    return apply if storage.pipe == 1 else zf.pipeline(apply, storage.pipe, pipe=storage.pipe)


def _our_parts(config: GPTConfig, params: Any, storage: Storage) -> Any:
    """This rank's part of parameters that were read in full."""
    if storage.ranks == 1:
        return params
    sizes = {x.format.group_size for x in zf.tree.leaves(params) if isinstance(x, QTensor)}
    common = math.lcm(*(size for size in sizes if size)) if any(sizes) else None
    return _our_step(config, common, storage).place(params)


# --- Hugging Face -------------------------------------------------------------------------------


def _theirs(path: Path, home: Path, document: dict[str, Any], storage: Storage) -> TextModel:
    model = _functional(home, storage)
    if file := _low_bit_file(path, storage):
        params, how = quant.load(file, like=model), f"as {file.name} has them"
        if storage.ranks > 1:
            params = _their_step(model.apply, model, storage).place(params)
    elif storage.ranks > 1:
        params, how = _their_parts(path, model, storage)
    elif storage.bits is None:
        params, how = read_files(path, model), "full precision"
    else:
        params = quantize_files(
            path,
            storage.bits,
            storage.group_size,
            True,
            None,
            dynamic=storage.dynamic,
            model=model,
        )
        how = f"{storage.format}"
    # A stage's flats are bytes, or of the model's dtype already.
    held = storage.held if storage.pipe == 1 else (lambda x: x.to(storage.device))
    params = zf.tree.map(held, params)
    encode, decode = words(home)
    return TextModel(
        decoder=model,
        params=params,
        encode=encode,
        decode=decode,
        stop=ends(home, document),
        said=f"{model._name}, weights in {how}",
    )


def _their_parts(path: Path, model: Any, storage: Storage) -> tuple[Any, str]:
    """This rank's part of the parameters, of which it reads no other."""
    apply = model.apply
    if storage.bits is not None:
        how: Any = {"group_size": storage.group_size, "dynamic": storage.dynamic}
        apply = zf.quantize(apply, bits=storage.bits, **how)
    params = _their_step(apply, model, storage).place(path)
    return params, "full precision" if storage.bits is None else f"{storage.format}"


def _their_step(apply: Any, model: Any, storage: Storage) -> Any:
    """What places a rank's parameters."""
    if storage.tensor > 1:
        apply = zf.split(apply, model, tensor=storage.tensor)
    return apply if storage.pipe == 1 else zf.pipeline(apply, storage.pipe, pipe=storage.pipe)


def _functional(home: Path, storage: Storage) -> Any:
    """The model of a configuration, without memory for its parameters."""
    with without_parameters():
        module = causal_module(home, storage.dtype)
    model = zf.functionalize(module.eval())
    buffers = {name: x.to(storage.device) for name, x in model.buffers.items()}
    return dataclasses.replace(model, buffers=buffers)


def causal_module(home: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The module of a configuration of Hugging Face, as it is made: no weights are read.

    Raises:
        CheckpointError: there is no configuration.
        PlacementError: transformers is not installed, or makes no such model of it.
    """
    read_config(home)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise PlacementError(
            f"{home} holds a model of Hugging Face, and transformers is not installed: pip install "
            "'zfunc-torch[hf]'."
        ) from None
    try:
        config = AutoConfig.from_pretrained(home, local_files_only=True)
        how = {} if dtype is None else {"dtype": dtype}
        made: nn.Module = AutoModelForCausalLM.from_config(config, **how)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise PlacementError(
            f"{home / CONFIG}: transformers makes no causal language model of it: {error!s:.400}"
        ) from None
    return made


def words(home: Path) -> Words:
    """The tokenizer beside a model: text -> ids, and back.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if not any((home / name).is_file() for name in TOKENIZERS):
        raise CheckpointError(
            f"{home} has no tokenizer ({TOKENIZERS[0]}): copy it there, from where the model comes "
            "from. zf.generate continues ids without one."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(home, local_files_only=True)
    except Exception as error:  # whatever a broken file makes of it
        raise CheckpointError(f"{home}: its tokenizer cannot be read: {error!r:.300}") from None
    return (
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )


def ends(home: Path, document: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, as ``generation_config.json`` or the model's own says."""
    file = home / "generation_config.json"
    found = _document(file).get("eos_token_id") if file.is_file() else None
    found = document.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [found]
    return tuple(i for i in ids if isinstance(i, int))
