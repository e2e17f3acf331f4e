#include "moments.h"

#include "calls.h"
#include "look.h"
#include "private_torch.h"
#include "quietly.h"
#include "saved_tensors.h"
#include "session.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace pytracer {

namespace {

constexpr int kDeepestBatch = 4;
const std::vector<Py_ssize_t> kNotMet{-1};  // sizes that no optimizer's groups have
constexpr size_t kMostStepping = 5;
constexpr size_t kMostStructures = 256;  // then all are dropped, and those in use come again
constexpr int kDeepestState = 6;
constexpr int kHolders = 1;     // state is a dictionary, mostly of a dictionary for each parameter
constexpr int kMostPasses = 8;  // in one step; a program may have no optimizer that ends it

bool is_power_of_four(uint64_t number) {
  return std::has_single_bit(number) && std::countr_zero(number) % 2 == 0;
}

// Due in these calls of an outermost module: 2, 3, 5, 17, 65, ... There may be many modules.
bool is_look_due(uint64_t call) {
  return call == 3 || (call > 1 && is_power_of_four(call - 1));
}

// Due in these passes: the first 8, 16, 64, 256, ... Frames are looked through each time.
bool are_variables_due(uint64_t pass) {
  return pass <= 8 || is_power_of_four(pass);
}

// Models' names for the keys and values of earlier words: past_key_values, cache, kv_cache, ...
bool names_a_cache(PyObject* name) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &length);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  std::string_view view(text, static_cast<size_t>(length));
  return view.find("past") != view.npos || view.find("cache") != view.npos;
}

Listeners& all_listeners() {
  static auto* const listeners = new Listeners;
  return *listeners;
}

template <class... Arguments>
bool tell(const py::object& listener, Arguments... arguments) {
  std::array<PyObject*, sizeof...(arguments)> given{arguments...};
  return quietly::call(listener.ptr(), given.data(), given.size());
}

// An attribute that the object itself has, or null.
py::object attribute(PyObject* object, PyObject* name) {
  return py::reinterpret_steal<py::object>(look::attribute(object, name));
}

PyObject* interned(const char* name) {
  return PyUnicode_InternFromString(name);
}

// each(parameters) for the list of each of the optimizer's groups.
template <class Each>
void each_group(PyObject* optimizer, Each each) {
  static PyObject* const param_groups = interned("param_groups");
  static PyObject* const params = interned("params");
  py::object groups = attribute(optimizer, param_groups);
  if (!groups || !PyList_Check(groups.ptr())) {
    return;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups.ptr()); ++i) {
    PyObject* group = PyList_GET_ITEM(groups.ptr(), i);
    PyObject* listed = PyDict_Check(group) ? PyDict_GetItemWithError(group, params) : nullptr;
    PyErr_Clear();
    if (listed != nullptr && (PyList_Check(listed) || PyTuple_Check(listed))) {
      each(listed);
    }
  }
}

std::vector<Py_ssize_t> group_sizes(PyObject* optimizer) {
  std::vector<Py_ssize_t> sizes;
  each_group(optimizer,
             [&](PyObject* parameters) { sizes.push_back(PySequence_Fast_GET_SIZE(parameters)); });
  return sizes;
}

void add_parameters(PyObject* optimizer, std::vector<PyObject*>& found) {
  each_group(optimizer, [&](PyObject* parameters) {
    PyObject** items = PySequence_Fast_ITEMS(parameters);
    found.insert(found.end(), items, items + PySequence_Fast_GET_SIZE(parameters));
  });
}

uint64_t identity_of_state(PyObject* optimizer, int depth) {
  static PyObject* const state = interned("state");
  py::object found = attribute(optimizer, state);
  return found ? labels::identity_of(found.ptr(), depth) : 0;
}

// Null if the object is gone.
py::object referred_to(const py::object& reference) {
  return py::reinterpret_steal<py::object>(look::referred_to(reference.ptr()));
}

py::object reference_to(PyObject* object) {
  auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object, nullptr));
  if (!reference) {
    throw py::error_already_set();
  }
  return reference;
}

void label_as(uint8_t category, std::string_view role, PyObject* part) {
  const at::Tensor& tensor = THPVariable_Unpack(part);
  labels::adopt_cpu(tensor, /*also_known=*/true);
  labels::record(tensor, labels::number_of(category, role, "", tensor));
}

}  // namespace

bool GraphWalks::is_due(uint64_t structure, bool must) {
  if (passes_ == 0 || passes_ == kMostPasses) {
    passes_ = 0;
    walking_ = false;
  }
  ++passes_;
  walking_ = is_due_by_itself(structure) || walking_ || must;
  return walking_;
}

bool GraphWalks::is_due_by_itself(uint64_t structure) {
  if (met_.size() > kMostStructures) {
    met_.clear();
  }
  uint64_t met = ++met_[structure];
  return met <= 2 || (met >= 16 && is_power_of_four(met));
}

void Moments::add_reducer(PyObject* module) {
  std::erase_if(reducers_, [](const auto& known) { return !referred_to(known); });
  reducers_.push_back(reference_to(module));
}

bool Moments::reducers_run_no_python() {
  static PyObject* const hooks = interned(private_torch::kCommunicationHooks);
  bool some = false;
  for (const py::object& known : reducers_) {
    if (py::object module = referred_to(known)) {
      py::object listed = attribute(module.ptr(), hooks);
      if (!listed || !PyList_Check(listed.ptr()) || PyList_GET_SIZE(listed.ptr()) > 0) {
        return false;
      }
      some = true;
    }
  }
  return some;
}

bool Moments::before_root(PyObject* module,
                          PyObject* const* args,
                          Py_ssize_t count,
                          PyObject* names) {
  bool is_reading_due = false;
  sessions::AllListening listening = sessions::listening();
  for (const auto& session : *listening) {
    is_reading_due = session->called() || is_reading_due;
  }
  if (is_reading_due && !tell(all_listeners().read_memory)) {
    return false;
  }
  if (watched.label() > 0 && !tell(all_listeners().look_again)) {
    return false;
  }
  if (!label_inside_a_step()) {
    return false;
  }
  if (is_look_due(++entries_[module]) && !tell(all_listeners().note_attributes, module)) {
    return false;
  }
  if (!label_inputs(module, args, count, names)) {
    return false;
  }
  for (const auto& session : *listening) {
    session->phases->root_entered(module);
  }
  return true;
}

bool Moments::after_root() {
  sessions::AllListening listening = sessions::listening();
  for (const auto& session : *listening) {
    session->phases->root_left();
  }
  return true;
}

// The graph need not be read if hooks see each save as it happens, as those of one thread do.
bool Moments::before_backward(PyObject* outputs, uint64_t structure, bool must) {
  sessions::AllListening listening = sessions::listening();
  bool by_hooks = std::any_of(
      listening->begin(), listening->end(), [](const auto& one) { return one->by_hooks; });
  bool go_on = true;
  if (by_hooks && !saved_tensors::is_home()) {
    go_on = tell(all_listeners().read_graph, outputs);
  } else if (by_hooks) {
    go_on = tell(all_listeners().read_graph_of_func, outputs);
  } else if (walks_.is_due(structure, must)) {
    go_on = tell(all_listeners().read_graph, outputs);
  }
  // After the graph: what it keeps, no variable keeps alone.
  if (go_on && are_variables_due(++passes_)) {
    go_on = tell(all_listeners().note_variables);
  }
  for (const auto& session : *listening) {  // not before the graph has been read
    if (go_on) {
      session->phases->backward_begins(outputs);
    }
  }
  return go_on;
}

bool Moments::after_backward() {
  sessions::AllListening listening = sessions::listening();
  for (const auto& session : *listening) {
    session->phases->backward_ends();
  }
  watched.label_gradients();
  if (has_engines && !tell(all_listeners().label_engines)) {
    return false;
  }
  return label_inside_a_step();
}

// The gradients as the optimizer sees them; its parameters may belong to no module.
bool Moments::before_step(PyObject* optimizer) {
  if (optimizer != Py_None) {
    std::shared_ptr<Optimizer> one = entry_of(optimizer);
    one->steps = true;
    std::vector<Py_ssize_t> groups = group_sizes(optimizer);
    if (one->groups != groups) {
      bool is_new = one->groups == kNotMet;
      one->groups = std::move(groups);
      if (!tell(all_listeners().meet_optimizer, optimizer)) {
        return false;
      }
      if (is_new) {  // its state has labels now
        one->state = identity_of_state(optimizer, kDeepestState);
        one->holders = identity_of_state(optimizer, kHolders);
      }
    }
    add_parameters(optimizer, parameters_);
    size_t labelled = watched.label_gradients_of(parameters_);
    parameters_.clear();
    if (labelled == 0) {
      watched.label(/*again=*/true);  // so that a step that does nothing has an event, too
    }
    if (has_engines && !tell(all_listeners().label_engines)) {
      return false;
    }
    if (!label_replaced_state(*one)) {
      return false;
    }
    std::erase(stepping_, one);
    stepping_.push_back(one);
    if (stepping_.size() > kMostStepping) {
      stepping_.erase(stepping_.begin());
    }
  }
  sessions::AllListening listening = sessions::listening();
  for (const auto& session : *listening) {
    session->phases->step_begins();
  }
  return true;
}

// The state that this step has made.
bool Moments::after_step(PyObject* optimizer) {
  sessions::AllListening listening = sessions::listening();
  for (const auto& session : *listening) {
    session->phases->step_ends();
  }
  if (optimizer != Py_None) {
    std::shared_ptr<Optimizer> one = entry_of(optimizer);
    std::erase(stepping_, one);
    if (!label_changed_state(*one)) {
      return false;
    }
  }
  walks_.stepped();
  bool is_reading_due = false;
  for (const auto& session : *listening) {
    is_reading_due = session->stepped() || is_reading_due;
  }
  return !is_reading_due || tell(all_listeners().read_memory);
}

std::shared_ptr<Moments::Optimizer> Moments::entry_of(PyObject* optimizer) {
  for (const auto& one : optimizers_) {
    if (referred_to(one->reference).ptr() == optimizer) {
      return one;
    }
  }
  std::erase_if(optimizers_, [](const auto& one) { return !referred_to(one->reference); });
  auto one = std::make_shared<Optimizer>();
  one->reference = reference_to(optimizer);
  one->groups = kNotMet;
  optimizers_.push_back(one);
  return one;
}

// Labels all state if some of it is new: it has grown, or its tensors were replaced.
bool Moments::label_changed_state(Optimizer& optimizer) {
  py::object held = referred_to(optimizer.reference);
  uint64_t now = held ? identity_of_state(held.ptr(), kDeepestState) : optimizer.state;
  if (now == optimizer.state) {
    return true;
  }
  optimizer.state = now;
  optimizer.holders = identity_of_state(held.ptr(), kHolders);
  return tell(all_listeners().label_state, held.ptr());
}

// Between two steps, load_state_dict replaces all state at once. Single tensors that the program
// replaces are labelled as the step ends, if they are still there.
bool Moments::label_replaced_state(Optimizer& optimizer) {
  py::object held = referred_to(optimizer.reference);
  uint64_t now = held ? identity_of_state(held.ptr(), kHolders) : optimizer.holders;
  return std::exchange(optimizer.holders, now) == now || label_changed_state(optimizer);
}

void Moments::add_optimizer(PyObject* optimizer) {
  entry_of(optimizer);
}

// In a closure: state may come and go within one step, as LBFGS's history does. Optimizers around
// others may never step.
bool Moments::label_inside_a_step() {
  auto stepping = stepping_;  // another thread may get a turn
  std::copy_if(
      optimizers_.begin(), optimizers_.end(), std::back_inserter(stepping), [](const auto& one) {
        return !one->steps;
      });
  return std::all_of(stepping.begin(), stepping.end(), [this](const auto& one) {
    return label_changed_state(*one);
  });
}

// Weights stay in their places; inputs are new.
bool Moments::label_inputs(PyObject* module,
                           PyObject* const* args,
                           Py_ssize_t count,
                           PyObject* names) {
  py::list caches;  // arguments that are caches
  if (!find_caches(module, args, count, names, caches)) {
    return false;
  }
  std::vector<py::object> cached;  // the tensors in them
  if (!caches.empty()) {
    PyObject* given = caches.ptr();
    PyObject* found = nullptr;
    if (!quietly::call(all_listeners().tensors_of_caches.ptr(), &given, 1, &found)) {
      return false;
    }
    auto list = py::reinterpret_steal<py::object>(found);
    for (Py_ssize_t i = 0; list && PyList_Check(found) && i < PyList_GET_SIZE(found); ++i) {
      cached.push_back(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(found, i)));
    }
  }
  auto is_cached = [&cached](PyObject* tensor) {
    return std::any_of(
        cached.begin(), cached.end(), [tensor](const auto& one) { return one.ptr() == tensor; });
  };
  Py_ssize_t all = count + (names != nullptr ? PyTuple_GET_SIZE(names) : 0);
  look::each_tensor(args, all, kDeepestBatch, /*also_in_objects=*/true, [&](PyObject* tensor) {
    if (!is_cached(tensor)) {
      label_as(labels::kInputs, "batch", tensor);
    }
  });
  for (const py::object& tensor : cached) {
    label_as(labels::kFunctional, "kv_cache", tensor.ptr());
  }
  return true;
}

// Finds caches by the names of the arguments.
bool Moments::find_caches(
    PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names, py::list& caches) {
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    if (names_a_cache(PyTuple_GET_ITEM(names, i))) {
      caches.append(py::handle(args[count + i]));
    }
  }
  if (count == 0) {
    return true;
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  auto found = cache_positions_.find(type);
  if (found == cache_positions_.end() || referred_to(found->second.type).ptr() != type) {
    PyObject* answer = nullptr;
    if (!quietly::call(all_listeners().cache_positions.ptr(), &module, 1, &answer)) {
      return false;
    }
    CachePositions known{reference_to(type), {}};
    auto positions = py::reinterpret_steal<py::object>(answer);
    for (Py_ssize_t i = 0; positions && i < PyTuple_GET_SIZE(answer); ++i) {
      known.positions.push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(answer, i)));
    }
    found = cache_positions_.insert_or_assign(type, std::move(known)).first;
  }
  for (Py_ssize_t at : found->second.positions) {
    if (at < count) {
      caches.append(py::handle(args[at]));
    }
  }
  return true;
}

namespace moments {

namespace {

std::shared_ptr<Moments>& in_use() {
  static auto* const moments = new std::shared_ptr<Moments>;
  return *moments;
}

}  // namespace

void set_listeners(const py::object& hooks) {
  all_listeners() = {hooks.attr("name_of_module"),
                     hooks.attr("look_again"),
                     hooks.attr("note_attributes"),
                     hooks.attr("cache_positions"),
                     hooks.attr("tensors_of_caches"),
                     hooks.attr("read_graph"),
                     hooks.attr("read_graph_of_func"),
                     hooks.attr("note_variables"),
                     hooks.attr("label_engines"),
                     hooks.attr("meet_optimizer"),
                     hooks.attr("label_state"),
                     hooks.attr("read_memory")};
}

const Listeners& listeners() {
  return all_listeners();
}

void use(std::shared_ptr<Moments> moments) {
  in_use() = std::move(moments);
}

std::shared_ptr<Moments> current() {
  return in_use();
}

}  // namespace moments

}  // namespace pytracer
