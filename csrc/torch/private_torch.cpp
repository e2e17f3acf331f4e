#include "private_torch.h"

#include "devices.h"
#include "exchange.h"
#include "frame_locals.h"
#include "imagined_guard.h"

#include <pybind11/eval.h>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string_view>

namespace py = pybind11;

namespace pytracer::private_torch {

// ------------------------------------------------------------------ Python's side of torch

py::object call_impl() {
  static auto* const attributes =
      new py::object(py::module_::import("torch.nn").attr("Module").attr("__dict__"));
  return (*attributes)["_call_impl"];
}

py::object annotation_class() {
  static auto* const kind =
      new py::object(py::module_::import("torch.autograd.profiler").attr("record_function"));
  return *kind;
}

py::object enter_annotation() {
  return annotation_class().attr("__dict__")["__enter__"];
}

py::object run_backward() {
  static auto* const engine = new py::object(
      py::module_::import("torch.autograd").attr("Variable").attr("_execution_engine"));
  return py::type::of(*engine).attr("run_backward");
}

py::object saved_tensors_function(const char* name) {
  return py::module_::import("torch._C._autograd").attr(name);
}

bool is_step_wrapper(PyCodeObject* code) {
  static const char* const file = [] {
    auto optimizer = py::module_::import("torch.optim.optimizer").attr("Optimizer");
    py::object name = optimizer.attr("profile_hook_step").attr("__code__").attr("co_filename");
    return PyUnicode_AsUTF8(name.release().ptr());  // kept for good
  }();
  return PyUnicode_CompareWithASCIIString(code->co_name, "wrapper") == 0 && file != nullptr &&
         std::strcmp(PyUnicode_AsUTF8(code->co_filename), file) == 0;
}

PyObject* set_eval_frame(PyObject* callback) {
  static PyObject* const function = [] {
    PyObject* module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
    PyObject* attribute =
        module != nullptr ? PyObject_GetAttrString(module, "set_eval_frame") : nullptr;
    Py_XDECREF(module);
    PyErr_Clear();
    return attribute;
  }();
  PyObject* before = function != nullptr ? PyObject_CallOneArg(function, callback) : nullptr;
  PyErr_Clear();
  return before;
}

bool compiles_backward() {
  static PyObject* const module = PyUnicode_InternFromString("torch._dynamo.compiled_autograd");
  static PyObject* const flag = PyUnicode_InternFromString("compiled_autograd_enabled");
  PyObject* compiled = PyDict_GetItemWithError(PyImport_GetModuleDict(), module);
  PyObject* enabled = compiled != nullptr && PyModule_Check(compiled)
                          ? PyDict_GetItemWithError(PyModule_GetDict(compiled), flag)
                          : nullptr;
  PyErr_Clear();
  return enabled != nullptr && enabled != Py_False;
}

py::object queued_calls(const char* device) {
  std::string module = std::string("torch.") + device;
  py::object queued = py::getattr(py::module_::import(module.c_str()), "_queued_calls", py::none());
  return PyList_Check(queued.ptr()) ? queued : py::object();
}

py::object capture_question(const char* device) {
  std::string name = std::string("_") + device + "_isCurrentStreamCapturing";
  return py::getattr(py::module_::import("torch._C"), name.c_str(), py::none());
}

// ------------------------------------------------------------------ symbols

namespace {

constexpr bool kKnowsWorkspaces =
    TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 15;

void* loaded_cuda() {
  return dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
}

}  // namespace

std::vector<Workspaces*> workspaces() {
  std::vector<Workspaces*> all;
  void* library = kKnowsWorkspaces ? loaded_cuda() : nullptr;
  for (const char* name : {"_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
                           "_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv"}) {
    if (void* function = library != nullptr ? dlsym(library, name) : nullptr) {
      all.push_back(&reinterpret_cast<Workspaces& (*)()>(function)());
    }
  }
  return all;
}

namespace {

using Dynamic = ElfW(Dyn);
using Relocation = ElfW(Rela);
using Symbol = ElfW(Sym);

constexpr char kLibrary[] = "libtorch_cpu.so";

// Where a loaded library keeps the tables by which it finds its imports.
struct Imports {
  const Relocation* entries = nullptr;
  size_t bytes = 0;
  const Symbol* symbols = nullptr;
  const char* texts = nullptr;
};

Imports imports_of(const Dynamic* dynamic) {
  Imports imports;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    switch (dynamic->d_tag) {
      case DT_JMPREL:
        imports.entries = reinterpret_cast<const Relocation*>(dynamic->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        imports.bytes = dynamic->d_un.d_val;
        break;
      case DT_SYMTAB:
        imports.symbols = reinterpret_cast<const Symbol*>(dynamic->d_un.d_ptr);
        break;
      case DT_STRTAB:
        imports.texts = reinterpret_cast<const char*>(dynamic->d_un.d_ptr);
        break;
      default:
        break;
    }
  }
  return imports;
}

struct Wanted {
  const char* function;
  void* entry;
};

// Called for each loaded library; stops at libtorch_cpu. Skips an entry that the loader has made
// read-only.
int find_entry(dl_phdr_info* library, size_t /*size*/, void* result) {
  auto* wanted = static_cast<Wanted*>(result);
  const char* file = std::strrchr(library->dlpi_name, '/');
  if (std::strcmp(file != nullptr ? file + 1 : library->dlpi_name, kLibrary) != 0) {
    return 0;
  }
  const Dynamic* dynamic = nullptr;
  uintptr_t read_only = 0;
  uintptr_t read_only_end = 0;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const auto& segment = library->dlpi_phdr[i];
    if (segment.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const Dynamic*>(library->dlpi_addr + segment.p_vaddr);
    } else if (segment.p_type == PT_GNU_RELRO) {
      read_only = library->dlpi_addr + segment.p_vaddr;
      read_only_end = read_only + segment.p_memsz;
    }
  }
  if (dynamic == nullptr) {
    return 1;
  }
  const Imports imports = imports_of(dynamic);
  for (size_t i = 0; i < imports.bytes / sizeof(Relocation); ++i) {
    const Relocation& entry = imports.entries[i];
    const Symbol& symbol = imports.symbols[ELF64_R_SYM(entry.r_info)];
    uintptr_t address = library->dlpi_addr + entry.r_offset;
    bool writable = address < read_only || address >= read_only_end;
    if (writable && std::strcmp(imports.texts + symbol.st_name, wanted->function) == 0) {
      wanted->entry = reinterpret_cast<void*>(address);
      break;
    }
  }
  return 1;
}

void* entry_of(const char* function) {
  Wanted wanted{function, nullptr};
  dl_iterate_phdr(&find_entry, &wanted);
  return wanted.entry;
}

}  // namespace

Demangle* demangle_entry() {
  static auto* const entry = static_cast<Demangle*>(entry_of("_ZN3c108demangleB5cxx11EPKc"));
  return entry;
}

Listeners* listeners_entry() {
  static auto* const entry =
      static_cast<Listeners*>(entry_of("_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE"));
  return entry;
}

// ------------------------------------------------------------------ at run time

namespace {

constexpr const char* kProgram = R"(
import sys
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

def own_variables(read):
    mark = 7
    return read(sys._getframe()).get("mark")

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5)
product = weight * 3
outputs = Twice.apply(product)
module = torch.nn.ReLU()
)";

// The names of torch's records on this thread while the tiny program runs.
class RecordNames {
 public:
  RecordNames() {
    names.clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  }

  ~RecordNames() { at::removeCallback(handle_); }

  RecordNames(const RecordNames&) = delete;  // it is removed once
  RecordNames& operator=(const RecordNames&) = delete;

  static bool any_begins_with(std::string_view prefix) {
    return std::any_of(names.begin(), names.end(), [prefix](const std::string& name) {
      return std::string_view(name).substr(0, prefix.size()) == prefix;
    });
  }

 private:
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
    names.emplace_back(fn.name());
    return nullptr;
  }

  static inline thread_local std::vector<std::string> names;

  at::CallbackHandle handle_;
};

template <class Try>
std::string problem_of(Try attempt) {
  try {
    return attempt();
  } catch (py::error_already_set& error) {
    return py::str(error.value());
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string unless(bool is_well, const char* problem) {
  return is_well ? "" : problem;
}

const torch::autograd::Node* node_of(const py::object& tensor) {
  return THPVariable_Unpack(tensor.ptr()).grad_fn().get();
}

std::string problem_with_node_types(const py::dict& program) {
  const torch::autograd::Node* torchs = node_of(program["product"]);
  const torch::autograd::Node* python = node_of(program["outputs"]);
  if (torchs == nullptr || !is_torchs_node(typeid(*torchs))) {
    return "a node of torch's own is not known by its type's name";
  }
  if (python == nullptr || !is_python_node(typeid(*python)) || is_torchs_node(typeid(*python))) {
    return "a Function in Python is not known by its node's type";
  }
  return "";
}

std::string problem_with_object(const py::dict& program) {
  auto* node = const_cast<torch::autograd::Node*>(node_of(program["outputs"]));
  if (node == nullptr || !is_python_node(typeid(*node))) {
    return "there is no such node";
  }
  PyObject* object = object_of(static_cast<torch::autograd::PyNode&>(*node));
  bool is_its = object != nullptr && std::strcmp(Py_TYPE(object)->tp_name, "TwiceBackward") == 0;
  return unless(is_its, "the node of a Function in Python does not lead to its object");
}

std::string problem_with_variables(const py::dict& program) {
  py::cpp_function read([](const py::object& frame) {
    return py::reinterpret_steal<py::object>(
        frame_locals::all(reinterpret_cast<PyFrameObject*>(frame.ptr())));
  });
  py::object mark = program["own_variables"](read);
  return unless(py::isinstance<py::int_>(mark) && mark.cast<int>() == 7,
                "a variable of a running function is not found");
}

std::string problem_with_workspaces() {
  if (loaded_cuda() == nullptr) {
    return "";  // nothing to find
  }
  if (!kKnowsWorkspaces) {
    return "this release of torch may keep them in another way";
  }
  return unless(workspaces().size() == 2, "libtorch_cuda.so does not export both");
}

std::string problem_with_steps(const py::dict& program) {
  py::object code = program["optimizer"].attr("step").attr("__func__").attr("__code__");
  bool is_known =
      PyCode_Check(code.ptr()) != 0 && is_step_wrapper(reinterpret_cast<PyCodeObject*>(code.ptr()));
  return unless(is_known, "the wrapper of an optimizer's step is not known by its name and file");
}

std::string problem_with_eval_frame() {
  PyObject* before = set_eval_frame(Py_None);
  if (before == nullptr) {
    return "it is not there, or refuses None";
  }
  Py_XDECREF(set_eval_frame(before));
  Py_DECREF(before);
  return "";
}

}  // namespace

std::vector<Check> check() {
  std::vector<Check> checks;
  auto add = [&checks](std::string name, std::string purpose, auto attempt) {
    checks.push_back({std::move(name), std::move(purpose), problem_of(attempt)});
  };
  add("torch.nn.Module._call_impl", "modules", [] {
    return unless(PyFunction_Check(call_impl().ptr()), "it is no function in Python");
  });
  add("torch.autograd.profiler.record_function.__enter__", "steps at little cost", [] {
    return unless(PyFunction_Check(enter_annotation().ptr()), "it is no function in Python");
  });
  add("torch._C._EngineBase.run_backward", "backward passes", [] {
    return unless(has_exchangeable_entry(run_backward().ptr()), "its entry cannot be exchanged");
  });
  for (const char* name : {kDisableHooks, kEnableHooks, kTopHooks}) {
    add(std::string("torch._C._autograd.") + name, "saved_tensors=\"hooks\"", [name] {
      return unless(has_exchangeable_entry(saved_tensors_function(name).ptr()),
                    "its entry cannot be exchanged");
    });
  }
  add("torch._C._dynamo.eval_frame.set_eval_frame",
      "callbacks that torch.compile leaves alone",
      &problem_with_eval_frame);
  for (const devices::Kind& kind : devices::kKinds) {
    if (kind.type == DeviceType::kCpu) {
      continue;
    }
    std::string device = kind.name;
    add("torch." + device + "._queued_calls", "traces that begin before the device is up", [&] {
      return unless(bool(queued_calls(kind.name)), "it is no list");
    });
    add("torch._C._" + device + "_isCurrentStreamCapturing", "phase times by the device", [&] {
      return unless(!capture_question(kind.name).is_none(), "it is not there");
    });
  }
  add("cublas_handle_stream_to_workspace", "the workspaces of cuBLAS", &problem_with_workspaces);
  add("c10::demangle in libtorch_cpu.so", "names of nodes at less cost", [] {
    return unless(demangle_entry() != nullptr, "the library has no entry that may be written");
  });
  add("at::getStepCallbacksUnlessEmpty in libtorch_cpu.so", "reads at less cost", [] {
    return unless(listeners_entry() != nullptr, "the library has no entry that may be written");
  });
  add("the table of at::CUDAHooksInterface", "imagined runs", &imagined::problem_with_hooks);
  add("DistributedDataParallel._comm_hooks", "quiet backward passes of its models", [] {
    py::object kind = py::module_::import("torch.nn.parallel").attr("DistributedDataParallel");
    py::object names = kind.attr("register_comm_hook").attr("__code__").attr("co_names");
    return unless(names.contains(kCommunicationHooks), "the method does not add to it");
  });

  py::dict program;
  std::string problem = problem_of([&] {
    program["__builtins__"] = py::module_::import("builtins");
    program["__name__"] = "pytracer._private_torch";
    py::exec(kProgram, program);
    RecordNames heard;
    program["outputs"].attr("sum")().attr("backward")();
    program["optimizer"].attr("step")();
    return std::string();
  });
  auto try_program = [&](const char* name, const char* purpose, auto attempt) {
    add(name, purpose, [&] { return problem.empty() ? attempt() : problem; });
  };
  try_program("names of autograd's nodes", "backward passes, node by node", [&] {
    return unless(RecordNames::any_begins_with(kNodePrefix), "no record has the engine's prefix");
  });
  try_program("name of AccumulateGrad's node", "gradients that do not stay", [&] {
    return unless(RecordNames::any_begins_with(kAccumulateGrad), "no record has this name");
  });
  try_program("name of an optimizer's step", "steps", [&] {
    return unless(RecordNames::any_begins_with(kOptimizerPrefix), "no record has this prefix");
  });
  try_program("wrapper of an optimizer's step", "steps, optimizer by optimizer", [&] {
    return problem_with_steps(program);
  });
  try_program("types of autograd's nodes", "quiet backward passes", [&] {
    return problem_with_node_types(program);
  });
  try_program("torch::autograd::PyNode's object", "FSDP's nodes", [&] {
    return problem_with_object(program);
  });
  try_program("torch.nn.Module._parameters, ._modules", "parameters without Python", [&] {
    py::object attributes = program["module"].attr("__dict__");
    bool are_there = py::isinstance<py::dict>(attributes["_parameters"]) &&
                     py::isinstance<py::dict>(attributes["_modules"]);
    return unless(are_there, "a module does not keep them in dictionaries");
  });
  try_program("variables of running functions", "names of variables, whose step it is", [&] {
    return problem_with_variables(program);
  });
  return checks;
}

}  // namespace pytracer::private_torch
