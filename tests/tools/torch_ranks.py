"""torch's own tests of several processes on rank threads, beside gloo processes.

`python -m tests.tools.torch_ranks [FILE ...]`: a FILE is named as in torch's test/distributed, such as fsdp/test_fsdp_core.py; without one,
all of `FOLDERS` and `FILES`, of torch 2.6.0 as Debian packs it.  Their devices are set to cpu.  What passes on processes and not on rank
threads is listed with its reason, and so is what rank threads leave to processes.  Outcomes are kept in `--kept`, and what is there does
not run again.  What is skipped because of the number of ranks runs with another.  The processes take hours: `--reference failed` runs there only what does not pass on rank threads, and
`--fork` starts them with torch imported, in a tenth of the time.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import TestCase

from localtensor.torch_suites.bases import is_suite
from localtensor.torch_suites.rank_run import TorchsOwnWay
from tests.tools.torch_files import FAILED, PASSED, SKIPPED, Kept, Verdict, debian_sources, limited, read

FOLDERS = ("_tensor", "tensor", "_composable", "checkpoint", "fsdp", "optim", "pipelining", "algorithms")
FILES = ("test_c10d_*.py", "test_functional_api.py", "test_device_mesh.py", "test_distributed_spawn.py")
WAYS = ("threads", "processes")
LEFT = "left to processes"
LIMITS = {"threads": 300, "processes": 240}  # seconds for one test
RANKS = 3  # WORLD_SIZE of torch's distributed_test
OTHER_RANKS = {"world size of 4": 4, "small world size": 8}
"""The number of ranks for a test that torch skips with fewer, by what its reason says."""

ENVIRONMENT = {"BACKEND": "gloo", "PYTHONDONTWRITEBYTECODE": "1"}  # of torch's distributed_test
ON_CPU = (
    (r"skip_if_lt_x_gpu\((\d+)\)", r"skip_if_lt_x_gpu(\1, allow_cpu=True)"),
    (r"(?m)^ *@(common_distributed\.)?skip_if_no_gpu\n", ""),
    (r"not TEST_(CUDA|MULTIGPU)\b", "False"),
    (r"torch\.cuda\.device_count\(\) < self\.world_size", "False"),
    (r"\brequires_nccl\b", "requires_gloo"),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
    (r"(rank:[^/\"]+)/cuda:[^\"]+", r"\1/cpu"),
    (r"f?\"cuda:(\d|\{[^\"]*\})\"", '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"\.cuda\((self\.rank|(dist\.get_)?rank(\(\))?|device_ids?|torch\.cuda\.current_device\(\))\)", ".cpu()"),
    (r"torch\.device\(\"cuda\"(, [\w.]+)?\)", 'torch.device("cpu")'),
    (r"\"cuda\"", '"cpu"'),
    (r"torch\.cuda\.current_device\(\)", 'torch.device("cpu")'),
    (r"torch\.cuda\.(synchronize|empty_cache|reset_peak_memory_stats)\(\)", "None"),
    (r"torch\.cuda\.set_device\(([^()]|\(\))*\)", "None"),
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r"% torch\.cuda\.device_count\(\)", "% 8"),
    (r"\btorch\.cuda\.device_count\(\)(?=\)| //)", "8"),
    (r"\.to\((self\.rank|rank|device_id)\)", ".cpu()"),
    (r"(def device\(self\)[^\n]*:\n +)return self\.rank", r'\1return torch.device("cpu")'),
    (r"return \"nccl\"", 'return "gloo"'),
    ("MultiProcContinousTest", "MultiProcContinuousTest"),
)
"""What makes a file of tests for GPUs one for the CPU: a pattern, and what takes its place."""


WITHOUT_GPU = """import torch
from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel
from torch.nn.parallel import DistributedDataParallel

fsdp_handle, ddp_init = _init_utils._init_device_handle, DistributedDataParallel.__init__


def handle(state, module, ignored_params, device_id):
    return fsdp_handle(state, module, ignored_params, torch.device("cpu") if device_id is None else device_id)


def init(self, module, device_ids=None, output_device=None, *args, **kwargs):
    ddp_init(self, module, None, None, *args, **kwargs)


fully_sharded_data_parallel._init_device_handle = handle
DistributedDataParallel.__init__ = init
torch.Tensor.pin_memory = lambda tensor, *device: tensor
torch.accelerator.device_count = lambda: 8  # what FSDPTest looks at
"""
"""A module for the tests: FSDP takes the first accelerator where no device is named, and DDP refuses the numbers of GPUs for modules on the CPU."""


class SuiteTests:
    """A plugin of pytest: only tests over torch's bases for several ranks run, each within a limit of seconds."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds

    def pytest_pycollect_makeitem(self, collector: Any, obj: object) -> list[Any] | None:
        if not isinstance(obj, type) or not issubclass(obj, TestCase):
            return None
        return None if is_suite(obj) or hasattr(collector.obj, "spawn_threads_and_init_comms") else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: object) -> Iterator[None]:
        try:
            with limited(self._seconds):
                return (yield)
        finally:
            for process in multiprocessing.active_children():
                process.kill()


def fork_processes() -> None:
    """From now on torch's base for several processes forks them.  Threads of ops do not survive that: an op uses one core."""

    def _spawn_processes(self: common_distributed.MultiProcessTestCase) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    torch.set_num_threads(1)
    common_distributed.MultiProcessTestCase._spawn_processes = _spawn_processes  # type: ignore[method-assign]


def verdicts(file: Path) -> dict[str, Verdict]:
    """The verdict of each test in a file of lines."""
    return {verdict.test: verdict for verdict in read(file)}


def on_cpu(text: str) -> str:
    """The text of a file of tests, with its devices set to cpu.

    >>> on_cpu('@skip_if_lt_x_gpu(2)\\nx.cuda().to("cuda")')
    '@skip_if_lt_x_gpu(2, allow_cpu=True)\\nx.cpu().to("cpu")'
    """
    for pattern, becomes in ON_CPU:
        text = re.sub(pattern, becomes, text)
    if re.search(r"common_fsdp|FullyShardedDataParallel|DistributedDataParallel|\breplicate\(", text):
        text = re.sub(r"(?m)^(?=(import|from) torch\b)", "import without_gpu\n", text, count=1)
    return text


def write_tests(source: Path, target: Path) -> None:
    """Writes the files of torch's test/distributed, with devices set to cpu, where they are not yet there."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "without_gpu.py").write_text(WITHOUT_GPU)
    for file in source.rglob("*.py"):
        copy = target / file.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(on_cpu(file.read_text()))


def run_file(file: Path, way: str, kept: Path, only: frozenset[str] | None, options: Sequence[str]) -> int:
    """Runs the tests of a file one of the `WAYS`; their verdicts are lines of `kept`.  Returns pytest's exit code."""
    quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", f"--rootdir={file.parent}", "-W", "ignore"]
    ranks = ["-p", "localtensor.torch_suites", "-o", f"suites_timeout={LIMITS['threads']}"]
    ranks += ["-W", f"error::{TorchsOwnWay.__module__}.{TorchsOwnWay.__qualname__}"]
    plugins = [Kept(kept, {TorchsOwnWay: LEFT}, only), SuiteTests(LIMITS[way])]
    return int(pytest.main([*quiet, *(ranks if way == "threads" else []), *options, str(file)], plugins=plugins))


def lines_of(name: str, way: str, ranks: int, kept: Path) -> Path:
    """The file of lines for the verdicts on a file of tests.

    >>> lines_of("fsdp/test_wrap.py", "threads", 4, Path("kept")).name
    'fsdp+test_wrap.py.4.jsonl'
    """
    number = "" if ranks == RANKS else f".{ranks}"
    return kept / way / f"{name.replace('/', '+')}{number}.jsonl"


def verdicts_of(
    name: str, way: str, kept: Path, only: Iterable[str] | None, options: Sequence[str]
) -> dict[str, Verdict]:
    """The verdict of each test of a file, with as many ranks as it asks for."""
    found = verdicts_with(RANKS, name, way, kept, only, options)
    for reason, ranks in OTHER_RANKS.items():
        skipped = {test for test, verdict in found.items() if verdict.outcome == SKIPPED and reason in verdict.reason}
        if skipped:
            found |= verdicts_with(ranks, name, way, kept, skipped, options)
    return found


def verdicts_with(
    ranks: int, name: str, way: str, kept: Path, only: Iterable[str] | None, options: Sequence[str]
) -> dict[str, Verdict]:
    """The verdict of each test of a file, which runs in a process of its own, and in one more after each crash."""
    lines = lines_of(name, way, ranks, kept)
    lines.parent.mkdir(exist_ok=True)
    chosen = [] if only is None else ["--only", json.dumps(sorted(only))]
    command = [
        sys.executable,
        "-m",
        "tests.tools.torch_ranks",
        name,
        "--way",
        way,
        "--ranks",
        str(ranks),
        "--kept",
        str(kept),
        *chosen,
        *options,
    ]
    (kept / "rendezvous" / "barrier").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **ENVIRONMENT, "WORLD_SIZE": str(ranks), "TEMP_DIR": str(kept / "rendezvous")}
    tests = kept / "distributed"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str((tests / name).parent), str(tests), os.environ.get("PYTHONPATH", "")]
    )
    while True:
        before = len(verdicts(lines))
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        output, _ = process.communicate()
        if process.returncode not in (0, 1, 5) and len(verdicts(lines)) == before:
            print(f"{name}, {way}: {output[-1500:]}", file=sys.stderr)
        if process.returncode in (0, 1, 2, 3, 4, 5) or len(verdicts(lines)) == before:
            return verdicts(lines)


def print_comparison(ours: dict[str, Verdict], reference: dict[str, Verdict]) -> None:
    """Prints, by folder, how many tests pass on processes and how many of them on rank threads; then the others by name."""
    passed = {test for test, verdict in reference.items() if verdict.outcome == PASSED}
    passed |= {test for test, verdict in ours.items() if verdict.outcome == PASSED and test not in reference}
    missing = Verdict("", FAILED, "it is not collected")
    folders: dict[str, Counter[str]] = {}
    for test in sorted(passed):
        outcome = ours.get(test, missing).outcome
        folders.setdefault(test.partition("::")[0].partition("/")[0], Counter()).update([outcome])
    print("| folder | pass on gloo processes | pass on rank threads | left to processes |\n|---|---|---|---|")
    for folder, counts in (*folders.items(), ("all", sum(folders.values(), Counter()))):
        print(f"| {folder} | {counts.total()} | {counts[PASSED]} | {counts[LEFT]} |")
    for test in sorted(passed):
        verdict = ours.get(test, missing)
        if verdict.outcome != PASSED:
            print(f"  {test}: {verdict.outcome}: {verdict.reason[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument(
        "--from", dest="folder", type=Path, help="a folder of torch's test/distributed, in place of 2.6.0's"
    )
    parser.add_argument("--kept", type=Path, default=Path("torch_ranks.kept"), help="the folder of outcomes")
    parser.add_argument("--reference", choices=("all", "failed", "none"), default="all")
    parser.add_argument("-k", dest="names", default="", help="pytest's expression for names of tests")
    parser.add_argument("--fork", action="store_true", help="fork the processes, in place of starting new ones")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=RANKS, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    kept: Path = chosen.kept.absolute()
    tests = kept / "distributed"
    if chosen.way:
        name = chosen.files[0]
        lines = lines_of(name, chosen.way, chosen.ranks, kept)
        only = None if chosen.only is None else frozenset(chosen.only)
        if chosen.fork and chosen.way == "processes":
            fork_processes()
        sys.exit(run_file(tests / name, chosen.way, lines, only, ["-k", chosen.names]))
    write_tests(chosen.folder or debian_sources(), tests)
    options = ["-k", chosen.names, *(["--fork"] if chosen.fork else [])]
    ours: dict[str, Verdict] = {}
    reference: dict[str, Verdict] = {}
    for name in chosen.files or files_of(tests):
        found = verdicts_of(name, "threads", kept, None, options)
        ours.update((f"{name}::{test}", verdict) for test, verdict in found.items())
        print(name, dict(Counter(verdict.outcome for verdict in found.values())), flush=True)
        only = (
            None
            if chosen.reference == "all"
            else {test for test, verdict in found.items() if verdict.outcome not in (PASSED, SKIPPED)}
        )
        if chosen.reference != "none" and (only is None or only):
            there = verdicts_of(name, "processes", kept, only, options)
            reference.update((f"{name}::{test}", verdict) for test, verdict in there.items())
    print_comparison(ours, reference)


def files_of(tests: Path) -> list[str]:
    """The names of the files of tests, in the order of `FOLDERS` and `FILES`."""
    found = [file for folder in FOLDERS for file in sorted((tests / folder).rglob("test_*.py"))]
    found += [file for pattern in FILES for file in sorted(tests.glob(pattern))]
    return [str(file.relative_to(tests)) for file in found if not re.search("nccl|ucc", file.name)]


if __name__ == "__main__":
    main()
