"""The layering rules, read off the source tree; each rule is shown a planted violation too."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from verbs import script

import cpuopt.kernels  # which registers what the package brings
from cpuopt import ops
from cpuopt.kernels import registry

ROOT = Path(cpuopt.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
ABOVE = """
library; cli; report; judge; lab; train; custom; profiler; engine; generate; check; measure; weights; building; models;
functional; nn; program; kernels; data; ad; ops; comm; isolate; machine; files; errors; wording; signals
"""
"""All packages and root modules, from the top down: one imports only those behind it."""
RANK = {part: -rank for rank, part in enumerate(re.split(r"[;\s]+", ABOVE.strip()))}
ENTRY = {"__init__.py", "__main__.py"}
"""The package's own doors: they open what is asked for."""


@cache
def tree_of(file):
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


@cache
def imports(tree, file):
    """The dotted names that a file imports or holds in a string, made absolute; ``from a import b`` gives ``a.b``."""
    package, found = ["cpuopt", *file.split("/")[:-1]], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) - node.level + 1] if node.level else []
            found += [".".join([*home, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"cpuopt(\.\w+)+", str(node.value)):
            found.append(node.value)  # as of a process to start
    return found


@cache
def names(tree):
    """Every name that a file mentions in code, with its last part for an attribute: ``print``, ``numba.njit``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(f"{ast.unparse(node.value)}.{node.attr}")
    return found


def uses(tree, file, pattern):
    """What a file imports or mentions that the pattern matches whole."""
    return sorted({name for name in (*imports(tree, file), *names(tree)) if re.fullmatch(pattern, name)})


def within(*places):
    return lambda file: file.startswith(places)


RULES = {
    "the ops import neither numba nor kernels": (
        r"(numba|llvmlite|cpuopt\.kernels)(\..*)?",
        lambda file: not file.startswith(("ops/", "op.py")),
        ("ops/gelu.py", "from ..kernels.vanilla import gelu"),
    ),
    "mpi4py is imported only in comm/mpi.py": (
        r"mpi4py(\..*)?",
        within("comm/mpi.py"),
        ("engine.py", "def f():\n    from mpi4py import MPI"),
    ),
    "numba is imported only below kernels/": (
        r"(numba|llvmlite)(\..*)?",
        within("kernels/"),
        ("engine.py", "def f():\n    import numba.core"),
    ),
    "only cli/, __main__.py, report/ and kernels/compile/progress.py print": (
        r"print|rich\..*|sys\.(stdout|stderr)(\..*)?|logging(\..*)?",
        within("cli/", "__main__.py", "report/", "kernels/compile/progress.py"),
        ("train.py", "print('step')"),
    ),
    "numba's compilers are called only in kernels/compile/jit.py": (
        r"(numba|nb)\.(jit|generated_jit)|(.*\.)?(njit|vectorize|guvectorize|cfunc|stencil|jitclass)",
        within("kernels/compile/jit.py"),
        ("kernels/vanilla/gelu.py", "from numba import jit"),
    ),
    "numba's internals are named in one file": (  # the four are of its interface for extensions
        r"numba\.(core|np|parfors)\.(?!(cgutils|imputils|typing|typeconv)\b).*",
        within("kernels/compile/numba_internals.py"),
        ("kernels/compile/lines.py", "from numba.core import codegen"),
    ),
    "nothing is registered with numba where the compile cache cannot see it": (
        r"(.*\.)?(overload|overload_method|overload_attribute|register_jitable)(?<!typing\.overload)",
        within(),
        ("kernels/toolkit/fastmath.py", "from numba.extending import overload"),
    ),
    "only the compile cache unpickles": (
        r"(pickle|cPickle|_pickle|marshal|shelve|dill|joblib|cloudpickle)(\..*)?|.*\.(un)?pickle\..*",
        within("kernels/compile/cache.py"),
        ("record.py", "import pickle"),
    ),
    "no text is run as code": (r"eval|exec|builtins(\..*)?|(yaml|runpy)(\..*)?", within(), ("record.py", "eval('1')")),
    "only train/steps.py steps the engine of a job, by take_step(); library/instruments.py steps that of a user": (
        r"(.*\.)?engine\.step",
        within("train/steps.py", "library/instruments.py"),
        ("profiler.py", "job.engine.step(lr=1.0)"),
    ),
    "only measure/comparison.py works out intervals; lab/records.py, the noise of unchanged kernels": (
        r"(.*\.)?(percentile|quantile)",
        within("measure/comparison.py", "lab/records.py"),
        ("lab/ab.py", "low = np.percentile(ratios, 2.5)"),
    ),
    "the generator of backwards works on trees: it searches and takes apart no text": (
        r"(re|regex|sre_\w+|tokenize|token|string|difflib)(\..*)?|.*\.(partition|rpartition|rsplit|find|rfind|translate)",
        lambda file: not file.startswith("ad/"),
        ("ad/reverse.py", "from re import sub"),
    ),
    "the generator turns a tree into text in one place, and text into a tree where it reads and quotes": (
        r"ast\.(unparse|parse|literal_eval|get_source_segment)|compile",
        lambda file: (
            not file.startswith("ad/") or file in ("ad/trees.py", "ad/lower/scope.py", "ad/subset.py", "ad/rules.py")
        ),
        ("ad/pullback.py", "value = ast.parse(line[3:])"),
    ),
    "PyTorch is never imported": (r"torch(\..*)?", within(), ("checkpoint.py", "import torch.nn as nn")),
}


def makes_by_default(tree):
    """The lines that make an engine with the defaults of the command line."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [node.lineno for node in calls if ast.unparse(node.func).split(".")[-1] == "Engine"]


def test_checks_and_runs_make_an_engine_of_explicit_options():
    assert {file: lines for file in FILES if (lines := makes_by_default(tree_of(file)))} == {}
    assert makes_by_default(ast.parse("engine = core.Engine(model, inputs)")) == [1]
    assert not makes_by_default(ast.parse("engine = Engine.from_options(model, inputs)"))


def said(tree, file):
    """Everything that a file's code mentions, its strings included; docstrings may cite a source."""
    cited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in cited)
    yield from (node.value for node in strings if isinstance(node.value, str))
    yield from imports(tree, file)
    yield from names(tree)


def named_models(tree, file):
    """What of a file names a model; two flags name the first one's tokenizer, as data/ does, and chats have a form."""
    spared = {
        "cli/data.py": {"gpt2"},
        "train/settings.py": {"gpt2", "llama3"},
        "cli/generate.py": {"llama3"},
        "lab/peers/suite.py": {"gpt2-nano", "gpt2-baby", "gpt2-124M"},  # the table of sizes that are measured
    }
    names = re.compile(r"(?i)gpt[-_]?2|llama(?!2\.c)|qwen|smollm|mistral|gemma")  # llama2.c is a format of files
    found = [text for text in said(tree, file) if names.search(text)]
    return [text for text in found if not spared.get(file, set()).intersection(text.split())]


def test_only_models_and_weights_name_a_model():
    files = [file for file in FILES if not file.startswith(("models/", "weights/", "data/"))]
    assert {file: found for file in files if (found := named_models(tree_of(file), file))} == {}


@pytest.mark.parametrize("rule", RULES)
def test_a_layering_rule_holds_and_notices_what_it_forbids(rule):
    pattern, allowed, (planted_in, planted) = RULES[rule]
    found = {file: uses(tree_of(file), file, pattern) for file in FILES if not allowed(file)}
    assert {file: what for file, what in found.items() if what} == {}, rule
    assert not allowed(planted_in)
    assert uses(ast.parse(planted), planted_in, pattern)


def modules(file, tree=None):
    """The files of the package that a file imports something from."""
    for name in imports(tree or tree_of(file), file):
        package, *parts = name.split(".")
        inner, outer = "/".join(parts), "/".join(parts[:-1])
        for path in (f"{inner}.py", f"{inner}/__init__.py", f"{outer}.py", f"{outer}/__init__.py"):
            if package == "cpuopt" and path in FILES:
                yield path
                break


def part(file):
    return file.split("/")[0].removesuffix(".py")


def graph_with(file=None, planted=""):
    graph = {other: set(modules(other)) for other in FILES}
    if file:
        graph.setdefault(file, set()).update(modules(file, ast.parse(planted)))
    return graph


def climbs(graph):
    """Where a file imports from a package or root module that stands above its own."""
    pairs = ((file, other) for file, others in graph.items() if file not in ENTRY for other in others)
    return {f"{file} imports {other}" for file, other in pairs if RANK[part(other)] > RANK[part(file)]}


def circles(graph):
    """The files that import each other, by whatever way, when they are loaded or later."""
    graph = {file: set(others) for file, others in graph.items()}
    while free := {file for file, others in graph.items() if not others & graph.keys()}:
        for file in free:
            del graph[file]
    while free := set(graph) - set().union(*graph.values()):
        for file in free:
            del graph[file]
    return set(graph)


def test_every_package_and_root_module_has_a_rank():
    assert {part(file) for file in FILES if file not in ENTRY} == RANK.keys()


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        *(("nn/trace.py", "from ..engine import Engine"), ("ops/declaration.py", "from ..kernels import registry")),
        *(("errors.py", "from .train.job import Settings"), ("machine.py", "from cpuopt.report import console")),
        ("kernels/registry.py", "def f():\n    from .. import engine"),
        ("ad/plan.py", "if TYPE_CHECKING:\n    from ..program.program import Call"),
        ("isolate/child.py", "module = 'cpuopt.lab.worker'"),
    ],
)
def test_an_import_upwards_is_noticed_and_there_is_none(file, planted):
    assert climbs(graph_with(file, planted))
    assert climbs(graph_with()) == set()


def test_no_files_import_each_other():
    graph, amx = graph_with(), "kernels/toolkit/micro/amx"
    graph[f"{amx}/proof.py"].remove(f"{amx}/prove.py")  # a child process, which asks for no proof
    assert circles(graph) == set()
    assert circles(graph_with("ops/declaration.py", "from .gelu import gelu_forward")) >= {"ops/gelu.py"}


def test_the_drawing_of_the_packages_is_of_these_imports():
    drawn = script("docs/packages.py")
    assert drawn.PICTURE.read_text(encoding="utf-8") == drawn.draw()
    graph = {part(file): set() for file in FILES if file not in ENTRY}
    for file, others in graph_with().items():
        if file not in ENTRY:
            graph[part(file)] |= {part(other) for other in others if other not in ENTRY} - {part(file)}
    assert drawn.imports() == graph


@pytest.mark.parametrize("variant", ["vanilla", "optimized", "blas", "rows"])
def test_a_kernel_file_has_a_twin_in_ops(variant):
    files = {Path(f).name for f in FILES if f.startswith(f"kernels/{variant}/")}
    assert {f for f in files if not f.startswith("_") and f"ops/{f}" not in FILES} == set()
    assert variant == "optimized" or len(files) > 1


def test_every_op_file_has_a_vanilla_twin():
    alone = {f for f in FILES if f.startswith("ops/") and f"kernels/vanilla/{Path(f).name}" not in FILES}
    assert alone == {f"ops/{name}.py" for name in ("declaration", "rounding", "storage", "update")}


def test_vanilla_is_complete():
    assert [op for op in ops.ALL if (op, "vanilla") not in registry.KERNELS] == []


# Machines -------------------------------------------------------------------------------------------------------------

MICRO = "kernels/toolkit/micro/"
MACHINE = re.compile(r"(?i)avx|amx|\bneon|\bsse\d|dpbf16|\bzen ?\d|\bxeon|sapphire")
CUT = re.compile(r"kernels/(optimized/(_|matmul|classifier|attention|gqa)\w*|toolkit/(blocks|pairs|simd|tiles))\.py")
"""The files of products and attention."""


def of_machines(name, text):
    """The names of instruction sets and processors in a text, and the thresholds of products that are plain numbers."""
    found = MACHINE.findall(text)
    for node in ast.parse(text).body if CUT.fullmatch(name) else ():
        match node:
            case ast.Assign(targets=[ast.Name(threshold)], value=value) if not isinstance(value, ast.JoinedStr):
                parts = [n for n in ast.walk(value) if not isinstance(n, ast.operator | ast.Load)]
                numbers = [n.value for n in parts if isinstance(n, ast.Constant) and isinstance(n.value, int)]
                found += [threshold] * (max(numbers, default=0) > 1 and not any(isinstance(n, ast.Name) for n in parts))
    return found


def test_kernels_name_machines_and_their_thresholds_in_one_place():
    texts = {f: path.read_text(encoding="utf-8") for f, path in FILES.items() if f.startswith("kernels/")}
    assert {f: found for f, text in texts.items() if not f.startswith(MICRO) and (found := of_machines(f, text))} == {}
    for line in ("# AVX-512: 112", 'dot = "avx512bf16" in features', "DEPTH = 4 * 256"):
        assert of_machines("kernels/optimized/matmul.py", line)
    assert not of_machines("kernels/optimized/matmul.py", "PACKED = 0\nRANGES = 4 * BLOCK\n")
