#include "python_stacks.h"

#include "../core/recorder.h"
#include "private_torch.h"

#include <Python.h>

#include <atomic>
#include <bit>
#include <exception>
#include <frameobject.h>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pytracer::python_stacks {

namespace {

// Deep enough for any training script; recursion beyond it loses its outermost frames.
constexpr size_t kMaxDepth = 192;
constexpr size_t kMostKnown = size_t{1} << 16;  // code points, and stacks

// All that the names and the line of an instruction depend on. A code object itself is not held:
// it would keep alive what hangs on it, such as the graphs of torch.compile. Strings and bytes hold
// nothing and never change.
struct CodePoint {
  PyObject* file;
  PyObject* name;
  PyObject* lines;
  int first_line;
  int instruction;

  bool operator==(const CodePoint&) const = default;
};

PyObject* qualified_name(const PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030b0000
  return code->co_qualname;
#else
  return code->co_name;
#endif
}

int last_instruction(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti < 0 ? -1 : frame->f_lasti * 2;
#endif
}

CodePoint point_of(const PyCodeObject* code, int instruction) {
  return {code->co_filename,
          qualified_name(code),
          code->co_linetable,
          code->co_firstlineno,
          instruction};
}

// Cheap, because it runs for each frame.
struct CodePointHash {
  size_t operator()(const CodePoint& point) const {
    auto position =
        static_cast<uint64_t>(point.first_line) << 32 | static_cast<uint32_t>(point.instruction);
    return reinterpret_cast<uintptr_t>(point.lines) +
           reinterpret_cast<uintptr_t>(point.file) * 0x9e3779b97f4a7c15ULL +
           reinterpret_cast<uintptr_t>(point.name) * 0xd6e8feb86659fd93ULL +
           position * 0xff51afd7ed558ccdULL;
  }
};

// The GIL guards it, and it is valid in one recording. The parts of its code points are held, so
// that no other object gets their addresses.
struct Known {
  uint32_t generation = 0;
  std::unordered_map<CodePoint, StackFrame, CodePointHash> frames;
  std::unordered_map<size_t, uint32_t> stacks;
  std::unordered_map<PyObject*, bool> files;  // whether a compiler wrote it; held
};

Known& known() {
  static auto* const tables = new Known;
  return *tables;
}

bool starts_with(PyObject* text, const char* prefix) {
  Py_ssize_t length = 0;
  const char* utf8 = text != nullptr && PyUnicode_CheckExact(text)
                         ? PyUnicode_AsUTF8AndSize(text, &length)
                         : nullptr;
  if (utf8 == nullptr) {
    PyErr_Clear();
    return false;
  }
  return std::string_view(utf8, static_cast<size_t>(length)).starts_with(prefix);
}

// A variable of the frame's module, borrowed; null if there is none.
PyObject* globals_of(PyFrameObject* frame, const char* name) {
#if PY_VERSION_HEX >= 0x030b0000
  PyObject* globals = PyFrame_GetGlobals(frame);
#else
  PyObject* globals = Py_NewRef(frame->f_globals);
#endif
  PyObject* found = PyDict_CheckExact(globals) ? PyDict_GetItemString(globals, name) : nullptr;
  Py_DECREF(globals);  // the frame has it
  return found;
}

uint32_t intern_unicode(PyObject* text) {
  Py_ssize_t length = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text, &length);
  if (utf8 == nullptr) {
    PyErr_Clear();  // lone surrogates in a file name
    return Recorder::get().strings.intern("?");
  }
  return Recorder::get().strings.intern({utf8, static_cast<size_t>(length)});
}

StackFrame frame_at(PyCodeObject* code, const CodePoint& point) {
  int line = PyCode_Addr2Line(code, point.instruction);
  return {0,
          intern_unicode(point.file),
          intern_unicode(point.name),
          static_cast<uint32_t>(line > 0 ? line : 0)};
}

// An object of a subclass may hold anything.
bool may_be_held(const CodePoint& point) {
  return PyUnicode_CheckExact(point.file) && PyUnicode_CheckExact(point.name) &&
         PyBytes_CheckExact(point.lines);
}

struct Call {
  PyCodeObject* code;  // kept by its frame, which is still running
  int instruction;
};

// Line tables are searched from their start, so each code point is looked up once.
StackFrame resolve(const Call& call) {
  CodePoint point = point_of(call.code, call.instruction);
  if (!may_be_held(point)) {
    return frame_at(call.code, point);
  }
  auto it = known().frames.find(point);
  if (it == known().frames.end()) {
    it = known().frames.emplace(point, frame_at(call.code, point)).first;
    Py_INCREF(point.file);
    Py_INCREF(point.name);
    Py_INCREF(point.lines);
  }
  return it->second;
}

// The row of the innermost call, which comes first.
uint32_t row_of(const std::vector<Call>& calls) {
  uint32_t row = 0;
  for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
    StackFrame resolved = resolve(*call);
    resolved.parent = row;
    row = Recorder::get().stacks.intern(resolved);
  }
  return row;
}

// Inductor loads what it writes into modules of this name; torch.fx compiles a graph's code from a
// string.
bool is_generated(PyFrameObject* frame, PyObject* file) {
  if (!PyUnicode_CheckExact(file)) {
    return false;
  }
  auto& files = known().files;
  if (auto it = files.find(file); it != files.end()) {
    return it->second;
  }
  if (files.size() > kMostKnown) {
    clear();
  }
  bool generated = starts_with(file, private_torch::kGraphCode) ||
                   starts_with(globals_of(frame, "__name__"), private_torch::kGeneratedModule);
  files.emplace(Py_NewRef(file), generated);
  return generated;
}

// Calls visit(code, instruction) for each frame, from the innermost on.
template <class Visit>
void walk(Visit&& visit) {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (size_t depth = 0; frame != nullptr && depth < kMaxDepth; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    visit(code, last_instruction(frame));
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(code);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
}

// Keeps the row of the stack, unless something in it may not be held. A program that makes new code
// again and again begins with empty tables now and then: the recorder still knows the rows.
uint32_t learn(size_t hash) {
  std::vector<Call> calls;
  calls.reserve(kMaxDepth);
  bool is_kept = true;
  walk([&](PyCodeObject* code, int instruction) {
    calls.push_back({code, instruction});
    is_kept = is_kept && may_be_held(point_of(code, instruction));
  });
  if (known().frames.size() > kMostKnown || known().stacks.size() > kMostKnown) {
    clear();
  }
  uint32_t row = row_of(calls);
  if (is_kept) {
    known().stacks.emplace(hash, row);
  }
  return row;
}

uint32_t take_with_gil() noexcept try {
  if (known().generation != Recorder::generation()) {
    clear();
    known().generation = Recorder::generation();
  }
  // 64 well-mixed bits over the whole stack: only among billions of stacks would two clash.
  size_t hash = 0;
  walk([&hash](PyCodeObject* code, int instruction) {
    hash =
        std::rotl(hash ^ CodePointHash{}(point_of(code, instruction)), 27) * 0xc4ceb9fe1a85ec53ULL;
  });
  auto row = known().stacks.find(hash);
  return row != known().stacks.end() ? row->second : learn(hash);
} catch (const std::exception&) {  // no memory for another line

  return 0;
}

// How far it is above an allocation: an imagined run allocates in Python.
std::atomic<int> frames_above_allocator{0};

// How far the generated code is above an operator that it calls: OpOverload.__call__ and its kind.
constexpr int kMostAbove = 4;

uint32_t generated_with_gil(int most_above) noexcept try {
  if (known().generation != Recorder::generation()) {
    clear();
    known().generation = Recorder::generation();
  }
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  uint32_t row = 0;
  for (int above = 0; frame != nullptr && row == 0 && above <= most_above; ++above) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (is_generated(frame, code->co_filename)) {
      row = Recorder::get().stacks.intern(resolve({code, last_instruction(frame)}));
    }
    Py_DECREF(code);
    PyFrameObject* caller = above < most_above ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return row;
} catch (const std::exception&) {  // no memory for another line

  return 0;
}

// An object for the frame may be made here, and until Python 3.11 that may begin a collection,
// which frees the program's tensors.
uint32_t generated_in_allocator() {
  int collects = PyGC_Disable();
  uint32_t row = generated_with_gil(frames_above_allocator.load(std::memory_order_relaxed));
  if (collects != 0) {
    PyGC_Enable();
  }
  return row;
}

bool holds_gil(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030d0000
  return PyThreadState_GetUnchecked() == state;
#else
  return _PyThreadState_UncheckedGet() == state;
#endif
}

bool python_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

uint32_t take() {
  // A thread that never ran Python has no lines; giving it a Python state would be slow.
  PyThreadState* state = Py_IsInitialized() ? PyGILState_GetThisThreadState() : nullptr;
  if (state == nullptr || python_ends()) {
    return 0;
  }
  if (holds_gil(state)) {
    return take_with_gil();
  }
  PyEval_RestoreThread(state);
  uint32_t row = take_with_gil();
  PyEval_SaveThread();
  return row;
}

uint32_t take_generated(Recorder::Caller caller) {
  PyThreadState* state = Py_IsInitialized() ? PyGILState_GetThisThreadState() : nullptr;
  if (state == nullptr || python_ends()) {
    return 0;
  }
  if (holds_gil(state)) {
    return caller == Recorder::Caller::kAllocator ? generated_in_allocator()
                                                  : generated_with_gil(kMostAbove);
  }
  if (caller == Recorder::Caller::kAllocator) {
    return 0;
  }
  PyEval_RestoreThread(state);
  uint32_t row = generated_with_gil(kMostAbove);
  PyEval_SaveThread();
  return row;
}

}  // namespace

void allocates_in_python(int frames) {
  frames_above_allocator.store(frames);
}

void expect_generated(bool is_expected) {
  Recorder::get().take_generated.store(is_expected ? &take_generated : nullptr);
}

void install() {
  Recorder::get().take_stack.store(&take);
}

void uninstall() {
  Recorder::get().take_stack.store(nullptr);
}

void clear() {
  for (auto& [point, frame] : known().frames) {
    Py_DECREF(point.file);
    Py_DECREF(point.name);
    Py_DECREF(point.lines);
  }
  for (auto& [file, generated] : known().files) {
    Py_DECREF(file);
  }
  known().files.clear();
  known().frames.clear();
  known().stacks.clear();
}

}  // namespace pytracer::python_stacks
