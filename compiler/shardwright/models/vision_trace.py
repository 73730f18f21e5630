"""Measure what a vision encoder computes and saves on fake parameters, like layer_trace.py for
decoder layers.

`get_image_features` runs in the first image format that it accepts (tasks/vision_language.py), on
real values and integers. Then each block of distinct shapes runs alone; blocks are children of the
outermost module lists that run once each. Letters: n patches of an image.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from shardwright.models.layer_trace import (
    TRACED_DTYPES,
    error_reason,
    fake_parameters,
    shape_signature,
    stub_parameters,
)
from shardwright.models.model_graph import (
    ImageCost,
    PipelineSplit,
    SavedVisionActivations,
    VisionEncoder,
    VisionLayer,
    lies_under,
)
from shardwright.models.model_skeleton import Arguments, Batch, replace_forward
from shardwright.models.tasks.vision_language import (
    MakeImages,
    UnsupportedImages,
    VisionEncoderShape,
    feature_count,
    forward_input_names,
    image_features,
    patches,
    shapes,
    vision_encoder_shape,
)
from shardwright.models.trace_meter import PieceTrace, measure_piece, tensors_in
from shardwright.recipe.literal_types import CHECKPOINTING

SIDE = 16
"""Patches of the shorter side of an image of free size; doubled for the longer one. Windows (8
patches in Qwen2.5-VL) divide it."""

_ASIDE = frozenset({"last_hidden_state", "hidden_states", "attentions"})
"""Fields of a vision encoder's output that no decoder takes."""


def trace_vision_encoder(model: PreTrainedModel, cut: PipelineSplit) -> VisionEncoder:
    """Trace the vision encoder of a model on the meta device, which cannot be used afterwards; its
    text part does not run."""
    whys = []
    try:
        encoder = vision_encoder_shape(model.config)
        # torch also logs what a fake tensor refuses before it raises.
        with patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True):
            for make in shapes(set(forward_input_names(model))):
                try:
                    return _trace(model, cut, encoder, make)
                except Exception as error:  # another type's format, or fake tensors
                    whys.append(error_reason(error))
    except UnsupportedImages as why:
        whys.append(str(why))
    return VisionEncoder(
        patch=1,
        patches=0,
        patches_per_token=1.0,
        layers=(),
        tower=(),
        projector=(),
        untraced=whys[0],
    )


def _trace(
    model: PreTrainedModel, cut: PipelineSplit, encoder: VisionEncoderShape, make: MakeImages
) -> VisionEncoder:
    model.train()
    stub_parameters(model, torch.float32)
    runs: dict[int, list[_EncoderRun]] = {}
    large = dataclasses.replace(encoder, times=max(1, SIDE // (2 * encoder.cell)))
    for element_bytes, dtype in TRACED_DTYPES.items():
        stub_parameters(model, dtype)
        # Two images where the size is free (one twice as wide), else one of the encoder's size.
        images = [make(large, [[width]]) for width in (1, 3)]
        if images[0]["pixel_values"].shape == images[1]["pixel_values"].shape:
            images = images[:1]
        runs[element_bytes] = []
        for image in images:
            inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in image.items()}
            count = patches(encoder, inputs)
            run = _EncoderRun(model, cut, inputs, count, flops=element_bytes == 4)
            runs[element_bytes].append(run)
    first = runs[4]
    tiles = first[0].tiles if len(first) == 1 else 0
    layers = []
    for index, name in enumerate(first[0].names):
        kept = [
            SavedVisionActivations(
                checkpointing=mode,
                element_bytes=element_bytes,
                bytes=_fit(
                    [(run.patches, run.pieces[index].kept[at].total) for run in measured], tiles
                ),
            )
            for element_bytes, measured in runs.items()
            for at, mode in enumerate(CHECKPOINTING)
            if mode != "selective"
        ]
        pieces = [(run.patches, run.pieces[index]) for run in first]
        layers.append(
            VisionLayer(
                name=name,
                widths=first[0].widths[index],
                forward=_fit([(n, piece.forward_flops) for n, piece in pieces], tiles),
                backward=_fit([(n, piece.backward_flops) for n, piece in pieces], tiles),
                kept=tuple(kept),
            )
        )
    return VisionEncoder(
        patch=encoder.patch,
        patches=first[0].patches // tiles if tiles else 0,
        patches_per_token=first[0].patches / first[0].tokens,
        layers=tuple(layers),
        tower=first[0].towers,
        projector=first[0].projector,
    )


def _fit(points: list[tuple[int, int]], tiles: int) -> ImageCost:
    """Fit the cost to points (n, value): one image, or two of which one has twice the patches.

    tiles: tiles of an image of fixed size, 0 where the size is free.
    """
    if tiles:
        return ImageCost(per_image=points[0][1] // tiles)
    (n, short), (_, long) = points
    per_pair = max(0, round((long - 2 * short) / (2 * n * n)))
    return ImageCost(per_patch=max(0, round((short - per_pair * n * n) / n)), per_pair=per_pair)


class _NoBlocks(Exception):
    """The modules of the list at `path` change the shape of their input (mergers of several
    depths)."""

    def __init__(self, path: str) -> None:
        self.path = path


@dataclass
class _EncoderBlock:
    """Hold a block's call.

    index: the first block that computes the same shapes; arguments and output are that block's.
    """

    index: int
    arguments: Arguments
    output: Any


class _EncoderRun:
    """Run the vision encoder on one image in one precision.

    names, widths, pieces: of each block, and of everything around the blocks.
    towers, projector: paths, as in VisionEncoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cut: PipelineSplit,
        inputs: Batch,
        patches: int,
        *,
        flops: bool,
    ) -> None:
        """Capture and measure the blocks.

        flops: whether to count them and run the backward pass.
        """
        self.model: Any = model
        self.inputs, self.patches, self.flops = inputs, patches, flops
        pixels = inputs["pixel_values"].shape
        self.tiles = pixels[0] * pixels[1] if len(pixels) == 5 else 1  # tiles of one image
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.blocks = _blocks(model, cut)
        # Modules outside the blocks, with the width of their output.
        self._called: list[tuple[str, int]] = []
        with fake_parameters(list(model.modules()), self.fake):
            while True:
                try:
                    calls = self._capture()
                    break
                except _NoBlocks as other:
                    self.blocks = {
                        p: m for p, m in self.blocks.items() if p.rpartition(".")[0] != other.path
                    }
                    self._called.clear()
            self.blocks = {path: module for path, module in self.blocks.items() if path in calls}
            self.tokens = feature_count(self._features())
            self.towers, self.projector = self._parts(cut)
        self.names = (*self.blocks, "")
        known = {
            path: self._block(path, each)
            for path, each in calls.items()
            if list(calls).index(path) == each.index
        }
        order = list(calls)
        self.pieces = [
            *(known[order[calls[path].index]] for path in self.blocks),
            self._around(calls),
        ]
        outside = [
            p
            for name, p in model.named_parameters()
            if (
                lies_under(name, (*self.towers, *self.projector))
                and not lies_under(name, tuple(self.blocks))
            )
        ]
        self.widths = (
            *(_widest(module.parameters()) for module in self.blocks.values()),
            _widest(outside),
        )

    def _features(self) -> Any:
        with torch.no_grad(), _KnownMasks():
            return image_features(self.model)(**self.inputs)

    def _capture(self) -> dict[str, _EncoderBlock]:
        """Record the call of each block, in order; blocks of equal shapes run once."""
        calls: dict[str, _EncoderBlock] = {}
        kinds: dict[str, tuple[int, Any]] = {}

        def run(path: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if path in calls:
                raise ValueError(f"{path} ran twice")
            key = shape_signature(self.blocks[path], (args, kwargs))
            if key not in kinds:
                kinds[key] = len(calls), forward(*args, **kwargs)
            index, output = kinds[key]
            calls[path] = _EncoderBlock(index=index, arguments=(args, kwargs), output=output)
            try:
                return _passed(output, _hidden_of(args, kwargs, output))
            except ValueError:
                raise _NoBlocks(path.rpartition(".")[0]) from None

        def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
            if calls:  # not before the first block
                widths = (t.shape[-1] for t in tensors_in(output) if t.ndim)
                self._called.append((name, max(widths, default=0)))

        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if name not in self.blocks and not any(
                    name.startswith(f"{path}.") for path in self.blocks
                ):
                    hook = module.register_forward_hook(partial(note, name))
                    stack.callback(hook.remove)
            for path, module in self.blocks.items():
                stack.enter_context(replace_forward(module, partial(run, path, module.forward)))
            self._features()
        if not calls:
            raise ValueError("no list of its modules runs on an image")
        return calls

    def _block(self, path: str, block: _EncoderBlock) -> PieceTrace:
        """Measure one block alone, in the same shapes."""
        module = self.blocks[path]
        args, kwargs = block.arguments
        hidden = _hidden_of(args, kwargs, block.output)
        with fake_parameters(list(module.modules()), self.fake) as parameters:
            with self.fake:
                fake_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, requires_grad=True)

            def run(tensor: torch.Tensor | None) -> Any:
                swapped = pytree.tree_map(
                    lambda leaf: tensor if leaf is hidden else leaf, (args, kwargs)
                )
                return module(*swapped[0], **swapped[1])

            shared = [t for t in tensors_in((args, kwargs)) if t is not hidden]
            # The fake versions of a layer's real inputs are known too.
            known = [
                *parameters,
                *shared,
                *(self.fake.from_tensor(t) for t in shared if type(t).__name__ != "FakeTensor"),
            ]
            return self._measured(run, fake_hidden, known, fake_hidden.numel(), module)

    def _around(self, calls: dict[str, _EncoderBlock]) -> PieceTrace:
        """Measure everything but the blocks."""

        def passed(path: str, /, *args: Any, **kwargs: Any) -> Any:
            output = calls[path].output
            return _passed(output, _hidden_of(args, kwargs, output))

        def run(_: torch.Tensor | None) -> Any:
            with ExitStack() as stack:
                for path, module in self.blocks.items():
                    stack.enter_context(replace_forward(module, partial(passed, path)))
                with _KnownMasks():
                    output = image_features(self.model)(**self.inputs)
            if isinstance(output, dict):
                return [value for name, value in output.items() if name not in _ASIDE]
            return output

        with fake_parameters(list(self.model.modules()), self.fake) as parameters:
            return self._measured(run, None, [*parameters, *tensors_in(dict(self.inputs))], 0, None)

    def _measured(
        self,
        run: Callable[[torch.Tensor | None], Any],
        given: torch.Tensor | None,
        known: list[torch.Tensor],
        width: int,
        layer: nn.Module | None,
    ) -> PieceTrace:
        return measure_piece(
            run,
            given,
            layer=layer,
            attention_module="",
            known=known,
            width=width,
            count_flops=self.flops,
        )

    def _parts(self, cut: PipelineSplit) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the paths of the vision encoders and of the projector.

        An encoder is the largest module that holds blocks and no decoder layer. The projector is
        the modules beside the encoders that ran on an image, and those inside, after the first
        block, with a matrix and the decoder's width.
        """
        stacks = dict.fromkeys(path.rpartition(".")[0] for path in self.blocks)
        found: dict[str, None] = {}
        for path in stacks:  # up to its first difference from the decoder layers' path
            mine, theirs = path.split("."), cut.stack.split(".")
            pairs = enumerate(zip(mine, theirs, strict=False))
            common = next((k for k, (a, b) in pairs if a != b), len(theirs))
            found[".".join(mine[: common + 1])] = None
        towers = tuple(found)
        holders = {above for tower in towers for above in _above(tower)}
        inner = {above for path in stacks for above in _above(path)} | set(stacks)
        width = self.model.config.get_text_config().hidden_size
        projector = [
            name
            for name, size in self._called
            if name not in inner
            and (
                not lies_under(name, towers)
                or (
                    size == width
                    and any(p.ndim > 1 for p in self.model.get_submodule(name).parameters())
                )
            )
        ]
        projector += [
            name for name, _ in self.model.named_parameters() if name.rpartition(".")[0] in holders
        ]
        outer = [
            n
            for n in dict.fromkeys(projector)
            if not any(n.startswith(f"{other}.") for other in projector)
        ]
        return towers, tuple(outer)


class _KnownMasks(TorchFunctionMode):
    """Index fake tensors by the places of a real mask: fake ones have no values to count."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function == torch.Tensor.__getitem__:
            tensor, mask = args
            is_mask = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
            if is_mask and isinstance(tensor, FakeTensor) and not isinstance(mask, FakeTensor):
                return tensor[mask.nonzero(as_tuple=True)]
        return function(*args, **(kwargs or {}))


def _blocks(model: nn.Module, cut: PipelineSplit) -> dict[str, nn.Module]:
    """Return possible blocks by path: children of the outermost module lists outside the decoder
    stack."""
    lists = [
        path
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList)
        and len(m) > 1
        and not f"{path}.".startswith(f"{cut.stack}.")
    ]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    alike = [
        path
        for path in outer
        if len({type(child) for child in model.get_submodule(path).children()}) == 1
    ]
    return {
        f"{path}.{name}": child
        for path in alike
        for name, child in model.get_submodule(path).named_children()
    }


def _above(path: str) -> list[str]:
    """Return the paths of the enclosing modules, the model's own ("") included."""
    parts = path.split(".")
    return [".".join(parts[:k]) for k in range(len(parts))]


def _hidden_of(args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> torch.Tensor:
    """Return the argument with the shape of the block's output."""
    out = next((t for t in tensors_in(output) if t.is_floating_point()), None)
    inputs = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    hidden = next((t for t in inputs if out is not None and t.shape == out.shape), None)
    if hidden is None:
        raise ValueError("a block changes the shape of its input")
    return hidden


def _passed(output: Any, hidden: torch.Tensor) -> Any:
    """Return `output` with the hidden states in place of its first tensor."""
    first = next(t for t in tensors_in(output) if t.is_floating_point())
    return pytree.tree_map(lambda leaf: hidden if leaf is first else leaf, output)


def _widest(parameters: Any) -> tuple[int, int]:
    matrices = [(p.shape[0], p.numel() // p.shape[0]) for p in parameters if p.ndim > 1]
    return max(matrices, key=lambda shape: shape[0] * shape[1], default=(0, 0))
