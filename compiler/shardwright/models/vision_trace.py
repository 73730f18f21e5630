"""What the tower of a model that sees computes and keeps, seen by running it on fake parameters, as
models/layer_trace.py runs the decoder layers.

`get_image_features` is run as it is, in the first shape of picture that it takes
(models/tasks/vision_language.py), on real values and real integers (grids, which its code asks for
their values); each block that computes other shapes than those before it is then run alone. No type
is named: the blocks are the children of the outermost lists of modules that run once each. Letters:
n patches of a picture.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
)
from shardwright.models.model_skeleton import Arguments, Batch, replace_forward
from shardwright.models.tasks.vision_language import (
    MakeImages,
    UnsupportedImages,
    VisionEncoderShape,
    forward_input_names,
    image_features,
    patches,
    shapes,
    vision_encoder_shape,
)
from shardwright.models.trace_meter import PieceTrace, measure_piece, tensors_in
from shardwright.recipe.literal_types import CHECKPOINTING

SIDE = 16
"""Patches of the shorter side of a picture that a tower without a size of its own is traced on; it
is doubled for the longer one. Windows (112 pixels in Qwen2.5-VL, 8 patches) divide it."""

_ASIDE = frozenset({"last_hidden_state", "hidden_states", "attentions"})
"""Fields of a tower's output that no decoder takes."""


def trace_vision_encoder(model: PreTrainedModel, cut: PipelineSplit) -> VisionEncoder:
    """`model`: on the meta device with the attention that will run; it cannot be used afterwards.
    Its text part does not run."""
    whys = []
    try:
        tower = vision_encoder_shape(model.config)
        with _quiet():
            for make in shapes(set(forward_input_names(model))):
                try:
                    return _trace(model, cut, tower, make)
                except (
                    Exception
                ) as error:  # whatever a type raises on another one's shape, or on fake tensors
                    whys.append(error_reason(error))
    except UnsupportedImages as why:
        whys.append(str(why))
    return _untraced(whys[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what a fake tensor refuses, before it raises it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _untraced(why: str) -> VisionEncoder:
    return VisionEncoder(
        patch=1, patches=0, patches_per_token=1.0, layers=(), tower=(), projector=(), untraced=why
    )


def _trace(
    model: PreTrainedModel, cut: PipelineSplit, tower: VisionEncoderShape, make: MakeImages
) -> VisionEncoder:
    model.train()
    stub_parameters(model, torch.float32)
    runs: dict[int, list[_EncoderRun]] = {}
    for element_bytes, dtype in TRACED_DTYPES.items():
        stub_parameters(model, dtype)
        runs[element_bytes] = [
            _EncoderRun(model, cut, inputs, patches(tower, inputs), flops=element_bytes == 4)
            for inputs in _pictures(tower, make, dtype)
        ]
    first = runs[4]
    tiles = first[0].tiles if len(first) == 1 else 0
    layers = []
    for index, name in enumerate(first[0].names):
        pieces = [run.pieces[index] for run in first]
        kept = [
            SavedVisionActivations(
                checkpointing=mode,
                element_bytes=element_bytes,
                bytes=_fit([(r.patches, _whole(r.pieces[index], at)) for r in measured], tiles),
            )
            for element_bytes, measured in runs.items()
            for at, mode in enumerate(CHECKPOINTING)
            if mode != "selective"
        ]
        forward, backward = (
            _fit([(r.patches, value(p)) for r, p in zip(first, pieces, strict=True)], tiles)
            for value in (_forward, _backward)
        )
        layers.append(
            VisionLayer(
                name=name,
                widths=first[0].widths[index],
                forward=forward,
                backward=backward,
                kept=tuple(kept),
            )
        )
    return VisionEncoder(
        patch=tower.patch,
        patches=first[0].patches // tiles if tiles else 0,
        patches_per_token=first[0].patches / first[0].tokens,
        layers=tuple(layers),
        tower=first[0].towers,
        projector=first[0].projector,
    )


def _forward(piece: PieceTrace) -> int:
    return piece.forward_flops


def _backward(piece: PieceTrace) -> int:
    return piece.backward_flops


def _whole(piece: PieceTrace, mode: int) -> int:
    return piece.kept[mode].whole + piece.kept[mode].divided


def _fit(points: list[tuple[int, int]], tiles: int) -> ImageCost:
    """points: (n, value) of one picture, or of two of which one has twice the patches. tiles: that
    one of fixed size was cut into; 0 where its size may be any."""
    if tiles:
        return ImageCost(per_image=points[0][1] // tiles)
    (n, short), (_, long) = points
    per_pair = max(0, round((long - 2 * short) / (2 * n * n)))
    return ImageCost(per_patch=max(0, round((short - per_pair * n * n) / n)), per_pair=per_pair)


def _pictures(tower: VisionEncoderShape, make: MakeImages, dtype: torch.dtype) -> list[Batch]:
    """What get_image_features takes of a picture: of two where its size may be any, one twice as
    wide as the other, and else of the tower's own size."""
    large = dataclasses.replace(tower, times=max(1, SIDE // (2 * tower.cell)))
    made = [make(large, [[width]]) for width in (1, 3)]
    if made[0]["pixel_values"].shape == made[1]["pixel_values"].shape:
        made = made[:1]
    return [
        {n: v.to(dtype) if v.is_floating_point() else v for n, v in each.items()} for each in made
    ]


class _NoBlocks(Exception):
    """path: of a list whose modules change the shape of what they are given (mergers of several
    depths)."""

    def __init__(self, path: str) -> None:
        self.path = path


@dataclass
class _EncoderBlock:
    """index: of the first block that computes the same shapes; arguments and output of that one."""

    index: int
    arguments: Arguments
    output: Any


class _EncoderRun:
    """The tower on one picture, in one precision. names, widths, pieces: of each block, and of what
    stands around them.

    towers, projector: paths, as in Vision."""

    def __init__(
        self,
        model: PreTrainedModel,
        cut: PipelineSplit,
        inputs: Batch,
        patches: int,
        *,
        flops: bool,
    ) -> None:
        """flops: whether they are counted, and the backward pass run."""
        self.model: Any = model
        self.inputs, self.patches, self.flops = inputs, patches, flops
        pixels = inputs["pixel_values"].shape
        self.tiles = pixels[0] * pixels[1] if len(pixels) == 5 else 1  # of one picture
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.blocks = _blocks(model, cut)
        self._called: list[
            tuple[str, int]
        ] = []  # a module outside the blocks, and the width of what it returned
        with fake_parameters(list(model.modules()), self.fake):
            found = self._capture_of_blocks()
            self.blocks = {path: module for path, module in self.blocks.items() if path in found}
            self.tokens = _tokens(self._features())
            self.towers, self.projector = self._parts(cut)
        self.names = (*self.blocks, "")
        known = {
            path: self._block(path, each)
            for path, each in found.items()
            if list(found).index(path) == each.index
        }
        order = list(found)
        self.pieces = [
            *(known[order[found[path].index]] for path in self.blocks),
            self._around(found),
        ]
        outside = [p for name, p in model.named_parameters() if self._is_around(name)]
        self.widths = (
            *(_widest(module.parameters()) for module in self.blocks.values()),
            _widest(outside),
        )

    def _features(self) -> Any:
        with torch.no_grad():
            return image_features(self.model)(**self.inputs)

    def _capture_of_blocks(self) -> dict[str, _EncoderBlock]:
        while True:
            try:
                return self._capture()
            except _NoBlocks as other:
                self.blocks = {
                    p: m for p, m in self.blocks.items() if p.rpartition(".")[0] != other.path
                }
                self._called.clear()

    def _capture(self) -> dict[str, _EncoderBlock]:
        """The blocks that ran, in order. Of those that compute the same shapes the first is run."""
        found: dict[str, _EncoderBlock] = {}
        kinds: dict[str, tuple[int, Any]] = {}

        def run(path: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if path in found:
                raise ValueError(f"{path} ran twice")
            key = shape_signature(self.blocks[path], (args, kwargs))
            if key not in kinds:
                kinds[key] = len(found), forward(*args, **kwargs)
            index, output = kinds[key]
            found[path] = _EncoderBlock(index=index, arguments=(args, kwargs), output=output)
            try:
                return _passed(output, _hidden_of(args, kwargs, output))
            except ValueError:
                raise _NoBlocks(path.rpartition(".")[0]) from None

        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if name not in self.blocks and not any(
                    name.startswith(f"{path}.") for path in self.blocks
                ):
                    hook = partial(self._note, name, found)
                    stack.callback(module.register_forward_hook(hook).remove)
            for path, module in self.blocks.items():
                stack.enter_context(replace_forward(module, partial(run, path, module.forward)))
            self._features()
        if not found:
            raise ValueError("no list of its modules runs on a picture")
        return found

    def _note(
        self, name: str, found: dict[str, _EncoderBlock], module: nn.Module, args: Any, output: Any
    ) -> None:
        if found:
            self._called.append(
                (name, max((t.shape[-1] for t in tensors_in(output) if t.ndim), default=0))
            )

    def _block(self, path: str, block: _EncoderBlock) -> PieceTrace:
        """A block alone, in the same shapes."""
        module = self.blocks[path]
        args, kwargs = block.arguments
        hidden = _hidden_of(args, kwargs, block.output)
        with fake_parameters(list(module.modules()), self.fake) as parameters:
            with self.fake:
                given = torch.empty(hidden.shape, dtype=hidden.dtype, requires_grad=True)

            def run(tensor: torch.Tensor | None) -> Any:
                swapped = pytree.tree_map(
                    lambda leaf: tensor if leaf is hidden else leaf, (args, kwargs)
                )
                return module(*swapped[0], **swapped[1])

            shared = [t for t in tensors_in((args, kwargs)) if t is not hidden]
            # What a layer is handed is on the fake side what the mode makes of it.
            known = [
                *parameters,
                *shared,
                *(self.fake.from_tensor(t) for t in shared if not _is_fake(t)),
            ]
            return self._measured(run, given, known, given.numel(), module)

    def _around(self, found: dict[str, _EncoderBlock]) -> PieceTrace:
        """All but the blocks."""

        def passed(path: str, /, *args: Any, **kwargs: Any) -> Any:
            output = found[path].output
            return _passed(output, _hidden_of(args, kwargs, output))

        def run(_: torch.Tensor | None) -> Any:
            with ExitStack() as stack:
                for path, module in self.blocks.items():
                    stack.enter_context(replace_forward(module, partial(passed, path)))
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
        """Paths of the towers, each the largest module that holds blocks and none of the decoder's;
        and of the projector: modules beside the towers that ran on a picture, and inside them those
        behind the first block that hold a matrix and give features of the decoder's width."""
        stacks = dict.fromkeys(path.rpartition(".")[0] for path in self.blocks)
        towers = tuple(dict.fromkeys(_distinct_prefix(path, cut.stack) for path in stacks))
        holders = {above for tower in towers for above in _above(tower)}
        inner = {above for path in stacks for above in _above(path)} | set(stacks)
        width = self.model.config.get_text_config().hidden_size
        found = [
            name
            for name, size in self._called
            if name not in inner
            and (not _lies_under(name, towers) or (size == width and self._has_matrix(name)))
        ]
        found += [
            name for name, _ in self.model.named_parameters() if name.rpartition(".")[0] in holders
        ]
        outer = [
            n for n in dict.fromkeys(found) if not any(n.startswith(f"{other}.") for other in found)
        ]
        return towers, tuple(outer)

    def _has_matrix(self, path: str) -> bool:
        return any(p.ndim > 1 for p in self.model.get_submodule(path).parameters())

    def _is_around(self, name: str) -> bool:
        return _lies_under(name, (*self.towers, *self.projector)) and not _lies_under(
            name, tuple(self.blocks)
        )


def _blocks(model: nn.Module, cut: PipelineSplit) -> dict[str, nn.Module]:
    """Children of the outermost lists of modules outside the decoder stack, by path: those that may
    be blocks."""
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


def _distinct_prefix(path: str, other: str) -> str:
    """The longest beginning of `path` that is no beginning of `other`, cut behind their first
    difference."""
    mine, theirs = path.split("."), other.split(".")
    common = next(
        (k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs)
    )
    return ".".join(mine[: common + 1])


def _above(path: str) -> list[str]:
    """Paths of the modules around it, the model's own ("") among them."""
    parts = path.split(".")
    return [".".join(parts[:k]) for k in range(len(parts))]


def _lies_under(name: str, paths: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def _hidden_of(args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> torch.Tensor:
    """The argument that comes out of a block again in the same shape."""
    out = next((t for t in tensors_in(output) if t.is_floating_point()), None)
    given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    hidden = next((t for t in given if out is not None and t.shape == out.shape), None)
    if hidden is None:
        raise ValueError("a block changes the shape of what it is given")
    return hidden


def _passed(output: Any, hidden: torch.Tensor) -> Any:
    """`output`, with the hidden states in the place of its first tensor."""
    first = next(t for t in tensors_in(output) if t.is_floating_point())
    return pytree.tree_map(lambda leaf: hidden if leaf is first else leaf, output)


def _tokens(output: Any) -> int:
    """Rows of features for the decoder."""
    found = getattr(output, "pooler_output", output)
    if isinstance(found, torch.Tensor):
        return found.numel() // found.shape[-1]
    return sum(_tokens(part) for part in found)


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"


def _widest(parameters: Any) -> tuple[int, int]:
    matrices = [(p.shape[0], p.numel() // p.shape[0]) for p in parameters if p.ndim > 1]
    return max(matrices, key=lambda shape: shape[0] * shape[1], default=(0, 0))
