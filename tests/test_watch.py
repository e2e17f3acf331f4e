"""`pytracer watch`: a recording on a terminal while it goes on, and never a byte of it wrong."""

import fcntl
import itertools
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pytracer import errors, load, trace
from pytracer.analysis.answers.step_memory import StepMemory
from pytracer.analysis.answers.training_steps import peak_positions
from pytracer.analysis.facts import timelines, usage
from pytracer.cli import main
from pytracer.cli.watch import catch_up
from pytracer.data._native import core
from pytracer.export import terminal
from pytracer.export.live import Following, gpu_users, screen, step_line
from tests.mutations import HEADER

pyte = pytest.importorskip("pyte")

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
STEPS = 12
PLAIN = terminal.PLAIN.paint

# A training that takes its time, as its arguments say: steps, seconds between them, file. There
# may be a second file: as soon as that is there, it takes no time any more.
TRAINING = """
import os, sys, time, torch
from torch import nn
from pytracer import trace
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
steps, pause, path = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

def train():
    for step in range(steps):
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss of step", step, flush=True)
        time.sleep(0 if any(map(os.path.exists, sys.argv[4:])) else pause)

if path == "-":
    train()
    sys.exit(7)
with trace(model, optimizer, path=path, table=False):
    train()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole recording with lines, of a model with attention."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("watch") / "trained.pytrace"
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with trace(model, optimizer, path=path, stacks=True, table=False):
        for _ in range(STEPS):
            model(torch.randn(4, 16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)  # several flushes
    return path


@pytest.fixture(scope="module")
def gan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A critic that steps twice for each step of a generator."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("watch") / "gan.pytrace"
    generator, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
    with trace(generator, critic, *optimizers, path=path, table=False):
        for i in range(STEPS):
            critic(generator(torch.randn(32, 8)).detach()).sum().backward()
            optimizers[1].step()
            if i % 2:
                critic(generator(torch.randn(32, 8))).sum().backward()
                optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            time.sleep(0.01)
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def followed(path: Path) -> Following:
    following = Following(path)
    catch_up(following)
    return following


def shown_memory(following: Following) -> StepMemory:
    shown = following.shown()
    assert shown is not None
    return shown.memory


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **more}


# ---------------------------------------------------------------- what is shown is what was


@pytest.mark.parametrize("name", ["trained", "gan", "h200", "streamed-1.1", "streamed-1.0"])
def test_a_recording_that_is_over_shows_what_its_summary_says(
    name: str, trained: Path, gan: Path
) -> None:
    path = {"trained": trained, "gan": gan}.get(name, DATA / f"{name}.pytrace")
    following, whole = followed(path), load(path)
    assert following.finished
    device = following.main
    assert device is not None
    peak = whole.peak
    assert device["peak"]["bytes"] == peak.bytes
    assert device["peak"]["step"] == (peak.step or 0)
    steps = whole.steps()
    memory, ends = shown_memory(following), timelines.timeline(whole.data).step_ends
    position = peak_positions(whole.data)[len(ends) - 1]
    assert memory.peak.by_category == usage.moment(whole.data, position, peak.device).by_category
    assert memory.peak.bytes == following.steps(len(ends) - 1)[0].peak
    if len(ends) == len(steps) and peak.position == position:
        assert memory.peak.by_category == peak.by_category
    shown = following.steps(0)
    assert [step.number for step in shown] == list(range(len(steps)))
    assert [step.peak for step in shown] == steps["peak_bytes"].tolist()
    assert [step.end for step in shown] == steps["end_bytes"].tolist()


def test_modules_and_lines_are_those_of_the_last_steps_peak(trained: Path) -> None:
    whole, following = load(trained), followed(trained)
    last = whole.steps().iloc[-1]
    assert last["peak_bytes"] == whole.peak.bytes  # so the last step's peak is as the first one's
    lines = dict(following.lines())
    expected = whole.by("line", at="peak")["bytes"]
    for name, amount in lines.items():
        assert amount == expected[name], name
    assert sum(amount for _, amount in following.modules()) <= whole.peak.bytes
    assert any(name.startswith("layers.*") for name, _ in following.modules())


def test_the_rules_rest_while_a_recording_goes_on_and_run_at_its_end(
    trained: Path, tmp_path: Path
) -> None:
    """A picture may be of an earlier step, and says of which; the last picture is of the last."""
    whole, path = trained.read_bytes(), tmp_path / "growing.pytrace"
    path.write_bytes(whole[:-200])
    following = followed(path)
    first = following.shown()
    assert first is not None
    assert first.step == following.state["step"] - 1
    assert any(f"of step {first.step}" in row for row in screen(following, (80, 24), paint=PLAIN))
    following._rests_until, following._shown_of = float("inf"), None
    assert following.shown() is first
    path.write_bytes(whole)
    catch_up(following)
    last = following.shown()
    assert last is not None
    assert last is not first
    assert last.step == STEPS - 1


def test_before_a_step_has_ended_there_are_no_categories(tmp_path: Path) -> None:
    """The modules of what is in use now are there."""
    path, model = tmp_path / "forward.pytrace", nn.Sequential(nn.Linear(64, 64))
    with trace(model, path=path, devices="cpu", table=False), torch.no_grad():
        kept = [model(torch.randn(8, 64)) for _ in range(3)]
    assert len(kept) == 3  # all of them lived until the end
    following = followed(path)
    assert following.state["step"] == 0
    rows = screen(following, (80, 24), paint=PLAIN)
    assert any("categories follow" in row for row in rows)
    assert dict(following.modules()) == dict(load(path).by("module", at="end")["bytes"])


@pytest.mark.parametrize("piece", [1, 7, 1000, 65536])
def test_it_does_not_matter_in_which_pieces_a_file_grows(
    piece: int, trained: Path, tmp_path: Path
) -> None:
    """A chunk that is written in part is waited for, and no row is read twice."""
    whole = trained.read_bytes()
    most = 2000 * piece  # looks at the file
    cuts = [*range(0, min(len(whole), most), piece), len(whole)]
    path = tmp_path / "growing.pytrace"
    path.write_bytes(b"")
    following = Following(path)
    levels = []
    with path.open("ab") as file:
        for begin, end in itertools.pairwise(cuts):
            file.write(whole[begin:end])
            file.flush()
            catch_up(following)
            levels.append(following.state["step"])
    assert levels == sorted(levels)
    expected = followed(trained)
    assert following.state == expected.state
    assert following.steps(0) == expected.steps(0)


def test_a_flush_is_shown_whole_or_not_at_all(trained: Path, tmp_path: Path) -> None:
    """At every cut the events are those that a reader finds in the same part of the file."""
    whole = trained.read_bytes()
    path = tmp_path / "cut.pytrace"
    seen = set()
    for cut in range(4000, len(whole), len(whole) // 23):
        path.write_bytes(whole[:cut])
        columns, _ = core.read_file(os.fsencode(path), core.NO_LIMIT)
        events = len(columns["events.ticks"])
        assert followed(path).state["events"] == events
        seen.add(events)
    assert len(seen) > 3


@pytest.mark.ci
def test_memory_does_not_grow_with_the_recording(script: Path, tmp_path: Path) -> None:
    """Many steps take no more than a few do; docs/watch.md has the figures of 10,000."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from pytracer.cli.watch import catch_up\nfrom pytracer.export.live import Following\n"
        "f = Following(Path(sys.argv[1]))\ncatch_up(f)\n"
        "peak = Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]\n"
        "print(f.state['step'], peak)\n"
    )
    peaks = {}
    for steps in (300, 1500):  # by 300 the rules have run, and their window is full
        path = tmp_path / f"{steps}.pytrace"
        run = [sys.executable, str(script), str(steps), "0", str(path)]
        subprocess.run(run, env=environment(), check=True, stdout=subprocess.DEVNULL)
        looked = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env=environment(),
            check=True,
            stdout=subprocess.PIPE,
        )
        done, peaks[steps] = map(int, looked.stdout.split())
        assert done == steps
    assert peaks[1500] < 50 << 10  # KiB
    assert peaks[1500] < peaks[300] + (4 << 10)


# ---------------------------------------------------------------- files that are not as they should be


def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pytrace"
    other.write_text("no trace at all, but text")
    for path in (other, tmp_path / "missing.pytrace", tmp_path):
        assert main(["watch", str(path)]) == 4
        said = capsys.readouterr().err
        assert said.startswith(f"pytracer: {path}: ")
        assert said.count("\n") == 1


def test_damage_is_told_and_nothing_behind_it_is_shown(trained: Path, tmp_path: Path) -> None:
    """A checksum that is wrong is waited for, until the file has grown far beyond it."""
    whole = bytearray(trained.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    path = tmp_path / "damaged.pytrace"
    path.write_bytes(whole)
    following = followed(path)
    before = following.state["events"]
    assert not following.finished
    with path.open("ab") as file:
        file.write(bytes(2 << 20))
    with pytest.raises(errors.UnreadableTrace, match=r"damaged at byte [\d,]+; .*pytracer summary"):
        catch_up(following)
    assert following.state["events"] == before


def test_a_file_that_is_replaced_is_told(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    path.write_bytes(trained.read_bytes())
    following = followed(path)
    path.write_bytes(trained.read_bytes()[: HEADER * 100])
    followed_again = Following(path)
    catch_up(followed_again)
    assert following.finished  # what is over stays as it was
    growing = tmp_path / "growing.pytrace"
    growing.write_bytes(trained.read_bytes()[:-200])
    following = followed(growing)
    growing.write_bytes(trained.read_bytes()[:5000])
    with pytest.raises(errors.UnreadableTrace, match="replaced by another recording"):
        catch_up(following)


def test_a_recording_whose_process_is_gone_is_told(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "killed.pytrace"
    path.write_bytes(trained.read_bytes()[:-300])
    following = followed(path)
    assert not following.finished
    assert not following.abandoned  # this process
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    following._meta = following.meta._replace(pid=gone.pid)
    assert following.abandoned
    assert "its process is gone" in screen(following, (80, 24), paint=PLAIN)[0]


# ---------------------------------------------------------------- the text


def test_no_line_is_wider_than_the_terminal(trained: Path) -> None:
    following = followed(trained)
    for width in (1, 2, 9, 20, 40, 52, 80, 200):
        for height in (1, 3, 10, 24, 60):
            lines = screen(
                following,
                (width, height),
                paint=PLAIN,
                users=["GPU 0: 1 MiB of 2 MiB in use; others: none"],
                program="a\x1b[31mb\tc 漢字" * 30,
            )
            assert len(lines) == height
            assert max(map(len, lines)) <= width
            assert all(line.isprintable() for line in lines)


def test_other_users_of_a_gpu_are_named() -> None:
    gpus = {
        "aaa": {
            "used": 3 << 30,
            "total": 8 << 30,
            "driver_reserve": 0,
            "processes": [
                {"pid": 1, "bytes": 1 << 30, "name": "python"},
                {"pid": 2, "bytes": 2 << 30, "name": "python"},
                {"pid": 3, "bytes": None},
            ],
        },
        "bbb": {},
    }
    said = gpu_users(gpus, own=1)
    assert said == [
        "GPU 0: 3.00 GiB of 8.00 GiB in use; others: python 2 2.00 GiB, process 3 unknown"
    ]


# ---------------------------------------------------------------- in a terminal


class Terminal:
    """A program in a terminal of its own, and what a person would see there."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.code: int | None = None
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs the tests may ignore Ctrl-C
            os.execvpe(command[0], command, environment(TERM="xterm-256color"))
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def read(self, seconds: float) -> bool:
        """What came within that time; False when the program is over."""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux: the other end is closed
            data = b""
        self.written += data
        self._stream.feed(data)
        return bool(data)

    def wait_for(self, shown: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
        """The screen as soon as it shows that."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if shown(self.text):
                return self.text
            assert self.read(0.2), "\n".join(self.text)
        raise AssertionError("\n".join(self.text))

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def finish(self, seconds: float = 60) -> int:
        limit = time.monotonic() + seconds
        while self.read(0.2) and time.monotonic() < limit:
            pass
        if time.monotonic() >= limit:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def training(script: Path, tmp_path: Path) -> Iterator[Path]:
    """One that goes on until the test is over."""
    path = tmp_path / "run.pytrace"
    command = [sys.executable, str(script), "100000", "0.05", str(path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    yield path
    process.kill()
    process.wait()


def step_of(lines: list[str]) -> int:
    """The step that the first line speaks of; -1 if it speaks of none."""
    _, _, after = lines[0].partition("step ")
    number = after.split(" ")[0].replace(",", "")
    return int(number) if number.isdecimal() else -1


def test_in_a_terminal_it_follows_resizes_and_leaves(training: Path) -> None:
    """Every picture is whole: the same lines, each beginning and ending where it should."""
    watch = Terminal([sys.executable, "-m", "pytracer", "watch", str(training)])
    # A picture may arrive in parts: its last line is its end.
    first = watch.wait_for(lambda lines: step_of(lines) > 0 and lines[-1].startswith("q leaves"))
    assert first[0].startswith("run.pytrace   recording   step ")
    assert first[1].startswith("cpu   now ")
    assert any(line.startswith("  weights ") for line in first)
    assert first[-1] == "q leaves; the training goes on"
    later = watch.wait_for(lambda lines: step_of(lines) > step_of(first) + 3)
    # Five categories always have a row; the others only while they hold something.
    assert [line[:10] for line in later[3:9]] == [line[:10] for line in first[3:9]]

    for columns, lines in ((40, 10), (132, 50), (12, 4), (80, 24)):
        watch.resize(columns, lines)
        text = watch.wait_for(
            lambda text, lines=lines: (
                len(text) == lines and text[-1].startswith("q leaves"[:12]) and "run" in text[0]
            )
        )
        before = step_of(text)
        if columns >= 40:  # else the step does not fit
            text = watch.wait_for(lambda text, before=before: step_of(text) > before)
        assert text[0].startswith("run.pytrace"[: columns - 3])
        assert sum("q leaves" in line for line in text) == 1  # nothing wrapped or scrolled
        assert sum(line.startswith("run.pyt") for line in text) == 1

    watch.press(b"x")
    watch.press(b"q")
    assert watch.finish() == 0
    assert b"\x1b[?1049l" in watch.written  # the shell's own screen is back
    assert b"\x1b[?25h" in watch.written
    assert "pytracer summary" in "".join(watch.text)


def test_in_a_terminal_ctrl_c_leaves_as_q_does(training: Path) -> None:
    watch = Terminal([sys.executable, "-m", "pytracer", "watch", str(training)])
    watch.wait_for(lambda lines: step_of(lines) > 0)
    watch.press(b"\x03")
    assert watch.finish() == 0
    assert b"Traceback" not in watch.written
    assert b"\x1b[?1049l" in watch.written


def test_a_terminal_without_a_cursor_gets_a_line_a_step(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    command = [sys.executable, str(script), "40", "0.02", str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL):
        while not (path.exists() and path.stat().st_size):
            time.sleep(0.05)
        watch = subprocess.run(
            [sys.executable, "-m", "pytracer", "watch", str(path)],
            env=environment(TERM="dumb"),
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    expected = followed(path).steps(0)
    lines = watch.stdout.splitlines()
    assert "\x1b" not in watch.stdout
    assert len(lines) == len(expected) == 40
    for line, step in zip(lines, expected, strict=True):
        # The clock is read again and again: a time may differ in its last digit.
        assert line.rsplit("   ", 1)[0] == step_line(step).rsplit("   ", 1)[0]


def test_run_live_shows_the_steps_and_keeps_what_the_program_is(
    script: Path, tmp_path: Path
) -> None:
    """Its output comes when the picture is over, and its exit code is its own."""
    out = tmp_path / "live.pytrace"
    command = [sys.executable, "-m", "pytracer", "run", "--live", "-o", str(out), str(script)]
    seen = tmp_path / "seen"
    shown = Terminal([*command, "40", "0.4", "-", str(seen)], columns=100, lines=60)
    shown.wait_for(
        lambda lines: (
            step_of(lines) > 2
            and lines[0].startswith("live.")
            and any(line.startswith("program  loss of step ") for line in lines)
        )
    )
    seen.touch()
    assert shown.finish() == 7
    assert b"loss of step 39" in shown.written.rpartition(b"\x1b[?1049l")[2]
    assert len(load(out).steps()) == 40  # every step, not the first five


def test_run_live_goes_on_when_the_picture_is_left(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "live.pytrace"
    command = [sys.executable, "-m", "pytracer", "run", "--live", "-o", str(out), str(script)]
    left = tmp_path / "left"
    shown = Terminal([*command, "30", "0.4", "-", str(left)])
    shown.wait_for(lambda lines: step_of(lines) > 0)
    shown.press(b"q")
    shown.wait_for(lambda _: b"\x1b[?1049l" in shown.written)
    left.touch()
    assert shown.finish() == 7
    assert len(load(out).steps()) == 30


def test_run_live_without_a_terminal_prints_lines(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "live.pytrace"
    command = [sys.executable, "-m", "pytracer", "run", "--live", "-o", str(out), str(script)]
    done = subprocess.run(
        [*command, "6", "0", "-"], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7
    assert "loss of step 5" in done.stdout
    assert sum(line.startswith("step ") for line in done.stderr.splitlines()) == 6


def test_run_live_is_for_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "--live", "train.py"]) == 2
    assert "pytracer watch train.rank0.pytrace" in capsys.readouterr().err
