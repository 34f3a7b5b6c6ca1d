"""Module: a tree of named parameters, buffers and sub-modules, as in torch, that may run under layouts of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Union

from hpcpar import remaking, scope
from hpcpar.layout.layout import Layout
from hpcpar.nn.relayout import Moves
from hpcpar.recomputation import recompute
from hpcpar.tensors import Parameter, Tensor

Self = TypeVar("Self", bound="Module")

Parameters = Union["Module", Iterable[Parameter], Iterable[tuple[str, Parameter]]]

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OWN = ("layout", "out", "training", "full_name", "forward")


class Module:
    """Base of all layers and networks; a subclass gives `forward`.

    Attributes
    ----------
    layout : Layout or None
        The layout of the first input: whatever arrives is repartitioned to it, and the move is remembered
        (`hpcpar.nn.relayouts`).
    out : Layout or None
        The layout of the result, likewise.
    recomputed : bool
        Backward runs the module again, instead of keeping what it computes (`hpcpar.nn.recompute`).
    not_kept : frozenset of str
        Operations inside whose results are made again, likewise.
    option_choices : mapping of str to sequence
        What attributes that a plan may set (`parallel.Placement`, options) may be, of those that are one of a few.
    training : bool
    full_name : str
        The path from the outermost module, ``"enc3.conv1"``; "" for the outermost itself.

    Notes
    -----
    Parameters and modules become part of the tree when they are assigned to attributes, buffers (tensors that are saved
    but not trained) by `register_buffer`. Every rank builds the same tree in the same order.
    """

    layout: Layout | None = None
    out: Layout | None = None
    recomputed = False
    not_kept: frozenset[str] = frozenset()
    option_choices: Mapping[str, Sequence[Any]] = {}
    training: bool

    def __init__(self) -> None:
        own = self.__dict__
        own.update(training=True, full_name="", _moves=Moves())
        own.update(_parameters={}, _buffers={}, _modules={}, _transient=set(), _before=[], _after=[])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; called by ``module(...)``."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope.enter(self.full_name or type(self).__name__)
        try:
            if self._before:
                args = self._prepared(args)
            if self.not_kept:
                with remaking.choosing(self.not_kept):
                    result = self._run(*args, **kwargs)
            else:
                result = recompute(self._run, *args, **kwargs) if self.recomputed else self._run(*args, **kwargs)
            for hook in self._after:
                changed = hook(self, args, result)
                result = result if changed is None else changed
        except ValueError as error:
            scope.name_error(error)
            raise
        finally:
            scope.leave()
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result, under the module's layouts."""
        if self.layout is not None:
            args = (self._moves.bring(self.full_name, args[0], self.layout), *args[1:])
        result = self.forward(*args, **kwargs)
        return result if self.out is None else self._moves.bring(f"{self.full_name} (out)", result, self.out)

    def _prepared(self, args: tuple) -> tuple:
        for hook in self._before:
            changed = hook(self, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        return args

    # ---- the tree

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in self.__dict__:
            if isinstance(value, (Tensor, Module)):
                raise AttributeError(f"{type(self).__name__}: call super().__init__() before assigning {name!r}")
            object.__setattr__(self, name, value)
        elif isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Module):
            self.add_module(name, value)
        elif name in self._buffers and (value is None or isinstance(value, Tensor)):
            self._place(self._buffers, name, value)
        elif name in self._parameters or name in self._modules:
            if value is not None:
                raise TypeError(f"{name!r} of {type(self).__name__} takes a parameter or module, or None")
            self._place(self._parameters if name in self._parameters else self._modules, name, None)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        for registry in _REGISTRIES:
            self.__dict__[registry].pop(name, None)

    def _place(self, registry: dict[str, Any], name: str, value: Any) -> None:
        """Enter a value in one registry, for walks over the tree, and as an attribute, for quick access."""
        if not name or "." in name:
            raise KeyError(f"a parameter, buffer or module has a name without dots, got {name!r}")
        if name in _OWN and value is not None:
            raise KeyError(f"{name!r} is an attribute of every module (see Module); a part of it needs another name")
        for other in _REGISTRIES:
            if self.__dict__[other] is not registry:
                self.__dict__[other].pop(name, None)
        registry[name] = self.__dict__[name] = value

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Add a parameter, or None where an optional one is absent.

        TypeError for anything else; KeyError for a name with a dot, or of an attribute that every module has.
        """
        if parameter is not None and not isinstance(parameter, Parameter):
            raise TypeError(f"parameter {name!r} of {type(self).__name__} is a {type(parameter).__name__}")
        self._place(self._parameters, name, parameter)
        if parameter is not None and not parameter.name:  # else it is shared, and keeps its first name
            parameter.name = _join(self.full_name, name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that is not trained; `state_dict` has it where it is `persistent`. Errors as for parameters."""
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.is_parameter):
            raise TypeError(f"buffer {name!r} of {type(self).__name__} is a {type(tensor).__name__}, not a Tensor")
        self._place(self._buffers, name, tensor)
        (self._transient.discard if persistent else self._transient.add)(name)

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a sub-module. Errors as for parameters."""
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"module {name!r} of {type(self).__name__} is a {type(module).__name__}")
        self._place(self._modules, name, module)
        if module is not None:
            module._take_name(_join(self.full_name, name))

    register_module = add_module

    def _take_name(self, name: str) -> None:
        """Renew the full names of everything below; a parameter that has its name elsewhere, being shared, keeps it."""
        before, self.__dict__["full_name"] = self.full_name, name
        for key, parameter in self._parameters.items():
            if parameter is not None and parameter.name == _join(before, key):
                parameter.name = _join(name, key)
        for key, child in self.named_children():
            child._take_name(_join(name, key))

    def named_modules(self, prefix: str = "", seen: set[Module] | None = None) -> Iterator[tuple[str, Module]]:
        """Yield this module and all below, with names relative to it; each once."""
        seen = set() if seen is None else seen
        if self in seen:
            return
        seen.add(self)
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(_join(prefix, name), seen)

    def modules(self) -> Iterator[Module]:
        """Yield this module and all below, each once."""
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the direct sub-modules with their names."""
        return ((name, child) for name, child in self._modules.items() if child is not None)

    def children(self) -> Iterator[Module]:
        """Yield the direct sub-modules."""
        return (child for _, child in self.named_children())

    def _named(self, registry: str, prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix) if recurse else ((prefix, self),):
            for name, value in module.__dict__[registry].items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield _join(path, name), value

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters with their names; one that is used twice appears under its first name."""
        return self._named("_parameters", prefix, recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield all parameters, each once."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers with their names."""
        return self._named("_buffers", prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield all buffers, each once."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def get_submodule(self, target: str) -> Module:
        """Return the module with the relative name `target`; AttributeError where there is none."""
        module: Module = self
        for name in target.split(".") if target else ():
            found = module._modules.get(name)
            if found is None:
                raise AttributeError(f"{type(module).__name__} has no sub-module {name!r} (of {target!r})")
            module = found
        return module

    def get_parameter(self, target: str) -> Parameter:
        """Return the parameter with the relative name `target`; AttributeError where there is none."""
        path, _, name = target.rpartition(".")
        found = self.get_submodule(path)._parameters.get(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no parameter {target!r}")
        return found

    # ---- everything at once

    def apply(self: Self, function: Callable[[Module], None]) -> Self:
        """Call `function` for every module, children first, and return this one."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def train(self: Self, mode: bool = True) -> Self:
        """Set training mode here and below."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: Self) -> Self:
        """Set evaluation mode here and below."""
        return self.train(False)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Freeze or thaw all parameters."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero."""
        for parameter in self.parameters():
            parameter.zero_grad(set_to_none)

    def to(self: Self, dtype: Any = None, device: str | None = None) -> Self:
        """Bring floating parameters and buffers to a dtype, and all to a device ("cpu" or "gpu"), in place."""
        from hpcpar.nn.state import convert

        for tensor in (*self.parameters(), *self.buffers()):
            convert(tensor, dtype, device)
        return self

    def float(self: Self) -> Self:
        """Bring floating parameters and buffers to float32."""
        return self.to("float32")

    def double(self: Self) -> Self:
        """Bring floating parameters and buffers to float64."""
        return self.to("float64")

    # ---- state

    def state_dict(self, prefix: str = "", numpy: bool = False) -> dict[str, Any]:
        """Return parameters and persistent buffers by name; see `hpcpar.nn.state.state_dict`."""
        from hpcpar.nn.state import state_dict

        return state_dict(self, prefix, numpy)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Take values by name; see `hpcpar.nn.state.load_state_dict`."""
        from hpcpar.nn.state import load_state_dict

        return load_state_dict(self, state, strict)

    def shown_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape under which torch knows the own parameter `name`, None where it is the parameter's own."""
        return None

    # ---- hooks and printing

    def register_forward_pre_hook(self, hook: Callable[[Module, tuple], Any]) -> Removable:
        """Call ``hook(module, args)`` before `forward`; what it returns, if anything, replaces the arguments."""
        return Removable(self._before, hook)

    def register_forward_hook(self, hook: Callable[[Module, tuple, Any], Any]) -> Removable:
        """Call ``hook(module, args, result)`` after `forward`; what it returns, if anything, replaces the result."""
        return Removable(self._after, hook)

    def extra_repr(self) -> str:
        """Return what the representation shows between the parentheses."""
        return ""

    def __repr__(self) -> str:
        extra = self.extra_repr()
        for what in ("layout", "out"):
            if getattr(self, what) is not None:
                extra += f"{', ' if extra else ''}{what}={getattr(self, what)!r}"
        if self.recomputed or self.not_kept:
            which = True if self.recomputed else tuple(sorted(self.not_kept))
            extra += f"{', ' if extra else ''}recompute={which}"
        children = [f"({name}): {_indented(repr(child))}" for name, child in self.named_children()]
        if not children:
            return f"{type(self).__name__}({extra})"
        lines = [extra] * bool(extra) + children
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"


class Removable:
    """A hook that was registered; `remove` takes it back."""

    def __init__(self, hooks: list[Callable], hook: Callable) -> None:
        self._hooks, self._hook = hooks, hook
        hooks.append(hook)

    def remove(self) -> None:
        """Take the hook back; harmless if repeated."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def relayouts(model: Module) -> list[str]:
    """Return one line for each change of layout that modules of `model` made so far, in the order of the modules.

    A line names the module, both layouts, the steps and the elements that this rank received:
    ``enc3.conv1: Layout(...) -> Layout(...): all_gather(dim 2, depth), 1024 elements``.
    """
    return [line for module in model.modules() for line in module._moves.lines()]


def parameters_of(source: Parameters) -> list[tuple[str, Parameter]]:
    """Return (name, parameter) pairs of a module, of parameters (by their own names) or of such pairs.

    Raises
    ------
    ValueError
        When nothing is given, or two parameters have one name.
    """
    given = list(source.named_parameters()) if isinstance(source, Module) else list(source)
    pairs = [item if isinstance(item, tuple) else (item.name or f"parameter{i}", item) for i, item in enumerate(given)]
    for _, parameter in pairs:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"expected parameters or (name, parameter) pairs, got a {type(parameter).__name__}")
    if not pairs:
        raise ValueError("there is no parameter; was the model's parameters() iterator used up before?")
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise ValueError(f"two parameters are called {min(twice)!r}; pass (name, parameter) pairs with different names")
    return pairs


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
