"""A plan of layouts for the parameters of a model, as data: patterns of names, and what lies where.

One line splits a layer over an axis; the model itself does not change, and neither do its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcpar.ahead import Ahead
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.names import matching
from hpcpar.nn.module import Module
from hpcpar.nn.state import relayout_

OVERLAPS = ("reduce", "scatter", "gather")
"""What a `Placement` can overlap."""


@dataclass(frozen=True)
class Column:
    """Split the outputs of a linear layer or convolution over an axis; the result is split there, without a message.

    Parameters
    ----------
    axis : str or tuple of str
    input, out : Layout, optional
        Layouts to which the layer brings its input and its result.
    """

    axis: str | tuple[str, ...]
    input: Layout | None = None
    out: Layout | None = None


@dataclass(frozen=True)
class Row:
    """Split the inputs of a linear layer or convolution over an axis: the result is partial, and costs one reduction.

    Parameters
    ----------
    axis : str or tuple of str
    input, out : Layout, optional
        Layouts to which the layer brings its input and its result.
    """

    axis: str | tuple[str, ...]
    input: Layout | None = None
    out: Layout | None = None


@dataclass(frozen=True, init=False)
class Placement:
    """Layouts of the parameters of a module, by their names in it, and of its input and result.

    Parameters
    ----------
    input, out : Layout, optional
    keep : {"moved", "source"}, optional
        What operations save of the module's parameters where they move them: ``"source"`` gathers a split weight once
        more in backward instead of holding it whole (`Tensor.keep`).
    overlap : collection of str, optional
        Which messages of a linear layer or einsum go on under computation: "reduce", that completes the gradient of its
        input; "scatter", those of the gradients of its parameters; "gather", those of its parameters, one layer ahead
        in the order of use. Bits do not depend on whether they do (`hpcpar.primitives.under_way.overlap`).
    options : mapping, optional
        Attributes of the module that say how it computes under these layouts: ``{"context": "ring"}`` of an attention.
    **parameters : Layout
        ``Placement(weight=Layout("model"), bias=Layout("model"))``.
    """

    input: Layout | None = None
    out: Layout | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    keep: str | None = None
    overlap: frozenset[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        input: Layout | None = None,
        out: Layout | None = None,
        *,
        keep: str | None = None,
        overlap: Collection[str] | None = None,
        options: Mapping[str, Any] | None = None,
        **parameters: Layout,
    ) -> None:
        for name, layout in {"input": input, "out": out, **parameters}.items():
            if layout is not None and not isinstance(layout, Layout):
                raise TypeError(f"Placement: {name} is a Layout, got {layout!r}")
        if keep not in (None, "moved", "source"):
            raise ValueError(f"Placement: keep is 'moved' or 'source', got {keep!r}")
        if isinstance(overlap, str) or not set(overlap or ()) <= set(OVERLAPS):
            raise ValueError(f"Placement: overlap is a collection of {', '.join(OVERLAPS)}, got {overlap!r}")
        overlap = None if overlap is None else frozenset(overlap)
        for name, value in (("input", input), ("out", out), ("keep", keep), ("overlap", overlap)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "options", dict(options or {}))

    def __repr__(self) -> str:
        given = {"input": self.input, "out": self.out, **self.parameters, "keep": self.keep, **self.options}
        if self.overlap is not None:
            given["overlap"] = tuple(name for name in OVERLAPS if name in self.overlap)
        return f"Placement({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"


Entry = Column | Row | Placement | Layout


def parallelize(model: Module, plan: Mapping[str, Entry]) -> Module:
    """Lay the parameters of a model out by a plan, and return the model. Collective.

    Parameters
    ----------
    plan : mapping of str to Column, Row, Placement or Layout
        Keys are patterns (``*``, ``?``, ``[...]``; ``*`` also matches dots) for full names: of modules, ``""`` for the
        model itself; for a Layout of parameters, ``"blocks.*.weight"``. Later entries win over earlier ones.

    Raises
    ------
    ValueError
        A pattern that matches nothing: the error names near ones. A layer that has no columns and rows. An option that
        a module does not have, or a value that it cannot have.
    LayoutError
        A layout that does not fit. All of these are raised on all ranks, before anything is changed.

    Notes
    -----
    Values stay what they are. Parameters stay the same objects; gradients are dropped.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    axes = next((tuple(p.mesh.axes) for p in parameters.values()), None)
    layouts: dict[str, Layout] = {}
    settings: list[tuple[Any, str, Any]] = []
    ahead = Ahead()
    for pattern, entry in plan.items():
        if isinstance(entry, Layout):
            for name in matching("parallelize", pattern, parameters, "parameter"):
                layouts[name] = entry
            continue
        for name in matching("parallelize", pattern, modules, "module"):
            module = modules[name]
            _check_axes(name, entry, axes)
            for own, layout in _layouts(name, module, entry).items():
                layouts[f"{name}.{own}" if name else own] = layout
            settings += [(module, "layout", entry.input)] * (entry.input is not None)
            settings += [(module, "out", entry.out)] * (entry.out is not None)
            if isinstance(entry, Placement):
                settings += _settings(name, module, entry, ahead)
    for name, layout in layouts.items():
        _check(name, parameters, layout)
    for name, layout in layouts.items():
        relayout_(parameters[name], layout)
    for holder, what, value in settings:
        setattr(holder, what, value)
    return model


def _settings(name: str, module: Module, entry: Placement, ahead: Ahead) -> list[tuple[Any, str, Any]]:
    """What an entry sets beside layouts: attributes of the module, and how messages of its parameters are made."""
    for option, value in entry.options.items():
        where = f"parallelize: a {type(module).__name__} ({name or 'the model'})"
        if not hasattr(module, option) or callable(getattr(module, option)) or option in module._parameters:
            raise ValueError(f"{where} has no option {option!r}")
        choices = module.option_choices.get(option)
        if choices is not None and value not in choices:
            raise ValueError(f"{where}: {option} is one of {', '.join(map(str, choices))}, got {value!r}")
    settings: list[tuple[Any, str, Any]] = [(module, *option) for option in entry.options.items()]
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        settings += [(parameter, "keep", entry.keep)] * (entry.keep is not None)
        if entry.overlap is not None:
            settings.append((parameter, "overlap", entry.overlap))
            settings.append((parameter, "ahead", ahead if "gather" in entry.overlap else None))
    return settings


def _layouts(name: str, module: Module, entry: Column | Row | Placement) -> dict[str, Layout]:
    """The layouts that an entry gives the module's own parameters."""
    if isinstance(entry, Placement):
        for own in entry.parameters:
            if module._parameters.get(own) is None:
                have = ", ".join(n for n, p in module._parameters.items() if p is not None) or "none"
                raise ValueError(f"parallelize: {name or 'the model'} has no parameter {own!r}; it has {have}")
        return dict(entry.parameters)
    if not isinstance(entry, (Column, Row)):
        kinds = "Column, Row, Placement or Layout"
        raise TypeError(f"parallelize: {name!r} is given a {type(entry).__name__}; it takes {kinds}")
    kind = type(entry).__name__.lower()
    dims = getattr(module, "parallel_dims", {}).get(kind)
    if dims is None:
        raise ValueError(f"parallelize: a {type(module).__name__} ({name}) has no {kind}s to split; use Placement")
    return {
        own: Layout(*[None] * dims[own], entry.axis) if own in dims else Layout()
        for own, parameter in module._parameters.items()
        if parameter is not None
    }


def _check_axes(name: str, entry: Entry, axes: Collection[str] | None) -> None:
    """Refuse layouts of inputs, results and options that name axes the mesh lacks: else the first step would."""
    given = {what: getattr(entry, what, None) for what in ("input", "out")} | getattr(entry, "options", {})
    for what, layout in given.items():
        for axis in layout.axes if isinstance(layout, Layout) and axes is not None else ():
            if axis not in axes:
                whose, has = f"{what} of {name or 'the model'}", ", ".join(axes)
                raise LayoutError(f"parallelize: {whose}: {layout!r} names the axis {axis!r}; the mesh has {has}")


def _check(name: str, parameters: Mapping[str, Any], layout: Layout) -> None:
    parameter = parameters.get(name)
    if parameter is None:
        raise ValueError(f"parallelize: {name} is shared with another module; place it under its first name")
    try:
        normal = layout.on(parameter.shape, parameter.mesh.shape)
    except LayoutError as error:
        raise LayoutError(f"parallelize: {name}: {error}") from None
    if normal.partial:
        raise LayoutError(f"parallelize: {name} cannot be kept partial: {layout!r}")


def describe(model: Module) -> str:
    """Return a table of the parameters: name, global shape, layout, and the shape of this rank's shard; no message."""
    rows = [("name", "shape", "layout", "shard")]
    rows += [(n, str(p.shape), repr(p.layout), str(tuple(p.shard.shape))) for n, p in model.named_parameters()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    whole = sum(p.numel() for p in model.parameters())
    here = sum(p.shard.size for p in model.parameters())
    return "\n".join([*lines, f"{whole} parameters, {here} on this rank"])
