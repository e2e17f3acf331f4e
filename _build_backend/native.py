"""Compiles pytracer's binaries: one for each Python, and those for each torch.

    _core.SOABI.so          reads files    csrc/core, csrc/reader.cpp; needs no torch
    _C-torch2.13.SOABI.so   records        csrc/core, csrc/torch, csrc/bindings.cpp
    _cuda-torch2.13.so      CUDA tracker   csrc/cuda; one for each row of ACCELERATORS
    _view.so                private files  csrc/view; preloaded, so it needs libc only
    _driver.so              asks cuDNN     csrc/driver; has the name of CUDA's driver
    _products.so            asks cuDNN     csrc/driver; has the name of cuBLASLt

An extension is bound to one release of torch (the layout of its classes), so each release has its
own; pytracer/data/_native.py opens the one for the torch that runs. They are compiled from torch's
headers and linked to empty libraries that have torch's names: at run time, Python has imported
torch already. So the build needs neither torch's libraries nor a GPU nor nvcc.

It needs only Python and a compiler: no ninja, no setuptools, no network.
"""

import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import cuda_headers

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "pytracer"
SOABI = sysconfig.get_config_var("SOABI")
ONLY_TO_RECORD = ("forward_map", "harvest", "recorder", "scope_stack", "streamer")  # of the core
SHARED = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")  # the extension is linked to these

FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fwrapv",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    f"-ffile-prefix-map={ROOT}=pytracer",  # no path of this machine in the binary
]


class CannotBuild(Exception):
    """Something is missing or not supported; the message has the command that helps."""


# ---------------------------------------------------------------------------- torch


class Torch(NamedTuple):
    folder: Path  # the package, with include/ and version.py
    version: str
    git: str
    cuda: str | None

    @property
    def release(self) -> str:
        return ".".join(self.version.split(".")[:2])


def torch_in(folder: Path) -> Torch:
    """Reads torch's version.py: importing torch takes seconds."""
    names = runpy.run_path(str(folder / "version.py"))
    git, cuda = names.get("git_version") or "", names.get("cuda")
    return Torch(folder, str(names["__version__"]), git, cuda)


def numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def check_release(torch: Torch) -> None:
    """Refuses a torch that is too old in one sentence; warns about one that is newer than tested."""
    known = runpy.run_path(str(PACKAGE / "basics" / "version.py"))
    oldest, newest = known["OLDEST_TORCH"], known["TESTED_TORCH"][-1]
    if numbers(torch.release) < numbers(oldest):
        raise CannotBuild(
            f"torch {torch.version} is older than pytracer supports ({oldest} to {newest}); "
            f"update it: pip install 'torch>={oldest}'"
        )
    if numbers(torch.release) > numbers(newest):
        print(
            f"warning: torch {torch.version} is newer than the tested ones ({oldest} to {newest}); "
            "`pytracer doctor` proves what works",
            file=sys.stderr,
        )


# ---------------------------------------------------------------------------- accelerators


class Accelerator(NamedTuple):
    """A device whose tracker is compiled from csrc/NAME into _NAME-torch2.13.so."""

    name: str
    title: str
    library: str  # torch's library that has the allocator; the tracker is linked to it by name
    version_in: Callable[[Torch], str | None]  # which one this torch was built for
    version_beside_others: str  # to compile for where torch was built without
    find_headers: Callable[[str], list[str]]  # the include directories of a version; [] for none
    wheels: Callable[[str], list[str]]  # packages with these headers
    flags: Callable[[Torch], list[str]]  # of the compiler, beside the include directories

    @property
    def switch(self) -> str:
        """The variable that asks for its tracker: auto, 1 or 0."""
        return f"PYTRACER_{self.name.upper()}"

    @property
    def folder(self) -> Path:
        return CSRC / self.name

    def version_for(self, torch: Torch) -> str:
        return self.version_in(torch) or self.version_beside_others


def cuda_flags(torch: Torch) -> list[str]:
    """A torch for CPUs has c10's headers of CUDA, all but one that its own build generates."""
    is_there = (torch.folder / "include/c10/cuda/impl/cuda_cmake_macros.h").is_file()
    return [] if is_there else ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]


ACCELERATORS = (
    Accelerator(
        name="cuda",
        title="CUDA",
        library="c10_cuda",
        version_in=lambda torch: torch.cuda,
        version_beside_others="13.0",
        find_headers=cuda_headers.find,
        wheels=cuda_headers.wheels,
        flags=cuda_flags,
    ),
)


def find_headers(accelerator: Accelerator, torch: Torch, wanted: str) -> list[str] | None:
    """The include directories for the tracker, or None to build without it."""
    is_in_torch = accelerator.version_in(torch) is not None
    if wanted == "0" or (wanted == "auto" and not is_in_torch):
        return None
    version = accelerator.version_for(torch)
    folders = accelerator.find_headers(version)
    if folders:
        return folders
    title = accelerator.title
    wheels = " ".join(f"'{wheel}'" for wheel in accelerator.wheels(version))
    remedy = (
        f"no headers of {title} {version} were found; install them: pip install {wheels}, "
        f"or set {title}_HOME to a toolkit of that version"
    )
    if wanted == "1":
        raise CannotBuild(f"{accelerator.switch}=1, but {remedy}")
    print(f"warning: building pytracer without its {title} tracker; {remedy}", file=sys.stderr)
    return None


# ---------------------------------------------------------------------------- tools


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        raise CannotBuild(
            f"no C++ compiler ({command[0]}); install one (apt install g++) or set CXX"
        )
    return command


def compiler_name(command: list[str]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0].strip() or command[0]


def find_pybind11(torches: list[Torch]) -> str:
    """Torch brings these headers; without torch they are a package of their own."""
    if torches:
        return str(torches[0].folder / "include")
    pybind11 = importlib.util.find_spec("pybind11")
    if pybind11 is None or pybind11.origin is None:
        raise CannotBuild("pybind11 is missing; install it: pip install pybind11")
    return str(Path(pybind11.origin).parent / "include")


def python_headers() -> str:
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").is_file():
        raise CannotBuild(
            f"{folder}/Python.h is missing; install Python's headers (apt install python3-dev)"
        )
    return folder


# ---------------------------------------------------------------------------- steps


class Step(NamedTuple):
    output: Path
    command: list[str]
    inputs: list[Path]
    says: str

    def is_done(self) -> bool:
        """Whether the output is newer than all its inputs, and the command is the same."""
        try:
            made = self.output.stat().st_mtime_ns
            if _note(self.output).read_text() != shlex.join(self.command):
                return False
            needed = [*self.inputs, *_includes(self.output)]
            return all(path.stat().st_mtime_ns <= made for path in needed)
        except OSError:  # a file is missing
            return False

    def run(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        _note(self.output).unlink(missing_ok=True)
        done = subprocess.run(
            self.command, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise CannotBuild(_failure(self, done.stdout + done.stderr))
        sys.stderr.write(done.stderr)  # warnings
        _note(self.output).write_text(shlex.join(self.command))


def _note(output: Path) -> Path:
    return output.with_name(output.name + ".command")


def _includes(output: Path) -> list[Path]:
    """The files that the compiler has read."""
    listed = output.with_name(output.name + ".d")
    if not listed.is_file():
        return []
    names = shlex.split(listed.read_text().replace("\\\n", " ").partition(":")[2])
    return [Path(name) for name in names]


def _failure(step: Step, output: str) -> str:
    """The first error, and where the others are: a compiler may print hundreds of lines."""
    log = step.output.with_name(step.output.name + ".failed")
    log.write_text(f"{shlex.join(step.command)}\n{output}")
    errors = [line for line in output.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)]
    first = (errors or output.splitlines() or ["no reason was given"])[0]
    return f"{step.says} failed: {first.strip()} (the whole output is in {log})"


def run_all(steps: list[Step], tell: Callable[[str], None]) -> None:
    """Runs the steps that are not done, as many at a time as MAX_JOBS or the processors allow."""
    by_output = {step.output: step for step in steps}
    graph = TopologicalSorter(
        {step.output: [path for path in step.inputs if path in by_output] for step in steps}
    )
    graph.prepare()
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    count, lock = 0, threading.Lock()

    def work(step: Step) -> Path:
        nonlocal count
        with lock:
            count += 1
            number = count
        if not step.is_done():
            tell(f"[{number}/{len(steps)}] {step.says}")
            step.run()
        return step.output

    running: set[Future[Path]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        while graph.is_active():
            running |= {pool.submit(work, by_output[path]) for path in graph.get_ready()}
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            try:
                graph.done(*(each.result() for each in finished))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class Progress:
    """A line per file to stderr; if an installer hides that, a line now and then to the terminal."""

    def __init__(self, every_s: float = 5) -> None:
        self.every_s, self.began, self.last = every_s, time.monotonic(), time.monotonic()
        self.lock = threading.Lock()

    def __call__(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        with self.lock:
            now = time.monotonic()
            if sys.stderr.isatty() or now - self.last < self.every_s:
                return
            self.last = now
        if "PIP_BUILD_TRACKER" in os.environ or "UV" in os.environ:
            _to_the_screen(f"  pytracer {text}, {now - self.began:.0f} s\n")


def _to_the_screen(text: str) -> None:
    try:
        with open("/dev/tty", "w") as screen:
            screen.write(text)
    except OSError:  # there is no terminal
        pass


# ---------------------------------------------------------------------------- the binaries


class Build:
    """The steps that make the binaries for one Python, in `build/native-SOABI`."""

    def __init__(self) -> None:
        self.cxx = compiler()
        self.python = python_headers()
        self.folder = ROOT / "build" / f"native-{SOABI}"
        self.flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        self.steps: list[Step] = []
        self.binaries: list[Path] = []

    def compile(
        self, source: Path, where: str, flags: Iterable[str], inputs: Iterable[Path] = ()
    ) -> Path:
        name = source.relative_to(CSRC) if source.is_relative_to(CSRC) else Path(source.name)
        output = self.folder / where / name.with_name(name.name + ".o")
        command = [*self.cxx, *self.flags, *flags, "-MMD", "-MF", f"{output}.d"]
        command += ["-c", str(source), "-o", str(output)]
        self.steps.append(Step(output, command, [source, *inputs], f"{where}: compiling {name}"))
        return output

    def link(
        self, name: str, objects: list[Path], flags: Iterable[str] = (), inputs: Iterable[Path] = ()
    ) -> None:
        output = self.folder / name
        command = [*self.cxx, *SHARED, "-pthread", *map(str, objects), "-o", str(output), *flags]
        command += shlex.split(os.environ.get("LDFLAGS", ""))
        self.steps.append(Step(output, command, [*objects, *inputs], f"linking {name}"))
        self.binaries.append(output)

    @property
    def core(self) -> Path:
        return self.folder / "libcore.a"

    def compile_core(self, to_record: bool) -> None:
        """Compiles the core once, for the reader and for all torches. Recording needs Linux."""
        sources = [
            source
            for source in sorted(CSRC.glob("core/*.cpp"))
            if to_record or source.stem not in ONLY_TO_RECORD
        ]
        objects = [self.compile(source, "core", []) for source in sources]
        command = ["ar", "rcs", str(self.core), *map(str, objects)]
        self.steps.append(Step(self.core, command, objects, "linking the core"))

    def stub(self, library: str) -> Path:
        """An empty library with the name of one of torch's."""
        output = self.folder / "stubs" / f"lib{library}.so"
        command = [*self.cxx, "-shared", "-nostdlib", f"-Wl,-soname,{output.name}"]
        command += ["-x", "c", os.devnull, "-o", str(output)]
        self.steps.append(Step(output, command, [], f"linking {output.name}, empty"))
        return output

    def reader(self, pybind11: str) -> None:
        flags = [f"-isystem{self.python}", f"-isystem{pybind11}"]
        reads = self.compile(CSRC / "reader.cpp", "reader", flags)
        self.link(f"_core.{SOABI}.so", [reads, self.core])

    def view(self) -> None:
        """Preloaded into programs of all kinds, so it brings what it needs of C++ along."""
        sources = sorted(CSRC.glob("view/*.cpp"))
        objects = [self.compile(source, "view", []) for source in sources]
        own = ["-static-libstdc++", "-static-libgcc", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL"]
        self.link("_view.so", objects, [*own, "-s", "-ldl"])

    def driver(self) -> None:
        """Loaded before cuDNN, which then finds them under these names."""
        for name, known_as in (("driver", "libcuda.so.1"), ("products", "libcublasLt.so.13")):
            made = self.compile(CSRC / "driver" / f"{name}.cpp", "driver", [])
            self.link(f"_{name}.so", [made], ["-nostdlib", "-s", f"-Wl,-soname,{known_as}"])

    def extension(self, torch: Torch, macros: dict[str, str]) -> None:
        where = f"torch{torch.release}"
        include = torch.folder / "include"
        flags = [
            f"-isystem{include}",
            f"-isystem{include}/torch/csrc/api/include",
            f"-isystem{self.python}",
            "-DTORCH_EXTENSION_NAME=_C",
            f"-ffile-prefix-map={torch.folder}=torch",
        ]
        # In two files: torch's headers take eight seconds in each.
        together = self.folder / "hooks.cpp"
        sources = sorted(CSRC.glob("torch/*.cpp"))
        write_if_other(together, "".join(f'#include "{source}"\n' for source in sources))
        about = [f'-D{name}="{value}"' for name, value in macros.items()]
        another_torch = [torch.folder / "version.py"]
        objects = [
            self.compile(together, where, flags, another_torch),
            self.compile(CSRC / "bindings.cpp", where, [*flags, *about], another_torch),
        ]
        stubs = [self.folder / "stubs" / f"lib{library}.so" for library in LIBRARIES]
        needed = ["-Wl,--no-as-needed", *map(str, stubs)]
        self.link(f"_C-torch{torch.release}.{SOABI}.so", [*objects, self.core], needed, stubs)

    def tracker(self, accelerator: Accelerator, torch: Torch, headers: list[str]) -> None:
        folders = (torch.folder / "include", *headers)
        flags = [f"-isystem{path}" for path in folders if path != "/usr/include"]
        flags.append(f"-ffile-prefix-map={torch.folder}=torch")
        flags += accelerator.flags(torch)
        sources = sorted(accelerator.folder.glob("*.cpp"))
        objects = [self.compile(source, f"torch{torch.release}", flags) for source in sources]
        stub = self.folder / "stubs" / f"lib{accelerator.library}.so"
        needed = ["-Wl,--no-as-needed", str(stub)]
        self.link(f"_{accelerator.name}-torch{torch.release}.so", objects, needed, [stub])


def write_if_other(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def build(torches: list[Torch], into: Path, wanted: Mapping[str, str] | None = None) -> None:
    """Compiles for these torches, and writes _build.json beside the binaries.

    `wanted` holds auto, 1 or 0 by the name of an accelerator: whether to build its tracker.
    """
    for torch in torches:
        check_release(torch)
    work = Build()
    facts = {
        "python": platform.python_version(),
        "abi": SOABI,
        "compiler": compiler_name(work.cxx),
        "torches": {},
    }
    libraries = (*LIBRARIES, *(accelerator.library for accelerator in ACCELERATORS))
    for library in libraries if torches else ():
        work.stub(library)
    for torch in torches:
        headers = {
            each: find_headers(each, torch, (wanted or {}).get(each.name, "auto"))
            for each in ACCELERATORS
        }
        of_torch = {
            "torch": torch.version,
            "torch_git": torch.git,
            **{each.name: each.version_for(torch) if headers[each] else None for each in headers},
        }
        facts["torches"][torch.release] = of_torch
        macros = {f"PYTRACER_{name.upper()}_VERSION": of or "" for name, of in of_torch.items()}
        macros["PYTRACER_PYTHON_VERSION"] = facts["python"]
        macros["PYTRACER_COMPILER"] = facts["compiler"]
        work.extension(torch, macros)
        for accelerator, folders in headers.items():
            if folders:
                work.tracker(accelerator, torch, folders)
    work.reader(find_pybind11(torches))
    if sys.platform == "linux":
        work.view()
        work.driver()
    work.compile_core(to_record=bool(torches))  # last, since the rest waits for torch's headers
    run_all(work.steps, Progress())
    install(work.binaries, into, facts)


def install(binaries: list[Path], into: Path, facts: dict) -> None:
    """Copies the binaries. The facts come last: if they are there, the binaries are whole."""
    into.mkdir(parents=True, exist_ok=True)
    facts_file = into / "_build.json"
    facts_file.unlink(missing_ok=True)
    trackers = [path for each in ACCELERATORS for path in into.glob(f"_{each.name}-*.so")]
    whole = [into / name for name in ("_view.so", "_driver.so", "_products.so")]
    for old in [*into.glob(f"_[Cc]*{SOABI}.so"), *trackers, *whole]:
        old.unlink(missing_ok=True)
    for binary in binaries:
        shutil.copy2(binary, into / binary.name)
    facts_file.write_text(json.dumps(facts, indent=2) + "\n")
