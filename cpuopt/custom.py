"""An op from one forward kernel: its declaration, its backward, its references and its check."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from . import ops, registry
from .ad import Backward
from .ad.ops import backward as generate
from .errors import UserError
from .op import Arg, Dim, Op, as_dim
from .program import Value
from .trace import current

Array = np.ndarray[Any, Any]


def differentiable(
    *args: Arg, flops: Dim | int = 0, source: str = ""
) -> Callable[[Callable[..., None]], DifferentiableOp]:
    """Make an op of a forward kernel: ``@differentiable(out("out", N), inp("inp", N))`` above its loops.

    The backward is generated from the kernel's source and registered with it, so the result can be called on the values
    of a model. The first output is what it returns, and what has a gradient; further outputs are kept for the backward.

    Parameters
    ----------
    args : the kernel's parameters as `cpuopt.op` declares them, with roles ``out``, ``in``, ``index`` and ``scalar``.
    flops : of one call, in size symbols; for the profiler's rates.
    source : paper, equation or function that it follows.

    Raises
    ------
    UserError
        For a kernel outside the differentiable subset, with its line, or a name that is taken.
    """

    def decorate(function: Callable[..., None]) -> DifferentiableOp:
        return DifferentiableOp(function, args, as_dim(flops), source)

    return decorate


class DifferentiableOp:
    """An op that `differentiable` made.

    Attributes
    ----------
    forward, backward : the declared ops.
    generated : the backward kernel with its text and its plan.
    judged : whether its gradient has been compared with differences, as it is when a model first calls it.
    """

    def __init__(self, function: Callable[..., None], args: tuple[Arg, ...], flops: Dim, source: str) -> None:
        from .kernels import jit

        name = function.__name__.removesuffix("_forward")
        for taken in (f"{name}_forward", f"{name}_backward"):
            if taken in ops.ALL:
                raise UserError(f"@differentiable: there is an op {taken!r} already; give the function another name")
        if wrong := [a.name for a in args if a.role not in ("out", "in", "index", "scalar")]:
            raise UserError(
                f"@differentiable {name}: '{wrong[0]}' has no such role; expected out, inp, index or scalar"
            )
        if not args or args[0].role != "out":
            raise UserError(f"@differentiable {name}: the first argument must be an out; it is what a call returns")
        self.name, self.function, self.source = name, function, source or f"{function.__code__.co_filename}"
        self.forward = Op(
            f"{name}_forward", *args, label=f"{name} forward", flops=flops, source=self.source,
            reference=self._named(self._reference_forward, [a.name for a in args]),
        )  # fmt: skip
        self.backward = self._declare_backward(flops)
        kernel = registry.Kernel(self.forward, registry.BASE, function)
        self.generated: Backward = generate(self.backward, kernel)
        self.judged = False
        before = dict(registry.KERNELS)
        try:
            jit.kernel(self.forward, registry.BASE, parallel="prange" in function.__code__.co_names)(function)
            for variant in (registry.BASE, "generated"):
                self._register(variant)
        except BaseException:
            registry.KERNELS.clear()
            registry.KERNELS.update(before)
            raise
        ops.ALL[self.forward.name], ops.ALL[self.backward.name] = self.forward, self.backward

    def __call__(self, *inputs: Any) -> Value:
        """Add a call to the model that is being traced: the inputs in their declared order.

        Raises
        ------
        UserError
            For another number of inputs; at the first call, for a gradient that is wrong.
        """
        names = [a.name for a in self.forward.args if a.role != "out"]
        if len(inputs) != len(names):
            raise UserError(f"{self.name} is given {len(inputs)} inputs; expected {len(names)}: {', '.join(names)}")
        self.judge()
        return current().emit(self.forward, dict(zip(names, inputs, strict=True)))

    def judge(self) -> None:
        """Compare the generated gradient with differences of its forward, in float64, where those are finite; once.

        Raises
        ------
        UserError
            Where they disagree.
        """
        from .lab.cases import SMALL, case
        from .lab.gradient import TOLERANCE, check_gradient

        if self.judged:
            return
        for kind in ("normal", "offset", "tiny"):  # the last two for what is defined above 0, or below 1
            try:
                with np.errstate(all="ignore"):
                    results = check_gradient(self.backward, case(self.backward, SMALL, kind))
            except (ValueError, ZeroDivisionError, OverflowError):  # Python's math refuses what NumPy calls NaN
                continue
            worst = max(results, key=lambda r: r.error)
            if TOLERANCE < worst.error < float("inf"):
                raise UserError(
                    f"{self.name}: its generated gradient disagrees with differences of its forward: {worst}; "
                    f"that is a fault of the generator: report it with the kernel and {self.name}.generated.text"
                )
            if worst.error <= TOLERANCE:
                self.judged = True
                return
        raise UserError(
            f"{self.name}: its gradient cannot be compared with differences: one of them is not finite for normal "
            "numbers, near 100 and near 1e-6; keep the forward finite there"
        )

    def handwritten(self, function: Callable[..., None]) -> Callable[..., None]:
        """Register a backward written by hand, with the declared parameters, if it agrees with the generated one.

        Raises
        ------
        UserError
            Where it does not: nothing is registered.
        """
        from .kernels import jit
        from .lab.check import check_all

        self.judge()
        kept = registry.KERNELS.pop((self.backward.name, registry.BASE))
        try:
            made = jit.kernel(self.backward, registry.BASE)(function)
            results = check_all([registry.KERNELS[self.backward.name, registry.BASE]], quick=True)
            worst = max(results, key=lambda r: r.ratio)
            if worst.verdict == "FAIL":
                raise UserError(
                    f"{self.backward.name}: the backward by hand disagrees with the generated one: {worst.reason}; "
                    f"see 'cpuopt ad {self.name}'"
                )
        except BaseException:
            registry.KERNELS[self.backward.name, registry.BASE] = kept
            raise
        return made

    def check(self) -> list[Any]:
        """Check the generated gradient in float64 against differences, and the compiled kernels against that."""
        from .lab.check import check_all
        from .lab.gradient import check_gradient

        kernels = [k for (name, _), k in registry.KERNELS.items() if name in (self.forward.name, self.backward.name)]
        return [*check_gradient(self.backward), *check_all(kernels, quick=True)]

    def _declare_backward(self, flops: Dim) -> Op:
        """Declare the backward with no more arguments than the generated kernel reads."""
        forward = self.forward
        adjoint = forward.args[0]
        gradients = [Arg(f"d{a.name}", "acc", a.shape, a.optional, reduces=self._reduction(a)) for a in forward.args
                     if a.role == "in"]  # fmt: skip
        given = [Arg(f"d{adjoint.name}", "in", adjoint.shape)]
        others = [a if a.role in ("index", "scalar") else Arg(a.name, "in", a.shape, a.optional) for a in forward.args]

        def declare(args: list[Arg]) -> Op:
            op = Op(
                f"{self.name}_backward", *gradients, *given, *args, label=f"{self.name} backward", flops=flops * 2,
                source=self.source, inverts=forward,
                reference=self._named(self._reference_backward, [a.name for a in [*gradients, *given, *args]]),
            )  # fmt: skip
            forward.backwards[:] = [op]
            return op

        trial = generate(declare(others), registry.Kernel(forward, registry.BASE, self.function))
        return declare([a for a in others if any(line.mentions(a.name) for line in trial.lines)])

    def _reduction(self, arg: Arg) -> Dim:
        """How many terms an element of a gradient may sum: the outputs for each element of the input."""
        size = as_dim(1)
        for d in self.forward.args[0].shape:
            size = size * d
        return size

    def _register(self, variant: str) -> None:
        from .kernels.generated import register

        register(self.backward, registry.KERNELS[self.forward.name, registry.BASE], variant)

    @staticmethod
    def _named(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
        """Give a reference the parameters that the checks look up by name."""

        def reference(**given: Any) -> Any:
            return function(**given)

        kinds = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        reference.__signature__ = Signature(kinds)  # type: ignore[attr-defined]
        return reference

    def _reference_forward(self, **given: Any) -> dict[str, Array]:
        """The kernel itself as plain Python in float64."""
        sizes = self.forward.bind(
            {a.name: np.shape(given[a.name]) for a in self.forward.arrays if given.get(a.name) is not None}
        )
        made = {a.name: np.zeros([d(sizes) for d in a.shape]) for a in self.forward.args if a.role == "out"}
        _wide(self.function)(**{a.name: made.get(a.name, _present(a, given.get(a.name))) for a in self.forward.args})
        return made

    def _reference_backward(self, **given: Any) -> dict[str, Array]:
        """The generated backward as plain Python in float64."""
        module = self.generated.module()
        made = {a.name: np.zeros(np.shape(given[a.name])) for a in self.backward.args
                if a.role == "acc" and given.get(a.name) is not None}  # fmt: skip
        args: list[Any] = []
        shapes = {a.name: np.shape(given[a.name]) for a in self.backward.arrays if given.get(a.name) is not None}
        sizes = self.backward.bind(shapes)
        for a in self.backward.args:
            args.append(made.get(a.name, _present(a, given.get(a.name))))
            args += [False] if a.role == "acc" else []
        for factor, like in module.SCRATCH.values():
            args.append(np.zeros(factor * int(np.prod([d(sizes) for d in self.forward.by_name[like].shape]))))
        _wide(getattr(module, self.backward.name))(*args)
        return made


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let what a function's text calls float32 be float64: a cast would round what differences are taken of."""

    def wide(value: Any) -> Any:
        if value is np.float32:
            return np.float64
        return SimpleNamespace(**{**vars(value), "float32": np.float64}) if isinstance(value, ModuleType) else value

    code, known = function.__code__, function.__globals__
    names = {n: wide(v) if n in code.co_names else v for n, v in known.items()}
    cells = tuple(CellType(wide(c.cell_contents)) for c in function.__closure__ or ())
    return FunctionType(code, names, function.__name__, function.__defaults__, cells)


def _present(arg: Arg, value: Any) -> Any:
    """An array, of length zero where it is absent."""
    return np.zeros((0,) * len(arg.shape)) if value is None and arg.role != "scalar" else value
