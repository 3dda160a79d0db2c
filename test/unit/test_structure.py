"""The structure that ARCHITECTURE.md describes: sizes, imports, names, kernels and the paths of the map.

import-linter (pyproject.toml) checks the layers. What it cannot see is checked here: the two modules that are
single files, and everything that is not an import.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("rwkv_batch", "routes", "app.py", "state_pool.py")
IMPORTING = (*PRODUCT, "demo")  # what makes the bundled model may import the product
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FOLDER = {"rwkv_batch": 1500, "routes": 2500}  # of routes a folder is a whole family
MOST_PARAMETERS = 7  # of a function; self and cls are not counted
MOST_ATTRIBUTES = 15  # of a class that is no record
MOST_IN_ALL = 20  # with those of the classes of ours that it is made from
# Their fields are those of a message, of a body of a request or reply, or of a struct that kernels read.
RECORD_BASES = {"Struct", "BaseModel", "TypedDict", "Structure"}
OPTIONS = {"EngineConfig", "FrontendConfig", "ServerConfig"}  # of the command line, one field each
NOT_OURS = ROOT / "routes/page/static/vendor"  # as others distribute it
# What tests may use of libraries: a named tuple's, ctypes', the system's, torch's, the OpenAI SDK's.
OF_LIBRARIES = {"_replace", "_obj", "_exit", "_sleep", "_request_id"}
BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
MAP = ROOT / "ARCHITECTURE.md"
# The single files, and what of ours they may import.
SINGLE_FILES = {"state_pool.py": ("rwkv_batch/state", "rwkv_batch/ops", "rwkv_batch/config")}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def files(*places: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    found = [ROOT / place for place in places]
    inside = (file for place in found for file in ([place] if place.is_file() else place.rglob("*")))
    return sorted(file for file in inside if file.suffix in suffixes and NOT_OURS not in file.parents)


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Imports, classes, functions and calls of a file, inside functions too."""
    wanted = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Call)
    return [
        node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, wanted)
    ]


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def package(file: Path) -> str:
    """The folder of a file. A file that lies in a folder of packages, or in none, is a package of its own."""
    folder = file.parent
    return name_of(file) if folder in (ROOT, ROOT / "rwkv_batch", ROOT / "routes") else name_of(folder)


@cache
def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


@cache
def imports(file: Path) -> set[Path]:
    """The files of the product and of the bundled model that a file imports, inside functions too."""
    names: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{name_of(file)} has a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if module_file(name) else node.module for name in inside}
    return {module_file(name) for name in names} & set(files(*IMPORTING)) - {file}


def assert_none(found: Iterable | dict) -> None:
    lines = [f"{k}: {v}" for k, v in found.items()] if isinstance(found, dict) else sorted(found)
    assert not lines, "\n".join(lines)


def assert_no_circle(edges: Iterable[tuple[str, str]]) -> None:
    graph = defaultdict(set)
    for importer, imported in edges:
        if importer != imported:
            graph[importer].add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_no_circle_of_files():
    assert_no_circle((name_of(a), name_of(b)) for a in files(*IMPORTING) for b in imports(a))


def test_no_circle_of_folders():
    assert_no_circle((package(a), package(b)) for a in files(*IMPORTING) for b in imports(a))


def test_the_product_runs_without_what_is_around_it():
    modules = (
        (name_of(file), node.module if isinstance(node, ast.ImportFrom) else alias.name)
        for file in files(*PRODUCT)
        for node in nodes(file)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    )
    around = ("demo", "bench", "test")
    assert_none({f"{file}: {module}" for file, module in modules if str(module).split(".")[0] in around})


@pytest.mark.parametrize(("file", "allowed"), SINGLE_FILES.items())
def test_a_single_file_keeps_to_its_layer(file, allowed):
    foreign = {name for other in imports(ROOT / file) if not (name := name_of(other)).startswith(allowed)}
    assert_none(foreign)


def test_no_file_is_too_long():
    suffixes = (".py", ".cu", ".cuh", ".js", ".css", ".html")
    everything = files("cuda", "bench", "demo", "test", *PRODUCT, suffixes=suffixes)
    long = {name_of(file): count for file in everything if (count := lines(file)) > MOST_LINES_OF_A_FILE}
    assert_none(long)


@pytest.mark.parametrize("place", MOST_LINES_OF_A_FOLDER)
def test_no_folder_of_a_package_is_too_long(place):
    """Each without its subfolders, which are packages of their own."""
    folders: Counter[str] = Counter()
    for file in files(place):
        folders[name_of(file.parent)] += lines(file)
    long = {name: count for name, count in folders.items() if count > MOST_LINES_OF_A_FOLDER[place]}
    assert_none(long)


def test_no_folder_has_one_module():
    """One with folders of its own is their place."""
    folders = {file.parent for file in files("rwkv_batch", "routes")}
    inside = {
        folder: [each for each in folder.iterdir() if not each.name.startswith("__")] for folder in folders
    }
    assert_none(name_of(folder) for folder, found in inside.items() if len(found) < 2)


def functions(file: Path) -> list[Function]:
    return [node for node in nodes(file) if isinstance(node, Function)]


def parameters(function: Function) -> list[str]:
    given = function.args
    rest = [each for each in (given.vararg, given.kwarg) if each]
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *rest]
    return [each.arg for each in named if each.arg not in ("self", "cls")]


def test_no_function_has_too_many_parameters():
    found = {
        f"{name_of(file)} {function.name}": len(parameters(function))
        for file in files(*PRODUCT)
        for function in functions(file)
        if len(parameters(function)) > MOST_PARAMETERS
    }
    assert_none(found)


def attributes(of: ast.ClassDef) -> set[str]:
    """Annotated fields, and what methods store in self."""
    fields = {ast.unparse(node.target) for node in of.body if isinstance(node, ast.AnnAssign)}
    stores = (n for n in ast.walk(of) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return fields | {node.attr for node in stores if ast.unparse(node.value) == "self"}


def bases(of: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """The names of all classes that it is made from."""
    names = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in of.bases}
    return names.union(*(bases(classes[name], classes) for name in names if name in classes))


def is_frozen(of: ast.ClassDef) -> bool:
    return any(re.match(r"dataclass\(.*frozen=True", ast.unparse(each)) for each in of.decorator_list)


def is_record(of: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether its fields are those of something else: of a message, a body, the options, or a checkpoint."""
    of_tensors = [
        re.search(r"(Tensors?|Matrix|Norm)\b", ast.unparse(node.annotation)) is not None
        for node in of.body
        if isinstance(node, ast.AnnAssign)
    ]
    weights = is_frozen(of) and bool(of_tensors) and sum(of_tensors) >= 0.9 * len(of_tensors)
    options = is_frozen(of) and of.name in OPTIONS
    return weights or options or bool(RECORD_BASES & bases(of, classes))


def class_variables(of: ast.ClassDef) -> set[str]:
    """Names that its body assigns without an annotation."""
    targets = (target for node in of.body if isinstance(node, ast.Assign) for target in node.targets)
    return {name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)}


def test_no_class_has_too_many_attributes():
    """Neither of its own nor with those that it inherits, where a constant of the class is one more."""
    every = {
        node.name: (name_of(file), node)
        for file in files(*PRODUCT)
        for node in nodes(file)
        if isinstance(node, ast.ClassDef)
    }
    classes = {name: node for name, (_, node) in every.items()}
    found = {}
    for name, (file, node) in every.items():
        whole = [classes[each] for each in (name, *bases(node, classes)) if each in classes]
        in_all = set[str]().union(*(attributes(each) | class_variables(each) for each in whole))
        too_many = len(attributes(node)) > MOST_ATTRIBUTES or len(in_all) > MOST_IN_ALL
        if too_many and not is_record(node, classes):
            found[f"{file} {name}"] = f"{len(attributes(node))} of its own, {len(in_all)} in all"
    assert_none(found)


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Of a function, without those of the functions inside it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        yield (node := waiting.pop())
        if not isinstance(node, Function | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def displays(function: Function) -> set[str]:
    """Names to which it gives a tuple or a list that it writes out."""
    found = set()
    for node in own_nodes(function):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            value = getattr(node, "value", None)
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if both else [(target, value)]
            found |= {
                name.id
                for name, given in pairs
                if isinstance(name, ast.Name) and isinstance(given, (ast.Tuple, ast.List))
            }
    return found


def test_no_call_is_given_a_tuple_that_was_just_made():
    """Its members are arguments: where they are written one sees what each of them is."""
    assert_none(
        f"{name_of(file)}:{call.lineno} {ast.unparse(call)[:60]}"
        for file in files(*PRODUCT)
        for function in functions(file)
        for call in own_nodes(function)
        if isinstance(call, ast.Call)
        for given in call.args
        if isinstance(given, ast.Starred)
        if isinstance(given.value, (ast.Tuple, ast.List))
        or (isinstance(given.value, ast.Name) and given.value.id in displays(function))
    )


def test_nothing_is_cast():
    found = {
        name_of(file)
        for file in files(*PRODUCT)
        for node in nodes(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "cast"
    }
    assert_none(found)


def _opens_text(call: ast.Call) -> bool:
    """Whether it opens, reads or writes a text file."""
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if method else getattr(call.func, "id", "")
    if name in ("read_text", "write_text", "TextIOWrapper"):
        return True
    temporary = name in ("NamedTemporaryFile", "TemporaryFile")
    if (not temporary and name not in ("open", "fdopen")) or ast.unparse(call.func) == "os.open":
        return False
    place = 0 if temporary or (method and name == "open") else 1
    mode = next((k.value for k in call.keywords if k.arg == "mode"), None)
    mode = mode or (call.args[place] if len(call.args) > place else None)
    return "b" not in ast.literal_eval(mode) if mode else not temporary


def test_every_text_file_is_opened_with_its_encoding():
    """Without one it is read in that of the locale, which is GBK for many users."""
    assert_none(
        f"{name_of(file)}:{node.lineno} names no encoding"
        for file in files(*PRODUCT, "demo", "bench", "deploy", "hip")
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and _opens_text(node)
        and "encoding" not in {k.arg for k in node.keywords}
    )


def test_what_programs_say_is_read_in_a_named_encoding():
    assert_none(
        f"{name_of(file)}:{node.lineno} names no encoding"
        for file in files(*PRODUCT)
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and {"text", "universal_newlines"} & {k.arg for k in node.keywords}
        and "encoding" not in {k.arg for k in node.keywords}
        and getattr(node.func, "attr", "") in ("run", "Popen", "check_output")
    )


def _private_names(file: Path) -> Iterator[tuple[int, str]]:
    """Lines and names of members with one underscore that a file takes of anything but its own objects."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            if not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            named = (each.value for each in node.args[:2] if isinstance(each, ast.Constant))
            yield from ((node.lineno, str(name)) for name in named)


def test_no_test_reads_a_private_member_of_the_product():
    assert_none(
        f"{name_of(file)}:{line}: {name}"
        for file in files("test")
        for line, name in _private_names(file)
        if re.match(r"_[a-z]", name) and name not in OF_LIBRARIES
    )


def test_no_two_test_files_share_a_name():
    """pytest imports them by their names alone."""
    names = Counter(file.name for file in files("test") if file.name.startswith("test_"))
    assert_none({name: count for name, count in names.items() if count > 1})


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = defaultdict(list)
    for file in files("bench", "demo", *PRODUCT):
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(file))
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert_none(shared)


def test_a_docstring_begins_with_a_sentence_that_is_whole_by_itself():
    """Not with one that goes on from the name: "As X does", "See X", "The same with Y"."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert_none(
        f"{name_of(file)}:{node.lineno} {text.splitlines()[0]}"
        for file in files(*PRODUCT)
        for node in nodes(file)
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if re.match(r"(As|See|The same)\b", text)
    )


@pytest.mark.parametrize("kernel", files("cuda", suffixes=(".cu",)), ids=lambda file: file.stem)
def test_a_kernel_names_its_test(kernel):
    """The header names test/kernels/test_NAME.py; kernels whose names begin with NAME may share it."""
    header = re.match(r"(//.*\n)*", kernel.read_text(encoding="utf-8"))
    named = re.findall(r"test/kernels/test_(\w+)\.py", header[0] if header else "")
    own = [name for name in named if kernel.stem.startswith(name)]
    assert own and all((ROOT / f"test/kernels/test_{name}.py").is_file() for name in named), named


def paths(text: str) -> list[str]:
    """What is in backticks and looks like a path or a pattern of paths; not Class.method."""
    quoted = re.findall(r"`([^`\s]+)`", text)
    places = [name for name in quoted if re.fullmatch(r"\.?[\w*][\w*./-]*", name)]
    return [name for name in places if "/" in name or re.search(r"^[^A-Z].*\.\w+$", name)]


def test_every_path_of_the_map_exists():
    found = paths(MAP.read_text(encoding="utf-8"))
    assert len(found) > 50
    assert_none({name for name in found if not any(ROOT.glob(name))})


def test_every_method_of_the_map_exists():
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", MAP.read_text(encoding="utf-8")))
    classes = [node for file in files(*PRODUCT) for node in nodes(file) if isinstance(node, ast.ClassDef)]
    methods = {f"{c.name}.{f.name}" for c in classes for f in c.body if isinstance(f, ast.FunctionDef)}
    assert named and not named - methods, named - methods


def test_the_map_names_every_module():
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {package: set(re.findall(r"`([^`]+)`", modules)) for package, modules in rows}
    modules: dict[str, set[str]] = defaultdict(set)
    for file in files("rwkv_batch", "routes", suffixes=(".py", ".js")):
        if file.name != "__init__.py":
            modules[name_of(file.parent)].add(file.stem)
    assert_none(
        {
            package: f"not on the map: {sorted(names - listed.get(package, set()))}, "
            f"only there: {sorted(filter(str.isidentifier, listed.get(package, set()) - names))}"
            for package, names in modules.items()
            if names ^ {name for name in listed.get(package, set()) if name.isidentifier()}
        }
    )
