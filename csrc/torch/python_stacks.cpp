#include "python_stacks.h"

#include "../core/recorder.h"

#include <Python.h>

#include <array>
#include <unordered_map>

namespace pytracer::python_stacks {

namespace {

// Deep enough for any training script; recursion beyond it loses its outermost frames.
constexpr size_t kMaxDepth = 192;

struct CodePoint {
  PyCodeObject* code;
  int instruction;

  bool operator==(const CodePoint&) const = default;
};

struct CodePointHash {
  size_t operator()(const CodePoint& point) const {
    return hash_mix(reinterpret_cast<uintptr_t>(point.code),
                    static_cast<uint64_t>(point.instruction));
  }
};

// The GIL guards it, and it is valid in one recording. Code objects are kept alive, so that no
// other object gets their addresses.
struct Known {
  uint32_t generation = 0;
  std::unordered_map<CodePoint, StackFrame, CodePointHash> frames;
  std::unordered_map<size_t, uint32_t> stacks;
};

Known& known() {
  static auto* const tables = new Known;
  return *tables;
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

PyObject* qualified_name(PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030b0000
  return code->co_qualname;
#else
  return code->co_name;
#endif
}

// Line tables are searched from their start, so each code point is looked up once.
const StackFrame& resolve(const CodePoint& point) {
  auto [it, is_new] = known().frames.try_emplace(point);
  if (is_new) {
    Py_INCREF(point.code);
    int line = PyCode_Addr2Line(point.code, point.instruction);
    it->second = {0,
                  intern_unicode(point.code->co_filename),
                  intern_unicode(qualified_name(point.code)),
                  static_cast<uint32_t>(line > 0 ? line : 0)};
  }
  return it->second;
}

uint32_t take_with_gil() {
  if (known().generation != Recorder::get().generation()) {
    clear();
    known().generation = Recorder::get().generation();
  }
  std::array<CodePoint, kMaxDepth> points;
  size_t depth = 0;
  size_t hash = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && depth < kMaxDepth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    points[depth] = {code, PyFrame_GetLasti(frame)};
    hash = hash_mix(hash, CodePointHash{}(points[depth]));
    ++depth;
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(code);  // the frame, which is still running, keeps it
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  // 64 well-mixed bits over the whole stack: only among billions of stacks would two clash.
  auto [it, is_new] = known().stacks.try_emplace(hash, 0);
  if (is_new) {
    uint32_t row = 0;
    for (size_t i = depth; i > 0; --i) {
      StackFrame resolved = resolve(points[i - 1]);
      resolved.parent = row;
      row = Recorder::get().stacks.intern(resolved);
    }
    it->second = row;
  }
  return it->second;
}

uint32_t take() {
  // A thread that never ran Python has no lines; giving it a Python state would be slow.
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) {
    return 0;
  }
#if PY_VERSION_HEX >= 0x030d0000
  if (Py_IsFinalizing()) {
    return 0;
  }
#endif
  PyGILState_STATE gil = PyGILState_Ensure();
  uint32_t row = take_with_gil();
  PyGILState_Release(gil);
  return row;
}

}  // namespace

void install() {
  Recorder::get().take_stack.store(&take);
}

void uninstall() {
  Recorder::get().take_stack.store(nullptr);
}

void clear() {
  for (auto& [point, frame] : known().frames) {
    Py_DECREF(point.code);
  }
  known().frames.clear();
  known().stacks.clear();
}

}  // namespace pytracer::python_stacks
