// Looks into the program's objects without running any of its code. It asks an object's type, and
// reads an object's content where Python and torch keep it. It calls no __getattr__, property,
// proxy, override or __torch_dispatch__. The GIL must be held.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

namespace pytracer::look {

using Found = c10::function_ref<void(PyObject*)>;

// While it lives, no garbage is collected. Up to Python 3.11, any allocation may collect garbage,
// run finalizers and let other threads in. So containers stay as they are during a look.
class Undisturbed {
 public:
  Undisturbed() : was_enabled_(PyGC_Disable() != 0) {}

  ~Undisturbed() {
    if (was_enabled_) {
      PyGC_Enable();
    }
  }

  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  bool was_enabled_;
};

bool is_tensor(PyObject* object);

// Whether modules register this tensor as a parameter, and it was not computed: functional_call
// puts other tensors in a parameter's place for a moment.
bool is_parameter(PyObject* tensor);

// The object's own attributes: a new reference to their dictionary, or null if it has none.
PyObject* attributes(PyObject* object);

// One of them: a new reference, or null. Before Python 3.13, asking for all of them slows the
// program's own reads of this object from then on; an optimizer reads its state at each parameter.
PyObject* attribute(PyObject* object, PyObject* name);

// The referent of a weak reference: a new reference, or null once it is gone.
PyObject* referred_to(PyObject* reference);

// The item of a dictionary, list or tuple, of a class derived from one, or of a container of
// torch's own (a script module has these). A new reference, or null.
PyObject* item(PyObject* container, PyObject* key);

// Whether torch has defined the type: then calls of its objects run only torch's code.
bool is_of_torch(PyTypeObject* type);

// The tensors with memory that this one consists of. That is the tensor itself, or for a subclass
// without memory of its own the tensors in its attributes, such as a DTensor's shard. Gradients
// that are kept there are no part of it.
void each_part(PyObject* tensor, Found found);

// Whether its attributes are data. False for objects that compute or learn, for classes, Python's
// modules and functions, and for numbers and text.
bool is_record(PyObject* object);
// visit(name, value) for each attribute, also in slots.
void each_field(PyObject* object, c10::function_ref<void(PyObject*, PyObject*)> visit);

// Tensors in nested dictionaries, lists and tuples and, if asked for, in records. For a subclass
// its parts are found.
void each_tensor(PyObject* value, int depth, bool also_in_objects, Found found);
void each_tensor(
    PyObject* const* values, Py_ssize_t count, int depth, bool also_in_objects, Found found);

// Tensors whose memory is freed if the value loses `references` references: the value itself, or
// those in lists, tuples and dictionaries inside it. Nothing else may refer to any of these.
void each_owned_alone(PyObject* value, Py_ssize_t references, int depth, Found found);

// Shape and dtype as people write them; empty if there is none.
std::string shape_of(const at::Tensor& tensor);
const char* dtype_of(const at::Tensor& tensor);

// visit(module, its attributes) for these modules and those inside them, each once, in order, until
// it returns false.
void each_module(c10::ArrayRef<PyObject*> roots,
                 c10::function_ref<bool(PyObject*, PyObject*)> visit);

// The first parameter of the module or of a module inside it: a new reference, or null.
PyObject* first_parameter(PyObject* module);

// The device of its memory.
c10::Device device_of(const at::Tensor& tensor);

struct Memory {
  uint64_t address = 0;   // of the storage, which views share; 0 for none
  uint64_t bytes = 0;     // of the storage
  uint64_t elements = 0;  // of the tensor
};

Memory memory_of(const at::Tensor& tensor);

}  // namespace pytracer::look
