"""`localtensor compare`: a torchrun script compared with another, or with itself on fewer ranks."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from localtensor.errors import LocalTensorError, NoRanks, NoSuchScript
from localtensor.runner.torchrun import TorchrunOptions, checked_script
from strategies.base.options import BadOption
from strategies.base.progress import error_console
from strategies.base.signals import EXIT_CLEAN, EXIT_NOTHING, EXIT_USAGE, EXIT_WRONG, print_error
from strategies.cli.options import CompareOptions, deliver_text, fail

if TYPE_CHECKING:
    from localtensor.testing.compare.comparison import Comparison

CALL = "localtensor compare"


def run(options: CompareOptions) -> int:
    """The exit code: 0 equal, 1 a divergence, 2 for invalid options, 3 if nothing was compared."""
    try:
        parallel = _script(options, options.script, options.ranks, "SCRIPT")
        reference = replace(parallel, ranks=1)
        if options.reference:
            reference = _script(options, options.reference, None, "--reference")
        if parallel == reference:
            problem = "the script would be compared with itself"
            raise BadOption(CALL, "-n", parallel.ranks, problem, f"Pass -n 2, or a reference: '{parallel.name} -n 4'.")
        mesh = _mesh(options, parallel.ranks)
        checked_script(parallel)
        _check_reference(reference)
    except (LocalTensorError, SyntaxError) as error:
        said = f"{CALL}: {error}." if isinstance(error, SyntaxError) else str(error)
        return fail(said.replace("localtensor run:", f"{CALL}:", 1).replace("run:", f"{CALL}:", 1), EXIT_USAGE)
    from localtensor.testing.compare.scripts import compare_scripts  # lazy: options are refused without torch

    console = error_console()
    shown = console.is_terminal and not options.quiet
    try:
        with console.status("the reference") as status:
            done = compare_scripts(
                reference, parallel, mesh=mesh, progress=lambda what: status.update(what) if shown else None
            )
    except LocalTensorError as error:
        return fail(str(error), EXIT_NOTHING)
    files = [(options.json, as_json(done))] if options.json is not None else []
    files += [(options.html, done.as_html())] if options.html is not None else []
    code = deliver_text(f"{done}\n", files, EXIT_CLEAN if done.divergence is None else EXIT_WRONG)
    if options.html is not None and code != EXIT_NOTHING:
        print_error(f"{CALL}: the page is in {options.html}.")
    return code


def _check_reference(script: TorchrunOptions) -> None:
    """Raises as `checked_script`, with the option that names the reference."""
    try:
        checked_script(script)
    except (NoSuchScript, NoRanks) as error:
        _, _, problem = str(error).split(": ", 2)
        raise LocalTensorError(f"{CALL}: --reference: {problem}") from None


def as_json(done: Comparison) -> str:
    """The text of the file that --json writes."""
    return json.dumps(done.as_json(), indent=1) + "\n"


def _script(options: CompareOptions, text: str, ranks: int | None, option: str) -> TorchrunOptions:
    """A script by its text: `-n` or `--ranks` before `--` is its number of ranks, all other words are its own arguments."""
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        problem = "it names no script" if not text.strip() else str(error)
        raise BadOption(CALL, option, repr(text), problem, 'Pass "train.py -n 1".') from None
    own: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            own += words
            break
        if word not in ("-n", "--ranks"):
            own.append(word)
            continue
        if not words or not words[0].isdecimal():
            raise BadOption(CALL, option, repr(text), f"{word} needs a number of ranks", 'Pass "train.py -n 1".')
        if ranks is not None and option == "SCRIPT":
            raise BadOption(CALL, option, repr(text), "it has a second number of ranks", "Pass -n once.")
        ranks = int(words.pop(0))
    arguments = (*own, *options.arguments)
    count = 1 if ranks is None else ranks
    return TorchrunOptions(name, arguments, count, on=options.on, seed=options.seed, timeout=options.timeout)


def _mesh(options: CompareOptions, ranks: int) -> dict[str, int] | None:
    if not options.mesh:
        return None
    mesh: dict[str, int] = {}
    for part in options.mesh.split(","):
        name, _, size = part.strip().partition("=")
        if not name or not size.isdecimal() or int(size) < 1 or name in mesh:
            raise BadOption(CALL, "--mesh", repr(options.mesh), f"{part!r} is no axis", "Pass --mesh dp=2,tp=4.")
        mesh[name] = int(size)
    count = math.prod(mesh.values())
    if count != ranks:
        problem = f"it has {count} ranks, and the parallel script has {ranks}"
        raise BadOption(CALL, "--mesh", repr(options.mesh), problem, f"Pass axes of {ranks} ranks.")
    return mesh
