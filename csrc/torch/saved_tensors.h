// Saved-tensor hooks written in C: they see each tensor that autograd saves, as it is saved.
//
// Torch stops checking versions as soon as any default hook is active, and a hook that returns
// an operator's output makes a reference cycle. So pack lets torch save once more without hooks,
// and unpack lets it unpack: the check and its error are torch's own.
#pragma once

namespace pytracer::saved_tensors {

// Pushes our hooks on the calling thread's stack; they step aside when torch asks. False if this
// torch cannot be hooked. Doing either twice is harmless; the GIL must be held.
bool install();
void uninstall();

bool installed();

// Whether the calling thread is the one that installed them: others save without them.
bool is_home();

// Whether the calling thread saves tensors through somebody else's hooks. Needs no GIL.
bool program_has_hooks();

}  // namespace pytracer::saved_tensors
