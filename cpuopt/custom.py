"""An op from one forward kernel: its declaration, its backward, its references and its check."""

from __future__ import annotations

import ast
import hashlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from . import ops
from .ad import Backward, emit, read
from .ad.kernel import WrittenTwiceError, flat, mentioned
from .ad.trees import text
from .check.cases import NOT_FINITE, SMALL, arguments, case
from .check.check import check, check_quick
from .check.dual import IntegerOverflowError, integers, wide
from .check.fit import ERRORS
from .check.gradient import GradientResult, check_gradient
from .errors import WRONG, UserError
from .kernels import registry
from .kernels.compile import jit
from .kernels.generated import product, register
from .kernels.generated.load import backward as generate
from .nn.trace import current
from .ops.declaration import Arg, Dim, Op, as_dim, inp
from .program.program import Value

Array = np.ndarray[Any, Any]
Inputs = Callable[[dict[str, Any]], Mapping[str, Any]]
DOMAINS: dict[str, Callable[[Array], Array]] = {
    "normal numbers": lambda x: x,
    "positive ones": lambda x: np.abs(x) + 0.1,
    "numbers between 0 and 1": lambda x: 1 / (1 + np.exp(-x)),
    "numbers above 1": lambda x: np.abs(x) + 1.1,
    "numbers near 100": lambda x: x + 100,
    "whole numbers": np.rint,
}
"""The domains on which a gradient is judged, where its forward is finite: functions of normal numbers.

Whole numbers are those at which branches meet, roots have no slope, and divisors are 0."""
TO_INTEGER = {"int", "round", "np.int32", "np.int64", "np.uint64"}
TO_INTEGER |= {f"{home}{name}" for home in ("", "math.") for name in ("floor", "ceil", "trunc")}
"""The functions that make an integer of a float."""


def differentiable(
    *args: Arg, flops: Dim | int = 0, source: str = "", inputs: Inputs | None = None
) -> Callable[[Callable[..., None]], DifferentiableOp]:
    """Make an op from a forward kernel: ``@differentiable(out("out", N), inp("inp", N))`` above its loops.

    The backward is generated from the kernel's source and registered with it, so the result can be called on the values
    of a model. The first output is returned and has a gradient; further outputs are kept for the backward.

    Parameters
    ----------
    args : the kernel's parameters as `cpuopt.ops.declaration` declares them, of the kinds ``out``, ``in``, ``index``,
        ``scalar``, and ``state`` for an array that the kernel updates in place. A call is given such an array as an
        input, leaves it as it is, and returns the updated one.
    flops : the FLOPs of one call, in size symbols; for the profiler's rates.
    source : the paper, equation or function that it follows.
    inputs : function from random inputs by name, standard normal float64 numbers, to those of them that have to lie in
        a domain, such as positive definite matrices. Its gradient is then judged there.

    Raises
    ------
    UserError
        For a kernel outside the differentiable subset, with its line, or a name that is taken.
    """

    def decorate(function: Callable[..., None]) -> DifferentiableOp:
        return DifferentiableOp(function, args, as_dim(flops), source, inputs)

    return decorate


class DifferentiableOp:
    """An op that `differentiable` made.

    Attributes
    ----------
    forward, backward : the declared ops; for an array that the kernel updates, they have an output and an input.
    read : the parsed forward.
    compiled : the function that is compiled: the kernel, or its statements in plain loops if numba lacks some form of
        it, after a copy of what it updates.
    generated : the backward kernel with its text and its plan.
    judged : whether its gradient has been compared with the slope of its forward, as it is when a model first calls it.
    """

    def __init__(
        self,
        function: Callable[..., None],
        args: tuple[Arg, ...],
        flops: Dim,
        source: str,
        inputs: Inputs | None = None,
    ) -> None:
        if not hasattr(function, "__code__"):
            raise UserError(f"@differentiable: {function!r} is no Python function; write a kernel with def")
        name = function.__name__.removesuffix("_forward")
        for taken in (f"{name}_forward", f"{name}_backward"):
            if taken in ops.ALL:
                raise UserError(f"@differentiable: there is an op {taken!r} already; give the function another name")
        if wrong := [a.name for a in args if a.kind not in ("out", "in", "index", "scalar", "state")]:
            raise UserError(
                f"@differentiable {name}: '{wrong[0]}' has no such role; expected out, inp, index, scalar or state"
            )
        if not args or args[0].kind not in ("out", "state"):
            why = "the first argument must be an out or a state; it is what a call returns"
            raise UserError(f"@differentiable {name}: {why}")
        self.name, self.source = name, source or f"{function.__code__.co_filename}"
        self.inputs, self.given = [a.name for a in args if a.kind != "out"], inputs
        axes = {a.name: len(a.shape) for a in args if a.kind != "scalar"}
        self.read = read(function, [a.name for a in args if a.kind == "state"], axes)
        has, want = list(inspect.signature(function).parameters), [a.name for a in args]
        if has != want:
            raise UserError(
                f"@differentiable {name}: parameters are ({', '.join(has)}); the declaration says otherwise: "
                f"write def {function.__name__}({', '.join(want)})"
            )
        self.before = dict(self.read.before)
        self.compiled = self._as_read(function) if self.before or self.read.rewritten else function
        self.function = self._in_place(function) if self.before else function
        args = tuple(replace(a, kind="out") if a.kind == "state" else a for a in args) + tuple(
            replace(a, name=self.before[a.name], kind="in") for a in args if a.kind == "state"
        )
        self.forward = Op(
            f"{name}_forward", *args, label=f"{name} Forward", flops=flops, source=self.source,
            reference=self._named(self._run, [a.name for a in args]),
            inputs=self._domain if inputs else None, unfit=self._unfit(),
        )  # fmt: skip
        self.moved = [a.name for a in args if a.kind == "in"]
        self.forward.reference.kernel = self.function  # type: ignore[attr-defined]
        self.forward.reference.run = self._run  # type: ignore[attr-defined]
        self.forward.reference.judge = self.judge  # type: ignore[attr-defined]
        self._refuse_arguments()
        self.backward = self._declare_backward(flops)
        kernel = registry.Kernel(self.forward, registry.BASE, self.compiled)
        self.generated: Backward = generate(self.backward, kernel)
        self.judged, self.fits = False, ""
        before = dict(registry.KERNELS)
        try:
            parallel = "prange" in self.compiled.__code__.co_names
            jit.kernel(
                self.forward, registry.BASE, parallel=parallel, shown=function, **jit.PYTHON_INTEGERS
            )(self.compiled)  # fmt: skip
            vanilla = registry.KERNELS[self.forward.name, registry.BASE]
            for variant in (registry.BASE, registry.GENERATED):
                register(self.backward, vanilla, variant, **jit.PYTHON_INTEGERS)
        except BaseException:
            registry.KERNELS.clear()
            registry.KERNELS.update(before)
            raise
        ops.ALL[self.forward.name], ops.ALL[self.backward.name] = self.forward, self.backward

    def __call__(self, *inputs: Any, **sizes: int) -> Value:
        """Add a call to the model that is being traced.

        Parameters
        ----------
        inputs : in their declared order.
        sizes : the sizes of symbols that the inputs do not fix.

        Raises
        ------
        UserError
            For another number of inputs; at the first call, for a gradient that is wrong.
        """
        names = self.inputs
        if len(inputs) != len(names):
            raise UserError(f"{self.name} is given {len(inputs)} inputs; expected {len(names)}: {', '.join(names)}")
        self.judge()
        given = [self.before.get(n, n) for n in names]
        return current().emit(self.forward, dict(zip(given, inputs, strict=True)), **sizes)

    def _as_read(self, function: Callable[..., None]) -> Callable[..., None]:
        """Write the kernel as it was read, with a copy of what it updates at its start, and import it."""
        name = function.__name__
        doc = f"{name} in plain loops{', with a copy of what it updates in place' if self.before else ''}."
        code = emit.module(self.read, name, self.read.params, self.read.forward(), doc, {})
        key = hashlib.sha256(code.encode()).hexdigest()[:32]
        made = getattr(emit.load(name, key, lambda: code), name)
        if not self.before:  # the backward quotes the lines that a person wrote
            made.written_as = function
        return made  # type: ignore[no-any-return]

    def _in_place(self, function: Callable[..., None]) -> Callable[..., None]:
        """The same as plain Python: the kernel itself, on copies of what it updates."""
        params, before = list(self.read.params), dict(self.before)

        def copying(*args: Any) -> None:
            given = dict(zip(params, args, strict=True))
            for name, old in before.items():
                given[name][...] = given.pop(old)
            function(*given.values())

        return copying

    def judge(self) -> None:
        """Compare the generated gradient with the slope of its forward, and compiled kernels with their text; once.

        Raises
        ------
        UserError
            If they disagree, an output depends on its earlier content, nothing is finite, an integer overflows, or
            numba does not compile the forward or the backward.
        """
        if not self.judged:
            self._compile()
            self._refuse_overflow()
            self._refuse_old_values()
            self._results()
            self._compare()
            self.judged = True

    def _compile(self) -> None:
        """Compile both kernels, or load them: what numba refuses has no use for a gradient."""
        both = (self.forward.name, self.backward.name)
        jit.compile_kernels([registry.KERNELS[name, registry.BASE] for name in both], processes=1)

    def _compare(self) -> None:
        """Compare the compiled kernels with their text as plain Python, on the first domain that has a gradient.

        Raises
        ------
        UserError
            If one disagrees.
        """
        forward, backward = copy(self.forward), copy(self.backward)
        backward.inverts = forward
        if not self.given:
            forward.inputs = lambda drawn: {n: self.domains[self.fits](drawn[n]) for n in drawn if n in self.moved}
        for op in (forward, backward):
            kernel = registry.KERNELS[op.name, registry.BASE]
            result = check(replace(kernel, op=op), case(op, SMALL), threads=(1,))
            if result.refused:
                raise UserError(f"{kernel.name}: compiled, it disagrees with its text in Python: {result.reason}")

    @property
    def domains(self) -> dict[str, Callable[[Array], Array]]:
        """The domains on which it is judged."""
        return {"the declared inputs": lambda x: x} if self.given else DOMAINS

    def _domain(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Bring random inputs into the declared domain; an array that is updated has the name that the kernel uses."""
        own = {before: name for name, before in self.before.items()}
        assert self.given
        found = self.given({own.get(n, n): x for n, x in drawn.items()})
        return {self.before.get(n, n): x for n, x in found.items()}

    def _results(self) -> list[GradientResult]:
        """Compare the gradient with the forward's slope on each domain on which the forward is finite.

        Raises
        ------
        UserError
            If they disagree, or if there are none.
        """
        found, raised = list[GradientResult](), ""
        for name, domain in self.domains.items():
            try:
                with np.errstate(all="ignore"):
                    results = check_gradient(self.backward, domain=domain)
            except ERRORS as e:  # outside the kernel's domain
                raised = f"; it raises {type(e).__name__}: {e}"
                continue
            results = [r for r in results if r.errors[0] == r.errors[0]]  # NaN: no slope to compare with
            if not results:
                continue
            worst = max(results, key=lambda r: r.error)
            if worst.verdict == WRONG:
                raise UserError(
                    f"{self.name}: its generated gradient disagrees with the slope of its forward: {worst}; "
                    f"that is a fault of the generator: report it with the kernel and {self.name}.generated.text"
                )
            self.fits = self.fits if found else name
            found += results
        if not found:
            self.read.refuse_parameter(
                f"its gradient cannot be judged: it is not finite for any of {', '.join(self.domains)}{raised}",
                "declare inputs=, a function from random inputs by name to those of its domain",
            )
        return found

    def _refuse_overflow(self) -> None:
        """Refuse a forward with an integer that int64 does not hold, whatever its inputs are."""
        op, error = copy(self.forward), None
        op.reference = dict  # which finds no inputs unfit
        for domain in self.domains.values():
            given = arguments(op, case(op, SMALL), np.random.default_rng(0))
            try:
                with np.errstate(all="ignore"):
                    self._run(given | {n: domain(given[n].astype(float)) for n in self.moved}, watch=True)
                return
            except ERRORS as e:
                error = error or (e if isinstance(e, IntegerOverflowError) else None)
        if error:
            (*_, line) = (f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.read.file)
            self.read.refuse(line or 0, str(error), "compute it in np.uint64 if it is to wrap around")

    def _refuse_old_values(self) -> None:
        """Refuse a forward with an output that depends on its earlier content: in a model, that is garbage."""
        for domain in self.domains.values():
            given = arguments(self.forward, case(self.forward, SMALL), np.random.default_rng(0))
            given |= {n: domain(given[n].astype(float)) for n in self.moved}
            try:
                with np.errstate(all="ignore"):
                    ends = [self._run(given, start) for start in (0.0, 1.0, np.nan)]
            except ERRORS:  # outside the kernel's domain
                continue
            for name in ends[0]:
                if any(not np.array_equal(end[name], ends[0][name], equal_nan=True) for end in ends[1:]):
                    self.read.refuse(
                        self.read.first_write(name),
                        f"'{name}' depends on its content before the call: an element is added to or read before "
                        "it is assigned, or is never assigned",
                        f"assign every element of '{name}' first",
                    )

    def handwritten(self, function: Callable[..., None]) -> Callable[..., None]:
        """Register a backward written by hand, with the declared parameters, if it agrees with the generated one.

        Raises
        ------
        UserError
            If it does not: nothing is registered.
        """
        self.judge()
        kept = registry.KERNELS.pop((self.backward.name, registry.BASE))
        try:
            made = jit.kernel(self.backward, registry.BASE)(function)
            results = check_quick([registry.KERNELS[self.backward.name, registry.BASE]])
            worst = max(results, key=lambda r: r.ratio)
            if worst.refused:
                raise UserError(
                    f"{self.backward.name}: the backward by hand disagrees with the generated one: {worst.reason}; "
                    f"see 'cpuopt new-kernel {self.name} --backward'"
                )
        except BaseException:
            registry.KERNELS[self.backward.name, registry.BASE] = kept
            raise
        return made

    def check(self) -> list[Any]:
        """Check the generated gradient in float64 against differences, and the compiled kernels against that."""
        self.judge()
        kernels = [k for (name, _), k in registry.KERNELS.items() if name in (self.forward.name, self.backward.name)]
        return [*self._results(), *check_quick(kernels)]

    def _refuse_arguments(self) -> None:
        """Refuse inputs that are written, outputs that are not, and a parameter with the name of an adjoint."""
        for a in self.forward.args:
            line = self.read.first_write(a.name)
            if line and a.kind != "out":
                why = f"'{a.name}' is declared as an input, and is written"
                self.read.refuse(line, why, "write to an array that is declared as an out")
            if not line and a.kind == "out":
                self.read.refuse_parameter(f"nothing is written to '{a.name}', which is declared as an out")
            for adjoint in (f"d{a.name}", f"d{a.name}_add"):
                if adjoint in self.forward.by_name and (a.kind == "in" or a is self.forward.args[0]):
                    self.read.refuse_parameter(f"the backward needs the name '{adjoint}' for the adjoint of '{a.name}'")

    def _declare_backward(self, flops: Dim) -> Op:
        """Declare the backward with no more arguments than the generated kernel reads."""
        forward = self.forward
        adjoint = forward.args[0]
        most = as_dim(product(adjoint.shape))  # terms in an element of a gradient: the outputs for each input
        gradients = [replace(a, name=f"d{a.name}", kind="acc", reduces=most) for a in forward.args if a.kind == "in"]
        given = [inp(f"d{adjoint.name}", *adjoint.shape, types=adjoint.types)]
        others = [a if a.kind in ("index", "scalar") else replace(a, kind="in") for a in forward.args]

        def declare(args: list[Arg]) -> Op:
            op = Op(
                f"{self.name}_backward", *gradients, *given, *args, label=f"{self.name} Backward", flops=flops * 2,
                source=self.source, inverts=forward, unfit=forward.unfit,
                reference=self._named(self._run_backward, [a.name for a in [*gradients, *given, *args]]),
            )  # fmt: skip
            op.reference.run, op.reference.judge = self._run_backward, self.judge  # type: ignore[attr-defined]
            forward.backwards[:] = [op]
            return op

        kernel = registry.Kernel(forward, registry.BASE, self.compiled)
        while True:
            try:
                trial = generate(declare(others), kernel)
                break
            except WrittenTwiceError as e:  # then the backward computes it again, if it reads it
                others = [a for a in others if a.name != e.array]
        return declare([a for a in others if a.name in mentioned(trial.body)])

    @staticmethod
    def _named(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
        """Set a reference's signature, in which the checks look parameters up by name."""

        def reference(**given: Any) -> Any:
            with np.errstate(all="ignore"):
                return function(given)

        kinds = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        reference.__signature__ = Signature(kinds)  # type: ignore[attr-defined]
        return reference

    def _unfit(self) -> dict[str, str]:
        """Name the kinds of inputs of which a kernel that rounds to integers has no defined result."""
        calls = [n for s in flat(self.read.body) for e in s.trees for n in ast.walk(e) if isinstance(n, ast.Call)]
        if {text(c.func) for c in calls} & TO_INTEGER:
            return dict.fromkeys(NOT_FINITE, "its integer is not defined")
        return {}

    def _run(
        self, given: Mapping[str, Any], start: float = 0.0, dtype: Any = np.float64, watch: bool = False
    ) -> dict[str, Array]:
        """Call the kernel itself as plain Python in one type, with outputs that start from a number."""
        shapes = {a.name: np.shape(given[a.name]) for a in self.forward.arrays if given.get(a.name) is not None}
        sizes = self.forward.bind(shapes)
        made = {
            a.name: np.full([d(sizes) for d in a.shape], start, dtype) for a in self.forward.args if a.kind == "out"
        }
        args = [made.get(a.name, _present(a, given.get(a.name))) for a in self.forward.args]
        wide(self.function, dtype, watch)(*args)
        return made

    def _run_backward(self, given: Mapping[str, Any], dtype: Any = np.float64) -> dict[str, Array]:
        """Run the generated backward as plain Python in one type."""
        module = self.generated.module()
        made = {a.name: np.zeros(np.shape(given[a.name]), dtype) for a in self.backward.args
                if a.kind == "acc" and given.get(a.name) is not None}  # fmt: skip
        args: list[Any] = []
        shapes = {a.name: np.shape(given[a.name]) for a in self.backward.arrays if given.get(a.name) is not None}
        sizes = self.backward.bind(shapes)
        for a in self.backward.args:
            args.append(made.get(a.name, _present(a, given.get(a.name))))
            args += [False] if a.kind == "acc" else []
        for factor, like in module.SCRATCH.values():
            args.append(np.zeros(factor * int(np.prod([d(sizes) for d in self.forward.by_name[like].shape])), dtype))
        wide(getattr(module, self.backward.name), dtype)(*args)
        return made


def _present(arg: Arg, value: Any) -> Any:
    """Return an array, of length zero if it is absent."""
    return np.zeros((0,) * len(arg.shape)) if value is None and arg.kind != "scalar" else integers(value)
