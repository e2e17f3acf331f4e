"""Ways to start Python: how it is called, from where, as whom, with what, and what the program does.

A way is made of parts. Each part changes one thing of `python train.py`. A part goes together with
parts of other kinds, so there are more ways than anybody would write down.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# The torch of most ways is a stand-in: pytracer does not record it, and says so in one line.
WORK = """
import sys
print("ran", torch.ones(3).sum().item(), flush=True)
print(__name__, vars().get("__file__"), sys.path[:1], sorted(vars()), type(__builtins__))
"""
TRAIN = (
    WORK
    + """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    optimizer.step()
print("trained", loss.dtype)
"""
)


class Part(NamedTuple):
    """One thing that is not as in `python train.py`."""

    kind: str
    name: str
    call: Sequence[str] = ()  # the program: {text} is its source
    flags: Sequence[str] = ()  # of Python
    env: Mapping[str, str | None] = {}  # None: unset
    first: str = ""  # code before `import torch`
    last: str = ""  # code at the end
    files: Mapping[str, str] = {}  # in the program's folder
    shell: str = ""  # how bash starts the command "$@"
    stdin: str = ""
    torch: str = "import torch\n"
    real: bool = False  # the stand-in does not do
    root: bool = False  # only root can set it up
    run: bool = True  # also with `pytracer run`


class Way(NamedTuple):
    """Parts of different kinds."""

    parts: tuple[Part, ...]
    real: bool = False  # with the real torch

    @property
    def name(self) -> str:
        """What is unusual about it."""
        names = [f"{part.kind}: {part.name}" for part in self.parts]
        return ", ".join(names + ["torch"] * self.real)


# ---------------------------------------------------------------------- how Python is called

CALLS = [
    Part("call", "an absolute path", call=["{folder}/train.py", "--lr", "1"]),
    Part("call", "a link", call=["link.py"]),
    Part("call", "without a suffix", call=["train"]),
    Part("call", "bytecode", call=["train.pyc"], run=False),
    Part("call", "-c", call=["-c", "{text}", "x"], run=False),
    Part("call", "-m", call=["-m", "train", "-m", "x"]),
    Part("call", "-m of a package", call=["-m", "package.inner"]),
    Part("call", "-m of a package's main", call=["-m", "package"]),
    Part("call", "a folder", call=["package"]),
    Part("call", "a zip file", call=["app.pyz", "x"]),
    Part("call", "-", call=["-", "x"], stdin="{text}", run=False),
    Part("call", "a pipe", stdin="{text}", call=[""], run=False),
    Part("call", "executed", call=["train.py"], shell="./train.py", run=False),
    Part("call", "by a shell script", shell='printf \'exec "$@"\\n\' > go.sh; sh go.sh "$@"'),
    Part("call", "in the background", shell='"$@" & wait $!'),
    Part("call", "by runpy", call=["-m", "runpy", "train"], run=False),
    Part("call", "in a profile", call=["-m", "cProfile", "-o", "profile", "train.py"], run=False),
    Part(
        "call",
        "interactive",
        flags=["-i"],
        stdin="print(torch)\nimport sys\nsys.exit(4)\n",
        run=False,
    ),
    Part("call", "at a prompt", flags=["-i", "-q"], call=[""], stdin="{text}", run=False),
    Part("call", "no such script", call=["nope.py"], run=False),
    Part("call", "no such module", call=["-m", "nope"], run=False),
]

FLAGS = [
    Part("flags", flag, flags=flag.split(), run=flag not in ("-S", "-I -S"))
    for flag in (
        *("-I", "-E", "-s", "-S", "-I -S", "-P", "-B", "-u", "-O", "-OO", "-b", "-bb", "-q", "-R"),
        *("-W error", "-W always", "-W ignore", "-X dev", "-X importtime", "-X utf8=1"),
        *("-X utf8=0", "-X tracemalloc", "-X faulthandler", "-X frozen_modules=off"),
        *("-X no_debug_ranges", "-X warn_default_encoding", "-X int_max_str_digits=700"),
    )
]

ENVIRONMENTS = [
    Part(
        "environment",
        " ".join(f"{k}={v}" for k, v in env.items()),
        env=env,
        run="PYTHONINSPECT" not in env,
    )
    for env in (
        {"PYTHONSAFEPATH": "1"},
        {"LANG": "C", "LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "en_US.ISO-8859-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONUNBUFFERED": "1"},
        {"PYTHONDONTWRITEBYTECODE": "1"},
        {"PYTHONHASHSEED": "0"},
        {"PYTHONMALLOC": "debug"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONTRACEMALLOC": "5"},
        {"PYTHONASYNCIODEBUG": "1"},
        {"PYTHONNOUSERSITE": "1"},
        {"PYTHONPYCACHEPREFIX": "/proc/nowhere"},
        {"PYTHONPROFILEIMPORTTIME": "1"},
        {"PYTHONINSPECT": "1"},
        {"PYTHONFAULTHANDLER": "1"},
        {"PYTHONBREAKPOINT": "0"},
        {"PYTHONPATH": ":/nowhere:."},
        {"HOME": None},
        {"HOME": "/nowhere"},
        {"HOME": None, "PATH": None, "USER": None, "LOGNAME": None, "SHELL": None},
        {"TMPDIR": "/nowhere"},
        {"TMPDIR": "relative"},
        {"TERM": "dumb", "COLUMNS": "abc", "LINES": "0"},
        {"FORCE_COLOR": "1"},
        {"NO_COLOR": "1"},
        {"RANK": "3", "WORLD_SIZE": "8"},
        {"RANK": "x", "WORLD_SIZE": "-1"},
        {"RANK": "9" * 30, "WORLD_SIZE": "9" * 30},
        {"TORCHELASTIC_RESTART_COUNT": "../../x"},
        {"HUGE": "x" * 100_000},
        {"COVERAGE_PROCESS_START": "/nowhere"},
        {"PWD": "/nowhere"},
    )
]

# ---------------------------------------------------------------------- from where, and as whom

NO_RIGHTS = "setpriv --inh-caps=-all --bounding-set=-all"  # root may write and search everywhere
ANOTHER = (
    "setpriv --reuid 54321 --regid 54321 --clear-groups --inh-caps +dac_read_search "
    "--ambient-caps +dac_read_search"  # to read the Python that is tested
)
PLACES = [
    Part("place", "may not write", shell=f'chmod 555 .; {NO_RIGHTS} "$@"', call=["./train.py"]),
    Part(
        "place",
        "may not search",
        call=["-c", "{text}"],
        run=False,
        shell=f'mkdir private; cd private; chmod 000 .; {NO_RIGHTS} "$@"',
    ),
    Part("place", "another user", root=True, shell=f'chmod 755 .; {ANOTHER} "$@"'),
    Part(
        "place",
        "nobody at home",
        root=True,
        env={"HOME": None},
        shell=f'chmod 755 .; {ANOTHER} "$@"',
    ),
    Part(
        "place",
        "has been deleted",
        call=["{folder}/train.py"],
        shell='mkdir gone; cd gone; rmdir ../gone; "$@"',
    ),
    Part(
        "place",
        "deleted, -c",
        call=["-c", "{text}"],
        run=False,
        shell='mkdir gone; cd gone; rmdir ../gone; "$@"',
    ),
    Part("place", "the root", call=["{folder}/train.py"], root=True, shell=f'cd /; {ANOTHER} "$@"'),
    Part(
        "place", "no UTF-8", call=["../train.py"], shell="mkdir $'b\\xffd'; cd $'b\\xffd'; \"$@\""
    ),
    Part(
        "place", "a line break", call=["../train.py"], shell="mkdir $'a\\nb'; cd $'a\\nb'; \"$@\""
    ),
    Part(
        "place",
        "very deep",
        call=["{folder}/train.py"],
        shell='d=$(printf "%0200d" 0); for i in {1..18}; do mkdir $d; cd $d; done; "$@"',
    ),
    Part(
        "place",
        "a full disk",
        root=True,
        call=["{folder}/train.py"],
        shell="mkdir full; mount -t tmpfs -o size=16k none full; cd full; "
        'dd if=/dev/zero of=fill bs=1k 2>/dev/null; "$@"; code=$?; cd ..; umount -l full; '
        "rmdir full; exit $code",
    ),
    Part(
        "place",
        "all disks full",
        root=True,
        call=["{folder}/train.py"],
        env={"TMPDIR": "/nowhere"},
        shell="mkdir full; unshare -m bash -c 'for d in full /tmp /var/tmp /dev/shm; do "
        'mount --bind $PWD $PWD/full 2>/dev/null; done; "$@"\' bash "$@"',
    ),
    Part("place", "files in the way", shell='mkdir -p train.pytrace train.1.pytrace/x; "$@"'),
    Part("place", "links in the way", shell='ln -s train.pytrace train.pytrace; "$@"'),
]

STREAMS = [
    Part("streams", name, shell=f'"$@" {how}')
    for name, how in (
        ("no stdin", "<&-"),
        ("no stdout", ">&-"),
        ("no stderr", "2>&-"),
        ("none", "<&- >&- 2>&-"),
        ("stdout is full", ">/dev/full"),
        ("stderr is full", "2>/dev/full"),
        ("both are full", ">/dev/full 2>&1"),
        ("stdin is a folder", "<."),
        ("nobody reads stderr", "2> >(exec true)"),
        ("stderr may only be read", "2</dev/null"),
    )
]

LIMITS = [
    Part("limits", how, shell=f'ulimit {how}; "$@"')
    for how in ("-n 24", "-f 0", "-f 1", "-s 256", "-c 0", "-t 100", "-x 1", "-l 0", "-q 0")
]
LIMITS += [
    Part("limits", "nice", shell='nice -n 19 "$@"'),
    Part("limits", "one core", shell='taskset -c 0 "$@"'),
    Part("limits", "no new processes", shell=f'ulimit -u 1; {ANOTHER} "$@"', root=True),
    Part("limits", "memory", shell='ulimit -v 2500000; "$@"', real=True),
]

# ---------------------------------------------------------------------- what the program changes

ARGUMENTS = [
    Part("sys.argv", code, first=f"import sys\n{code}\n")
    for code in (
        *("del sys.argv", "sys.argv = None", "sys.argv = []", "sys.argv = [None]"),
        *("sys.argv = [b'x']", "sys.argv = [b'\\xff\\x00']", "sys.argv = ('x',)"),
        *("sys.argv = ['a' * 300]", "sys.argv = ['é' * 100_000]", "sys.argv = ['a/' * 3000]"),
        *("sys.argv = ['x\\0y']", "sys.argv = ['']", "sys.argv = ['..']", "sys.argv = [7, 8]"),
        *("sys.argv = ['a b\\n\\'\"$(x)']", "sys.argv[0] = '\\udcff'", "del sys.orig_argv"),
        *("sys.orig_argv = [None]", "sys.frozen = True; sys.executable = sys.argv[0]"),
        *("sys.executable = None", "sys.executable = ''", "sys.executable = '/bin/false'"),
        "class L(list): __getitem__ = None\nsys.argv = L(sys.argv)",
    )
]

ODD = "class Odd:\n    def __getattribute__(self, name): raise ValueError(name)\n"
GLOBALS = [
    Part("globals", code.splitlines()[-1], first=f"import sys\n{code}\n")
    for code in (
        *("sys.modules = dict(sys.modules)", "sys.meta_path = list(sys.meta_path)"),
        *("sys.meta_path = tuple(sys.meta_path)", f"{ODD}sys.modules['odd'] = Odd()"),
        "class F:\n    def find_spec(*a): return None\nsys.meta_path.insert(0, F())",
        "class F(list):\n    def __eq__(*a): raise ValueError\nsys.meta_path.append(F())",
        *("sys.path.insert(0, 3)", "sys.path = tuple(sys.path)", "sys.path_hooks.clear()"),
        f"{ODD}sys.stderr = Odd()",
        *("sys.stderr = None", "sys.stdout = sys.stderr = None", "del sys.stderr"),
        "import io\nsys.stderr = io.StringIO()",
        "import io; keep = sys.stderr\nsys.stderr = io.TextIOWrapper(io.BytesIO())",
        "sys.__stderr__ = None",
        *("sys.stderr.close()", "import os\nos.close(2)"),
        f"{ODD}sys.excepthook = Odd()",
        *("del sys.excepthook", "sys.excepthook = None", "sys.excepthook = print"),
        "def bad(*a): 1 / 0\nsys.excepthook = bad",
        "def bad(*a): sys.exit(9)\nsys.excepthook = bad",
        *("sys.unraisablehook = None", "import builtins\nbuiltins.print, said = None, print"),
        "import builtins\nbuiltins.open = None",
        "import builtins; find = builtins.__import__\nbuiltins.__import__ = lambda *a, **k: find(*a, **k)",
        "import os\nos.environ.clear()",
        "import os\nos.environ = dict(os.environ)",
        "import os\nos.getcwd = None",
        "import os\nos.getpid = lambda: 1",
        "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0",
        "import warnings\nwarnings.simplefilter('error')",
        "import warnings\nwarnings.showwarning = None",
        "sys.setrecursionlimit(90)",
        "import gc; gc.disable()\ngc.set_threshold(1)",
        "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
        "import faulthandler\nfaulthandler.enable()",
        "import locale\nlocale.setlocale(locale.LC_ALL, 'C')",
        "import random\nrandom.seed(3)",
        "import logging\nlogging.basicConfig(level=1)",
        "import threading\nthreading.excepthook = None",
        "import subprocess\nsubprocess.Popen = None",
        "import atexit\natexit.register(lambda: said('atexit') if 'said' in globals() else print('atexit'))",
        "import pathlib\npathlib.Path.exists = None",
        "import asyncio\nasyncio.set_event_loop(asyncio.new_event_loop())",
        "import decimal\ndecimal.getcontext().prec = 3",
        "sys.settrace(lambda *a: None)",
        "sys.setprofile(lambda *a: None)",
        "sys.setswitchinterval(1e-6)",
        "import codecs\ncodecs.register(lambda name: None)",
        "import os\nos.umask(0o777)",
        "import os\nos.nice(5)",
    )
]
HOOK = """import sys
def refuse(event, words):
    if {refused}: raise RuntimeError(event)
sys.addaudithook(refuse)
"""
GLOBALS += [
    Part("audit hook", refused, first=HOOK.format(refused=refused))
    for refused in (
        "event == 'open' and words[1] not in (None, 'r', 'rb')",
        "event.startswith('subprocess')",
        "event == 'import' and words[0].startswith('pytracer')",
        "event in ('exec', 'compile') and 'pytracer' in str(words)",
        "event == 'sys._getframe'",
    )
]

SHIM = "print('its own', __name__)\nvalue = 3\n"
NAMES = [
    Part(
        "its own module",
        name,
        files={f"{name}.py": SHIM},
        last=f"import {name}\nprint({name}.__name__, {name}.value)\n",
        real=real,
    )
    for name, real in (
        *(("pytracer", False), ("meta", False), ("names", False), ("files", False)),
        *(("schema", False), ("errors", False), ("runner", False), ("cli", False)),
        *(("json", False), ("argparse", False), ("platform", True), ("shlex", True)),
        *(("subprocess", False), ("typing", False), ("dataclasses", False), ("pathlib", False)),
        *(("inspect", False), ("numpy", False), ("pandas", True), ("sysconfig", True)),
        *(("contextlib", False), ("logging", False), ("atexit", False), ("runpy", False)),
        *(("start", False), ("difflib", False), ("importlib", False), ("pynvml", True)),
    )
]
NAMES += [
    Part(
        "its own module",
        "a package pytracer",
        files={"pytracer/__init__.py": SHIM},
        last="import pytracer\nprint(pytracer.value)\n",
    ),
    Part(
        "its own module",
        "pytracer, imported first",
        files={"pytracer.py": SHIM},
        first="import pytracer\nprint(pytracer.value)\n",
    ),
    Part(
        "its own module",
        "broken json",
        files={"json.py": "raise ValueError('mine')\n"},
        last="import json\n",
    ),
    Part(
        "its own module",
        "the script is pytracer.py",
        files={"pytracer.py": "{text}"},
        call=["pytracer.py"],
        run=False,
    ),
]

# ---------------------------------------------------------------------- torch

TORCH = [
    Part("torch", name, torch=code, files=files)
    for name, code, files in (
        ("not there", "import nowhere as torch\n", {}),
        ("blocked", "import sys\nsys.modules['torch'] = None\nimport torch\n", {}),
        (
            "blocked by a finder",
            (
                "import sys\nclass F:\n    def find_spec(self, name, *a):\n"
                "        if name == 'torch': raise ImportError('blocked')\n"
                "sys.meta_path.insert(0, F())\nimport torch\n"
            ),
            {},
        ),
        ("fails", "import torch\n", {"torch.py": "import json\n1 / 0\n"}),
        ("fails to import", "import torch\n", {"torch.py": "import colorsys\nimport nope\n"}),
        ("exits", "import torch\n", {"torch.py": "import colorsys, sys\nsys.exit(5)\n"}),
        (
            "interrupted",
            "import torch\n",
            {"torch.py": "import colorsys\nraise KeyboardInterrupt\n"},
        ),
        ("no Python", "import torch\n", {"torch.py": "x = (\n"}),
        ("something else", "import torch\n", {"torch.py": "def ones(n): return n\n"}),
        (
            "tried twice",
            (
                "try:\n    import torch\nexcept ZeroDivisionError: pass\n"
                "import os; os.unlink('torch.py')\nimport importlib; importlib.invalidate_caches()\n"
                "import torch\n"
            ),
            {"torch.py": "import colorsys\n1 / 0\n"},
        ),
        (
            "on a thread",
            (
                "import threading, importlib\n"
                "t = threading.Thread(target=importlib.import_module, args=('torch',))\n"
                "t.start(); t.join()\nimport torch\n"
            ),
            {},
        ),
        (
            "on two threads",
            (
                "import threading, importlib\n"
                "ts = [threading.Thread(target=importlib.import_module, args=('torch',)) for _ in '12']\n"
                "[t.start() for t in ts]; [t.join() for t in ts]\nimport torch\n"
            ),
            {},
        ),
        (
            "lazily",
            (
                "import importlib.util, sys\nspec = importlib.util.find_spec('torch')\n"
                "spec.loader = importlib.util.LazyLoader(spec.loader)\n"
                "torch = sys.modules['torch'] = importlib.util.module_from_spec(spec)\n"
                "spec.loader.exec_module(torch)\nprint('lazy')\n"
            ),
            {},
        ),
        ("again", "import torch, importlib\ndel torch.sub\nimportlib.reload(torch)\n", {}),
        ("only a part", "from torch import ones\nimport sys; torch = sys.modules['torch']\n", {}),
        (
            "a mock",
            (
                "from unittest import mock\nimport sys\n"
                "torch = sys.modules['torch'] = mock.MagicMock()\nimport colorsys, torch\n"
                "torch.ones = lambda n: mock.Mock(sum=lambda: mock.Mock(item=lambda: 3.0))\n"
            ),
            {},
        ),
        (
            "deep in the stack",
            "def f(n):\n    if n: return f(n - 1)\n    import torch\nf(880)\nimport torch\n",
            {},
        ),
        (
            "while an alarm rings",
            (
                "import signal, time\nclass Late(Exception): pass\n"
                "def late(*a): raise Late\nsignal.signal(signal.SIGALRM, late)\ntry:\n"
                "    signal.setitimer(signal.ITIMER_REAL, 0.3)\n    import torch\n    time.sleep(9)\n"
                "except Late: print('late')\nimport torch\n"
            ),
            {},
        ),
    )
]

# ---------------------------------------------------------------------- how it ends

ENDS = [
    Part("end", code.splitlines()[-1], last=f"import os, sys, signal\n{code}\n", real=real)
    for code, real in (
        *(("sys.exit(0)", False), ("sys.exit(3)", True), ("sys.exit(None)", False)),
        *(("sys.exit('a message')", False), ("sys.exit(-1)", False), ("sys.exit(256)", False)),
        *(("sys.exit(2.5)", False), ("sys.exit([1])", False), ("raise SystemExit", False)),
        ("class C:\n    def __eq__(*a): raise ValueError\nsys.exit(C())", False),
        *(("os._exit(5)", True), ("exit(6)", False), ("quit()", False)),
        *(
            (f"os.kill(os.getpid(), signal.SIG{name})", name == "KILL")
            for name in ("TERM", "KILL", "ABRT", "INT", "SEGV", "HUP", "USR1", "XFSZ")
        ),
        *(("raise KeyboardInterrupt", False), ("1 / 0", True), ("raise BaseException('x')", False)),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", True),
        ("class E(Exception):\n    __bool__ = __len__ = None\nraise E('x')", True),
        ("try: 1 / 0\nexcept Exception as e: raise ValueError('y') from e", False),
        ("raise MemoryError", False),
        ("def f(): f()\nf()", False),
        ("import threading\nthreading.Thread(target=lambda: 1 / 0).start()", False),
        (
            (
                "import threading\n"
                "threading.Thread(target=lambda: [torch.ones(9) for _ in iter(int, 1)], daemon=True).start()"
            ),
            True,
        ),
        (
            (
                "import threading, time\n"
                "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()"
            ),
            True,
        ),
        ("import atexit\natexit.register(lambda: 1 / 0)", True),
        ("import atexit\natexit.register(lambda: sys.exit(8))", False),
        ("import atexit\natexit.register(os._exit, 9)", True),
        ("class D:\n    def __del__(self): 1 / 0\nd = D()", False),
        ("def g():\n    try: yield\n    finally: print('closed')\nd = g(); next(d)", False),
        ("os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])", True),
        (
            "pid = os.fork()\nsys.exit(7 if pid == 0 else os.waitstatus_to_exitcode(os.wait()[1]))",
            True,
        ),
        ("import subprocess\nprint(subprocess.run([sys.executable, '-c', 'print(2)']))", False),
        ("import subprocess\nprint(subprocess.check_output('echo $0', shell=True))", False),
        ("signal.signal(signal.SIGTERM, lambda *a: sys.exit(8)); os.kill(os.getpid(), 15)", True),
        (
            (
                "signal.pthread_sigmask(signal.SIG_BLOCK, [10]); os.kill(os.getpid(), 10)\n"
                "print(signal.sigwait([10]))"
            ),
            True,
        ),
        ("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", True),
        ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", True),
        ("os.chdir('/'); os.environ.clear(); sys.path.clear(); sys.modules.clear()", True),
        ("for name in list(vars()): del vars()[name]", True),
        ("os.closerange(3, 99)", True),
        ("import shutil\nshutil.rmtree(os.getcwd())", True),
    )
]
ENDS += [
    Part(
        "end",
        f"multiprocessing, {way}",
        run=True,
        real=real,
        last=f"""
import multiprocessing
def work(queue): queue.put(torch.ones(100).sum().item())
if __name__ == "__main__":
    context = multiprocessing.get_context("{way}")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get())
    child.join()
    print(child.exitcode)
""",
    )
    for way, real in (("fork", True), ("spawn", True), ("forkserver", False))
]

KINDS = (
    *(CALLS, FLAGS, ENVIRONMENTS, PLACES, STREAMS, LIMITS),
    *(ARGUMENTS, GLOBALS, NAMES, TORCH, ENDS),
)


def single() -> Iterable[Way]:
    """The plain way, and those with one part."""
    yield Way((), real=True)
    for kind in KINDS:
        for part in kind:
            yield Way((part,), real=part.real)


def combined(count: int, seed: int = 40) -> Iterable[Way]:
    """Ways of three parts of different kinds, at random and always the same."""
    chance = random.Random(seed)
    for _ in range(count):
        kinds = chance.sample(KINDS, 3)
        parts = [chance.choice(kind) for kind in kinds]
        if fits(parts):
            yield Way(tuple(parts), real=any(part.real for part in parts))


def fits(parts: Sequence[Part]) -> bool:
    """Whether the parts do not undo each other."""
    return all(
        sum(bool(part[field]) for part in parts) < 2 for field in map(Part._fields.index, ONCE)
    )


ONCE = ("call", "shell", "stdin")
