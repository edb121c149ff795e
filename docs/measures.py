"""How much there is to read: ``python docs/measures.py [TREE ...]``, a table with a column for each tree.

Lines are those without blanks, comments and docstrings. A parameter list is that of one function, with ``self``.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(folder: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield the files of a folder, with text and tree."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        yield path, text, ast.parse(text)


def lines(text: str, tree: ast.Module) -> int:
    """Count the lines of a file with code."""
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def measures(root: Path) -> dict[str, str]:
    """Return what is measured of a tree, by name."""
    found = {
        f"lines of {name}/": f"{sum(lines(t, x) for _, t, x in parsed(root / name)):,}"
        for name in ("cpuopt", "tests", "benchmarks")
    }
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    found["words of documentation"] = f"{sum(len(p.read_text().split()) for p in pages):,}"
    functions: list[tuple[str, Function]] = []
    classes: Counter[str] = Counter()
    typed: list[str] = []
    for path, text, tree in parsed(root / "cpuopt"):
        where = str(path.relative_to(root / "cpuopt"))
        typed += [where] if "float32" in text and where != "ops/storage.py" else []
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, Function):
                functions.append((f"{where}: {node.name}", node))
    found["modules of cpuopt/"] = str(len([*parsed(root / "cpuopt")]))
    found["class names that occur more than once"] = str(sum(n > 1 for n in classes.values()))
    found["functions called step"] = str(sum(node.name == "step" for _, node in functions))
    name, longest = max(functions, key=lambda f: (f[1].end_lineno or 0) - f[1].lineno)
    found["longest function, lines"] = f"{(longest.end_lineno or 0) - longest.lineno + 1} ({name})"

    def parameters(f: Function) -> int:
        return len(f.args.args) + len(f.args.kwonlyargs) + len(f.args.posonlyargs)

    name, longest = max(functions, key=lambda f: parameters(f[1]))
    found["longest parameter list"] = f"{parameters(longest)} ({name})"
    found["files that say float32"] = str(len(typed))
    return found


def main() -> None:
    """Print the table."""
    roots = [Path(a) for a in sys.argv[1:]] or [Path(__file__).parents[1]]
    columns = [measures(root) for root in roots]
    print("| | " + " | ".join(str(root) for root in roots) + " |")
    print("| --- |" + " ---: |" * len(roots))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main()
