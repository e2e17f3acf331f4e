#include "quietly.h"

#include "../core/clock.h"
#include "../core/recorder.h"
#include "private_torch.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>

namespace pytracer::quietly {

namespace {

uint64_t count = 0;  // guarded by the GIL
PYTRACER_STATIC_TLS thread_local constinit Timed* innermost = nullptr;
constexpr uint64_t kLongNs = 30'000;  // less than interrupted_ticks()

class IsolatedFromProgram {
 public:
  IsolatedFromProgram()
      : functions_(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
        tracing_(may_stop_tracing() ? torch::jit::tracer::getTracingState() : nullptr),
        compiler_(private_torch::set_eval_frame(Py_None)) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    if (tracing_) {
      torch::jit::tracer::setTracingState(nullptr);
    }
  }

  // An exception may be on its way.
  ~IsolatedFromProgram() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_);
    if (tracing_) {
      torch::jit::tracer::setTracingState(std::move(tracing_));
    }
    if (compiler_ != nullptr && compiler_ != Py_None) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      Py_XDECREF(private_torch::set_eval_frame(compiler_));
      PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(compiler_);
  }

  IsolatedFromProgram(const IsolatedFromProgram&) = delete;
  IsolatedFromProgram& operator=(const IsolatedFromProgram&) = delete;

 private:
  // Inside of an operator torch refuses.
  static bool may_stop_tracing() {
    return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Tracer);
  }

  at::impl::TorchFunctionDisabledState functions_;
  std::shared_ptr<torch::jit::tracer::TracingState> tracing_;
  PyObject* compiler_;
};

// The folder of an imported package or module.
std::string folder_of(const char* module) {
  std::string folder;
  PyObject* found = PyImport_ImportModule(module);
  PyObject* file = found != nullptr ? PyObject_GetAttrString(found, "__file__") : nullptr;
  if (const char* path = file != nullptr ? PyUnicode_AsUTF8(file) : nullptr) {
    folder = std::string_view(path).substr(0, std::string_view(path).rfind('/') + 1);
  }
  PyErr_Clear();
  Py_XDECREF(file);
  Py_XDECREF(found);
  return folder;
}

// Whether our call runs the code in this file: it is ours, torch's or the standard library's.
bool runs_for_us(std::string_view file) {
  static const auto* const folders = new std::array{folder_of("pytracer"), folder_of("torch")};
  static const auto* const library = new std::string(folder_of("os"));
  auto is_in = [file](const std::string& folder) {
    return !folder.empty() && file.substr(0, folder.size()) == folder;
  };
  bool in_library = is_in(*library) && file.find("-packages/") == file.npos;
  return in_library || file.substr(0, 8) == "<frozen " ||
         std::any_of(folders->begin(), folders->end(), is_in);
}

// Whether our call raised the exception. A signal's handler belongs to the program: it may run
// between any two of our lines, and its exceptions are meant for the program.
bool is_ours(PyObject* traceback) {
  if (traceback == nullptr) {
    return true;
  }
  auto* last = reinterpret_cast<PyTracebackObject*>(traceback);
  while (last->tb_next != nullptr) {
    last = last->tb_next;
  }
  PyCodeObject* code = PyFrame_GetCode(last->tb_frame);
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  PyErr_Clear();
  bool ours = file == nullptr || runs_for_us(file);
  Py_DECREF(code);
  return ours;
}

// Clears the exception that is set, if it is ours.
bool forget_ours() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) {
    return false;
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (!is_ours(traceback)) {
    PyErr_Restore(type, value, traceback);
    return false;
  }
  ++count;
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return true;
}

int raise_now(void* exception) {
  auto* raised = static_cast<PyObject*>(exception);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised)), raised);
  Py_DECREF(raised);
  return -1;
}

}  // namespace

bool call(PyObject* callback, PyObject* const* args, size_t argc, PyObject** result) {
  IsolatedFromProgram isolated;
  Kind python{.is_long = true};  // never short
  Timed timed(python);
  Py_INCREF(callback);  // another thread may replace it meanwhile
  PyObject* returned = PyObject_Vectorcall(callback, args, argc, nullptr);
  Py_DECREF(callback);
  if (returned == nullptr && !forget_ours()) {
    return false;
  }
  if (result != nullptr) {
    *result = returned;
  } else {
    Py_XDECREF(returned);
  }
  return true;
}

bool after_exception() {
  return forget_ours();
}

Timed::Timed(Kind& kind)
    : kind_(kind),
      outer_(std::exchange(innermost, this)),
      by_thread_(kind.is_long),
      counts_(outer_ == nullptr || (by_thread_ && !outer_->by_thread_ && outer_->counts_)) {
  OwnTime::in_longer_call = true;
  began_at_ = ticks_now();
  if (counts_ && by_thread_) {
    began_ns_ = thread_ns();
  }
}

Timed::~Timed() {
  innermost = outer_;
  OwnTime::in_longer_call = outer_ != nullptr;
  if (!counts_) {
    return;
  }
  uint64_t ticks = ticks_now() - began_at_;
  if (by_thread_) {
    uint64_t ns = thread_ns() - began_ns_;
    OwnTime::add_ns(ns);
    kind_.is_long = ns > kLongNs;
  } else {
    uint64_t own = ticks - std::min(ticks, inside_);
    OwnTime::add_ticks(std::min(own, interrupted_ticks()));
    kind_.is_long = own > interrupted_ticks();
  }
  if (outer_ != nullptr) {
    outer_->inside_ += ticks;
  }
}

void raise_later() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) {
    PyException_SetTraceback(value, traceback);
  }
  // The main thread handles signals; another thread gets an asynchronous exception of this type.
  if (gettid() != getpid()) {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), type);
    Py_XDECREF(value);
  } else if (Py_AddPendingCall(&raise_now, value) != 0) {
    Py_XDECREF(value);  // the queue is full of others
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
}

uint64_t errors() {
  return count;
}

}  // namespace pytracer::quietly
