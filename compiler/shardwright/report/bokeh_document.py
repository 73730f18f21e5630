"""Write charts as the JSON that BokehJS draws, without the Python package bokeh.

bokeh and what it requires (Pillow, Tornado, narwhals, ...) take half of what the light install may
take. BokehJS itself, one script, comes with this package (decisions/042). Names of types and
attributes are Bokeh's: https://docs.bokeh.org/en/latest/docs/reference/models.html. The tests
compare every chart with what bokeh writes for the same calls.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from shardwright.utils.json_values import JsonObject, JsonValue

SCRIPT = "bokeh.min.js.gz"
VERSION = "3.9.2"
"""BokehJS's; `make generated` copies the script of the installed bokeh."""
FIRST_COLOR = "#1f77b4"
"""Bokeh's colour of a glyph that is given none."""
FADED_ALPHAS = {"nonselection": 0.1, "muted": 0.2}


def script() -> str:
    """Return BokehJS, with its licence."""
    packed = resources.files("shardwright.report").joinpath(SCRIPT).read_bytes()
    return f'{gzip.decompress(packed).decode("utf-8")}\nBokeh.set_log_level("info");'


class Model:
    """An object of BokehJS: its attributes are set and read as Python's. One left out is Bokeh's
    default."""

    _type: str
    _attributes: dict[str, Any]

    def __init__(self, type: str, /, **attributes: Any) -> None:
        self.__dict__.update(_type=type, _attributes=attributes)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._attributes[name]
        except KeyError:
            raise AttributeError(f"{self._type} is given no {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._attributes[name] = value


class Spec(dict[str, Any]):
    """Says where a glyph takes a value from: a column, one value, or an expression."""


def value_of(value: Any) -> Spec:
    return Spec(type="value", value=value)


def field_of(column: str, **transform: Any) -> Spec:
    return Spec(type="field", field=column, **transform)


class Each(Sequence[Model]):
    """Sets an attribute of several models at once."""

    def __init__(self, models: Iterable[Model]) -> None:
        self.__dict__["_models"] = tuple(models)

    def __getitem__(self, index: Any) -> Any:
        return self.__dict__["_models"][index]

    def __len__(self) -> int:
        return len(self.__dict__["_models"])

    def __setattr__(self, name: str, value: Any) -> None:
        for model in self:
            setattr(model, name, value)


def data_source(columns: Mapping[str, Any]) -> Model:
    """Create a ColumnDataSource."""
    return Model(
        "ColumnDataSource",
        selected=Model("Selection", indices=[], line_indices=[]),
        selection_policy=Model("UnionRenderers"),
        data=dict(columns),
    )


def fixed_ticker(ticks: Sequence[float]) -> Model:
    return Model("FixedTicker", ticks=list(ticks), minor_ticks=[])


def box_zoom_tool(dimensions: str) -> Model:
    edges = ("left", "right", "top", "bottom")
    handle = Model("AreaVisuals", fill_color="white", hover_fill_color="lightgray")
    overlay = Model(
        "BoxAnnotation",
        syncable=False,
        level="overlay",
        visible=False,
        line_color="black",
        line_alpha=1.0,
        line_width=2,
        line_dash=[4, 4],
        fill_color="lightgrey",
        fill_alpha=0.5,
        handles=Model("BoxInteractionHandles", all=handle),
        **dict.fromkeys(edges, math.nan),
        **dict.fromkeys((f"{edge}_units" for edge in edges), "canvas"),
    )
    return Model("BoxZoomTool", dimensions=dimensions, overlay=overlay)


_SCALES = {"linear": "LinearScale", "log": "LogScale", "category": "CategoricalScale"}
_AXES = {"linear": "LinearAxis", "log": "LogAxis", "category": "CategoricalAxis"}
_VISUALS = {"Line": ("line",), "Text": ("text",)}
_AREA = ("line", "fill", "hatch")


class Figure(Model):
    """A plot with an axis and a grid in each direction.

    x_range, y_range: (start, end), names of categories, or None for the data's own.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Model],
        x_range: Sequence[Any] | None = None,
        y_range: Sequence[Any] | None = None,
        x_axis_type: str = "linear",
        y_axis_type: str = "linear",
        x_axis_label: str | None = None,
        y_axis_label: str | None = None,
        **attributes: Any,
    ) -> None:
        kinds = [
            "category" if given and isinstance(given[0], str) else kind
            for given, kind in ((x_range, x_axis_type), (y_range, y_axis_type))
        ]
        below, left = (
            _axis(kind, label)
            for kind, label in zip(kinds, (x_axis_label, y_axis_label), strict=True)
        )
        super().__init__(
            "Figure",
            x_range=_range(x_range),
            y_range=_range(y_range),
            x_scale=Model(_SCALES[kinds[0]]),
            y_scale=Model(_SCALES[kinds[1]]),
            title=Model("Title"),
            renderers=[],
            toolbar=Model("Toolbar", tools=list(tools)),
            left=[left],
            below=[below],
            center=[Model("Grid", axis=below), Model("Grid", dimension=1, axis=left)],
            **attributes,
        )

    @property
    def xaxis(self) -> Each:
        return Each(self.below)

    @property
    def yaxis(self) -> Each:
        return Each(self.left)

    @property
    def axis(self) -> Each:
        return Each([*self.below, *self.left])

    @property
    def grid(self) -> Each:
        return Each(self.center[:2])

    @property
    def xgrid(self) -> Each:
        return Each(self.center[:1])

    @property
    def ygrid(self) -> Each:
        return Each(self.center[1:2])

    def add_layout(self, annotation: Model) -> None:
        self.center.append(annotation)

    def add_tools(self, *tools: Model) -> None:
        self.toolbar.tools.extend(tools)

    def line(self, x: Any, y: Any, **options: Any) -> Model:
        return self._draw("Line", {"x": x, "y": y}, **options)

    def scatter(self, x: Any, y: Any, **options: Any) -> Model:
        marks = options.keys() & {"size", "marker"}
        given: dict[str, Any] = {key: options.pop(key) for key in sorted(marks)}
        return self._draw("Scatter", {"x": x, "y": y, **_values(given)}, **options)

    def rect(self, x: str, y: str, width: float, height: float, **options: Any) -> Model:
        return self._draw("Rect", {"x": x, "y": y, "width": width, "height": height}, **options)

    def quad(self, left: Any, right: Any, bottom: Any, top: Any, **options: Any) -> Model:
        edges = {"left": left, "right": right, "bottom": bottom, "top": top}
        return self._draw("Quad", edges, **options)

    def text(self, x: str, y: str, text: str, **options: Any) -> Model:
        return self._draw("Text", {"x": x, "y": y, "text": text}, **options)

    def hbar_stack(
        self,
        columns: Sequence[str],
        *,
        y: str,
        height: float,
        colors: Sequence[str],
        **options: Any,
    ) -> None:
        """Draw a bar for each column, each on the end of the one before."""
        for place, (column, color) in enumerate(zip(columns, colors, strict=True)):
            ends = {
                edge: Spec(type="expr", expr=Model("Stack", fields=list(columns[:count])))
                for edge, count in (("left", place), ("right", place + 1))
            }
            places = {"y": y, "height": height, **ends}
            self._draw("HBar", places, name=column, color=color, **options)

    def _draw(
        self,
        type: str,
        places: Mapping[str, Any],
        *,
        source: Model | None = None,
        name: str | None = None,
        color: str | None = None,
        tags: list[str] | None = None,
        **visuals: Any,
    ) -> Model:
        """Add a glyph. A list among its places becomes a column of a source of its own."""
        columns = {key: value for key, value in places.items() if isinstance(value, list)}
        at = {key: _place(key, value) for key, value in places.items()}
        faded = {
            state: {
                key.removeprefix(f"{state}_"): visuals.pop(key)
                for key in [key for key in visuals if key.startswith(f"{state}_")]
            }
            for state in FADED_ALPHAS
        }
        kinds = _VISUALS.get(type, _AREA)
        if type != "Text":
            own = [f"{kind}_color" for kind in kinds if color or kind != "hatch"]
            visuals = {**dict.fromkeys(own, color or FIRST_COLOR), **visuals}
        more = {} if tags is None else {"tags": tags}

        def glyph(changed: Mapping[str, Any]) -> Model:
            shown = {**visuals, **changed}
            return Model(type, **at, **(shown if type == "Line" else _values(shown)), **more)

        renderer = Model(
            "GlyphRenderer",
            data_source=data_source(columns) if source is None else source,
            view=Model("CDSView", filter=Model("AllIndices")),
            glyph=glyph({}),
            **{
                f"{state}_glyph": glyph(
                    {**dict.fromkeys((f"{kind}_alpha" for kind in kinds), alpha), **faded[state]}
                )
                for state, alpha in FADED_ALPHAS.items()
            },
            **({} if name is None else {"name": name}),
        )
        self.renderers.append(renderer)
        return renderer


def _range(given: Sequence[Any] | None) -> Model:
    if given is None:
        return Model("DataRange1d")
    if isinstance(given[0], str):
        return Model("FactorRange", factors=list(given), range_padding=0.1)
    return Model("Range1d", start=given[0], end=given[1])


def _axis(kind: str, label: str | None) -> Model:
    ticker, formatter = {
        "linear": (Model("BasicTicker", mantissas=[1, 2, 5]), "BasicTickFormatter"),
        "log": (Model("LogTicker", mantissas=[1, 5]), "LogTickFormatter"),
        "category": (Model("CategoricalTicker"), "CategoricalTickFormatter"),
    }[kind]
    named = {} if label is None else {"axis_label": label}
    return Model(
        _AXES[kind],
        ticker=ticker,
        formatter=Model(formatter),
        major_label_policy=Model("AllLabels"),
        **named,
    )


def _place(key: str, value: Any) -> Spec:
    if isinstance(value, Spec):
        return value
    if isinstance(value, list):
        return field_of(key)
    return field_of(value) if isinstance(value, str) else value_of(value)


def _values(attributes: Mapping[str, Any]) -> dict[str, Spec]:
    return {
        key: value if isinstance(value, Spec) else value_of(value)
        for key, value in attributes.items()
    }


def chart_json(name: str, figure: Figure) -> JsonObject:
    """Return what Bokeh.embed.embed_item draws. name: begins the ids, which a page has once."""
    ids: dict[int, str] = {}
    fresh: Iterator[int] = itertools.count(1)

    def encoded(value: Any) -> JsonValue:
        if isinstance(value, Model):
            if id(value) in ids:
                return {"id": ids[id(value)]}
            own = ids[id(value)] = f"{name}-{next(fresh)}"
            attributes = {key: encoded(inner) for key, inner in value._attributes.items()}
            return {"type": "object", "name": value._type, "id": own, "attributes": attributes}
        if isinstance(value, Spec):
            return {key: encoded(inner) for key, inner in value.items()}
        if isinstance(value, Mapping):
            entries = [[encoded(key), encoded(inner)] for key, inner in value.items()]
            return {"type": "map", "entries": entries}
        if isinstance(value, np.ndarray):
            packed = gzip.compress(np.ascontiguousarray(value).tobytes(), mtime=0)
            return {
                "type": "ndarray",
                "array": {"type": "bytes", "data": base64.b64encode(packed).decode()},
                "shape": list(value.shape),
                "dtype": value.dtype.name,
                "order": "little",
            }
        if isinstance(value, list | tuple):
            return [encoded(inner) for inner in value]
        if isinstance(value, float) and not math.isfinite(value):
            word = "nan" if math.isnan(value) else "+inf" if value > 0 else "-inf"
            return {"type": "number", "value": word}
        scalar: JsonValue = value
        return scalar

    root = encoded(figure)
    config = encoded(Model("DocumentConfig", notifications=Model("Notifications")))
    document: JsonObject = {"version": VERSION, "title": "", "config": config, "roots": [root]}
    return {
        "target_id": None,
        "root_id": ids[id(figure)],
        "doc": document,
        "version": VERSION,
    }
