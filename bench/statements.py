#!/usr/bin/env python3
"""Count the statements of the product's Python: rwkv_batch, routes, app.py and state_pool.py.

Statements are counted in the syntax tree, so formatting and comments change nothing. Docstrings do not count.

    python bench/statements.py [CHECKOUT]        # this checkout without an argument
    python bench/statements.py --files           # one line per file, the largest first
"""

import argparse
import ast
from pathlib import Path

PRODUCT = ("rwkv_batch", "routes", "app.py", "state_pool.py")


def product_files(root: Path) -> list[Path]:
    """The Python files of the product in a checkout, sorted by path."""
    found = [root / place for place in PRODUCT]
    return sorted(file for place in found for file in ([place] if place.is_file() else place.rglob("*.py")))


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a bare string."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def statements(source: str) -> int:
    """Statements of a module, docstrings left out."""
    nodes = ast.walk(ast.parse(source))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--files", action="store_true", help="one line per file")
    options = parser.parse_args()
    counts = {file: statements(file.read_text(encoding="utf-8")) for file in product_files(options.checkout)}
    if options.files:
        for file, count in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{count:6} {file.relative_to(options.checkout)}")
    print(f"{sum(counts.values())} statements in {len(counts)} files")


if __name__ == "__main__":
    main()
