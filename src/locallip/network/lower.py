"""From a user's nn.Module to a `Network`: trace with torch.fx, then one rule per node.

Containers vanish; linear layers compose; `+` merges terms, so z + conv(z) is one operator and a skip over an activation
is two terms; an activation closes a stage. Whatever has no rule raises `UnsupportedLayer` with its qualified path.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from locallip.activations import Activation
from locallip.arithmetic import alone
from locallip.network import rules
from locallip.network.checks import (
    EXTEND,
    SUPPORTED,
    UnsupportedLayer,
    check_module,
    check_no_hidden_code,
    check_same_function,
    check_same_operations,
    example,
    unwrap,
)
from locallip.network.stages import Network, Offset, PassThrough, Stage
from locallip.ops import Diagonal, Identity, LinearOp, Sum, compose

#: Maps that an operator may be made of where several layers read what it gives.
LONGEST = 16


@dataclass(frozen=True)
class _Form:
    """An affine expression in the outputs of earlier stages: sum_k terms[k](z_k) + offset."""

    shape: torch.Size
    terms: Mapping[int, LinearOp]
    offset: Offset = field(default_factory=Offset)
    names: Mapping[int, str] = field(default_factory=dict)  # the path of the last layer that each term went through

    def then(self, step: rules.Affine, path: str | None = None) -> _Form:
        terms = {source: compose(step.op, op) for source, op in self.terms.items()}
        parts = [(compose(step.op, op), value) for op, value in self.offset.parts]
        if step.shift is not None:
            parts.append((step.op, step.shift))
        if step.bias is not None:
            parts.append((Identity(step.op.out_shape), step.bias))
        names = self.names if path is None else dict.fromkeys(self.terms, path)
        return _Form(step.op.out_shape, terms, Offset(tuple(parts)), names)

    def plus(self, other: _Form) -> _Form:
        terms = dict(self.terms)
        for source, op in other.terms.items():
            terms[source] = _sum(terms[source], op) if source in terms else op
        return _Form(self.shape, terms, Offset(self.offset.parts + other.offset.parts), {**self.names, **other.names})


def _sum(first: LinearOp, second: LinearOp) -> Sum:
    """One sum of all summands so far, or hundreds of additions would be sums within sums."""
    return Sum([*(first.parts if isinstance(first, Sum) else [first]), second])


class _Proxy(fx.Proxy):
    """Stands for a tensor while forward is traced; x += y stays in place, or other names of x would keep the old value."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class _Tracer(fx.Tracer):
    """Treats every module with a rule as one node and looks inside everything else that is not torch's own."""

    #: Else a product of buffers would be a constant like any other, with the rounding of the module's dtype.
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return rules.module_rule(m) is not None or super().is_leaf_module(m, module_qualified_name)


@alone()
def lower(module: nn.Module, input_shape: Sequence[int]) -> Network:
    """The network of `module` for samples of `input_shape` (without batch); parameters are read through, not copied."""
    module = unwrap(module)
    check_module(module)
    with _settled(), _as_it_was(module):
        like = example(module, input_shape, batch=2)
        root, graph = _traced(module)
        network = _Lowering(root, graph, like).run()
        check_same_function(network, module, input_shape)
        check_same_operations(module, root, graph, input_shape)
    return network


@alone()
def lower_again(module: nn.Module, input_shape: Sequence[int]) -> Network:
    """As `lower`, without what it compares, which costs most: for telling whether the module is still what was lowered."""
    module = unwrap(module)
    check_no_hidden_code(module)
    with _settled(), _as_it_was(module):
        root, graph = _traced(module)
        return _Lowering(root, graph, example(module, input_shape, batch=2)).run()


def _traced(module: nn.Module) -> tuple[_Root, fx.Graph]:
    root = _Root(module)
    try:
        return root, _Tracer().trace(root)
    except Exception as error:
        raise UnsupportedLayer(
            f"{type(module).__name__} cannot be traced: {error}. Control flow that depends on the data is not "
            "supported; forward must be the same computation for every input."
        ) from error


@contextmanager
def _settled() -> Iterator[None]:
    """Without autocast and inference mode, whatever the caller has set."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), torch.inference_mode(False):
        yield


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Puts back what forward keeps in its module when it is traced or run: a stand-in there would be taken for a tensor."""
    before = [(layer, dict(vars(layer))) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, kept in before:
            vars(layer).clear()
            vars(layer).update(kept)


class _Root(nn.Module):
    """The user's module with one input and nothing else: further arguments of its forward keep their defaults."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class _Lowering:
    """One pass over the graph; keeps a trial value of every node and the affine form of those that depend on the input."""

    def __init__(self, module: nn.Module, graph: fx.Graph, like: Tensor):
        self.module, self.graph, self.like = module, graph, like
        self.interpreter = fx.Interpreter(module, graph=graph)
        self.order = list(graph.nodes)
        self.values: dict[fx.Node, Any] = {}
        self.forms: dict[fx.Node, _Form] = {}
        self.stages: list[Stage] = []

    def run(self) -> Network:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._enter(node)
            elif node.op == "output":
                return self._finish(node)
            else:
                self._visit(node)
        raise UnsupportedLayer("the module returns nothing")

    def _enter(self, node: fx.Node) -> None:
        self.values[node] = self.like
        shape = self.like.shape[1:]
        self.forms[node] = _Form(shape, {0: Identity(shape)})

    def _finish(self, node: fx.Node) -> Network:
        result = node.args[0]
        if not isinstance(result, fx.Node) or result not in self.forms:
            raise self._unsupported(node, "the network must return one tensor that depends on its input")
        form = self.forms[result]
        self.stages.append(Stage("output", form.terms, form.offset, None, form.names))
        return Network(self.like.shape[1:], tuple(self.stages))

    def _visit(self, node: fx.Node) -> None:
        inputs = [arg for arg in node.all_input_nodes if arg in self.forms]
        self._refuse_overwriting(node, inputs)
        try:
            with torch.no_grad():
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.values[n])
                self.values[node] = getattr(self.interpreter, node.op)(node.target, args, kwargs)
        except Exception as error:
            shape = tuple(self.like.shape[1:])
            raise ValueError(
                f"the model does not accept samples of shape {shape}, which is x without its batch dimension: "
                f"{self._kind(node)} at '{_path(node)}' says: {error}"
            ) from error
        if inputs and isinstance(self.values[node], Tensor):
            self.forms[node] = self._form_of(node, inputs)
        elif inputs and not _is_shape_query(node):
            raise self._unsupported(node, "it does not return a tensor")

    def _form_of(self, node: fx.Node, inputs: list[fx.Node]) -> _Form:
        try:
            form = self._combine(node, inputs)
            if form is None:
                form = self._follow(node, self._step(node, inputs))
        except UnsupportedLayer:
            raise
        except (TypeError, ValueError) as error:  # a rule refuses, or does not take the arguments of this call
            raise self._unsupported(node, str(error)) from error
        if form.shape != self.values[node].shape[1:]:
            raise self._unsupported(node, "its output shape mixes samples of the batch or follows no known rule")
        # A sum of branches that several layers read becomes a stage of its own, so cost stays linear in depth; so does a
        # long map of one branch, which each of them would repeat.
        if len(node.users) > 1 and (len(form.terms) > 1 or any(op.pieces > LONGEST for op in form.terms.values())):
            form = self._close(form, PassThrough(), node)
        return form

    def _combine(self, node: fx.Node, inputs: list[fx.Node]) -> _Form | None:
        """Sums, differences, negation, and scaling by constants; None for everything else."""
        target = node.target
        if target in rules.NEGATIONS:
            return self.forms[inputs[0]].then(rules.scale(-1.0, self.forms[inputs[0]].shape, self.like))
        if target in rules.ADDITIONS or target in rules.SUBTRACTIONS:
            sign = 1.0 if target in rules.ADDITIONS else -1.0
            return self._add(node, sign * float(node.kwargs.get("alpha", 1)))  # type: ignore[arg-type]
        if target in rules.PRODUCTS or target in rules.QUOTIENTS:
            return self._scale(node, target in rules.QUOTIENTS)
        return None

    def _add(self, node: fx.Node, sign: float) -> _Form:
        left, right = self._operands(node)
        if isinstance(left, _Form) and isinstance(right, _Form):
            if left.shape != right.shape:
                raise rules.Refused(f"adding {tuple(left.shape)} and {tuple(right.shape)} would broadcast")
            return left.plus(right if sign == 1 else right.then(rules.scale(sign, right.shape, self.like)))
        if isinstance(left, _Form):
            return left.then(rules.shift(right, sign, left.shape, self.like))
        signed = right if sign == 1 else right.then(rules.scale(sign, right.shape, self.like))
        return signed.then(rules.shift(left, 1.0, right.shape, self.like))

    def _scale(self, node: fx.Node, divide: bool) -> _Form:
        if node.kwargs:
            raise rules.Refused(f"options {dict(node.kwargs)} have no rule")
        left, right = self._operands(node)
        if isinstance(left, _Form) and isinstance(right, _Form):
            raise rules.Refused("a product or quotient of two values that depend on the input is not linear")
        if isinstance(left, _Form):
            step = rules.scale(right, left.shape, self.like)
            if divide:
                step = rules.Affine(Diagonal(_reciprocal(step.op), left.shape))
            return left.then(step)
        if divide:
            raise rules.Refused("division by a value that depends on the input is not linear")
        return right.then(rules.scale(left, right.shape, self.like))

    def _operands(self, node: fx.Node) -> list[Any]:
        """The two operands of an arithmetic node: affine forms, or the constants themselves."""
        operands = [*node.args, *(node.kwargs[k] for k in ("other",) if k in node.kwargs)]
        if len(operands) != 2:
            raise rules.Refused("only two operands have a rule")
        return [self._operand(operand) for operand in operands]

    def _operand(self, operand: Any) -> Any:
        if not isinstance(operand, fx.Node):
            return operand
        if operand in self.forms:
            return self.forms[operand]
        return self._constant(operand)

    def _constant(self, node: fx.Node) -> Any:
        """A stored tensor, or one of its views, or a number; what forward computes from them is refused.

        A computed tensor would stay behind when training moves the parameters, carry rounding of the module's dtype, or be
        random.
        """
        if self._is_computed(node):
            raise rules.Refused(
                "it uses a tensor that forward computes; store the result as a buffer or use a parametrization"
            )
        return self.values[node]

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether forward computes it from stored tensors, be it a tensor or a number such as (a * b).item()."""
        if node in self.forms:  # of which nothing but sizes come here
            return False
        if isinstance(self.values[node], Tensor):
            return node.op != "get_attr" and not self._is_view_of_buffer(node)
        return any(self._is_computed(arg) for arg in node.all_input_nodes)

    def _is_view_of_buffer(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return not isinstance(self.values[node], nn.Parameter)
        views = node.target in rules.RESHAPES or node.target in rules.VIEWS
        return views and all(self._is_view_of_buffer(arg) for arg in node.all_input_nodes)

    def _step(self, node: fx.Node, inputs: list[fx.Node]) -> rules.Step:
        """The affine map or activation of a node with one input that depends on x."""
        if len(inputs) != 1:
            raise rules.Refused("there is no rule for joining values that depend on the input other than by + and -")
        in_shape = self.forms[inputs[0]].shape
        if node.op == "call_module":
            module = self.interpreter.fetch_attr(str(node.target))
            rule = rules.module_rule(module)
            if rule is None:
                raise rules.Refused("there is no rule for this type of layer")
            return rule(module, in_shape, self.like)
        if node.target in rules.RESHAPES:
            return rules.reshape(in_shape, self.values[node].shape, len(self.like))
        function = rules.FUNCTION_RULES.get(node.target)
        if function is None:
            raise rules.Refused("there is no rule for this operation")
        if not node.args or node.args[0] is not inputs[0]:
            raise rules.Refused("the value that depends on the input must be its first argument")
        rest = [self._resolve(arg) for arg in node.args[1:]]
        return function(in_shape, self.like, *rest, **{k: self._resolve(v) for k, v in node.kwargs.items()})

    def _resolve(self, arg: Any) -> Any:
        return map_arg(arg, self._constant)

    def _follow(self, node: fx.Node, step: rules.Step) -> _Form:
        (source,) = [arg for arg in node.all_input_nodes if arg in self.forms]
        form = self.forms[source]
        if isinstance(step, Activation):
            return self._close(form, step, node)
        plain = step.op.single_entry_rows  # a reshape or a scaling does not give the layer its name
        return form.then(step, None if plain else _path(node))

    def _close(self, form: _Form, activation: Activation, node: fx.Node) -> _Form:
        """End a stage with `activation`; what follows starts from its output."""
        self.stages.append(Stage(_path(node), form.terms, form.offset, activation, form.names))
        shape = activation.out_shape(form.shape)
        return _Form(shape, {len(self.stages): Identity(shape)})

    def _refuse_overwriting(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """An in-place layer whose input somebody else reads computes something else than its graph shows."""
        if "out" in node.kwargs:
            raise self._unsupported(node, "it writes into another tensor; leave out= away")
        if not self._in_place(node):
            return
        if any(n not in self.forms and isinstance(self.values[n], Tensor) for n in node.all_input_nodes[:1]):
            raise self._unsupported(node, "it changes a stored tensor; forward must leave them as they are")
        if not inputs:  # a number such as x.shape[0]
            return
        later = set(self.order[self.order.index(node) + 1 :])
        memory = _memory(self.values[node.all_input_nodes[0]])
        for other, value in self.values.items():
            if _memory(value) == memory and later & set(other.users):
                raise self._unsupported(node, "it overwrites a value that another layer reads; use inplace=False")

    def _in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self.interpreter.fetch_attr(str(node.target)), "inplace", False))
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        augmented = name in {"iadd", "isub", "imul", "itruediv"}
        return augmented or (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))

    def _kind(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self.interpreter.fetch_attr(str(node.target))).__name__
        return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))

    def _unsupported(self, node: fx.Node, why: str) -> UnsupportedLayer:
        help_ = f"\nSupported: {SUPPORTED}. {EXTEND}" if why.startswith("there is no rule") else ""
        return UnsupportedLayer(f"{self._kind(node)} at '{_path(node)}' is not supported: {why}.{help_}")


def _memory(value: Any) -> int | None:
    """Where the numbers of a tensor lie; None for anything else."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def _path(node: fx.Node) -> str:
    """The qualified path of a module node; for an operation, its name inside the module whose forward calls it."""
    if node.op == "call_module":
        return _inside_root(str(node.target)) or "the model itself"
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    owner = [_inside_root(str(key)) for key in stack]
    return f"{owner[-1]}.{node.name}" if owner and owner[-1] else node.name


def _inside_root(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")


def _is_shape_query(node: fx.Node) -> bool:
    """x.size(0), x.shape, x.dim(): numbers that a reshape uses, and attributes that no value flows through."""
    named = node.op == "call_method" and node.target in {"size", "dim", "numel", "ndimension"}
    return named or (node.target is builtins.getattr and node.args[1] in {"shape", "ndim", "device", "dtype"})


def _reciprocal(op: LinearOp) -> Callable[[torch.dtype], Tensor]:
    assert isinstance(op, Diagonal)
    factor = op.factor
    return lambda dtype: factor(dtype).reciprocal()
