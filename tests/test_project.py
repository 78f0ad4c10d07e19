"""Rules that hold over all files: shared blocks, flags, line budgets, imports, banners, docs, pins."""

import ast
import importlib
import io
import re
import shlex
import sys
import textwrap
import tokenize
from dataclasses import fields
from pathlib import Path

import pytest
import tiny_runs

import common

ROOT = common.ROOT
MODULES = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
SCRIPTS = [
    name for name, tree in TREES.items() if any(isinstance(n, ast.ClassDef) and n.name == "Args" for n in tree.body)
]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md")])

METRICS_PAGE = ROOT / "docs" / "metrics.md"

each_script = pytest.mark.parametrize("script", SCRIPTS)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def source(name: str) -> str:
    return MODULES[name].read_text(encoding="utf-8")


def test_the_scripts_are_found():
    assert {"sft", "grpo"} <= set(SCRIPTS) and "common" not in SCRIPTS and "rewards" not in SCRIPTS


# ---------------------------------------------------------------------------------------------------- shared blocks


def shared_blocks(name: str) -> dict[str, str]:
    """Name of a block between `# [shared: name]` and `# [/shared]` -> its syntax tree as text."""
    text = source(name)
    found = re.findall(r"^ *# \[shared: ([^\]]+)\]\n(.*?)^ *# \[/shared\]$", text, re.MULTILINE | re.DOTALL)
    assert len(found) == text.count("[shared:") == text.count("[/shared]"), f"{name}.py: a shared block is not closed"
    return {block: ast.dump(ast.parse(textwrap.dedent(body))) for block, body in found}


def test_blocks_of_one_name_are_the_same_in_all_scripts():
    versions: dict[str, dict[str, list[str]]] = {}
    for script in SCRIPTS:
        for block, tree in shared_blocks(script).items():
            versions.setdefault(block, {}).setdefault(tree, []).append(script)
    different = {block: list(trees.values()) for block, trees in versions.items() if len(trees) > 1}
    assert different == {}
    alone = [block for block, trees in versions.items() if sum(map(len, trees.values())) < 2]
    assert alone == [] and "learning_rate_at" in versions


# ------------------------------------------------------------------------------------------------------------ flags


def flag_help(script: str) -> dict[str, str | None]:
    """Field of Args -> the string below it."""
    (args,) = [n for n in TREES[script].body if isinstance(n, ast.ClassDef) and n.name == "Args"]
    helps: dict[str, str | None] = {}
    for node, below in zip(args.body, [*args.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and below.value.value
            helps[node.target.id] = text or None
    return helps


def args_read(name: str) -> set[str]:
    """Every x that a module reads as `args.x` or `self.args.x`."""
    reads = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    return {n.attr for n in reads if getattr(n.value, "id", None) == "args" or getattr(n.value, "attr", None) == "args"}


@each_script
def test_every_flag_has_a_help_string_and_is_read(script):
    helps = flag_help(script)
    assert helps.keys() == {field.name for field in fields(importlib.import_module(script).Args)}
    assert [name for name, text in helps.items() if not text] == []
    assert set(helps) - args_read(script) - args_read("common") == set()


@each_script
def test_every_flag_that_a_script_reads_exists(script):
    assert args_read(script) - flag_help(script).keys() == set()


@each_script
def test_there_are_at_most_52_flags(script):
    assert len(flag_help(script)) <= (60 if script == "ppo_rlhf" else 52)


MAY_DIFFER = {
    "model": "what `toy` stands for: a fresh model in sft.py, the shipped checkpoint elsewhere",
    "answer_column": "the text to imitate in sft.py, the right answer for reward functions elsewhere",
    "steps": "optimizer steps with a default from --epochs offline, rollouts online",
}


def test_the_same_flag_has_the_same_help_in_all_scripts():
    helps: dict[str, set[str | None]] = {}
    for script in SCRIPTS:
        for name, text in flag_help(script).items():
            helps.setdefault(name, set()).add(text)
    assert {name: texts for name, texts in helps.items() if len(texts) > 1 and name not in MAY_DIFFER} == {}
    assert [name for name in MAY_DIFFER if len(helps[name]) < 2] == []  # the list holds no more than it must


# ----------------------------------------------------------------------------------------------------- line budgets

MOST_LINES = {
    "sft": 320, "reward_model": 380, "process_reward_model": 320, "best_of_n": 300, "dpo_family": 480, "grpo": 540,
    "rloo_remax": 480, "ppo_rlhf": 620,
}  # fmt: skip
MOST_CODE_LINES_OF_COMMON = 920


def code_lines(text: str) -> int:
    """Lines with code: no blank lines, no comments, no docstrings (nor the help strings of flags)."""
    tree, lines = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines - {text.count("\n") + 1})  # the end marker stands on a line of its own


SAMPLE = '''"""Doc
string."""

# comment
x = [
    1,  # one
]


def f():
    """Doc."""
    return "a"  # the fifth
'''


def test_code_lines_are_counted_without_comments_and_docstrings():
    assert code_lines(SAMPLE) == 5


@each_script
def test_a_script_keeps_its_line_budget(script):
    assert len(source(script).splitlines()) <= MOST_LINES[script]


@each_script
def test_the_docstring_of_a_script_has_at_most_30_lines(script):
    assert len(ast.get_docstring(TREES[script]).splitlines()) <= 30


def test_common_keeps_its_line_budget():
    assert code_lines(source("common")) <= MOST_CODE_LINES_OF_COMMON


# ---------------------------------------------------------------------------------------------------------- imports

OURS = {*MODULES, "toy", "tests", "benchmarks", "docs"}


def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names.add(node.module.split(".")[0])
    return names


def required() -> set[str]:
    """Import names of the packages in requirements.txt, and what comes with torch or transformers for certain."""
    names = {line.split("==")[0].replace("-", "_") for line in (ROOT / "requirements.txt").read_text().splitlines()}
    return names | {"jinja2", "huggingface_hub"}


@each_script
def test_a_script_imports_common_and_nothing_else_of_ours(script):
    assert imports(TREES[script]) & OURS == {"common"}


def test_common_imports_the_toy_inside_functions_alone():
    inside = set()
    for node in ast.walk(TREES["common"]):
        if isinstance(node, ast.FunctionDef):
            inside |= imports(node)
    assert inside & OURS == {"toy"}
    assert imports(TREES["common"]) & OURS == {"toy"}
    at_the_top = [
        n for n in ast.walk(TREES["common"]) if isinstance(n, ast.Import | ast.ImportFrom) and n.col_offset == 0
    ]
    assert at_the_top and imports(ast.Module(at_the_top, [])) & OURS == set()


def test_the_reward_file_imports_nothing_of_ours():
    assert imports(TREES["rewards"]) & OURS == set()


@pytest.mark.parametrize("module", MODULES)
def test_every_other_import_is_in_the_standard_library_or_the_requirements(module):
    assert imports(TREES[module]) - OURS - set(sys.stdlib_module_names) - required() == set()


# ---------------------------------------------------------------------------------------------------------- banners

BANNERS = [
    "1 setup", "2 data", "3 models", "4 loop", "4a rollout", "4b rewards", "4c reference and value log-probs",
    "4d advantages", "4e update", "4f log", "4g evaluate and save",
]  # fmt: skip
ALWAYS = {"1 setup", "2 data", "3 models", "4 loop", "4e update", "4f log", "4g evaluate and save"}
TRAINING = [script for script in SCRIPTS if script != "best_of_n"]


@pytest.mark.parametrize("script", TRAINING)
def test_the_numbered_banners_of_main_stand_in_order(script):
    (main,) = [n for n in TREES[script].body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    body = source(script).splitlines()[main.lineno - 1 : main.end_lineno]
    found = [match[1] for line in body if (match := re.fullmatch(r" +# (\d[a-z]? .+)", line))]
    found = [re.sub(r"^4c reference and old log-probs$", "4c reference and value log-probs", name) for name in found]
    assert found == [name for name in BANNERS if name in found]
    assert set(found) >= ALWAYS
    if "group_size" in flag_help(script):
        assert found == BANNERS


COMMON_SECTIONS = ["tensors", "text", "distributed", "sampling", "runs"]


def test_common_has_its_five_sections_in_order():
    assert re.findall(r"^# -+ (\w+)$", source("common"), re.MULTILINE) == COMMON_SECTIONS


# ------------------------------------------------------------------------------------------------------- docstrings


@pytest.mark.parametrize("module", ["common", "rewards", *SCRIPTS])
def test_public_functions_and_classes_have_docstrings(module):
    public = [n for n in TREES[module].body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
    public += [
        n for c in public if isinstance(c, ast.ClassDef) for n in c.body
        if isinstance(n, ast.FunctionDef) and n.name[0] != "_"
    ]  # fmt: skip
    bare = [n.name for n in public if ast.get_docstring(n) is None]
    assert set(bare) <= {"main", "Args"} and ast.get_docstring(TREES[module])


@pytest.mark.parametrize("module", MODULES)
def test_no_file_has_a_note_to_its_authors(module):
    assert re.findall(r"\b(?:TODO|FIXME|XXX)\b", source(module)) == []


# ------------------------------------------------------------------------------------------------------------- pins


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    found = dict(re.fullmatch(r"([\w-]+)==([\w.]+)", line).groups() for line in lines)
    assert len(found) == len(lines)
    return found


def test_gpu_requirements_are_the_cpu_ones_and_vllm():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert gpu.items() >= cpu.items() and gpu.keys() - cpu.keys() == {"vllm"}
    assert pins("requirements-test.txt").keys().isdisjoint(gpu)


# ------------------------------------------------------------------------------------------------------------- docs


def test_every_script_has_a_page():
    expected = {"README.md", "metrics.md", *(f"{script}.md" for script in SCRIPTS)}
    assert {page.name for page in PAGES} >= expected


OTHER_FLAGS = {  # of other programs
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--standalone",
    "--help", "--extra-index-url", "--no-deps",
}  # fmt: skip
RUN_FILES = {
    "args.json", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json", "complete.json", "state.json",
    "config.json", "model.safetensors", "tokenizer.json", "model", "checkpoints", "step_N",
}  # fmt: skip
USER_FILES = re.compile(r"(my|train|test|data)\w*\.(py|jsonl|parquet)|DIR|\.\.\.|…|runs/.*|\.venv/.*")


METRIC_FAMILIES = ("eval/", "rewards/", "completions/", "clip_ratio/", "sampler/", "seconds/", "logps/")


def code_of(page: Path) -> tuple[list[str], list[str]]:
    """(inline code, lines of fenced blocks) of a page; a line that ends in a backslash goes on with the next."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fence = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = "\n".join(fence.findall(text))
    return re.findall(r"`([^`\n]+)`", fence.sub("", text)), [line.strip() for line in blocks.splitlines()]


def commands(page: Path) -> list[list[str]]:
    """The words of every command that a page names, in a block or inline, comments and prompts removed."""
    inline, fenced = code_of(page)
    starts = re.compile(r"^(\$ )?(\w+=\S+ )*(\.venv/bin/)?(python3?|torchrun|make) ")
    return [
        shlex.split(re.sub(r"^\$ ", "", line), comments=True)
        for line in [*fenced, *inline] if starts.match(line + " ")
    ]  # fmt: skip


def flags_of(path: Path) -> set[str]:
    """The flags of a program with a class Args."""
    classes = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
    fields_of = [
        node.target.id for c in classes if c.name == "Args" for node in c.body if isinstance(node, ast.AnnAssign)
    ]
    return {f"--{no}{name.replace('_', '-')}" for name in fields_of for no in ("", "no-")}


def known_flags() -> set[str]:
    return OTHER_FLAGS.union(*map(flags_of, [*MODULES.values(), *ROOT.glob("benchmarks/*.py")]))


@each_page
def test_flags_named_in_docs_exist(page):
    inline, fenced = code_of(page)
    named = {flag for code in [*inline, *fenced] for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    assert named - known_flags() == set()


@each_page
def test_commands_named_in_docs_work(page):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        words = [word for word in words if not re.match(r"^\w+=", word)]
        program, rest = Path(words[0]).name, words[1:]
        if program == "make":
            assert set(rest) <= targets, words
            continue
        file = next((word for word in rest if word.endswith(".py")), None)
        if file is None:  # the bare name of a program, `python -m pytest` and the like
            assert not rest or rest[0].startswith("-"), words
            continue
        assert (ROOT / file).is_file(), words
        given = [word for word in rest[rest.index(file) + 1 :] if word not in ("...", "…")]
        if file.startswith("benchmarks/"):
            assert {word for word in given if word.startswith("--")} <= flags_of(ROOT / file), words
        elif Path(file).stem in SCRIPTS and "--help" not in given:
            assert common.parse_args(importlib.import_module(Path(file).stem).Args, given), words


@each_page
def test_names_of_code_in_docs_exist(page):
    """`common.pad` is an attribute of that module; `b_mask` stands somewhere in the code."""
    inline, _ = code_of(page)
    code = "\n".join(path.read_text(encoding="utf-8") for path in [*MODULES.values(), *ROOT.glob("toy/*.py")])
    for name in inline:
        if match := re.fullmatch(r"(\w+)\.(\w+)(\(.*\))?", name):
            module, attribute, _ = match.groups()
            assert module not in MODULES or attribute == "py" or hasattr(importlib.import_module(module), attribute), (
                name
            )
        elif re.fullmatch(r"[a-z]\w*_\w+", name):
            assert re.search(rf"\b{name}\b", code), name


@each_page
def test_files_named_in_docs_exist(page):
    inline, _ = code_of(page)
    looks_like_a_file = re.compile(r"[\w./-]+\.(?:py|md|txt|toml|jsonl?|parquet|safetensors|png|svg)|[\w.-]+/[\w./-]*")
    missing = []
    for code in inline:
        name = code.split(":")[0].split("=")[0]
        if not looks_like_a_file.fullmatch(name) or USER_FILES.fullmatch(name) or Path(name).name in RUN_FILES:
            continue
        if not (ROOT / name).exists() and not (page.parent / name).exists():
            missing.append(code)
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing += [link for link in links if not (page.parent / link).exists()]
    assert [name for name in missing if not name.startswith(METRIC_FAMILIES)] == []


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> dict[str, set[str]]:
    """script -> every metric name that a tiny run of it logs, with --eval-every and all roles."""
    folder = tmp_path_factory.mktemp("metrics")
    stub = folder / "stub.py"
    stub.write_text("def stub(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    judge = tiny_runs.toy_reward_model(folder / "judge")
    settings = {"sft": {}, "grpo": {"reward": [f"{stub}:stub"], "reward_model": [str(judge)]}}
    names = {}
    for script, changes in settings.items():
        run = tiny_runs.run(script, folder, script, steps=2, eval_every=1, eval_samples=4, **changes)
        names[script] = {general(key) for line in tiny_runs.lines(run / "metrics.jsonl") for key in line}
    return names


def general(name: str) -> str:
    """The name with its variable part replaced."""
    return re.sub(r"^rewards/[^/]+/mean$", "rewards/NAME/mean", re.sub(r"^eval/pass@\w+$", "eval/pass@K", name))


def metrics_described(page: Path) -> dict[str, str]:
    """The names in backticks in the first column of a page's tables -> the second column."""
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return {general(name): row[2].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[1])}


def test_the_metrics_page_describes_exactly_what_is_logged(logged):
    described = metrics_described(METRICS_PAGE)
    assert described.keys() == set().union(*logged.values())
    for name, scripts in described.items():
        if scripts == "all" or re.fullmatch(r"\w+\.py(, \w+\.py)*", scripts):
            named = set(logged) if scripts == "all" else {script.removesuffix(".py") for script in scripts.split(", ")}
            assert named == {script for script, names in logged.items() if name in names}, name
