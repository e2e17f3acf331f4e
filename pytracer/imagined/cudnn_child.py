"""Asks cuDNN for the plan that it would choose on a card that is not there, and the plan's workspace.

    python cudnn_child.py libcudnn.so.9 _driver.so _products.so

Questions on standard input and answers on standard output are lines of JSON. The other libraries have the names
of CUDA's driver and of cuBLASLt. cuDNN looks whether the first is there, before it offers kernels that are compiled
at run time. The second it asks for an algorithm, before it offers engines that use cuBLASLt.

A program of its own: cuDNN stays out of the program that imagines. cuDNN's graph API answers from a text of
a card's properties since 9.8. The questions are those of torch's Conv_v8.cpp: one convolution, its tensors
aligned to 32 bytes, the instant heuristics and then the fallbacks, filtered by numerical notes.
"""

import ctypes
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

# cudnn_graph.h
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _PLAN, _KNOB, _GRAPH, _TENSOR, _CARD = (
    1,
    2,
    3,
    4,
    5,
    7,
    15,
    17,
    38,
)
_DATA_TYPE, _INT64, _FLOAT, _DOUBLE, _MODE, _HEURISTIC_MODE, _KNOB_TYPE = 1, 3, 4, 5, 7, 8, 9
_NOTE, _DESCRIPTOR, _BEHAVIOR, _INT32, _CHAR = 11, 15, 19, 23, 24
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_TENSOR_CORE, _ROUNDS_INPUTS, _VARIES = 0, 1, 4  # numerical notes
_COMPILED = 0  # a note of behavior: compiled at run time
_MOST_NOTES, _MOST_KNOBS = 10, 44
_INSTANT, _FALLBACK = 0, 2
# The operation, and its attributes: x, w, y, the convolution, and the first of two factors.
_OPERATIONS = {
    "forward": (10, 704, 703, 705, 702, 700),
    "input": (12, 710, 709, 711, 708, 706),
    "weight": (11, 716, 715, 717, 714, 712),
}
_ALIGNMENT = 32
_DOWN, _ACROSS = 27, 28  # the knobs for the blocks of a cluster
_WITHOUT_DRIVER = 18  # processors that cuDNN counts
_SPLITS = 25  # the knob that is 0 where a persistent kernel may share a tile between blocks


class Refused(Exception):
    """cuDNN said no."""


class Library:
    """The functions of cuDNN's graph API."""

    def __init__(self, path: str) -> None:
        """Loads it."""
        self._functions = functions = ctypes.CDLL(path)
        address, count = ctypes.c_void_p, ctypes.c_int64
        functions.cudnnGetVersion.restype = ctypes.c_size_t
        functions.cudnnBackendCreateDescriptor.argtypes = [ctypes.c_int, ctypes.POINTER(address)]
        functions.cudnnBackendDestroyDescriptor.argtypes = [address]
        functions.cudnnBackendFinalize.argtypes = [address]
        functions.cudnnBackendSetAttribute.argtypes = [
            address,
            ctypes.c_int,
            ctypes.c_int,
            count,
            address,
        ]
        functions.cudnnBackendGetAttribute.argtypes = [
            address, ctypes.c_int, ctypes.c_int, count, ctypes.POINTER(count), address,
        ]  # fmt: skip
        self.version = int(functions.cudnnGetVersion())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, f"cudnnBackend{name}")


class Descriptor:
    """One of cuDNN's descriptors, which keeps those that it names."""

    def __init__(self, library: Library, kind: int) -> None:
        """Makes an empty one."""
        self._library, self.address = library, ctypes.c_void_p()
        self._kept: list[Any] = []
        _check(library.CreateDescriptor(kind, ctypes.byref(self.address)))

    def __del__(self) -> None:
        """Frees it."""
        self._library.DestroyDescriptor(self.address)

    def set(self, attribute: int, kind: int, values: Any) -> None:
        """Sets an attribute to an array of ctypes."""
        _check(
            self._library.SetAttribute(self.address, attribute, kind, len(values), _start(values))
        )

    def integers(self, attribute: int, *values: int) -> None:
        """Sets an attribute to integers."""
        self.set(attribute, _INT64, (ctypes.c_int64 * len(values))(*values))

    def choice(self, attribute: int, kind: int, value: int) -> None:
        """Sets an attribute to a member of an enumeration."""
        self.set(attribute, kind, (ctypes.c_int * 1)(value))

    def names(self, attribute: int, *others: "Descriptor") -> None:
        """Sets an attribute to other descriptors."""
        self._kept += others
        self.set(attribute, _DESCRIPTOR, _addresses(others))

    def done(self) -> "Descriptor":
        """Finishes it."""
        _check(self._library.Finalize(self.address))
        return self

    def get(self, attribute: int, kind: int, values: Any = None) -> int:
        """Reads an attribute into an array of ctypes, if any, and returns how many there are."""
        count, most = ctypes.c_int64(), 0 if values is None else len(values)
        start = None if values is None else _start(values)
        _check(
            self._library.GetAttribute(
                self.address, attribute, kind, most, ctypes.byref(count), start
            )
        )
        return count.value

    def filled(self, attribute: int, kind: int, most: int) -> list["Descriptor"]:
        """Reads descriptors of a kind."""
        made = [Descriptor(self._library, kind) for _ in range(most)]
        count = self.get(attribute, _DESCRIPTOR, _addresses(made))
        for one in made:
            one._kept.append(self)
        return made[:count]


def _check(status: int) -> None:
    if status:
        raise Refused(status)


def _start(values: Any) -> Any:
    return ctypes.cast(values, ctypes.c_void_p)


def _addresses(descriptors: Iterable[Descriptor]) -> Any:
    found = [one.address for one in descriptors]
    return (ctypes.c_void_p * len(found))(*found)


class Asker:
    """Answers questions about convolutions."""

    def __init__(self, library: Library, products: Any) -> None:
        """Asks nothing yet. `products`: the library that stands in for cuBLASLt."""
        self._library = library
        self._allowed = products.pytracer_allowed
        self._allowed.restype = ctypes.c_int64
        self._cards: dict[str, Descriptor] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The first plan that torch would run."""
        card, graph = self._card(asked["card"]), self._graph(asked)
        for config in self._configs(graph, card):
            engine, notes, is_compiled = self._engine(config)
            if _is_filtered(notes, asked):
                continue
            need = _of_config if is_compiled else self._of_plan
            try:
                size = need(config, card)
            except Refused:
                continue
            knobs = self._knobs(config)
            self._allowed()
            self._config(graph, card, engine, knobs)
            allowed = self._allowed()
            unsplit, fewer = size, []
            if knobs.get(_SPLITS) == 0 and _ACROSS in knobs:
                unsplit = need(self._config(graph, card, engine, {**knobs, _SPLITS: 1}), card)
                cluster = knobs.get(_DOWN, 1) * knobs.get(_ACROSS, 1)
                for count in range(cluster, _WITHOUT_DRIVER, cluster):
                    made = self._config(graph, card, engine, knobs, processors=count)
                    fewer.append((count, need(made, card)))
            return {
                "engine": engine,
                "knobs": list(knobs.items()),
                "bytes": size,
                "allowed": max(0, allowed),
                "unsplit": unsplit,
                "fewer": fewer,
            }
        return {"engine": None}

    def _new(self, kind: int) -> Descriptor:
        return Descriptor(self._library, kind)

    def _card(self, text: str) -> Descriptor:
        if text not in self._cards:
            made, given = self._new(_CARD), text.encode()
            made.set(2702, _CHAR, (ctypes.c_char * len(given)).from_buffer_copy(given))
            self._cards[text] = made.done()
        return self._cards[text]

    def _graph(self, asked: dict[str, Any]) -> Descriptor:
        dtype = _TYPES[asked["dtype"]]
        is_double = asked["dtype"] == "float64"
        convolution = self._new(_CONVOLUTION)
        convolution.choice(100, _DATA_TYPE, dtype if is_double else 0)
        convolution.choice(101, _MODE, 1)  # cross-correlation
        convolution.integers(106, len(asked["padding"]))
        convolution.integers(102, *asked["dilation"])
        convolution.integers(103, *asked["stride"])
        convolution.integers(104, *asked["padding"])
        convolution.integers(105, *asked["padding"])
        convolution.done()
        kind, *attributes, described, factor = _OPERATIONS[asked["operation"]]
        operation = self._new(kind)
        for name, attribute in zip("xwy", attributes, strict=True):
            sizes, strides = asked[name]
            tensor = self._new(_TENSOR)
            tensor.integers(906, ord(name))
            tensor.choice(901, _DATA_TYPE, dtype)
            tensor.integers(902, *sizes)
            tensor.integers(903, *strides)
            tensor.integers(900, _ALIGNMENT)
            operation.names(attribute, tensor.done())
        operation.names(described, convolution)
        for attribute, value in ((factor, 1.0), (factor + 1, 0.0)):
            number = ctypes.c_double if is_double else ctypes.c_float
            operation.set(attribute, _DOUBLE if is_double else _FLOAT, (number * 1)(value))
        graph = self._new(_GRAPH)
        graph.names(801, operation.done())
        return graph.done()

    def _configs(self, graph: Descriptor, card: Descriptor) -> Iterator[Descriptor]:
        for mode in (_INSTANT, _FALLBACK):
            heuristics = self._new(_HEURISTICS)
            heuristics.names(201, graph)
            heuristics.choice(200, _HEURISTIC_MODE, mode)
            heuristics.names(204, card)
            heuristics.done()
            most = heuristics.get(202, _DESCRIPTOR)
            yield from heuristics.filled(202, _CONFIG, most)

    def _engine(self, config: Descriptor) -> tuple[int, list[int], bool]:
        """Its number, its numerical notes, and whether it is compiled at run time."""
        (engine,) = config.filled(300, _ENGINE, 1)
        number, notes, behavior = (
            (ctypes.c_int64 * 1)(), (ctypes.c_int * _MOST_NOTES)(), (ctypes.c_int * _MOST_NOTES)(),
        )  # fmt: skip
        engine.get(1301, _INT64, number)
        count = engine.get(1303, _NOTE, notes)
        of_behavior = engine.get(1305, _BEHAVIOR, behavior)
        return number[0], list(notes[:count]), _COMPILED in behavior[:of_behavior]

    def _knobs(self, config: Descriptor) -> dict[int, int]:
        found = {}
        for knob in config.filled(302, _KNOB, _MOST_KNOBS):
            name, value = (ctypes.c_int * 1)(), (ctypes.c_int64 * 1)()
            knob.get(600, _KNOB_TYPE, name)
            knob.get(601, _INT64, value)
            found[name[0]] = value[0]
        return found

    def _config(
        self,
        graph: Descriptor,
        card: Descriptor,
        engine: int,
        knobs: dict[int, int],
        processors: int = 0,
    ) -> Descriptor:
        """Made of an engine and its knobs, for at most so many processors if it is said."""
        made = self._new(_ENGINE)
        made.names(1300, graph)
        made.integers(1301, engine)
        made.names(1307, card)
        if processors:
            made.set(1306, _INT32, (ctypes.c_int32 * 1)(processors))
        config = self._new(_CONFIG)
        config.names(300, made.done())
        chosen = []
        for name, value in knobs.items():
            knob = self._new(_KNOB)
            knob.choice(600, _KNOB_TYPE, name)
            knob.integers(601, value)
            chosen.append(knob.done())
        if chosen:
            config.names(302, *chosen)
        return config.done()

    def _of_plan(self, config: Descriptor, card: Descriptor) -> int:
        plan = self._new(_PLAN)
        plan.names(401, config)
        plan.names(407, card)
        return _size(plan.done(), 402)


def _of_config(config: Descriptor, _: Descriptor) -> int:
    """Without a plan, because that would compile the kernel."""
    return _size(config, 303)


def _size(descriptor: Descriptor, attribute: int) -> int:
    size = (ctypes.c_int64 * 1)()
    descriptor.get(attribute, _INT64, size)
    return int(size[0])


def _is_filtered(notes: list[int], asked: dict[str, Any]) -> bool:
    """As filterEngineConfigs of torch."""
    if asked["deterministic"] and _VARIES in notes:
        return True
    without_tf32 = asked["dtype"] == "float32" and not asked["tf32"]
    return _ROUNDS_INPUTS in notes or (without_tf32 and _TENSOR_CORE in notes)


def main() -> None:
    """Answers until its input ends."""
    ctypes.CDLL(sys.argv[2])
    products = ctypes.CDLL(sys.argv[3])
    library = Library(sys.argv[1])
    asker = Asker(library, products)
    _say({"version": library.version})
    for line in sys.stdin:
        try:
            answer = asker.answer(json.loads(line))
        except Refused as problem:
            answer = {"problem": str(problem)}
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
