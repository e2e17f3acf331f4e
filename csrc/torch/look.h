// Looks into the program's objects without running any of its code: what an object is its type
// says, what it holds is read where Python and torch keep it. No __getattr__, no property, no
// proxy, no override and no __torch_dispatch__ is asked. The GIL must be held.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

namespace pytracer::look {

using Found = c10::function_ref<void(PyObject*)>;

// While it lives no garbage is collected: up to Python 3.11 any allocation may do that, and with it
// run finalizers and let other threads in. So containers stay as they are while they are looked at.
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

// Whether it is what modules register as a parameter, and was not computed: functional_call puts
// other tensors in a parameter's place for a moment.
bool is_parameter(PyObject* tensor);

// The object's own attributes: a new reference to their dictionary, or null where it has none.
PyObject* attributes(PyObject* object);

// What a weak reference refers to: a new reference, or null once it is gone.
PyObject* referred_to(PyObject* reference);

// The item of a dictionary, list or tuple, of what is derived from one, or of a container of
// torch's own (a script module has such). A new reference, or null.
PyObject* item(PyObject* container, PyObject* key);

// Whether torch has defined the type: then what its objects are asked runs torch's code only.
bool is_of_torch(PyTypeObject* type);

// The tensors with memory that this one is made of: itself, unless it is a subclass without memory
// of its own. Then those that it has as attributes, such as a DTensor's shard; gradients that
// somebody keeps there are no part of it.
void each_part(PyObject* tensor, Found found);

// Tensors in nested dictionaries, lists and tuples, and where asked in objects that are batches:
// not in what computes or learns. Parts of subclasses are found in their place.
void each_tensor(PyObject* value, int depth, bool also_in_objects, Found found);
void each_tensor(
    PyObject* const* values, Py_ssize_t count, int depth, bool also_in_objects, Found found);

// Shape and dtype as people write them; of what has none, empty.
std::string shape_of(const at::Tensor& tensor);
const char* dtype_of(const at::Tensor& tensor);

// The first parameter of the module or of one that it has: a new reference, or null.
PyObject* first_parameter(PyObject* module);

// Where its memory lies.
c10::Device device_of(const at::Tensor& tensor);

struct Memory {
  uint64_t address = 0;   // of the storage, which views share; 0 for none
  uint64_t bytes = 0;     // of the storage
  uint64_t elements = 0;  // of the tensor
};

Memory memory_of(const at::Tensor& tensor);

}  // namespace pytracer::look
